"""From the rows of one block to the columns of one slice.

A `Pipeline` holds what a worker loads once: the renderer and the encoder. `run` takes the rows of a
block through them: parsed values → rendered texts with trained spans → ids and mask → length policy
→ `SliceColumns`. Each text is rendered once and encoded once. Whatever a room rejects on the way
keeps its place in the account: rows in = rows served + rows rejected, each with a reason.

`Stages` adds up seconds per stage, so that the next bottleneck is visible.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill.build.recipe import Recipe
from tokenmill.chat import Rendering, Renderer
from tokenmill.errors import RowError
from tokenmill.source import BlockRows
from tokenmill.store.columns import SliceColumns
from tokenmill.store.record import RejectedRow
from tokenmill.tokenizer import Encoded, Encoder, Tokenizer, apply_length

_DETAIL_CHARS = 300  # a rejection's detail is for a person; a template can raise a whole document
_json = msgspec.json.Encoder()


class Stages:
    """Seconds spent per stage."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the enclosed block to one stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class Pipeline:
    """Everything a worker needs to turn rows into tokens, loaded once.

    Args:
        recipe: What is to be made.
        tokenizer: The tokenizer, loaded.
        engine: Which engine may encode; never changes the result.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, engine: str = "auto") -> None:
        self.recipe = recipe
        self.renderer = Renderer(
            recipe.chat_spec(), tokenizer.template, tokenizer.special_tokens
        )
        self.encoder = Encoder(tokenizer, engine)
        self.stages = Stages()
        self.notes: Counter[str] = Counter()

    def run(self, rows: BlockRows) -> SliceColumns:
        """Render, encode and mask one block."""
        good = [i for i, value in enumerate(rows.values) if not isinstance(value, RowError)]
        rejected = [
            self._rejected(rows, i, 0, value)
            for i, value in enumerate(rows.values)
            if isinstance(value, RowError)
        ]
        with self.stages.stage("render"):
            rendering = self.renderer.render([rows.values[i] for i in good])
        source = np.array([good[i] for i in rendering.source], np.int32)
        part = np.asarray(rendering.part, np.int32)
        rejected += [
            self._rejected(rows, good[i], p, error) for i, p, error in rendering.rejected
        ]
        with self.stages.stage("encode"):
            encoded = self.encoder.encode(
                rendering.texts,
                rendering.spans,
                [[end for _, end in turns] for turns in rendering.turns],
            )
        kept = self._kept(encoded, len(source))
        rejected += [
            self._rejected(rows, int(source[i]), int(part[i]), error)
            for i, error in encoded.rejected
        ]
        raise NotImplementedError

