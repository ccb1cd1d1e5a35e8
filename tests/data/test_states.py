"""Arbitrary states: each raises StateError or is a valid position."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.making import make_columns, make_store
from tokenmill.data.loader import Loader
from tokenmill.data.mixture import Mixture, mix
from tokenmill.data.packs import Pack
from tokenmill.data.stream import RunIndex
from tokenmill.errors import StateError, UsageError
from tokenmill.store import Store

KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "grouped": {"group_by_length": True},
    "packs": {"pack": Pack(32, window=10)},
    "dropping": {"pack": Pack(6, window=5, oversize="drop")},
    "mix": {"mix": "repeat"},
    "mix that drops": {"mix": "drop"},
    "mixed packs": {"mix": "stop", "pack": Pack(32, window=10)},
}
NUMBERS = ("epoch", "position", "window", "packs_before", "first_epoch", "version", "order_version")
COMPARED = ("kind", "dataset", "seed", "order", "packing", "version", "order_version")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    root = tmp_path_factory.mktemp("cache")
    return (
        make_store(root, [make_columns([3 + i % 9 for i in range(37)])], name="a"),
        make_store(root, [make_columns([4 + i % 5 for i in range(11)])], name="b"),
    )


def loader_of(kind: str, stores: tuple[Store, Store]) -> Loader:
    given = dict(KINDS[kind])
    exhausted = given.pop("mix", None)
    data: Store | Mixture = stores[0]
    if exhausted is not None:
        data = mix({"a": stores[0], "b": stores[1]}, {"a": 0.3, "b": 0.7}, exhausted=exhausted)
    with mock.patch.multiple("tokenmill.data.stream", LENGTH_WINDOW=8, LENGTH_GROUP=2):
        return Loader(data, batch_size=3, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrong",
    [np.zeros(3), np.asarray([42]), np.asarray(1), np.int64(42), np.str_("feistel"),
     -1, 1.5, True, "0", [], {}],
)  # fmt: skip
def test_state_with_wrong_types_is_rejected(
    kind: str, wrong: Any, stores: tuple[Store, Store]
) -> None:
    loader = loader_of(kind, stores)
    state = loader.state_dict()
    for name in {*NUMBERS, *COMPARED} & set(state):
        with pytest.raises(StateError):
            loader.load_state_dict({**state, name: wrong})
    if state["packing"]:
        for name in state["packing"]:
            with pytest.raises(StateError):
                loader.load_state_dict({**state, "packing": {**state["packing"], name: wrong}})
    assert loader.state_dict() == state


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.parametrize("kind", KINDS)
def test_any_numbers_are_a_valid_position_or_rejected(
    kind: str, data: st.DataObject, stores: tuple[Store, Store]
) -> None:
    loader = loader_of(kind, stores)
    state = loader.state_dict()
    numbers = st.one_of(
        st.integers(0, 60), st.integers(0, 1 << 66), st.sampled_from([36, 37, 38, 10**18, 1 << 62])
    )
    for name in set(NUMBERS[:5]) & set(state):
        state[name] = data.draw(numbers, label=name)
    try:
        loader.load_state_dict(state)
    except StateError:
        return
    loader.served()
    assert len(loader) > 0
    batches = loader.repeat()
    for _ in range(3):
        next(batches)
    assert loader.state_dict()["epoch"] >= state["epoch"]


@pytest.mark.parametrize("kind", KINDS)
def test_state_after_the_last_row_or_pack_is_rejected(
    kind: str, stores: tuple[Store, Store]
) -> None:
    loader = loader_of(kind, stores)
    rows = loader.stream.order.rows
    with pytest.raises(StateError):
        loader.load_state_dict({**loader.state_dict(), "position": rows})


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_out_of_range_are_rejected(kind: str, stores: tuple[Store, Store]) -> None:
    loader = loader_of(kind, stores)
    last = loader.stream.last_epoch
    with pytest.raises(StateError, match="epoch"):
        loader.load_state_dict({**loader.state_dict(), "epoch": last + 1, "first_epoch": 0})
    with pytest.raises(UsageError, match="epoch"):
        loader.set_epoch(last + 1)
    loader.set_epoch(last)
    loader.served()
    next(iter(loader))
    given = loader.stream.mixture or stores[0]
    for wrong in (last + 1, -1, True, 0.5):
        with pytest.raises(UsageError, match="epoch"):
            loader.set_epoch(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="epoch"):
        RunIndex(given, epochs=1 << 63)
