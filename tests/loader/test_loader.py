"""The loader's contract, point by point; what it serves is held by tests/consistency."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.making import make_columns, make_store
from tokenmill.dataset import filtered, mix
from tokenmill.errors import StateError, UsageError
from tokenmill.loader import Cursor, LengthGrouped, Loader
from tokenmill.packing import Pack
from tokenmill.store import Row, Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(0).integers(1, 30, 50).tolist()
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(lengths)], pad_id=9)


def numbers(loader: Iterable[dict[str, Any]]) -> list[list[int]]:
    return [batch["indices"].tolist() for batch in loader]


# Batches


def test_batch_unpacked_has_the_contracts_names_types_and_shape(store: Store) -> None:
    batch = next(iter(Loader(store, batch_size=4)))
    kinds = {
        n: (v.dtype.str[1:], v.shape[0]) for n, v in batch.items() if n != "num_trained_tokens"
    }
    assert kinds == {"input_ids": ("i8", 4), "attention_mask": ("u1", 4), "labels": ("i8", 4),
                     "loss_mask": ("u1", 4)}  # fmt: skip
    assert isinstance(batch["num_trained_tokens"], int)


def test_batch_packed_has_the_contracts_names_types_and_shape(store: Store) -> None:
    batch = next(iter(Loader(store, batch_size=3, pack=Pack(64))))
    kinds = {n: (v.dtype.str[1:], v.shape) for n, v in batch.items() if isinstance(v, np.ndarray)}
    cu_seqlens = kinds.pop("cu_seqlens")
    assert cu_seqlens[0] == "i4"
    assert kinds == {
        "input_ids": ("i8", (3, 64)), "labels": ("i8", (3, 64)), "position_ids": ("i8", (3, 64)),
        "loss_mask": ("u1", (3, 64)), "seq_idx": ("i4", (3, 64)),
    }  # fmt: skip
    assert batch["max_seqlen"] == int(np.diff(batch["cu_seqlens"]).max())
    assert batch["cu_seqlens"][-1] == 3 * 64


def test_padding_side_multiple_and_pad_id_are_followed(store: Store) -> None:
    batch = next(iter(Loader(store, batch_size=5, pad_side="left", pad_to_multiple_of=16)))
    assert batch["input_ids"].shape[1] % 16 == 0
    padding = batch["attention_mask"] == 0
    assert set(batch["input_ids"][padding].tolist()) == {9}
    assert not padding[:, -1].any()
    other = next(iter(Loader(store, batch_size=5, pad_id=77)))
    assert set(other["input_ids"][other["attention_mask"] == 0].tolist()) == {77}


def test_pad_id_nobody_knows_must_be_said(tmp_path: Path) -> None:
    one = make_store(tmp_path / "a", [make_columns([3])], name="a", pad_id=3)
    two = make_store(tmp_path / "b", [make_columns([3])], name="b", pad_id=4)
    with pytest.raises(UsageError, match="say pad_id"):
        Loader(mix({"a": one, "b": two}))
    assert len(list(Loader(mix({"a": one, "b": two}), pad_id=0))) == 1


def test_short_last_batch_is_shared_evenly_and_idle_ranks_get_padding(store: Store) -> None:
    for world, size, expected in ((4, 3, [1, 1, 0, 0]), (3, 4, [1, 1, 0]), (3, 7, [3, 3, 2])):
        last = []
        for rank in range(world):
            loader = Loader(store, batch_size=size, rank=rank, world_size=world,
                            indices=True)  # fmt: skip
            last.append(list(loader)[-1])
        assert [len(batch["indices"]) for batch in last] == expected
        for batch, share in zip(last, expected, strict=True):
            if not share:
                assert batch["input_ids"].shape[0] == 1
                assert set(batch["labels"].ravel().tolist()) == {-100}
                assert not batch["attention_mask"].any()
            assert batch["num_trained_tokens"] == last[0]["num_trained_tokens"]


def every_other(row: Row) -> dict[str, Any]:
    return {"loss_mask": np.arange(len(row)) % 2}


@pytest.mark.parametrize("more", [{}, {"pack": Pack(40, oversize="split")}])
def test_mapped_rows_are_served_and_counted_on_all_ranks(
    store: Store, more: dict[str, Any]
) -> None:
    given = {"batch_size": 3, "world_size": 2, **more}
    ranks = [Loader(store.map(every_other), rank=rank, **given) for rank in range(2)]
    plain = [Loader(store, rank=rank, **given) for rank in range(2)]
    for ours, theirs in zip(zip(*ranks, strict=True), zip(*plain, strict=True), strict=True):
        trained = sum(int((batch["labels"] != -100).sum()) for batch in ours)
        assert [batch["num_trained_tokens"] for batch in ours] == [trained] * 2
        for mapped, stored in zip(ours, theirs, strict=True):
            assert np.array_equal(mapped["input_ids"], stored["input_ids"])
        assert ranks[0].state_dict() == plain[0].state_dict()


# Iteration and state


def test_endless_stream_goes_on_and_states_name_the_place(store: Store) -> None:
    loader = Loader(store, batch_size=10)
    for number, _ in enumerate(loader.repeat(), 1):
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == divmod(number * 10, 50)
        if number == 17:
            break


@pytest.mark.parametrize("prefetch", [0, 3])
def test_iterators_of_a_loader_share_its_position(store: Store, prefetch: int) -> None:
    expected = numbers(Loader(store, 8, indices=True))
    loader = Loader(store, 8, indices=True, prefetch=prefetch)
    one, two = iter(loader), iter(loader)
    found = [next(turn)["indices"].tolist() for turn in (one, two, two, one)]
    assert found + numbers(loader) == expected


def test_epochs_of_repeat_count_from_the_start_of_the_run(store: Store) -> None:
    whole = numbers(Loader(store, 8, indices=True).repeat(3))
    assert len(whole) == -(-150 // 8)
    flat = [row for batch in whole for row in batch]
    for epoch in range(3):
        assert sorted(flat[epoch * 50 : epoch * 50 + 50]) == list(range(50))
    begun = Loader(store, 8, indices=True)
    batches = begun.repeat(3)
    found = [next(batches)["indices"].tolist() for _ in range(9)]  # in the second epoch
    resumed = Loader(store, 8, indices=True)
    resumed.load_state_dict(begun.state_dict())
    resumed.set_epoch(resumed.epoch)  # trainers announce the epoch; this moves nothing
    assert found + numbers(resumed.repeat(3)) == whole
    assert list(resumed.repeat(3)) == []
    assert len(numbers(resumed.repeat(4))) == -(-200 // 8) - len(whole)
    moved = Loader(store, 8, indices=True)
    moved.set_epoch(5)
    assert len(numbers(moved.repeat(1))) == 7


def test_set_epoch_goes_to_another_epoch_and_keeps_the_place_in_the_same(store: Store) -> None:
    whole = Loader(store, 8, indices=True)
    epochs = [numbers(whole) for _ in range(3)]
    loader = Loader(store, 8, indices=True)
    for epoch in (0, 1, 2, 1):
        loader.set_epoch(epoch)
        assert numbers(loader) == epochs[epoch]
    loader.set_epoch(2)
    next(iter(loader))
    loader.set_epoch(2)
    assert numbers(loader) == epochs[2][1:]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 1}, r"another seed \(the state's: 42, this loader's: 1\)"),
    ({"shuffle": False}, r"another order \(the state's: 'feistel', this loader's: 'sequential'\)"),
    ({"group_by_length": LengthGrouped(64, 8)}, "length_grouped/64/8"),
    ({"pack": Pack(64)}, "another packing.*None.*64"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSALS)
def test_state_of_another_stream_is_refused_saying_which(
    store: Store, changed: dict[str, Any], message: str
) -> None:
    state = Loader(store).state_dict()
    with pytest.raises(StateError, match=message):
        Loader(store, **changed).load_state_dict(state)


def test_state_of_another_dataset_names_both_keys(store: Store) -> None:
    view = filtered(store, "length > 5")
    with pytest.raises(StateError, match=f"dataset.*{store.key}.*{view.key}"):
        Loader(view).load_state_dict(Loader(store).state_dict())
    both = mix({"a": store, "b": view}, {"a": 1, "b": 1})
    other = mix({"a": store, "b": view}, {"a": 1, "b": 2})
    with pytest.raises(StateError, match=f"dataset.*{both.key}.*{other.key}"):
        Loader(other).load_state_dict(Loader(both).state_dict())


def test_state_of_another_pack_length_method_window_or_rank_count_is_refused(store: Store) -> None:
    state = Loader(store, pack=Pack(64)).state_dict()
    for pack in (Pack(65), Pack(64, "first_fit"), Pack(64, window=9), Pack(64, oversize="drop")):
        with pytest.raises(StateError, match="another packing"):
            Loader(store, pack=pack).load_state_dict(state)
    two = Loader(store, pack=Pack(64, "balanced"), world_size=2).state_dict()
    with pytest.raises(StateError, match=r"'ranks': 2.*'ranks': 4"):
        Loader(store, pack=Pack(64, "balanced"), world_size=4).load_state_dict(two)


@pytest.mark.parametrize(
    ("field", "value"),
    [("version", 2), ("order_version", 0), ("kind", "x"), ("epoch", -1), ("position", 51),
     ("position", 1.5), ("position", True), ("epoch", None), ("first_epoch", "0")],
)  # fmt: skip
def test_state_that_was_tampered_with_is_refused(store: Store, field: str, value: Any) -> None:
    loader = Loader(store)
    state = {**loader.state_dict(), field: value}
    with pytest.raises(StateError):
        loader.load_state_dict(state)
    assert loader.cursor == Cursor()


@pytest.mark.parametrize("state", [None, [], {}, {"epoch": 0, "position": 0}, "state"])
def test_state_that_is_none_is_refused(store: Store, state: Any) -> None:
    with pytest.raises(StateError, match="not a state"):
        Loader(store).load_state_dict(state)


def test_packed_state_outside_of_its_window_is_refused(store: Store) -> None:
    loader = Loader(store, pack=Pack(64, window=20), batch_size=1)
    state = loader.state_dict()
    with pytest.raises(StateError, match="window is 3"):
        loader.load_state_dict({**state, "window": 3})
    with pytest.raises(StateError, match="packs_before=3 exceeds"):
        loader.load_state_dict({**state, "packs_before": 3})
    with pytest.raises(StateError, match="pack 40"):
        loader.load_state_dict({**state, "position": 40})
