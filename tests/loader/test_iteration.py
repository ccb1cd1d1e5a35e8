"""Iterators of a loader: their ends, errors and interrupts.

What loops serve under any sequence of actions is checked by tests/consistency/test_machine.py.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from tests.store.making import make_columns, make_store
from tokenmill.errors import UsageError
from tokenmill.loader import Cursor, Loader
from tokenmill.store import Store

LENGTHS = [3 + (7 * i) % 11 for i in range(19)]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(LENGTHS)])


@pytest.mark.parametrize(("drop_last", "batches"), [(False, 4), (True, 3)])
def test_after_the_last_batch_of_an_epoch_comes_the_next_epoch(
    store: Store, drop_last: bool, batches: int
) -> None:
    """Also for a state that is saved there; ``i + 1 == len(loader)`` finds the last batch."""
    loader = Loader(store, batch_size=5, drop_last=drop_last)
    for epoch in range(3):
        found = [(len(loader), loader.epoch) for _ in loader]
        assert found == [(batches, epoch)] * (batches - 1) + [(batches, epoch + 1)]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_state_too_near_the_end_of_its_epoch_is_one_empty_loop(store: Store, prefetch: int) -> None:
    """As ranks with a smaller global batch save it after their last full batch."""
    loader = Loader(store, 5, drop_last=True, indices=True, prefetch=prefetch)
    epochs = [[batch["indices"].tolist() for batch in loader] for _ in range(2)]
    loader.load_state_dict({**loader.state_dict(), "epoch": 0, "position": 15})
    assert list(loader) == []
    assert loader.cursor == Cursor(1)
    assert [batch["indices"].tolist() for batch in loader] == epochs[1]


def test_iterator_that_ended_stays_ended_and_one_that_failed_fails_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = Loader(store, 5)
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
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [batch["indices"].tolist() for batch in Loader(store, 5, indices=True)]
    loader = Loader(store, 5, indices=True)
    fill, calls = type(loader.filler).fill, count()

    def interrupted(*given: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return fill(*given)

    monkeypatch.setattr(type(loader.filler), "fill", interrupted)
    rows = iter(loader)
    found: list[list[int]] = []
    while len(found) < len(expected):
        try:
            found.append(next(rows)["indices"].tolist())
        except KeyboardInterrupt:
            continue
    assert found == expected


def test_account_of_a_run_counts_what_its_last_batch_borrowed(store: Store) -> None:
    loader = Loader(store, batch_size=5)
    assert len(list(loader.repeat(3))) == 12  # ⌈3 × 19 / 5⌉, not 3 × ⌈19 / 5⌉
    assert loader.served()["data"]["rows"] == 60
    assert loader.served()["data"]["passes"] == 3
    with pytest.raises(UsageError, match="epochs"):
        loader.repeat(0)
