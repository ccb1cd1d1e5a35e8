"""Saving and loading at any step, any number of times, in new processes equals never stopping."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.consistency.cases import CASES, loader_of, run_of
from tests.consistency.child import digest, in_fresh_interpreter, in_new_process, serve
from tests.consistency.corpus import Corpus
from tests.faults.tools import Zygote

EPOCHS = 3
REPORT = "tests.consistency.child:print_report"
WHOLE = ("packed",)
"""Streams of which `make test` tries every step in a process of its own; `make soak`: of all."""


def streams(some: int, every: int) -> list[Any]:
    """Every stream with `some`; those of `WHOLE`, and in a soak all, with `every` instead."""
    soak = pytest.mark.soak
    return [pytest.param(name, some) for name in CASES if name not in WHOLE] + [
        pytest.param(name, every, marks=() if name in WHOLE else soak) for name in CASES
    ]


def uninterrupted(corpus: Corpus, name: str, **more: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Digest of every batch, and the state before the first and behind each."""
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


@pytest.mark.parametrize(("name", "share"), streams(some=5, every=1))
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


@pytest.mark.parametrize(("name", "times"), streams(some=8, every=30))
def test_chained_resumes_in_new_processes(
    corpus: Corpus, zygote: Zygote, name: str, times: int
) -> None:
    most = len(uninterrupted(corpus, name)[0]) // times + 1
    steps = random.Random(name)
    takes = [steps.randint(0, most) for _ in range(times)]
    resume_in_a_chain(corpus, name, takes, partial(in_new_process, zygote))


@pytest.mark.slow
@pytest.mark.parametrize("take", [9, pytest.param(1, marks=pytest.mark.soak)])
def test_chained_resumes_in_fresh_interpreters(corpus: Corpus, take: int) -> None:
    """Nothing is inherited at all: 36 batches, each epoch ending with a partial one."""
    seeds = count()

    def run(job: dict[str, Any]) -> dict[str, Any]:
        return in_fresh_interpreter(job, PYTHONHASHSEED=str(next(seeds)))

    resume_in_a_chain(corpus, "rows_keep", [take] * (EPOCHS * 12 // take), run)


@pytest.mark.parametrize("prefetch", [1, 7])
@pytest.mark.parametrize("name", ["rows_keep", "packed", "mixed"])
def test_resume_counts_what_was_handed_out_not_what_was_prefetched(
    corpus: Corpus, zygote: Zygote, name: str, prefetch: int
) -> None:
    run, geometry = partial(in_new_process, zygote), {"prefetch": prefetch}
    resume_in_a_chain(corpus, name, [4] * 6, run, geometry=geometry)


@pytest.mark.slow
@pytest.mark.parametrize(
    "workers", [None, {"num_workers": 2, "prefetch_factor": 3}], ids=["thread", "workers"]
)
def test_crash_of_a_trainer_with_the_prefetch_full_loses_and_repeats_nothing(
    corpus: Corpus, host_zygote: Zygote, tmp_path: Path, workers: dict[str, Any] | None
) -> None:
    """SIGKILL at several steps; the next process goes on from the last state on disk."""
    if workers is not None:
        pytest.importorskip("torch")
    batches, _ = uninterrupted(corpus, "rows_keep")
    log = tmp_path / "steps.jsonl"
    served: list[str] = []
    state = None
    for take in (4, 1, 9):
        log.unlink(missing_ok=True)
        task = job(corpus, "rows_keep", state, take, log=str(log), die=True, torch=workers,
                   geometry={"prefetch": 0 if workers else 6})  # fmt: skip
        (crashed,) = host_zygote.run({"call": REPORT, "argument": task})
        assert crashed.exit == -signal.SIGKILL, crashed
        steps = [json.loads(line) for line in log.read_text().splitlines()]
        assert len(steps) == take
        served += [step["batch"] for step in steps]
        state = steps[-1]["state"]
    (last,) = host_zygote.run({"call": REPORT, "argument": job(corpus, "rows_keep", state, None)})
    served += last.said["batches"]
    assert served == batches
