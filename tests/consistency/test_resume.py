"""Saving and loading at any step, any number of times, in new processes equals never stopping."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from tests.consistency.cases import CASES, loader_of, run_of
from tests.consistency.child import digest, in_fresh_interpreter, in_new_process, serve
from tests.consistency.corpus import Corpus
from tests.faults.tools import Zygote
from tests.sampling import sampled

EPOCHS = 3
REPORT = "tests.consistency.child:print_report"
ENVIRONMENTS = (
    {"PYTHONHASHSEED": "0", "TZ": "Asia/Tokyo", "LC_ALL": "C"},
    {"PYTHONHASHSEED": "12345", "TZ": "America/New_York", "LC_ALL": "C.UTF-8"},
)


def in_a_soak(number: int) -> list[Any]:
    return [pytest.param(name, number, marks=pytest.mark.soak) for name in CASES]


def uninterrupted(corpus: Corpus, name: str, **more: Any) -> tuple[list[str], list[dict[str, Any]]]:
    loader = loader_of(corpus, name, **more)
    states, batches = [loader.state_dict()], []
    for batch in run_of(loader, name, EPOCHS):
        batches.append(digest(batch))
        states.append(loader.state_dict())
    return batches, states


def job(corpus: Corpus, name: str, state: Any, take: int | None, **more: Any) -> dict[str, Any]:
    return {
        "root": str(corpus.root), "case": name, "geometry": {}, "epochs": EPOCHS, "state": state,
        "take": take, **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "share"), [*((name, 6 if name == "packed" else 24) for name in CASES), *in_a_soak(1)]
)
def test_resume_at_every_step(corpus: Corpus, zygote: Zygote, name: str, share: int) -> None:
    """One step of so many in a new process, the others with new objects in this one."""
    batches, states = uninterrupted(corpus, name)
    assert len(batches) > 10
    pids = {os.getpid()}
    for step, state in enumerate(states):
        # Far enough to cross the next end of a window; every eleventh goes on to the very end.
        take = None if step % 11 == 0 else 3
        task = job(corpus, name, state, take)
        report = in_new_process(zygote, task) if step % share == 0 else serve(task)
        pids.add(report["pid"])
        stop = len(batches) if take is None else min(step + take, len(batches))
        assert report["batches"] == batches[step:stop], f"resumed at step {step}"
        assert report["state"] == states[stop]
    assert len(pids) == len(states[::share]) + 1


def resume_in_a_chain(
    corpus: Corpus, name: str, takes: Iterable[int], run: Callable[..., Any], **more: Any
) -> None:
    """So many resumes, each from the state of the one before, and then to the end."""
    batches, states = uninterrupted(corpus, name)
    served: list[str] = []
    state = None
    for take in (*takes, None):
        report = run(job(corpus, name, state, take, **more))
        served += report["batches"]
        state = report["state"]
        assert state == states[len(served)]
    assert served == batches


@pytest.mark.parametrize(("name", "times"), [("packed", 4), ("mixed_drop", 3), *in_a_soak(30)])
def test_chained_resumes_in_new_processes(
    corpus: Corpus, zygote: Zygote, name: str, times: int
) -> None:
    most = len(uninterrupted(corpus, name)[0]) // times + 1
    steps = random.Random(name)
    takes = [steps.randint(0, most) for _ in range(times)]
    resume_in_a_chain(corpus, name, takes, partial(in_new_process, zygote))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "times"),
    sampled([("mixed_packed", 1), ("rows_keep", 12), ("mixed_packed", 12)], 3),
)
def test_chained_resumes_in_fresh_interpreters(corpus: Corpus, name: str, times: int) -> None:
    """Nothing is inherited: neither memory, nor hash seed, locale and time zone."""
    environments = cycle(ENVIRONMENTS)

    def run(job: dict[str, Any]) -> dict[str, Any]:
        return in_fresh_interpreter(job, **next(environments))

    takes = [len(uninterrupted(corpus, name)[0]) // (times + 1)] * times
    resume_in_a_chain(corpus, name, takes, run)


@pytest.mark.parametrize("prefetch", [1, 7])
@pytest.mark.parametrize("name", ["rows_keep", "packed", "mixed"])
def test_resume_counts_returned_batches_not_prefetched_ones(
    corpus: Corpus, name: str, prefetch: int
) -> None:
    resume_in_a_chain(corpus, name, [4] * 6, serve, geometry={"prefetch": prefetch})


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [None, {"num_workers": 2, "prefetch_factor": 3}], ids=["thread", "workers"]
)
def test_crash_of_a_trainer_with_the_prefetch_full_loses_and_repeats_nothing(
    corpus: Corpus,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    workers: dict[str, Any] | None,
) -> None:
    """SIGKILL at several steps; the next process goes on from the last state on disk."""
    if workers is not None:
        pytest.importorskip("torch")
    zygote: Zygote = request.getfixturevalue("zygote" if workers is None else "library_zygote")
    batches, _ = uninterrupted(corpus, "rows_keep")
    log = tmp_path / "steps.jsonl"
    served: list[str] = []
    state = None
    for take in (1, 9):
        log.unlink(missing_ok=True)
        task = job(corpus, "rows_keep", state, take, log=str(log), die=True, torch=workers,
                   geometry={"prefetch": 0 if workers else 6})  # fmt: skip
        (crashed,) = zygote.run({"call": REPORT, "argument": task})
        assert crashed.exit == -signal.SIGKILL, crashed
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(steps) == take
        served += [step["batch"] for step in steps]
        state = steps[-1]["state"]
    served += in_new_process(zygote, job(corpus, "rows_keep", state, None))["batches"]
    assert served == batches
