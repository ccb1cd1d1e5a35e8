"""Loops over epochs, and `repeat`, against plain lists of samples cut into global batches.

Under any geometry, shape of samples and interruption; and `len` is what a loop hands out.
"""

from __future__ import annotations

import json
from itertools import chain, count, islice, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.store.making import make_columns, make_store
from tokenmill.dataset import Mixture, mix
from tokenmill.errors import UsageError
from tokenmill.loader import Cursor, LengthGrouped, Loader
from tokenmill.packing import Pack
from tokenmill.store import Store

LENGTHS = [3 + (7 * i) % 11 for i in range(19)]
SHAPES: dict[str, dict[str, Any]] = {
    "rows": {},
    "grouped": {"group_by_length": LengthGrouped(8, 2)},
    "stored order": {"shuffle": False},
    "packs": {"pack": Pack(20, window=7)},
    "packs of some rows": {"pack": Pack(6, window=3, oversize="drop")},  # some windows have none
    "balanced packs": {"pack": Pack(24, window=8, method="balanced")},
}
Sample = tuple[int, ...]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    root = tmp_path_factory.mktemp("cache")
    one = make_store(root, [make_columns(LENGTHS)], name="one")
    return one, make_store(root, [make_columns(LENGTHS[:6], seed=1)], name="two")


def data_of(stores: tuple[Store, Store], exhausted: str | None) -> Store | Mixture:
    if exhausted is None:
        return stores[0]
    weights = {"one": 0.4, "two": 0.6}
    return mix({"one": stores[0], "two": stores[1]}, weights, exhausted=exhausted)


def samples(loader: Loader, epoch: int) -> list[Sample]:
    """The rows of every sample of an epoch."""
    packs, _ = loader.stream.samples.take(Cursor(epoch), 1000)
    ends = packs.bounds.tolist()
    return [tuple(packs.rows[a:b].tolist()) for a, b in pairwise(ends)]


def cut(values: list[Sample], size: int) -> list[list[Sample]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def expected_run(
    loader: Loader, size: int, epochs: int, *, repeat: bool, drop_last: bool
) -> list[list[Sample]]:
    each = [samples(loader, epoch) for epoch in range(epochs)]
    if repeat:
        stream = list(chain.from_iterable(each))
        later = (sample for epoch in count(epochs) for sample in samples(loader, epoch))
        return cut([*stream, *islice(later, -len(stream) % size)], size)
    batches = [batch for epoch in each for batch in cut(epoch, size)]
    return [batch for batch in batches if len(batch) == size or not drop_last]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("repeat", [True, False], ids=["repeat", "epochs"])
@settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drop_last=st.booleans(),
    exhausted=st.sampled_from([None, "repeat", "stop", "drop"]),
    batch_size=st.sampled_from([1, 2, 3, 5, 12, 30]),
    world=st.sampled_from([1, 2, 3]),
    prefetch=st.sampled_from([0, 0, 2]),
    epochs=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_loops_left_entered_again_and_resumed_serve_the_lists(
    stores: tuple[Store, Store],
    shape: str,
    repeat: bool,
    drop_last: bool,
    exhausted: str | None,
    batch_size: int,
    world: int,
    prefetch: int,
    epochs: int,
    data: st.DataObject,
) -> None:
    def loaders(world: int, batch_size: int) -> list[Loader]:
        return [
            Loader(data_of(stores, exhausted), batch_size, rank=rank, world_size=world,
                   drop_last=drop_last, prefetch=prefetch, indices=True, **SHAPES[shape])
            for rank in range(world)
        ]  # fmt: skip

    size = world * batch_size
    ranks = loaders(world, batch_size)
    if any(len(samples(ranks[0], epoch)) < size for epoch in range(epochs)):
        assume(not repeat and not drop_last)
    expected = expected_run(ranks[0], size, epochs, repeat=repeat, drop_last=drop_last)
    # Ranks of another number that serve the same global batches, where there can be such.
    geometries = [(world, batch_size)]
    if shape != "balanced packs":
        geometries.append((size, 1))
    found: list[list[int]] = []
    while ranks[0].epoch < epochs:
        epoch, before = ranks[0].epoch, len(found)
        counted = len(ranks[0]) if ranks[0].cursor.position == 0 else None
        stop = data.draw(st.none() | st.integers(0, 4), label="batches before a break")
        ended = stop != 0
        loops = [rank.repeat(epochs) if repeat else iter(rank) for rank in ranks]
        for number, batches in enumerate(zip(*loops, strict=True) if ended else (), 1):
            found.append([row for batch in batches for row in batch["indices"].tolist()])
            assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
            if number == stop:
                ended = False
                break
        if ended:
            assert ranks[0].epoch > epoch, "a loop that came to its end stayed in its epoch"
            if not repeat and counted is not None:
                assert len(found) - before == counted
        if data.draw(st.booleans(), label="save and load"):
            state = json.dumps(ranks[0].state_dict())
            ranks = loaders(*data.draw(st.sampled_from(geometries)))
            for rank in ranks:
                rank.load_state_dict(json.loads(state))
        if data.draw(st.booleans(), label="announce"):
            for rank in ranks:
                rank.set_epoch(rank.epoch)
    assert found == [[row for sample in batch for row in sample] for batch in expected]
    assert list(ranks[0].repeat(epochs)) == [] if repeat else ranks[0].epoch == epochs


def test_length_in_a_loops_body_is_the_loops(stores: tuple[Store, Store]) -> None:
    """``i + 1 == len(loader)`` is how people find the last batch."""
    loader = Loader(stores[0], batch_size=5)
    for _ in range(4):
        assert [len(loader) for _ in loader] == [4] * 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_state_too_near_the_end_of_its_epoch_is_one_empty_loop(
    stores: tuple[Store, Store], prefetch: int
) -> None:
    """As ranks with a smaller global batch save it after their last full batch."""
    loader = Loader(stores[0], 5, drop_last=True, indices=True, prefetch=prefetch)
    epochs = [[batch["indices"].tolist() for batch in loader] for _ in range(2)]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 15})
    assert list(loader) == []
    assert loader.cursor == Cursor(1)
    assert [batch["indices"].tolist() for batch in loader] == epochs[1]


def test_iterator_that_ended_stays_ended_and_one_that_failed_fails_again(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(stores[0], 5)
    ended = iter(loader)
    assert len(list(ended)) == 4
    loader.set_epoch(0)
    assert list(ended) == []
    failing = iter(loader)
    next(failing)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "batch", lambda store, indices: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                next(failing)
    assert len(list(failing)) == 3  # nothing was lost


def test_interrupt_inside_a_batch_loses_nothing(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [batch["indices"].tolist() for batch in Loader(stores[0], 5, indices=True)]
    loader = Loader(stores[0], 5, indices=True)
    fill, calls = type(loader.filler).fill, count()

    def interrupted(*given: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return fill(*given)

    monkeypatch.setattr(type(loader.filler), "fill", interrupted)
    rows, found = iter(loader), []
    while len(found) < len(expected):
        try:
            found.append(next(rows)["indices"].tolist())
        except KeyboardInterrupt:
            continue
    assert found == expected


def test_account_of_a_run_counts_what_its_last_batch_borrowed(stores: tuple[Store, Store]) -> None:
    loader = Loader(stores[0], batch_size=5)
    assert len(list(loader.repeat(3))) == 12  # ⌈3 × 19 / 5⌉, not 3 × ⌈19 / 5⌉
    assert loader.served()["data"]["rows"] == 60
    assert loader.served()["data"]["passes"] == 3
    with pytest.raises(UsageError, match="epochs"):
        loader.repeat(0)
