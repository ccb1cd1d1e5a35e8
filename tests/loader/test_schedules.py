"""Mixtures with schedules: exact shares at every place, and another tail for a run under way."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

from tests.store.making import make_columns, make_store
from tokenmill.dataset import mix
from tokenmill.errors import StateError, UsageError
from tokenmill.loader import LengthGrouped, Loader
from tokenmill.packing import Pack
from tokenmill.store import Store

WEIGHTS: dict[str, Any] = {"a": [(0, 0.9), (100, 0.5)], "b": [(0, 0.1), (100, 0.5)]}
OTHER_TAIL = {"a": [(0, 0.9), (50, 0.7), (80, 0.0)], "b": [(0, 0.1), (50, 0.3), (80, 1.0)]}
NEAR_TAIL = {"a": [(0, 0.9), (38, 0.748), (80, 0.0)], "b": [(0, 0.1), (38, 0.252), (80, 1.0)]}
OTHER_START = {"a": [(0, 0.8), (100, 0.5)], "b": [(0, 0.2), (100, 0.5)]}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    root = tmp_path_factory.mktemp("cache")
    return {
        "a": make_store(root, [make_columns([3 + i % 9 for i in range(200)])], name="a"),
        "b": make_store(root, [make_columns([12 + i % 5 for i in range(90)])], name="b"),
    }


def rows(loader: Loader, steps: int) -> list[int]:
    batches = loader.repeat()
    return [row for _ in range(steps) for row in next(batches)["indices"].tolist()]


def test_shares_are_those_of_the_schedule_up_to_every_place(stores: dict[str, Store]) -> None:
    loader = Loader(mix(stores, WEIGHTS), batch_size=1, indices=True)
    for step, batch in enumerate(loader.repeat(), 1):
        ramp = min(step, 100)
        due = 0.9 * ramp - 0.004 * ramp * (ramp - 1) / 2 + 0.5 * (step - ramp)
        served = loader.served()
        assert served["a"]["rows"] + served["b"]["rows"] == step
        assert abs(served["a"]["rows"] - due) < 2
        assert len(batch["indices"]) == 1
        if step == 150:
            return


def test_thirty_chained_resumes_under_changing_ranks_serve_the_same_and_the_exact_shares(
    stores: dict[str, Store],
) -> None:
    data = mix(stores, WEIGHTS, exhausted="stop")
    whole = Loader(data, batch_size=12, indices=True)
    expected = rows(whole, 30)
    found: list[int] = []
    state = None
    for number in range(30):
        world = (1, 2, 3, 4, 6, 12)[number % 6]
        ranks = [
            Loader(data, batch_size=12 // world, rank=rank, world_size=world, indices=True)
            for rank in range(world)
        ]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        found += [row for loader in ranks for row in rows(loader, 1)]
        state = ranks[-1].state_dict()
        assert all(loader.state_dict() == state for loader in ranks)
        counts = {"a": sum(row < 200 for row in found), "b": sum(row >= 200 for row in found)}
        assert {name: of["rows"] for name, of in ranks[0].served().items()} == counts
    assert found == expected


KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "grouped": {"order": LengthGrouped(10, 2)},
    "packs": {"pack": Pack(32, window=10)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_run_goes_on_with_another_tail_and_not_with_another_past(
    stores: dict[str, Store], kind: str
) -> None:
    """Forty rows are served; the new schedule differs from the fiftieth on."""

    def loader_of(weights: Any) -> Loader:
        return Loader(mix(stores, weights), batch_size=1, indices=True, **KINDS[kind])

    first = loader_of(WEIGHTS)
    begun: list[int] = []
    batches = first.repeat()
    while len(begun) < 37:
        begun += next(batches)["indices"].tolist()
    state = json.loads(json.dumps(first.state_dict()))
    whole, changed = loader_of(OTHER_TAIL), loader_of(OTHER_TAIL)
    assert rows(whole, 1) == rows(loader_of(WEIGHTS), 1)
    changed.load_state_dict(state)
    straight = []
    batches = loader_of(OTHER_TAIL).repeat()
    while len(straight) < 150:
        straight += next(batches)["indices"].tolist()
    after = rows(changed, 12)
    assert begun + after == straight[: len(begun) + len(after)]
    with pytest.raises(StateError, match="differs before the state's position"):
        loader_of(OTHER_START).load_state_dict(state)
    # A window that was begun was arranged with all of its rows in sight.
    if kind == "rows":
        loader_of(NEAR_TAIL).load_state_dict(state)
    else:
        with pytest.raises(StateError, match="differs before the state's position"):
            loader_of(NEAR_TAIL).load_state_dict(state)
    with pytest.raises(StateError, match="dataset"):
        loader_of({"a": 0.9, "b": 0.1}).load_state_dict(state)
    for lie in (None, np.zeros(3), 5):
        with pytest.raises(StateError):
            loader_of(WEIGHTS).load_state_dict({**state, "schedule": lie})


def test_positions_in_tokens_are_reached_when_so_many_tokens_are_served(
    stores: dict[str, Store],
) -> None:
    points = [(1000, 0.0), (1500, 1.0)]
    data = mix(stores, {"a": 1.0, "b": points}, schedule_by="tokens")
    assert data.is_scheduled
    loader = Loader(data, batch_size=1)
    batches = loader.repeat()
    while not loader.served()["b"]["rows"]:
        next(batches)
    tokens = sum(of["tokens"] for of in loader.served().values())
    assert 950 < tokens < 1150
    assert mix(stores, {"a": 1.0, "b": points}).key != data.key


def test_scheduled_mixture_and_its_loader_survive_pickling(stores: dict[str, Store]) -> None:
    data = pickle.loads(pickle.dumps(mix(stores, WEIGHTS)))
    assert data.key == mix(stores, WEIGHTS).key
    assert "0.9…" in repr(data)


@pytest.mark.parametrize(
    ("weights", "options", "said"),
    [
        ({"a": [(0, 1)], "b": 0}, {}, "must be positive"),
        ({"a": [], "b": 1}, {}, "ascending positions"),
        ({"a": [(5, 1), (5, 2)], "b": 1}, {}, "ascending positions"),
        ({"a": [(0.5, 1)], "b": 1}, {}, "whole numbers from 0"),
        ({"a": [(0, 1, 2)], "b": 1}, {}, "points"),
        ({"a": [(0, "x")], "b": 1}, {}, "must be a number"),
        ({"a": [(0, -1)], "b": 1}, {}, "must be positive"),
        ({"a": [(0, 1)], "b": 1}, {"exhausted": "drop"}, "repeat"),
        ({"a": [(0, 1)], "b": 1}, {"schedule_by": "steps"}, "schedule_by is 'steps'; it is one of"),
    ],
)
def test_schedule_that_means_nothing_is_refused(
    stores: dict[str, Store], weights: Any, options: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        mix(stores, weights, **options)
