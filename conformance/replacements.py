"""A plugin of pytest that puts our classes in the place of a host's, before its tests are imported.

``CONFORMANCE_REPLACE`` names the function below that does it; empty, the host's own classes stay
there, so that both runs differ in nothing else. ``CONFORMANCE_STAND_INS`` are packages that the
host imports and its tests do not use; ``CONFORMANCE_PACKAGE`` is imported before any test is.

Of a file many tests never come to the class that is replaced. What stands here calls `reached`, and
the report of a test that came so far has the property ``ours``.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import os
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typing_extensions

from conformance.stand_ins import stand_in

_calls = 0


def reached() -> None:
    """Note that a test has come to something of ours."""
    global _calls
    _calls += 1


def _counted(kind: Any) -> None:
    """Count what is made of a class of ours: the class itself, for tests that look at its name."""
    make = kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807
        reached()
        make(self, *given, **named)

    kind.__init__ = __init__


# ---- rows: ids and masks ------------------------------------------------------------------------


def _prepared(row: dict[str, Any], tokenizer: Any, **options: Any) -> Any:
    """One row as a store has it, or None where it was rejected."""
    import tokenmill
    from tokenmill.errors import SourceError

    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "row.jsonl"
        source.write_text(json.dumps(row) + "\n", encoding="utf-8")
        try:
            store = tokenmill.prepare(
                str(source),
                tokenizer=tokenizer,
                executor="inline",
                cache_dir=_cache(),
                **options,
            )
        except SourceError:  # a source without a row that can be used is an error
            return None
        return next(iter(store), None)


@functools.cache
def _cache() -> str:
    return tempfile.mkdtemp(prefix="conformance-")


def skyrl_tokenization() -> None:
    """SkyRL's tokenization of a conversation: a row of a store, in SkyRL's form.

    With ``turn_end="turn"``: SkyRL trains what the template prints up to the next turn.
    """
    from skyrl.train import sft_trainer

    from tokenmill.integrations.skyrl.dataset import window

    def tokenize_chat_example(
        example: dict[str, Any],
        tokenizer: Any,
        max_length: int | None = None,
        messages_key: str = "messages",
        train_on_what: Any = sft_trainer.TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        tools_key: str | None = "tools",
        system_key: str | None = "system",
        processor: Any = None,
        **template_kwargs: Any,
    ) -> Any:
        reached()
        columns = [messages_key, *filter(None, (tools_key, system_key))]
        row = _prepared(
            {name: example[name] for name in columns if name in example},
            tokenizer,
            messages_key=messages_key,
            train_on=train_on_what.value,
            turn_end="turn",
            max_length=max_length,
            overlong="truncate",
            template_kwargs=template_kwargs or None,
            **{name: value for name, value in
               {"tools_key": tools_key, "system_key": system_key}.items() if value},
        )  # fmt: skip
        return None if row is None else window(row)

    sft_trainer.tokenize_chat_example = tokenize_chat_example


def _mask_generator(theirs: type) -> type:
    """The loss masks of miles and slime, whatever type of template is stated."""

    class Masks(theirs):  # type: ignore[misc]
        def get_loss_mask(
            self, messages: list[dict[str, Any]], tools: Any = None
        ) -> tuple[list[int], list[int]]:
            reached()
            given: dict[str, Any] = {"messages": copy.deepcopy(messages)}
            row = _prepared({**given, "tools": tools} if tools else given, self.tokenizer)
            if row is None:
                raise ValueError("rejected")
            return row.input_ids.tolist(), row.loss_mask.tolist()

        gen_multi_turn_loss_mask_qwen = get_loss_mask
        gen_multi_turn_loss_mask_qwen3 = get_loss_mask
        gen_multi_turn_loss_mask_qwen3_5 = get_loss_mask

    return Masks


def miles_masks() -> None:
    """The masks of miles."""
    from miles.utils import mask_utils

    mask_utils.MultiTurnLossMaskGenerator = _mask_generator(mask_utils.MultiTurnLossMaskGenerator)


def slime_masks() -> None:
    """The masks of slime."""
    from slime.utils import mask_utils

    mask_utils.MultiTurnLossMaskGenerator = _mask_generator(mask_utils.MultiTurnLossMaskGenerator)


def verl_sft() -> None:
    """Verl's SFT dataset."""
    from verl.utils.dataset import multiturn_sft_dataset

    from tokenmill.integrations.verl import SFTDataset

    _counted(SFTDataset)
    multiturn_sft_dataset.MultiTurnSFTDataset = SFTDataset


def verl_rl() -> None:
    """Verl's RL dataset."""
    from verl.utils.dataset import rl_dataset

    from tokenmill.integrations.verl import RLDataset

    _counted(RLDataset)
    rl_dataset.RLHFDataset = RLDataset


def slime_data_source() -> None:
    """Both data sources of slime."""
    from slime.rollout import data_source

    from tokenmill.integrations.miles import DataSource

    _counted(DataSource)
    data_source.RolloutDataSource = DataSource
    data_source.RolloutDataSourceWithBuffer = DataSource


# ---- what together: packs and micro-batches -----------------------------------------------------


def verl_balancing() -> None:
    """The partitions of verl that may be of different size, by the costs that verl states."""
    from verl.utils import seqlen_balancing

    from tokenmill.packing.micro import level

    theirs = seqlen_balancing.get_seqlen_balanced_partitions

    def balanced(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
        if equal_size:  # ours cuts by tokens, never by the number of rows
            return theirs(seqlen_list, k_partitions, equal_size)  # type: ignore[no-any-return]
        reached()
        costs = np.asarray([int(cost) for cost in seqlen_list], dtype=np.int64)
        groups, each = level(costs, costs, k_partitions, int(costs.sum()))
        assert each == 1
        return [np.flatnonzero(groups == number).tolist() for number in range(k_partitions)]

    seqlen_balancing.get_seqlen_balanced_partitions = balanced


def trl_packing() -> None:
    """`pack_dataset` of TRL: `Pack` over the rows of a table.

    ``bfd`` is best fit with rows cut to the length, ``bfd_split`` with rows cut apart. ``wrapped``
    fills packs without regard to rows, which no method of ours does: it is left to TRL.
    """
    from datasets import Dataset
    from trl import data_utils

    from tokenmill.packing import Pack
    from tokenmill.packing.packs import pack_window

    theirs = data_utils.pack_dataset
    oversize = {"bfd": "truncate", "bfd_split": "split"}

    def pack_dataset(dataset: Any, seq_length: int, strategy: str = "bfd", **more: Any) -> Any:
        if strategy not in oversize or not isinstance(dataset, Dataset):
            return theirs(dataset, seq_length, strategy, **more)
        reached()
        columns = dataset.with_format(None).to_dict()
        lengths = [len(row) for row in next(iter(columns.values()))]
        packs = pack_window(
            np.arange(len(lengths)), np.asarray(lengths),
            Pack(seq_length, oversize=oversize[strategy]),
        )  # fmt: skip
        pieces = list(zip(packs.rows.tolist(), packs.starts.tolist(), packs.lengths.tolist(),
                          strict=True))  # fmt: skip
        grouped = [pieces[a:b] for a, b in zip(packs.bounds[:-1], packs.bounds[1:], strict=True)]
        made: dict[str, Any] = {
            name: [
                [
                    token
                    for row, start, length in pack
                    for token in rows[row][start : start + length]
                ]
                for pack in grouped
            ]
            for name, rows in columns.items()
        }
        made["seq_lengths"] = [[length for _, _, length in pack] for pack in grouped]
        packed = Dataset.from_dict(made)
        wanted = {**dataset.format, "columns": [*dataset.format["columns"], "seq_lengths"]}
        kind = {"type": wanted["type"], "columns": wanted["columns"], **wanted["format_kwargs"]}
        return packed.with_format(**kind)

    data_utils.pack_dataset = pack_dataset


# ---- which when: orders, loaders and what they remember -----------------------------------------


def skyrl_samplers() -> None:
    """Both samplers of SkyRL, with its own arguments."""
    from skyrl.train.dataset import samplers

    from tokenmill.integrations.skyrl import Sampler

    class Sequential(Sampler):
        def __init__(self, data_source: Any) -> None:
            reached()
            super().__init__(data_source, order="sequential")

    class Mixing(Sampler):
        def __init__(
            self,
            data_source: Any,
            lengths: Any,
            weights: Any,
            num_samples: int | None = None,
            seed: int = 0,
            replacement: bool = True,
        ) -> None:
            reached()
            super().__init__(
                data_source, seed=seed, num_samples=num_samples, lengths=lengths, weights=weights
            )

    samplers.StatefulSequentialSampler = Sequential
    samplers.DataMixingSampler = Mixing


def grain_order() -> None:
    """Grain's shuffle, and with it its index sampler and its data loader, in our order.

    Which epoch and position an index is, and what is refused, stays grain's own; where a position
    of an epoch lies is ours.
    """
    from grain._src.python.dataset.transformations import shuffle

    from tokenmill.sampling import FeistelOrder

    def shuffled(self: Any, index: int) -> int:
        reached()
        length = len(self._parent)
        epoch, position = divmod(index, length)
        return FeistelOrder(length, self._seed).index(epoch, position) + epoch * length

    shuffle.ShuffleMapDataset._shuffled_index = shuffled


@functools.cache
def _numbered(rows: int) -> Any:
    """A store of so many rows, each of one token."""
    import tokenmill

    source = Path(_cache()) / f"{rows}.jsonl"
    lines = [json.dumps({"input_ids": [number % 200], "loss_mask": [1]}) for number in range(rows)]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = Path(tokenmill.__file__).parent / "examples" / "tokenizer"
    return tokenmill.prepare(
        str(source), tokenizer=str(tokenizer), format="tokens", executor="inline",
        cache_dir=_cache(),
    )  # fmt: skip


def streaming_loader() -> None:
    """The datasets and loaders of streaming that read one stream: a `Loader` says which sample.

    Samples are read by streaming's own reader, each under its number, which is a row of a store.
    Where a test states several streams, a sampling or a batching method, its own class is given.
    """
    import streaming
    import streaming.base
    from streaming.base.local import LocalDataset
    from torch.utils.data import IterableDataset, default_collate, get_worker_info

    import tokenmill

    own_dataset, own_loader = streaming.StreamingDataset, streaming.StreamingDataLoader
    known = {"local", "remote", "shuffle", "batch_size", "shuffle_seed", "num_canonical_nodes"}

    class Ordered(IterableDataset):  # type: ignore[misc]
        """Samples in the order of a loader, divided among the workers batch by batch."""

        def __init__(self, **named: Any) -> None:
            reached()
            self.samples = LocalDataset(named["remote"])
            self.named = named

        def __len__(self) -> int:
            return len(self.samples)

        def loader_of(self, batch_size: int, last: str) -> Any:
            return tokenmill.Loader(
                _numbered(len(self.samples)), batch_size, self.named.get("shuffle_seed", 9176),
                self.named.get("shuffle", False), last=last, indices=True,
            )  # fmt: skip

        def of(self, batch: Any) -> list[Any]:
            return [self.samples[int(row)] for row in batch["indices"].reshape(-1)]

        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            first, each = (worker.id, worker.num_workers) if worker else (0, 1)
            for number, batch in enumerate(self.loader_of(self.named["batch_size"], "keep")):
                if number % each == first:
                    yield from self.of(batch)

    class Serving:
        """A loader of its own, in this process: it needs no workers."""

        def __init__(
            self, dataset: Ordered, batch_size: int, num_workers: int = 0, drop_last: bool = False
        ) -> None:
            self.dataset = dataset
            self.loader = dataset.loader_of(batch_size, "drop" if drop_last else "keep")

        def __len__(self) -> int:
            return len(self.loader)

        def __iter__(self) -> Iterator[Any]:
            for batch in self.loader:
                yield default_collate(self.dataset.of(batch))

        def state_dict(self) -> Any:
            return self.loader.state_dict()

        def load_state_dict(self, state: Any) -> None:
            self.loader.load_state_dict(state)

    def make_dataset(*given: Any, **named: Any) -> Any:
        if given or set(named) - known or not {"remote", "batch_size"} <= set(named):
            return own_dataset(*given, **named)
        return Ordered(**named)

    def make_loader(*given: Any, **named: Any) -> Any:
        dataset = given[0] if given else named["dataset"]
        return (Serving if isinstance(dataset, Ordered) else own_loader)(*given, **named)

    for place in (streaming, streaming.base):
        place.StreamingDataset, place.StreamingDataLoader = make_dataset, make_loader


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace what the environment names, before a ``conftest.py`` imports the host."""
    named = os.environ.get("CONFORMANCE_STAND_INS", "").split(",")
    stand_in([*filter(None, named), "torchvision"])
    # Pydantic takes no other on Python 3.11.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    if package := os.environ.get("CONFORMANCE_PACKAGE"):
        importlib.import_module(package)
    if name := os.environ.get("CONFORMANCE_REPLACE"):
        globals()[name]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """Mark tests that come to something of ours, whether in their fixtures or in themselves."""
    try:
        return (yield)
    finally:
        if _calls > getattr(item.session, "_conformance_calls", 0):
            item.user_properties.append(("ours", "1"))
        item.session._conformance_calls = _calls
