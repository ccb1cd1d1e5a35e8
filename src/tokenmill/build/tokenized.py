"""The pipeline of rows that come as tokens: nothing is rendered, nothing is encoded.

``format="tokens"`` is a row format of the ordinary build. Blocks, keys, claims, workers, origins,
carried columns, the length policy and the account are those of every other row; only the middle of
the pipeline is replaced by reading and checking what is there (`tokenmill.tokenizer.tokenized`).
The tokenizer says how large its vocabulary is and how to pad, and shows the tokens to people. Which
turn a token belongs to is not known, so such rows have no turns.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import cached_property
from typing import Any

import numpy as np

from tokenmill.build.pipeline import Bad, Pipeline, digests_of
from tokenmill.build.recipe import Recipe
from tokenmill.chat import Rendering
from tokenmill.errors import RowError
from tokenmill.source import BlockRows
from tokenmill.store.columns import SliceColumns
from tokenmill.tokenizer import Tokenizer, apply_length
from tokenmill.tokenizer.tokenized import read_tokenized


def pipeline_of(recipe: Recipe, tokenizer: Tokenizer, engine: str, renderer: str) -> Pipeline:
    """The pipeline that a recipe's rows need."""
    if recipe.format == "tokens":
        return TokenizedPipeline(recipe, tokenizer)
    return Pipeline(recipe, tokenizer, engine, renderer)


class TokenizedPipeline(Pipeline):
    """Checks rows of tokens; no engine has a part in it, so there is none to distrust.

    Args:
        recipe: What is to be made.
        tokenizer: Whose ids the rows hold.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.distrusted = set()
        self.seconds = defaultdict(float)

    @cached_property
    def by_reference(self) -> Pipeline:
        """Reading columns is its own reference."""
        return self

    def run(self, rows: BlockRows) -> tuple[SliceColumns, dict[str, Any]]:
        """Check the ids and masks of one block."""
        start = time.perf_counter()
        values = rows.values
        bad: list[Bad] = [(i, 0, row) for i, row in enumerate(values) if isinstance(row, RowError)]
        good = [i for i, row in enumerate(values) if not isinstance(row, RowError)]
        encoded = read_tokenized(
            [values[i] for i in good],  # type: ignore[misc]  # the others are RowError
            len(self.tokenizer.table),
            everything=self.recipe.train_on == "everything",
        )
        encoded = apply_length(encoded, self.recipe.max_length, self.recipe.overlong)
        bad += [(good[i], 0, error) for i, error in encoded.rejected]
        source = np.array(good, np.int32)
        turnless = Rendering(roles=[()] * len(good))
        part, digests = np.zeros_like(source), digests_of(rows)
        columns = self._columns(rows, turnless, encoded, source, part, digests, bad)
        self.seconds["check"] += time.perf_counter() - start
        return columns, {}
