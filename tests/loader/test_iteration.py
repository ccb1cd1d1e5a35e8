"""One epoch per loop: the loops of a run, one after the other, are `repeat`.

Under any geometry, shape of samples and interruption; and `len` is what each of them hands out.
"""

from __future__ import annotations

import json
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.store.making import make_columns, make_store
from tokenmill.dataset import Mixture, mix
from tokenmill.errors import UsageError
from tokenmill.loader import LengthGrouped, Loader
from tokenmill.packing import Pack
from tokenmill.store import Store

LENGTHS = [3 + (7 * i) % 11 for i in range(19)]
SHAPES: dict[str, dict[str, Any]] = {
    "rows": {},
    "grouped": {"order": LengthGrouped(8, 2)},
    "as they stand": {"shuffle": False},
    "packs": {"pack": Pack(20, window=7)},
    "packs of some rows": {"pack": Pack(6, window=3, oversize="drop")},  # some windows have none
    "balanced packs": {"pack": Pack(24, window=8, method="balanced")},
    "budget": {"max_tokens": 14},
}


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


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    last=st.sampled_from(["wrap", "keep", "drop"]),
    exhausted=st.sampled_from([None, "repeat", "stop", "drop"]),
    batch_size=st.sampled_from([1, 2, 3, 5, 12, 30]),
    world=st.sampled_from([1, 2, 3]),
    prefetch=st.sampled_from([0, 0, 2]),
    epochs=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_loops_one_after_the_other_are_the_run(
    stores: tuple[Store, Store],
    shape: str,
    last: str,
    exhausted: str | None,
    batch_size: int,
    world: int,
    prefetch: int,
    epochs: int,
    data: st.DataObject,
) -> None:
    def loaders(world: int, batch_size: int, prefetch: int = 0) -> list[Loader]:
        return [
            Loader(data_of(stores, exhausted), batch_size, rank=rank, world_size=world, last=last,
                   epochs=epochs, prefetch=prefetch, indices=True, **SHAPES[shape])
            for rank in range(world)
        ]  # fmt: skip

    def step(batches: Any) -> list[int]:
        return [row for batch in batches for row in batch["indices"].tolist()]

    try:
        run = [step(batches) for batches in zip(*map(Loader.repeat, loaders(world, batch_size)),
                                                strict=True)]  # fmt: skip
    except UsageError as error:  # the geometry cannot serve an epoch at all
        assert "serve nothing" in str(error)
        assume(False)
    # Ranks of another number that serve the same global batches, where there can be such.
    geometries = [(world, batch_size)]
    if shape not in ("balanced packs", "budget"):
        geometries.append((world * batch_size, 1))
    ranks = loaders(world, batch_size, prefetch)
    found: list[list[int]] = []
    while found != run:
        assert found == run[: len(found)], "a loop went elsewhere"
        epoch, before = ranks[0].epoch, len(found)
        assert epoch < epochs
        while ranks[0].epoch == epoch:  # a loop over the epoch, left and entered again
            stop = data.draw(st.none() | st.integers(0, 4), label="batches before a break")
            ends = True
            for number, batches in enumerate(zip(*ranks, strict=True), 1):
                found.append(step(batches))
                assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
                if number == stop:
                    ends = False
                    break
            if ends:
                assert ranks[0].epoch > epoch, "a loop that came to its end stayed in its epoch"
            if data.draw(st.booleans(), label="save and load"):
                state = json.dumps(ranks[0].state_dict())
                ranks = loaders(*data.draw(st.sampled_from(geometries)), prefetch)
                for rank in ranks:
                    rank.load_state_dict(json.loads(state))
            if ranks[0].epoch == epoch:
                counted = len(ranks[0])
                assert counted >= len(found) - before
        if data.draw(st.booleans(), label="announce") and epochs > ranks[0].epoch:
            # Trainers do; it moves nothing, but it bounds the run anew.
            first = ranks[0].state_dict()["first_epoch"]
            for rank in ranks:
                rank.set_epoch(rank.epoch)
                rank.jump(rank.cursor, first)
    for rank in ranks:
        assert list(rank) == list(rank.repeat()) == []
        assert rank.epoch >= epochs


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    last=st.sampled_from(["wrap", "keep", "drop"]),
    exhausted=st.sampled_from([None, "repeat", "drop"]),
    batch_size=st.sampled_from([1, 3, 5, 30]),
    world=st.sampled_from([1, 2]),
    stop=st.integers(0, 12),
)
def test_length_is_what_the_loop_hands_out(
    stores: tuple[Store, Store],
    shape: str,
    last: str,
    exhausted: str | None,
    batch_size: int,
    world: int,
    stop: int,
) -> None:
    def make() -> Loader:
        data = data_of(stores, exhausted)
        return Loader(data, batch_size, world_size=world, last=last, **SHAPES[shape])

    loader = make()
    for _ in range(4):
        try:
            counted, handed_out, epoch = len(loader), 0, loader.epoch
            for _ in loader:
                handed_out += 1
                # Who breaks off behind the last batch enters the next epoch.
                assert (loader.epoch > epoch) == (handed_out == counted)
                if handed_out == min(stop, counted - 1):  # in the middle, and after a resume
                    again = make()
                    again.load_state_dict(loader.state_dict())
                    assert len(again) == len(loader) == counted
                    assert sum(1 for _ in again) == counted - handed_out
        except UsageError as error:
            assert "serve nothing" in str(error)
            return
        assert handed_out == counted


@pytest.mark.parametrize("prefetch", [0, 2])
def test_state_too_near_the_end_of_its_epoch_is_one_empty_loop(
    stores: tuple[Store, Store], prefetch: int
) -> None:
    """As releases before this one saved it behind the last whole batch, or other ranks do."""
    loader = Loader(stores[0], 5, last="drop", indices=True, prefetch=prefetch)
    whole = [batch["indices"].tolist() for batch in islice(loader.repeat(), 6)]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 15})
    assert list(loader) == []
    assert (loader.epoch, loader.cursor.position) == (1, 0)
    assert [batch["indices"].tolist() for batch in loader] == whole[3:]


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
