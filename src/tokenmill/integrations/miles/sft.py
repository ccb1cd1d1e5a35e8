"""`sft_rollout`: supervised fine-tuning in miles and slime, with tokens and masks from a store.

Their own SFT rollout renders and tokenizes each conversation in every step, message by message.
Here the store of ``--prompt-data`` is made once (or found), and a step looks its rows up: a sample
of `DataSource` knows its row of the source, the row's bytes have a digest, and the store keeps the
digest of every row it holds. So the store may be of more files, in another order, or made
elsewhere: ``TOKENMILL_STORE`` names one. A `Lookup` is that table, 16 bytes per row of the store.

A row that the store rejected (no assistant turn, a last turn by the user …) cannot be trained. It
is passed over, counted and logged, and the step takes the next one: a step is always full.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

import numpy as np

from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.dataset import as_view, tokens_alone
from tokenmill.errors import SourceError, UsageError
from tokenmill.fingerprint import checksum64
from tokenmill.integrations.hosts import prepared, response_mask
from tokenmill.integrations.miles.host import STORE, HostFlags
from tokenmill.integrations.miles.source import ROW, DataSource
from tokenmill.store import Row, Store, open_store

logger = logging.getLogger(__name__)


class Lookup:
    """Rows of a store by the bytes of their source row.

    Args:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        tokens_alone(as_view(store), "sft_rollout of miles and slime")
        digests = np.zeros(len(store), dtype=np.uint64)
        for first, columns in store.columns(["digest", "part"]):
            size = len(columns["digest"])
            digests[first : first + size] = columns["digest"]
            if np.any(columns["part"]):
                raise UsageError(
                    "this store has rows of single turns (expand=), so a conversation is "
                    "several of its rows; prepare it with expand='none'",
                    path=store.path,
                )
        self._order = np.argsort(digests, kind="stable")
        self._sorted = digests[self._order]
        self.passed_over: Counter[str] = Counter()

    def find(self, raw: bytes) -> Row | None:
        """The store's row of a source row, None where it has none."""
        digest = np.uint64(checksum64(raw))
        place = int(np.searchsorted(self._sorted, digest))
        if place == len(self._sorted) or self._sorted[place] != digest:
            return None
        return self.store[int(self._order[place])]


def sft_rollout(args: Any, rollout_id: Any, data_source: Any, evaluation: bool = False) -> Any:
    """One step's samples, with tokens, response_length and loss_mask from the store.

    Args:
        args: The host's flags.
        rollout_id: The step, unused: the data source knows its place.
        data_source: A `DataSource`.
        evaluation: Must be False: there is nothing to generate.
    """
    if evaluation:
        raise UsageError("sft_rollout cannot evaluate: set --eval-function-path")
    if not isinstance(data_source, DataSource) or data_source.dataset is None:
        raise UsageError(
            "sft_rollout needs --data-source-path tokenmill.integrations.miles.DataSource "
            "with --prompt-data"
        )
    if data_source.lookup is None:
        data_source.lookup = Lookup(open_sft_store(args))
    lookup: Lookup = data_source.lookup
    groups: list[list[Any]] = []
    missing = 0
    while len(groups) < args.rollout_batch_size:
        for group in data_source.get_samples(args.rollout_batch_size - len(groups)):
            row = lookup.find(data_source.dataset.rows.raw(getattr(group[0], ROW)))
            if row is None:
                missing += 1
                continue
            for sample in group:
                fill(sample, row)
            groups.append(group)
        if missing > len(data_source) + args.rollout_batch_size and not groups:
            raise SourceError(
                f"none of {missing:,} rows is in the store; it was made of other data",
                path=lookup.store.path,
            )
    if missing:
        lookup.passed_over["rows"] += missing
        logger.warning(
            "%s rows passed over, %s so far: the store rejected them (%s)",
            missing, lookup.passed_over["rows"], lookup.store.rejected,
        )  # fmt: skip
    return groups


def fill(sample: Any, row: Row) -> None:
    """Give a sample the tokens of a store's row."""
    sample.tokens = row.input_ids.tolist()
    sample.loss_mask = response_mask(row.loss_mask).tolist()
    sample.response_length = len(sample.loss_mask)
    sample.reward = 0


def open_sft_store(args: Any) -> Store:
    """The store that ``TOKENMILL_STORE`` names, else the one of the host's flags."""
    stated = os.environ.get(STORE)
    if stated:
        return open_store(stated)
    settings = HostFlags(args)
    recipe = Recipe(
        sources=settings.prompt_data,
        messages_key=settings.input_key,
        tools_key=settings.tool_key or "tools",
        template_kwargs=settings.template_kwargs,
        turn_end=settings.turn_end,
        trailing="trim",  # the hosts train what was answered before it
        **settings.tokenizer,
    )
    return prepared(recipe, RunOptions())
