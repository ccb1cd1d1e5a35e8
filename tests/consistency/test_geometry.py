"""Ranks, prefetch and environments: none of them changes the global order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.consistency.cases import CASES, RANK_FREE, arguments_of, data_of, loader_of
from tests.consistency.child import digest, in_fresh_interpreter
from tests.consistency.corpus import SIZES, Corpus, Sample
from tests.consistency.model import Model
from tokenmill.loader import Loader

GLOBAL = 12


def ranks_of(corpus: Corpus, name: str, world: int, state: Any, **more: Any) -> list[Loader]:
    data = data_of(corpus, name)
    loaders = []
    for rank in range(world):
        size = {"batch_size": GLOBAL // world, **more}
        loader = Loader(data, **arguments_of(name, rank=rank, world_size=world, **size))
        if state is not None:
            loader.load_state_dict(state)
        loaders.append(loader)
    return loaders


def take(corpus: Corpus, loaders: list[Loader], steps: int) -> list[list[Sample]]:
    """Global batches: the ranks' parts, one behind the other; all states must agree."""
    iterators = [loader.repeat() for loader in loaders]
    found = []
    for _ in range(steps):
        parts = [next(iterator, None) for iterator in iterators]
        if None in parts:
            assert parts == [None] * len(parts)
            break
        found.append([s for part in parts for s in corpus.samples(part)])  # type: ignore[arg-type]
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
    return found


def plain(steps: list[list[Sample]]) -> list[list[Sample]]:
    return [[sample for sample in step if sample] for step in steps]


@pytest.mark.parametrize("name", [name for name in RANK_FREE if "max_tokens" not in CASES[name]])
def test_world_size_changes_keep_the_global_batches(corpus: Corpus, name: str) -> None:
    """1 → 2 → 4 → 3 → 1 ranks over three epochs, with one global batch of 12 samples."""
    expected = plain(Model(corpus, name).run(GLOBAL, 3))
    found: list[list[Sample]] = []
    state = None
    for world, steps in ((1, 2), (2, 3), (4, 1), (3, 4), (1, 100)):
        loaders = ranks_of(corpus, name, world, state, epochs=3)
        found += take(corpus, loaders, steps)
        state = loaders[-1].state_dict()
    assert found == expected


def test_balanced_packs_of_four_ranks_are_those_of_four_ranks(corpus: Corpus) -> None:
    expected = plain(Model(corpus, "packed_balanced", ranks=4).run(8, 2))
    loaders = ranks_of(corpus, "packed_balanced", 4, None, epochs=2, batch_size=2)
    assert take(corpus, loaders, 1000) == expected


@pytest.mark.parametrize("name", [name for name in CASES if "max_tokens" in CASES[name]])
def test_world_size_changes_keep_the_micro_batches(corpus: Corpus, name: str) -> None:
    """Steps group other numbers of micro-batches; their sequence is the same."""
    keep = "keep" in name
    expected = [s for step in Model(corpus, name).run(1, 3) for s in step]
    found: list[Sample] = []
    state = None
    for world, steps in ((1, 3), (2, 4), (4, 2), (3, 1000)):
        loaders = ranks_of(corpus, name, world, state, epochs=3)
        found += [s for step in take(corpus, loaders, steps) for s in step]
        state = loaders[0].state_dict()
    # A last step of three ranks may wrap further into the next epoch than one of one rank.
    assert found[: len(expected)] == expected
    assert keep <= (len(found) == len(expected))


@pytest.mark.parametrize("name", ["rows_keep", "packed_keep", "mixed_drop", "grouped"])
def test_elastic_ranks_serve_every_row_once_per_epoch(corpus: Corpus, name: str) -> None:
    """8 → 4 → 16 ranks, also with another global batch each time."""
    rows = SIZES["one"] + (SIZES["two"] if "mix" in CASES[name] else 0)
    for epoch in range(2):
        counts: Counter[int] = Counter()
        state = None
        for world, size, steps in ((8, 1, 1), (4, 1, 1), (16, 1, 100)):
            data = data_of(corpus, name)
            loaders = []
            for rank in range(world):
                arguments = arguments_of(
                    name, rank=rank, world_size=world, batch_size=size, epochs=1
                )
                loader = Loader(data, **arguments)
                loader.set_epoch(epoch) if state is None else loader.load_state_dict(state)
                loaders.append(loader)
            for step in take(corpus, loaders, steps):
                counts.update(row for sample in step for row, _, _ in sample)
            state = loaders[0].state_dict()
        assert counts == Counter(range(rows))


def test_two_ranks_of_six_go_on_as_four_ranks_of_three(corpus: Corpus) -> None:
    expected = Model(corpus, "rows").run(12, 3)
    two = ranks_of(corpus, "rows", 2, None)
    begun = take(corpus, two, 4)
    four = ranks_of(corpus, "rows", 4, two[1].state_dict())
    assert begun + take(corpus, four, 9) == expected[:13]


@pytest.mark.parametrize("prefetch", [0, 1, 5])
@pytest.mark.parametrize("name", ["rows", "packed", "mixed", "budget"])
def test_prefetch_does_not_change_a_batch(corpus: Corpus, name: str, prefetch: int) -> None:
    expected = [digest(batch) for batch in loader_of(corpus, name, epochs=2).repeat()]
    loader = loader_of(corpus, name, epochs=2, prefetch=prefetch)
    assert [digest(batch) for batch in loader.repeat()] == expected


@pytest.mark.parametrize("name", ["packed", "mixed"])
def test_environment_does_not_change_a_batch(corpus: Corpus, name: str) -> None:
    expected = [digest(batch) for batch in loader_of(corpus, name, epochs=2).repeat()]
    job = {"root": str(corpus.root), "case": name, "geometry": {"epochs": 2}}
    for environment in (
        {"PYTHONHASHSEED": "0", "TZ": "Asia/Tokyo", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "12345", "TZ": "America/New_York", "LC_ALL": "C.UTF-8"},
    ):
        assert in_fresh_interpreter(job, **environment)["batches"] == expected
