"""PyTorch workers: their number, start method, prefetch and pinning change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from tests.consistency.cases import CASES, WEIGHTS, arguments_of, loader_of, run_of
from tests.consistency.child import digest
from tests.consistency.corpus import Corpus
from tests.sampling import sampled

torch = pytest.importorskip("torch")

from tokenmill.data.loader import Loader  # noqa: E402
from tokenmill.data.mixture import mix  # noqa: E402
from tokenmill.integrations.torch import DataLoader  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*", "ignore:.*worker processes.*", "ignore:.*multi-threaded.*"
)


def expected_of(corpus: Corpus, name: str) -> list[str]:
    return [digest(batch) for batch in run_of(loader_of(corpus, name), name, 3)]


def some(batches: Iterable[Any], steps: int) -> list[str]:
    return [digest(batch) for batch in itertools.islice(batches, steps)]


@pytest.mark.parametrize("name", sampled(["mixed_packed", "rows_keep"], 2))
def test_workers_change_on_every_resume(corpus: Corpus, name: str) -> None:
    """0 → 2 → 5 → 0 workers, with prefetch, pinning and persistence in between."""
    expected = expected_of(corpus, name)
    served: list[str] = []
    state = None
    for steps, options in (
        (3, {"num_workers": 0}),
        (4, {"num_workers": 2, "prefetch_factor": 4}),
        (2, {"num_workers": 5, "prefetch_factor": 1, "pin_memory": True}),
        (2, {"num_workers": 1, "persistent_workers": True}),
        (1000, {"num_workers": 0}),
    ):
        loader = DataLoader(loader_of(corpus, name), **options)
        if state is not None:
            loader.load_state_dict(state)
        served += some(run_of(loader, name, 3), steps)
        state = loader.state_dict()
    assert served == expected


def backwards(row: Any) -> dict[str, Any]:
    return {"input_ids": row.input_ids[::-1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "workers"),
    sampled([("fork", 2), ("forkserver", 1), ("spawn", 1)], 2),
)
def test_start_method_does_not_change_a_batch(corpus: Corpus, method: str, workers: int) -> None:
    """Nor what a function of the user's makes of the rows, which workers are handed."""
    mapped = {name: store.map(backwards) for name, store in corpus.stores.items()}
    data = mix(mapped, WEIGHTS, **CASES["mixed_packed"]["mix"])
    packed = arguments_of("mixed_packed")
    expected = [digest(batch) for batch in Loader(data, **packed).repeat(3)]
    assert expected != expected_of(corpus, "mixed_packed")
    loader = DataLoader(Loader(data, **packed), num_workers=workers, multiprocessing_context=method)
    assert some(loader.repeat(3), 1000) == expected


def test_persistent_workers_go_through_epochs_by_set_epoch(corpus: Corpus) -> None:
    """The usual trainer's loop, and the same loop resumed in the middle of its second epoch."""

    def run(loader: DataLoader, first: int, stop_after: int | None = None) -> list[str]:
        served: list[str] = []
        for epoch in range(first, 3):
            loader.set_epoch(epoch)
            for batch in loader:
                served.append(digest(batch))
                if len(served) == stop_after:
                    return served
        return served

    def make(**options: Any) -> DataLoader:
        return DataLoader(loader_of(corpus, "rows_keep"), **options)

    expected = expected_of(corpus, "rows_keep")
    workers = {"num_workers": 2, "persistent_workers": True}
    torch.manual_seed(5)
    generator = torch.random.get_rng_state()
    assert run(make(**workers), 0) == expected
    assert torch.equal(torch.random.get_rng_state(), generator)  # the global one is not used
    begun = make(**workers)
    served = run(begun, 0, stop_after=17)
    resumed = make(num_workers=1)
    resumed.load_state_dict(begun.state_dict())
    assert served + run(resumed, resumed.state_dict()["epoch"]) == expected


@pytest.mark.parametrize("name", CASES)
def test_tensors_equal_the_numpy_batches(corpus: Corpus, name: str) -> None:
    numpy_batches = loader_of(corpus, name)
    tensor_batches = DataLoader(loader_of(corpus, name))
    for ours, theirs in zip(numpy_batches, tensor_batches, strict=True):
        assert digest(ours) == digest(theirs)
        assert all(isinstance(value, int | torch.Tensor) for value in theirs.values())


@pytest.mark.parametrize(("name", "workers"), [("rows", 0), ("packed_split", 2)])
def test_loops_are_epochs_as_without_workers(corpus: Corpus, name: str, workers: int) -> None:
    """Left in the middle, entered again, announced: one epoch per loop, as the numpy loader's."""
    plain = loader_of(corpus, name)
    expected = [[digest(batch) for batch in plain] for _ in range(3)]
    loader = DataLoader(loader_of(corpus, name), num_workers=workers)
    found: list[list[str]] = []
    for _ in range(3):
        counted = len(loader)
        found.append(some(loader, 2) + some(loader, 1000))
        assert counted == len(found[-1])
    assert found == expected
