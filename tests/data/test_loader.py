"""The loader's contract, point by point; what it serves is checked by tests/consistency.

Loops, resumes and `set_epoch` in any sequence are checked by tests/consistency/test_machine.py.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.programs import python
from tests.store.making import damage_slice, make_columns, make_store
from tokenmill.data.cursor import Cursor
from tokenmill.data.loader import Loader
from tokenmill.data.mixture import mix
from tokenmill.data.packs import Pack
from tokenmill.data.stream import Stream
from tokenmill.data.view import as_view
from tokenmill.errors import CorruptionError, StateError, UsageError
from tokenmill.store import Row, Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(0).integers(1, 30, 50).tolist()
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(lengths)], pad_token_id=9)


def numbers(loader: Iterable[dict[str, Any]]) -> list[list[int]]:
    return [batch["indices"].tolist() for batch in loader]


# Batches


def test_padding_side_multiple_and_pad_id_are_followed(store: Store) -> None:
    batch = next(iter(Loader(store, batch_size=5, padding_side="left", pad_to_multiple_of=16)))
    assert batch["input_ids"].shape[1] % 16 == 0
    padding = batch["attention_mask"] == 0
    assert set(batch["input_ids"][padding].tolist()) == {9}
    assert not padding[:, -1].any()
    other = next(iter(Loader(store, batch_size=5, pad_token_id=77)))
    assert set(other["input_ids"][other["attention_mask"] == 0].tolist()) == {77}


def test_pad_id_is_taken_only_where_stores_agree(tmp_path: Path) -> None:
    one = make_store(tmp_path / "a", [make_columns([3])], name="a", pad_token_id=3)
    two = make_store(tmp_path / "b", [make_columns([3])], name="b", pad_token_id=4)
    none = make_store(tmp_path / "c", [make_columns([5])], name="none", pad_token_id=None)
    assert as_view(one).pad_token_id == 3
    assert as_view(none).pad_token_id == 1  # the end-of-sequence token
    with pytest.raises(UsageError, match="set pad_token_id"):
        Loader(mix({"a": one, "b": two}))
    assert len(list(Loader(mix({"a": one, "b": two}), pad_token_id=0))) == 1


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


@pytest.mark.parametrize("prefetch", [0, 3])
def test_iterators_of_a_loader_share_its_position(store: Store, prefetch: int) -> None:
    expected = numbers(Loader(store, 8, indices=True))
    loader = Loader(store, 8, indices=True, prefetch=prefetch)
    one, two = iter(loader), iter(loader)
    found = [next(turn)["indices"].tolist() for turn in (one, two, two, one)]
    assert found + numbers(loader) == expected


def test_epochs_of_repeat_count_from_the_start_of_the_run(store: Store) -> None:
    loader = Loader(store, 8, indices=True)
    flat = [row for batch in numbers(loader.repeat(3)) for row in batch]
    for epoch in range(3):
        assert sorted(flat[epoch * 50 : epoch * 50 + 50]) == list(range(50))
    loader.set_epoch(loader.epoch)  # trainers announce the epoch; this moves nothing
    assert list(loader.repeat(3)) == []
    assert len(numbers(loader.repeat(4))) == -(-200 // 8) - -(-150 // 8)
    loader.set_epoch(5)
    assert len(numbers(loader.repeat(1))) == 7


@pytest.mark.parametrize("prefetch", [0, 2])
def test_state_too_near_the_end_of_its_epoch_is_one_empty_loop(store: Store, prefetch: int) -> None:
    """As ranks with a smaller global batch save it after their last full batch."""
    loader = Loader(store, 8, drop_last=True, indices=True, prefetch=prefetch)
    epochs = [numbers(loader) for _ in range(2)]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 48})
    assert list(loader) == []
    assert loader.cursor == Cursor(1)
    assert numbers(loader) == epochs[1]


def test_iterator_that_ended_stays_ended(store: Store) -> None:
    loader = Loader(store, 13)
    ended = iter(loader)
    assert len(list(ended)) == 4
    loader.set_epoch(0)
    assert list(ended) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_error_inside_a_batch_is_raised_again_and_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    batches = iter(Loader(store, 13, indices=True))
    found = [next(batches)["indices"].tolist()]
    with monkeypatch.context() as patch:
        patch.setattr(Store, "batch", fails)
        for _ in range(2):
            with pytest.raises(error):
                next(batches)
    assert found + numbers(batches) == numbers(Loader(store, 13, indices=True))


# States


OTHER_STREAMS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"seed": 1}, r"another seed \(state: 42, this loader: 1\)"),
    ({}, {"shuffle": False}, r"order \(state: 'feistel', this loader: 'sequential'\)"),
    ({}, {"group_by_length": True}, "length_grouped/8192/64"),
    ({}, {"pack": Pack(64)}, "another packing.*None.*64"),
    *(
        ({"pack": Pack(64)}, {"pack": pack}, "another packing")
        for pack in (Pack(65), Pack(64, "first_fit"), Pack(64, window=9), Pack(64, oversize="drop"))
    ),
    (
        {"pack": Pack(64, "balanced"), "world_size": 2},
        {"pack": Pack(64, "balanced"), "world_size": 4},
        r"'ranks': 2.*'ranks': 4",
    ),
]


@pytest.mark.parametrize(("saved", "changed", "message"), OTHER_STREAMS)
def test_state_of_another_stream_is_rejected_with_both_values(
    store: Store, saved: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    state = Loader(store, **saved).state_dict()
    with pytest.raises(StateError, match=message):
        Loader(store, **changed).load_state_dict(state)


def test_state_of_another_dataset_names_both_keys(store: Store) -> None:
    view = store.filter("length > 5")
    with pytest.raises(StateError, match=f"dataset.*{store.key}.*{view.key}"):
        Loader(view).load_state_dict(Loader(store).state_dict())
    both = mix({"a": store, "b": view}, {"a": 1, "b": 1})
    other = mix({"a": store, "b": view}, {"a": 1, "b": 2})
    with pytest.raises(StateError, match=f"dataset.*{both.key}.*{other.key}"):
        Loader(other).load_state_dict(Loader(both).state_dict())


@pytest.mark.parametrize("state", [None, [], {}, {"epoch": 0, "position": 0}, "state"])
def test_other_objects_are_rejected_as_state(store: Store, state: Any) -> None:
    with pytest.raises(StateError, match="not the state"):
        Loader(store).load_state_dict(state)


def test_packed_state_outside_of_its_window_is_refused(store: Store) -> None:
    loader = Loader(store, pack=Pack(64, window=20), batch_size=1)
    state = loader.state_dict()
    with pytest.raises(StateError, match="window in the state is 3"):
        loader.load_state_dict({**state, "window": 3})
    with pytest.raises(StateError, match="packs_before=3 exceeds"):
        loader.load_state_dict({**state, "packs_before": 3})
    with pytest.raises(StateError, match="pack 40"):
        loader.load_state_dict({**state, "position": 40})


# Prefetching


def test_prefetch_thread_ends_when_the_iterator_is_dropped(store: Store) -> None:
    before = set(threading.enumerate())
    iterator = iter(Loader(store, prefetch=2))
    next(iterator)
    started = set(threading.enumerate()) - before
    assert [thread.name for thread in started] == ["tokenmill-prefetch"]
    del iterator
    gc.collect()
    for thread in started:
        thread.join(2.5)
        assert not thread.is_alive()


def test_prefetch_error_reaches_the_trainer_with_its_type(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([5] * 40)])
    damage_slice(tmp_path)
    loader = Loader(store, prefetch=2)
    iterator = iter(loader)
    for _ in range(2):  # and again: an error does not turn into a silent end
        with pytest.raises(CorruptionError, match="checksum"):
            list(iterator)
    assert loader.state_dict()["position"] == 0


def test_reading_imports_no_heavy_library_and_a_prefetching_process_exits(store: Store) -> None:
    program = (
        "import sys\nfrom tokenmill import Loader, Pack, mix, open_store\n"
        f"store = open_store({str(store.path)!r})\n"
        "iterator = iter(Loader(store, prefetch=3, pack=Pack(64)))\n"
        "next(iterator)\n"
        "views = store.split({'train': 0.5, 'val': 0.5})\n"
        "next(iter(Loader(mix(views))))\n"
        "heavy = {'pyarrow', 'jinja2', 'tokenizers', 'fastokens', 'transformers',\n"
        "         'datasets', 'torch', 'ray', 'fsspec', 'zstandard', 'typer', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = python(program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


# Refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size"), ({"batch_size": 2.0}, "batch_size"),
        ({"rank": 2, "world_size": 2}, "less than world_size=2, got 2"), ({"rank": -1}, "rank"),
        ({"world_size": 0}, "world_size"), ({"drop_last": "yes"}, "drop_last"),
        ({"padding_side": "top"}, "padding_side"), ({"seed": -1}, "seed"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": 2**40}, "at most 1048576"), ({"pad_to_multiple_of": 2**70}, "most"),
        ({"prefetch": -1}, "prefetch"), ({"group_by_length": (8, 2)}, "group_by_length"),
        ({"pack": 64}, "tm.Pack"), ({"pad_token_id": 2.9}, "pad_token_id"),
        ({"pad_token_id": "3"}, "pad_token_id"), ({"pad_token_id": True}, "pad_token_id"),
        ({"pad_token_id": -1}, "pad_token_id"), ({"pad_token_id": 2**70}, "pad_token_id"),
        ({"pack": Pack(64), "padding_side": "left"}, "requires padding_side='right'"),
        ({"pack": Pack(60), "pad_to_multiple_of": 8}, "must be a multiple of"),
        ({"pack": Pack(8)}, r"row \d+ has .* pack has 8"),
        ({"shuffle": False, "group_by_length": True}, "requires shuffle=True"),
    ],
)  # fmt: skip
def test_loader_rejects_wrong_arguments(store: Store, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(store, **wrong)


def test_loader_rejects_other_data(store: Store) -> None:
    with pytest.raises(UsageError, match="expected a store"):
        Loader([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no rows"):
        Loader(as_view(store)[:0])


def test_global_batch_larger_than_an_epoch_is_refused_where_it_cannot_be_served(
    store: Store,
) -> None:
    loader = Loader(store, batch_size=17, world_size=3, indices=True)
    with pytest.raises(UsageError, match="batch of 51 samples is larger than an epoch of 50"):
        loader.repeat()
    with pytest.raises(UsageError, match="epochs"):
        loader.repeat(0)
    with pytest.raises(UsageError, match="larger than an epoch"):
        next(iter(Loader(store, batch_size=51, drop_last=True)))
    assert [len(batch["indices"]) for batch in loader] == [17]  # one short batch


def test_packs_that_drop_everything_are_an_error_not_an_endless_search(store: Store) -> None:
    view = store.filter("length > 20")
    with pytest.raises(UsageError, match="no samples"):
        next(iter(Loader(view, pack=Pack(10, oversize="drop"))))


@pytest.mark.parametrize("length", [2**31, 2**70])
def test_pack_of_an_absurd_length_is_refused(length: int) -> None:
    with pytest.raises(UsageError, match=f"length must be at most 2147483647, got {length}"):
        Pack(length)


def test_longest_pack_takes_no_more_memory_than_its_rows(store: Store) -> None:
    units = Stream(store, pack=Pack(2**31 - 1)).samples.take(Cursor(), 2)[0]
    assert len(units) == 1
    assert units.tokens == int(store.lengths.sum())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_later_epoch_that_is_one_pack_short_does_not_end_the_run(
    store: Store, prefetch: int
) -> None:
    def make() -> Loader:
        return Loader(store, size, pack=pack, drop_last=True, prefetch=prefetch, indices=True)

    pack = Pack(64, method="sequential")
    packs = Stream(store, pack=pack).samples
    counts = [packs.count(epoch) for epoch in range(40)]
    size = counts[0]
    short = next(epoch for epoch, count in enumerate(counts) if count < size)
    loader = make()
    for epoch in range(short):
        assert len(list(loader)) == 1, epoch
    with pytest.warns(UserWarning, match=f"epoch {short}, which has {size - 1} packs"):
        assert list(loader) == []
    assert loader.epoch == short + 1
    # Continuous batches lose no pack, also where a run starts at the short epoch.
    loader = make()
    whole = numbers(loader.repeat(epochs=short + 2))
    assert len(whole) == -(-sum(counts[: short + 2]) // size)
    resumed = make()
    resumed.set_epoch(short)
    (batch,) = numbers(resumed.repeat(epochs=1))
    assert set(batch) == set(range(len(store)))
    assert len(batch) > len(store)  # the last pack is of the next epoch
