"""Grain and torchtitan: rows, packs and resume with Grain itself, and torchtitan if installed."""

from __future__ import annotations

import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import EXAMPLES, INLINE, TOKENIZER
from tests.integrations.conftest import labels_of, stand_in
from tokenmill.errors import SourceError, UsageError
from tokenmill.integrations.grain import DataSource, TorchtitanDataset
from tokenmill.store import Store

grain = pytest.importorskip("grain.python")

THREADS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)
KINDS = ("store", "view", "by_source", "lazy")


def data_of(kind: str, chat: Store, cache: Path) -> Any:
    if kind == "lazy":
        source = str(EXAMPLES / "conversations.jsonl")
        return tm.prepare(source, str(TOKENIZER), lazy=True, cache_dir=cache, **INLINE)
    return {"store": chat, "view": chat[:], "by_source": chat.by_source()}[kind]


def plain(item: Any) -> Any:
    if isinstance(item, Sequence):
        item = {"input_ids": item.input_ids, "labels": item.labels}
    return {name: np.asarray(values).tolist() for name, values in item.items()}


def require_resume(dataset: Any, steps: int) -> None:
    """A new iterator that loads the state of a step continues with the same items."""
    iterator, states, items = iter(dataset), [], []
    for _ in range(steps):
        states.append(iterator.get_state())
        items.append(plain(next(iterator)))
    for number in (1, steps // 2, steps - 3):
        resumed = iter(dataset)
        resumed.set_state(states[number])
        assert [plain(next(resumed)) for _ in range(3)] == items[number : number + 3]


@pytest.mark.parametrize("kind", KINDS)
def test_items_and_resume_are_the_same_for_every_kind_of_data(
    kind: str, chat: Store, tmp_path: Path
) -> None:
    source = DataSource(data_of(kind, chat, tmp_path))
    dataset = grain.MapDataset.source(source)
    assert len(dataset) == len(chat) > 50
    assert len(pickle.dumps(source)) < 16 << 10
    for item, row in zip(dataset, chat, strict=True):
        found = plain(item)
        assert found["input_ids"] == row.input_ids.tolist()
        assert found["labels"] == labels_of(row)
    assert [plain(item) for item in source._getitems([3, 1])] == [
        plain(source[3]), plain(source[1]),
    ]  # fmt: skip
    mixed = dataset[:20].shuffle(seed=3).repeat(2).to_iter_dataset(THREADS)
    require_resume(mixed, 30)  # in the second epoch, too


def test_rejected_rows_are_replaced_by_the_same_rows(tmp_path: Path) -> None:
    arguments = {"tokenizer": str(TOKENIZER), "cache_dir": tmp_path, **INLINE}
    path = str(EXAMPLES / "dirty.jsonl")
    store = tm.prepare(path, **arguments)
    by_source = DataSource(store.by_source())
    lazy = DataSource(tm.prepare(path, lazy=True, **arguments))
    assert len(by_source) == len(lazy) > len(store)
    items = [plain(item) for item in by_source]
    assert [plain(item) for item in lazy] == items
    accepted = [row.input_ids.tolist() for row in store]
    assert all(item["input_ids"] in accepted for item in items)


def test_a_grain_loader_refuses_the_state_of_other_data(chat: Store, other: Store) -> None:
    def loader(data: Any) -> Any:
        sampler = grain.IndexSampler(
            5, shuffle=True, seed=1, num_epochs=1, shard_options=grain.NoSharding()
        )
        iterator = iter(grain.DataLoader(data_source=DataSource(data), sampler=sampler))
        next(iterator)
        return iterator

    iterator = loader(chat)
    loader(chat).set_state(iterator.get_state())
    with pytest.raises(ValueError, match=r"tokenmill\.DataSource"):
        loader(other).set_state(iterator.get_state())


# torchtitan


@dataclass
class Sequence:
    input_ids: Any
    labels: Any
    positions: Any = None


@dataclass
class Single:
    source: Any

    def build(self, *, context: Any, dataset_iteration_policy: Any) -> Any:
        policy = dataset_iteration_policy
        source = self.source.build(dataset_iteration_policy=policy)
        dataset = grain.MapDataset.source(source)
        if policy.shuffle:
            dataset = dataset.shuffle(seed=policy.seed)
        share = len(dataset) // policy.dp_world_size
        dataset = dataset[policy.dp_rank * share : (policy.dp_rank + 1) * share]
        return dataset.repeat() if policy.repeat else dataset


@pytest.fixture(params=["stand-in", "torchtitan"])
def titan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torchtitan":
        pytest.importorskip("torchtitan", reason="torchtitan is not installed: only its stand-in")
        return
    components = "torchtitan.components.data"
    stand_in(monkeypatch, components, TextSequence=Sequence, SingleDatasetConfig=Single)


def built(source: Any, length: int = 4096, **policy: Any) -> Any:
    policy = {"seed": 1, "shuffle": False, "repeat": False, "dp_rank": 0, "dp_world_size": 1,
              **policy}  # fmt: skip
    return TorchtitanDataset(source=source).build(
        context=SimpleNamespace(max_context_length=length),
        dataset_iteration_policy=SimpleNamespace(**policy),
    )


def packed(dataset: Any, length: int) -> Any:
    """Pack as torchtitan does."""
    arrays = dataset.map(lambda one: {"input_ids": one.input_ids, "labels": one.labels})
    return grain.experimental.FirstFitPackIterDataset(
        arrays.to_iter_dataset(THREADS),
        length_struct={"input_ids": length, "labels": length},
        padding_struct={"input_ids": 0, "labels": -100},
        num_packing_bins=4,
    )


def next_tokens(row: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(row.input_ids[:-1].tolist()), tuple(labels_of(row)[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_packs_keep_every_row_and_its_mask(
    kind: str, chat: Store, tmp_path: Path, titan: None
) -> None:
    data = str(chat.path) if kind == "store" else data_of(kind, chat, tmp_path)
    length = int(max(chat.lengths))
    found: Counter[Any] = Counter()
    for pack in packed(built(data, shuffle=True), length):
        for number in range(1, int(pack["input_ids_segment_ids"].max()) + 1):
            inside = pack["input_ids_segment_ids"] == number
            ids, labels = pack["input_ids"][inside], pack["labels"][inside]
            found[tuple(ids.tolist()), tuple(labels.tolist())] += 1
    assert found == Counter(map(next_tokens, chat))


def test_ranks_resume_in_the_middle_of_packs(chat: Store, titan: None) -> None:
    length = int(max(chat.lengths))
    for rank in range(2):
        dataset = built(chat, shuffle=True, repeat=True, dp_rank=rank, dp_world_size=2)
        require_resume(packed(dataset, length), 30)


def test_long_rows_are_refused_because_torchtitan_would_drop_them(
    chat: Store, tmp_path: Path, titan: None
) -> None:
    longest = int(max(chat.lengths))
    assert len(built(chat, longest - 1)) == len(chat)
    with pytest.raises(SourceError, match=rf"max_context_length and 1 is {longest - 1} \(\d+ such"):
        built(chat, longest - 2)
    rows = built(data_of("lazy", chat, tmp_path), longest - 2)
    with pytest.raises(SourceError, match=f"has {longest} tokens"):
        rows[int(np.argmax(chat.lengths))]
    with pytest.raises(UsageError, match="expected a store"):
        built(object())
