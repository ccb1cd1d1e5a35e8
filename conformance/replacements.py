"""A pytest plugin that replaces a trainer's classes with ours before its tests are imported.

``CONFORMANCE_REPLACE`` names the function below that does it; if empty, nothing is replaced.
``CONFORMANCE_STAND_INS`` are packages that the trainer imports and its tests do not use.
``CONFORMANCE_PACKAGE`` is imported before any test. ``CONFORMANCE_PREPARE`` names a function below
that both runs call.

Many tests of a file never use the replaced class. Replacements call `reached`, and the report of
such a test has the property ``ours``.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
import multiprocessing
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

_calls = multiprocessing.Value("q", 0)  # also counts in forked workers


def reached() -> None:
    """Record that the current test used one of our classes."""
    with _calls.get_lock():
        _calls.value += 1


def _counted(kind: Any) -> None:
    """Count the instances of one of our classes, without changing its name."""
    make = kind.__init__

    @functools.wraps(make)
    def __init__(self: Any, *given: Any, **named: Any) -> None:  # noqa: N807
        reached()
        make(self, *given, **named)

    kind.__init__ = __init__


# ---- for both runs ------------------------------------------------------------------------


def miles_settings() -> None:
    """Define what miles reads from sglang for its settings."""
    from sglang.srt.debug_utils.dumper import DumperConfig
    from sglang.srt.server_args import ServerArgs

    def add_cli_args(parser: Any) -> None:
        for size in ("tp", "dp", "pp", "ep"):
            parser.add_argument(f"--{size}-size", type=int, default=1)
        for name in ("context-length", "reasoning-parser", "tool-call-parser", "chat-template",
                     "speculative-algorithm", "cuda-graph-backend-prefill"):  # fmt: skip
            parser.add_argument(f"--{name}", default=None)
        for name in ("enable-deterministic-inference", "enable-dp-attention"):
            parser.add_argument(f"--{name}", action="store_true")

    ServerArgs.add_cli_args = staticmethod(add_cli_args)
    DumperConfig._kv_pairs_to_dict = staticmethod(lambda pairs: {})


# ---- rows: ids and masks ------------------------------------------------------------------------


def _prepared(row: dict[str, Any], tokenizer: Any, **options: Any) -> Any:
    """Return the prepared row, or None if it was rejected."""
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
        except SourceError:  # no row is left
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

    from tokenmill.integrations.skyrl.data import window

    def tokenize_chat_example(
        example: dict[str, Any],
        tokenizer: Any,
        max_length: int | None = None,
        messages_key: str = "messages",
        train_on_what: Any = sft_trainer.TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        tools_key: str | None = "tools",
        system_key: str | None = "system",
        processor: Any = None,
        **chat_template_kwargs: Any,
    ) -> Any:
        reached()
        columns = [messages_key, *filter(None, (tools_key, system_key))]
        row = _prepared(
            {name: example[name] for name in columns if name in example},
            tokenizer,
            columns={"messages": messages_key, "tools": tools_key, "system": system_key},
            train_on=train_on_what.value,
            turn_end="turn",
            max_length=max_length,
            overlong="truncate",
            chat_template_kwargs=chat_template_kwargs or None,
        )
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


def miles_data_source() -> None:
    """Both data sources of miles."""
    _data_sources("miles")


def slime_data_source() -> None:
    """Both data sources of slime."""
    _data_sources("slime")


def _data_sources(package: str) -> None:
    data_source = importlib.import_module(f"{package}.rollout.data_source")

    from tokenmill.integrations.miles import DataSource

    _counted(DataSource)
    data_source.RolloutDataSource = DataSource
    data_source.RolloutDataSourceWithBuffer = DataSource


# ---- what together: packs and micro-batches -----------------------------------------------------


def verl_balancing() -> None:
    """The partitions of verl that may be of different size, by the costs that verl states."""
    from verl.utils import seqlen_balancing

    from tokenmill.data.micro import balance_groups

    theirs = seqlen_balancing.get_seqlen_balanced_partitions

    def balanced(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
        if equal_size:  # ours cuts by tokens, never by the number of rows
            return theirs(seqlen_list, k_partitions, equal_size)  # type: ignore[no-any-return]
        reached()
        costs = np.asarray([int(cost) for cost in seqlen_list], dtype=np.int64)
        groups, each = balance_groups(costs, costs, k_partitions, int(costs.sum()))
        assert each == 1
        return [np.flatnonzero(groups == number).tolist() for number in range(k_partitions)]

    seqlen_balancing.get_seqlen_balanced_partitions = balanced


def miles_packing() -> None:
    """Miles' first fit by decreasing length."""
    _first_fit("miles", "first_fit_decreasing_pack")


def slime_packing() -> None:
    """Slime's first fit."""
    _first_fit("slime", "first_fit_pack")


def _first_fit(package: str, name: str) -> None:
    """Rows that are longer than a pack are alone in one with miles and slime; here, too."""
    seqlen_balancing = importlib.import_module(f"{package}.utils.seqlen_balancing")

    from tokenmill.data.packs import Pack, pack_window

    def pack(lengths: list[int], capacity: int) -> list[list[int]]:
        reached()
        shown = np.minimum(np.asarray(lengths, dtype=np.int64), capacity)
        packs = pack_window(np.arange(len(lengths)), shown, Pack(capacity))
        return [rows.tolist() for rows in np.split(packs.rows, packs.bounds[1:-1])]

    setattr(seqlen_balancing, name, pack)


def slime_files() -> None:
    """Slime's reading of a file of which rows are chosen: rows of a source."""
    from slime.utils import data

    from tokenmill.sources.rows import open_rows

    def read_file(path: str) -> Iterator[Any]:
        reached()
        yield from open_rows(path, cache_dir=_cache())

    data.read_file = read_file


def trl_packing() -> None:
    """`pack_dataset` of TRL: `Pack` over the rows of a table.

    ``bfd`` is best fit with rows cut to the length, ``bfd_split`` with rows cut apart. ``wrapped``
    fills packs without regard to rows, which no method of ours does: it is left to TRL.
    """
    from datasets import Dataset
    from trl import data_utils

    from tokenmill.data.packs import Pack, pack_window

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

    Which epoch and position an index is, and what is refused, stays grain's own; the index of a
    position of an epoch is ours.
    """
    from grain._src.python.dataset.transformations import shuffle

    from tokenmill.data.order import FeistelOrder

    def shuffled(self: Any, index: int) -> int:
        reached()
        length = len(self._parent)
        epoch, position = divmod(index, length)
        order = FeistelOrder(length, self._seed)
        return int(order.indices(epoch, np.asarray([position]))[0]) + epoch * length

    shuffle.ShuffleMapDataset._shuffled_index = shuffled


def grain_positions() -> None:
    """Grain's iteration over a `MapDataset`: its position, and the position of a state.

    Grain's data loader and every iterator use it. Ours comes without grain's threads,
    which read ahead. Datasets of no row, or of more than a small store has, are left to grain.
    """
    from grain._src.python.dataset.transformations.prefetch import PrefetchDatasetIterator

    import tokenmill

    kind, most = PrefetchDatasetIterator, 10_000
    methods = ("__next__", "get_state", "set_state", "_get_next_index", "_set_next_index")
    own = {name: getattr(kind, name) for name in methods}

    class Walk:
        def __init__(self, rows: int) -> None:
            self.rows = rows
            self.loader = tokenmill.Loader(_numbered(rows), 1, shuffle=False, indices=True)
            self.batches = self.one_epoch()

        def one_epoch(self) -> Iterator[Any]:
            return iter(self.loader) if self.loader.epoch == 0 else iter(())

        def go(self, state: dict[str, Any]) -> None:
            reached()
            if state.keys() == {"next_index"}:  # grain's data loader keeps of a state this alone
                index = state["next_index"]
                ended = {"epoch": 1, "position": 0}
                place = ended if index == self.rows else {"epoch": 0, "position": index}
                state = {**self.loader.state_dict(), **place}
            self.loader.load_state_dict(state)
            self.batches = self.one_epoch()

        def state(self) -> dict[str, Any]:
            return {**self.loader.state_dict(), "next_index": self.next_index()}

        def next_index(self) -> int:
            return self.loader.cursor.epoch * self.rows + self.loader.cursor.position

    def walk_of(self: Any) -> Walk | None:
        if "_walk" not in vars(self):
            rows = self._dataset_length
            self._walk = Walk(rows) if 0 < rows <= most else None
        return self._walk  # type: ignore[no-any-return]

    def __next__(self: Any) -> Any:  # noqa: N807
        if (walk := walk_of(self)) is None:
            return own["__next__"](self)
        self._assert_not_closed()
        for batch in walk.batches:
            reached()
            element = self._map_parent[int(batch["indices"].item())]
            wanted = self._allow_nones or element is not None
            self._threshold_checker.check(wanted)
            if wanted:
                return self._stats.record_output_spec(element)
        raise StopIteration

    def get_state(self: Any) -> Any:
        walk = walk_of(self)
        return own["get_state"](self) if walk is None else walk.state()

    def set_state(self: Any, state: Any) -> None:
        walk = walk_of(self)
        own["set_state"](self, state) if walk is None else walk.go(state)

    def _get_next_index(self: Any) -> int:
        walk = walk_of(self)
        return own["_get_next_index"](self) if walk is None else walk.next_index()  # type: ignore[no-any-return]

    def _set_next_index(self: Any, index: int) -> None:
        if (walk := walk_of(self)) is None:
            own["_set_next_index"](self, index)
        else:
            walk.go({"next_index": index})

    for made in (__next__, get_state, set_state, _get_next_index, _set_next_index):
        setattr(kind, made.__name__, made)


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
    """The datasets and loaders of streaming: a `Loader` says which sample comes when.

    Streaming's own dataset reads the samples, each under its number, which is a row of a store.
    Where a test states a sampling or a batching method, it is given streaming's own class whole.
    """
    import streaming
    import streaming.base
    from torch.utils.data import IterableDataset, default_collate, get_worker_info

    import tokenmill
    from tokenmill.integrations.torch import DataLoader

    own_dataset, own_loader = streaming.StreamingDataset, streaming.StreamingDataLoader
    known = {"local", "remote", "streams", "shuffle", "batch_size", "shuffle_seed",
             "num_canonical_nodes", "batching_method", "download_timeout"}  # fmt: skip

    class Ordered(IterableDataset):  # type: ignore[misc]
        """Samples in the order of a loader, divided among torch's workers batch by batch."""

        def __init__(self, **named: Any) -> None:
            self.samples = own_dataset(**named)
            self.named = named

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, number: int) -> Any:
            return self.samples[number]

        def loader_of(self, batch_size: int, drop_last: bool = False) -> Any:
            return tokenmill.Loader(
                _numbered(len(self.samples)), batch_size, drop_last=drop_last, indices=True,
                seed=self.named.get("shuffle_seed", 9176),
                shuffle=self.named.get("shuffle", False),
            )  # fmt: skip

        def of(self, batch: Any) -> list[Any]:
            reached()
            return [self.samples[int(row)] for row in batch["indices"].reshape(-1)]

        @functools.cached_property
        def loader(self) -> Any:  # one, so that a second loop is the second epoch
            return self.loader_of(self.named["batch_size"])

        def __iter__(self) -> Iterator[Any]:
            worker = get_worker_info()
            first, each = (worker.id, worker.num_workers) if worker else (0, 1)
            for number, batch in enumerate(self.loader):
                if number % each == first:
                    yield from self.of(batch)

    class Serving:
        """Our own loader for torch, with the number of workers of the test."""

        def __init__(
            self, dataset: Ordered, batch_size: int, num_workers: int = 0, drop_last: bool = False
        ) -> None:
            self.dataset = dataset
            loader = dataset.loader_of(batch_size, drop_last)
            self.loader = DataLoader(loader, num_workers=num_workers)

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
        batching = named.get("batching_method", "random")
        if given or set(named) - known or "batch_size" not in named or batching != "random":
            return own_dataset(*given, **named)
        return Ordered(**named)

    def make_loader(*given: Any, **named: Any) -> Any:
        dataset = given[0] if given else named["dataset"]
        return (Serving if isinstance(dataset, Ordered) else own_loader)(*given, **named)

    for place in (streaming, streaming.base):
        place.StreamingDataset, place.StreamingDataLoader = make_dataset, make_loader


def streaming_partitions() -> None:
    """Streaming's partition of an epoch: what the `Loader` of every rank serves.

    From where a run is resumed, and without shuffling. What is refused or warned of, and the shape,
    stays streaming's own; the position of each sample is ours.
    """
    from streaming.base import partition

    import tokenmill

    theirs = partition.get_partitions

    def get_partitions(
        algo: str,
        num_samples: int,
        num_canonical_nodes: int,
        num_physical_nodes: int,
        ranks_per_node: int,
        workers_per_rank: int,
        batch_size: int,
        drop_first: int = 0,
        initial_physical_nodes: int | None = None,
    ) -> Any:
        shape = theirs(
            algo, num_samples, num_canonical_nodes, num_physical_nodes, ranks_per_node,
            workers_per_rank, batch_size, drop_first, initial_physical_nodes,
        ).shape  # fmt: skip
        made = np.full(shape, -1, dtype=np.int64)
        store = _numbered(num_samples)
        for rank in range(num_physical_nodes * ranks_per_node):
            loader = tokenmill.Loader(
                store, batch_size, shuffle=False, rank=rank, indices=True,
                world_size=num_physical_nodes * ranks_per_node,
            )  # fmt: skip
            if drop_first:
                loader.load_state_dict({**loader.state_dict(), "position": drop_first})
            for number, batch in enumerate(loader):
                reached()
                rows = batch["indices"].reshape(-1)
                turn, worker = divmod(number, workers_per_rank)
                node, rank_of_node = divmod(rank, ranks_per_node)
                made[node, rank_of_node, worker, turn, : len(rows)] = rows
        return made

    partition.get_partitions = get_partitions


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Replace what the environment names, before a ``conftest.py`` imports the host."""
    named = os.environ.get("CONFORMANCE_STAND_INS", "").split(",")
    stand_in([*filter(None, named), "torchvision"])
    # Pydantic takes no other on Python 3.11.
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    if package := os.environ.get("CONFORMANCE_PACKAGE"):
        importlib.import_module(package)
    for variable in ("CONFORMANCE_PREPARE", "CONFORMANCE_REPLACE"):
        if name := os.environ.get(variable):
            globals()[name]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """Mark tests that come to something of ours, whether in their fixtures or in themselves."""
    try:
        return (yield)
    finally:
        if _calls.value > getattr(item.session, "_conformance_calls", 0):
            item.user_properties.append(("ours", "1"))
        item.session._conformance_calls = _calls.value
