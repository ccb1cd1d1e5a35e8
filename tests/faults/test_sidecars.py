"""Processes that die while they attach values: no sidecar or a complete one, nothing to clean."""

from __future__ import annotations

import errno
import json
import random
import shutil
from pathlib import Path

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import EVERY, Findings, Outcome, Zygote, fault
from tests.faults.world import image

WRITERS = 8


@pytest.fixture
def store(clean: Clean, cache: Path) -> Path:
    return cache / "stores" / str(clean.result["key"])


def run(zygote: Zygote, function: str, argument: object, **more: str) -> Outcome:
    given = argument if isinstance(argument, str) else json.dumps(argument)
    (outcome,) = zygote.run(
        {"call": f"tests.faults.attaching:{function}", "argument": given, **more}
    )
    return outcome


def seen(zygote: Zygote, store: Path) -> dict[str, int]:
    outcome = run(zygote, "judge_sidecars", str(store))
    assert outcome.exit == 0, outcome.stdout + outcome.stderr
    return outcome.result


def clear_templates(store: Path) -> None:
    for part in ("sidecars", "staging"):
        shutil.rmtree(store.parent.parent / part, ignore_errors=True)


def die_and_recover(
    zygote: Zygote, store: Path, function: str, argument: object, nth: int, action: str
) -> bool:
    """One death; False when the call made fewer steps and so got away."""
    cache = store.parent.parent
    before = image(cache)
    died = run(zygote, function, argument, fault=fault(EVERY, cache, nth, action))
    if died.exit == 0 and died.seen < nth:
        clear_templates(store)
        return False
    assert died.exit == -9, (nth, died)
    assert seen(zygote, store)["sidecars"] in (0, 1)
    again = run(zygote, function, argument)
    assert again.exit == 0, (nth, again.stdout + again.stderr)
    assert seen(zygote, store) == {"sidecars": 1, "missing": 0}
    assert image(cache) == before, "the store itself is never touched"
    clear_templates(store)
    return True


def steps(zygote: Zygote, store: Path, function: str, argument: object) -> int:
    armed = fault(EVERY, store.parent.parent, 1 << 40, "count")
    outcome = run(zygote, function, argument, fault=armed)
    assert outcome.exit == 0, outcome.stdout + outcome.stderr
    clear_templates(store)
    return outcome.seen


@pytest.mark.parametrize("samples", [4, pytest.param(None, marks=pytest.mark.soak, id="all")])
@pytest.mark.parametrize("function", ["attach_whole", "attach_share"])
def test_death_at_any_step_leaves_no_sidecar_or_a_whole_one(
    zygote: Zygote, store: Path, function: str, samples: int | None
) -> None:
    argument = str(store) if function == "attach_whole" else [str(store), 0, 1]
    total, findings, died = steps(zygote, store, function, argument), Findings(), 0
    rng = random.Random(function)
    chosen = range(1, total + 1)
    for nth in rng.sample(chosen[total // 3 :], samples) if samples else chosen:
        with findings.of(f"step {nth}"):
            action = rng.choice(["kill", "die"])
            died += die_and_recover(zygote, store, function, argument, nth, action)
    findings.conclude()
    assert died >= findings.tried - (1 if samples else 3)


def test_eight_writers_of_which_some_are_killed_lose_nothing_that_was_flushed(
    zygote: Zygote, store: Path
) -> None:
    cache, rng = store.parent.parent, random.Random(8)
    runs: list[dict[str, object]] = [
        {"call": "tests.faults.attaching:attach_share", "argument": json.dumps([str(store), n, 8])}
        for n in range(WRITERS)
    ]
    for number in (1, 4, 6):
        nth = rng.randrange(1, 3)
        runs[number]["fault"] = fault("rename", cache / "sidecars", nth, "kill")
    outcomes = zygote.run(*runs)
    assert [outcome.exit for outcome in outcomes if outcome.exit != -9] == [0] * 5
    left = seen(zygote, store)
    assert left["sidecars"] == 0
    assert 0 < left["missing"] < 12, "of 24 rows, 15 were written by those that lived"
    # All at once again, each with its share of what is missing: no row is computed twice.
    again = zygote.run(*({**one, "fault": ""} for one in runs))
    assert [outcome.exit for outcome in again] == [0] * WRITERS, again
    assert seen(zygote, store)["missing"] == 0


def test_eight_that_attach_the_same_at_once_all_succeed(zygote: Zygote, store: Path) -> None:
    one = {"call": "tests.faults.attaching:attach_whole", "argument": str(store)}
    outcomes = zygote.run(*[one] * WRITERS)
    assert [outcome.exit for outcome in outcomes] == [0] * WRITERS, outcomes
    assert seen(zygote, store) == {"sidecars": 1, "missing": 0}


@pytest.mark.parametrize(("call", "code"), [("write", errno.ENOSPC), ("fsync", errno.EIO)])
@pytest.mark.parametrize("function", ["attach_whole", "attach_share"])
def test_disk_that_fails_is_a_typed_error_and_nothing_is_published(
    zygote: Zygote, store: Path, function: str, call: str, code: int
) -> None:
    argument = str(store) if function == "attach_whole" else [str(store), 0, 1]
    armed = fault(call, store.parent.parent / "staging", 1, "error", code, sticky=True)
    failed = run(zygote, function, argument, fault=armed)
    assert (failed.exit, failed.error) == (1, "CacheError"), failed.stderr
    assert seen(zygote, store)["sidecars"] == 0
    assert run(zygote, function, argument).exit == 0
    assert seen(zygote, store) == {"sidecars": 1, "missing": 0}
