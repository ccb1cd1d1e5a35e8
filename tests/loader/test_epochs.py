"""What `epochs` means under each `last`, against plain lists of samples."""

from __future__ import annotations

from itertools import count, islice
from typing import Any

import pytest

from tests.store.making import make_columns, make_store
from tokenmill.loader import Loader
from tokenmill.packing import Pack
from tokenmill.store import Store

LENGTHS = [3 + (7 * i) % 11 for i in range(23)]
Sample = tuple[int, ...]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(LENGTHS)])


def samples(store: Store, epoch: int, more: dict[str, Any]) -> list[Sample]:
    """One epoch's samples (a row, or the rows of a pack), by a loader that hands out one each."""
    loader = Loader(store, batch_size=1, epochs=1, last="keep", indices=True, **more)
    loader.set_epoch(epoch)
    return [tuple(batch["indices"].tolist()) for batch in loader]


def run(store: Store, ranks: int, **given: Any) -> list[list[int]]:
    """The rows of every global batch of a run."""
    loaders = [Loader(store, rank=r, world_size=ranks, indices=True, **given) for r in range(ranks)]
    steps = zip(*(loader.repeat() for loader in loaders), strict=True)
    return [[row for batch in step for row in batch["indices"].tolist()] for step in steps]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 5, 31])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("last", ["wrap", "keep", "drop"])
@pytest.mark.parametrize("more", [{}, {"pack": Pack(20, window=9)}], ids=["rows", "packs"])
def test_run_is_its_epochs_cut_into_global_batches(
    store: Store, epochs: int, size: int, ranks: int, last: str, more: dict[str, Any]
) -> None:
    wanted = size * ranks
    each = [samples(store, epoch, more) for epoch in range(epochs)]
    if last == "drop" and len(each[0]) < wanted:
        return
    expected: list[list[Sample]] = []
    if last == "wrap":
        stream = [sample for epoch in each for sample in epoch]
        total = len(stream)
        batches = -(-total // wanted)
        later = (sample for epoch in count(epochs) for sample in samples(store, epoch, more))
        stream += islice(later, batches * wanted - total)
        expected = [stream[i * wanted : (i + 1) * wanted] for i in range(batches)]
    else:
        for epoch in each:
            cuts = [epoch[i : i + wanted] for i in range(0, len(epoch), wanted)]
            expected += [cut for cut in cuts if last == "keep" or len(cut) == wanted]
    found = run(store, ranks, batch_size=size, epochs=epochs, last=last, **more)
    assert found == [[row for sample in batch for row in sample] for batch in expected]
    loader = Loader(store, batch_size=size, world_size=ranks, last=last, epochs=epochs, **more)
    if last != "wrap" and not more:
        assert len(found) == epochs * len(loader)
    elif not more:
        assert len(found) == -(-epochs * len(LENGTHS) // wanted) <= epochs * len(loader)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("budget", [13, 40, 500])
def test_token_budget_wraps_as_one_list_of_micro_batches(
    store: Store, ranks: int, budget: int
) -> None:
    rows = (row for epoch in count() for (row,) in samples(store, epoch, {}))
    expected: list[list[int]] = []
    position, row = 0, next(rows)
    while position < 3 * len(LENGTHS):
        step: list[int] = []
        for _ in range(ranks):
            cut: list[int] = []
            while not cut or (len(cut) + 1) * max(LENGTHS[r] for r in [*cut, row]) <= budget:
                cut.append(row)
                row = next(rows)
            step += cut
        position += len(step)
        expected.append(step)
    assert run(store, ranks, max_tokens=budget, epochs=3) == expected


def test_account_of_a_wrapped_run_counts_what_it_borrowed(store: Store) -> None:
    loader = Loader(store, batch_size=5, epochs=3)
    assert len(list(loader.repeat())) == 14  # ⌈3 × 23 / 5⌉, not 3 × ⌈23 / 5⌉
    assert loader.served()["data"]["rows"] == 70
    assert loader.served()["data"]["passes"] == 3
    for epoch in range(3):
        loader = Loader(store, batch_size=5, epochs=1)
        loader.set_epoch(epoch)
        assert len(list(loader)) == len(loader) == 5


@pytest.mark.parametrize("last", ["wrap", "keep", "drop"])
def test_length_in_a_loops_body_is_the_loops(store: Store, last: str) -> None:
    """``i + 1 == len(loader)`` is how people find the last batch."""
    loader = Loader(store, batch_size=5, last=last)
    for _ in range(4):
        expected = len(loader)
        said = [len(loader) for _ in loader]
        assert said == [expected] * len(said)
        assert len(said) == expected


def test_interrupt_inside_a_batch_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [batch["indices"].tolist() for batch in Loader(store, batch_size=5, indices=True)]
    loader = Loader(store, batch_size=5, indices=True)
    fill, calls = type(loader.stream.filler).fill, count()

    def interrupted(*given: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return fill(*given)

    monkeypatch.setattr(type(loader.stream.filler), "fill", interrupted)
    rows, found = iter(loader), []
    while len(found) < len(expected):
        try:
            found.append(next(rows)["indices"].tolist())
        except KeyboardInterrupt:
            continue
    assert found == expected
