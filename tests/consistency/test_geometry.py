"""The number of ranks does not change the global order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.consistency.cases import CASES, RANK_FREE, data_of, make_loader, run_of
from tests.consistency.corpus import SIZES, Corpus, Sample
from tests.consistency.model import Model
from tokenmill.data.loader import Loader

GLOBAL = 12


def ranks_of(corpus: Corpus, name: str, world: int, state: Any, **more: Any) -> list[Loader]:
    data = data_of(corpus, name)
    loaders = []
    for rank in range(world):
        size = {"batch_size": GLOBAL // world, **more}
        loader = make_loader(data, name, rank=rank, world_size=world, **size)
        if state is not None:
            loader.load_state_dict(state)
        loaders.append(loader)
    return loaders


def take(
    corpus: Corpus, name: str, loaders: list[Loader], steps: int, epochs: int | None = None
) -> list[list[Sample]]:
    iterators = [run_of(loader, name, epochs) for loader in loaders]
    found = []
    for _ in range(steps):
        parts = [next(iterator, None) for iterator in iterators]
        if None in parts:
            assert parts == [None] * len(parts)
            break
        found.append([s for part in parts for s in corpus.samples(part)])  # type: ignore[arg-type]
        trained = sum(int((part["labels"] != -100).sum()) for part in parts)  # type: ignore[index]
        assert {part["num_trained_tokens"] for part in parts} == {trained}  # type: ignore[index]
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
    return found


@pytest.mark.parametrize("name", RANK_FREE)
def test_world_size_changes_keep_the_global_batches(corpus: Corpus, name: str) -> None:
    """1 → 2 → 4 → 3 → 1 ranks over three epochs, with one global batch of 12 samples."""
    expected = Model(corpus, name).run(GLOBAL, 3)
    found: list[list[Sample]] = []
    state = None
    for world, steps in ((1, 2), (2, 3), (4, 1), (3, 4), (1, 100)):
        loaders = ranks_of(corpus, name, world, state)
        found += take(corpus, name, loaders, steps, epochs=3)
        state = loaders[-1].state_dict()
    assert found == expected


def test_balanced_packs_of_four_ranks_are_those_of_four_ranks(corpus: Corpus) -> None:
    expected = Model(corpus, "packed_balanced", ranks=4).run(8, 2)
    loaders = ranks_of(corpus, "packed_balanced", 4, None, batch_size=2)
    assert take(corpus, "packed_balanced", loaders, 1000, epochs=2) == expected


@pytest.mark.parametrize("name", ["rows_keep", "packed_keep", "mixed_drop", "grouped"])
def test_elastic_ranks_serve_every_row_once_per_epoch(corpus: Corpus, name: str) -> None:
    """8 → 4 → 16 ranks, also with another global batch each time."""
    rows = SIZES["one"] + (SIZES["two"] if "mix" in CASES[name] else 0)
    for epoch in range(2):
        counts: Counter[int] = Counter()
        state = None
        for world, steps in ((8, 1), (4, 1), (16, 100)):
            loaders = ranks_of(corpus, name, world, state, batch_size=1)
            for loader in loaders if state is None else ():
                loader.set_epoch(epoch)
            for step in take(corpus, name, loaders, steps, epochs=epoch + 1):
                counts.update(row for sample in step for row, _, _ in sample)
            state = loaders[0].state_dict()
        assert counts == Counter(range(rows))
