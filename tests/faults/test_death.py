"""T01 and T02: a process that dies at any step leaves no store or a whole one (P1, P4)."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import EVERY, Findings, Zygote, fault
from tests.faults.world import committed, picture, prepare_arguments


def steps(zygote: Zygote, clean: Clean, cache: Path, part: str) -> int:
    """How many calls of an undisturbed preparation touch a part of the cache."""
    armed = fault(EVERY, cache / part, 1 << 40, "count")
    outcome = zygote.one(prepare_arguments(clean.sources, cache), fault=armed)
    assert outcome.exit == 0, outcome.stderr
    assert picture(cache) == clean.picture
    shutil.rmtree(cache)
    return outcome.seen


def die_and_recover(
    zygote: Zygote, clean: Clean, cache: Path, part: str, nth: int, action: str
) -> bool:
    """One death: what is visible is whole, stays as it is, and the same command finishes.

    Returns False when the command made fewer calls and so got away.
    """
    arguments = prepare_arguments(clean.sources, cache)
    died = zygote.one(arguments, fault=fault(EVERY, cache / part, nth, action))
    if died.exit == 0 and died.seen < nth:
        shutil.rmtree(cache)
        return False
    assert died.exit == -9, (nth, died)
    zygote.judge(cache)
    before, done = picture(cache), committed(cache)
    again = zygote.one(arguments)
    assert again.exit == 0, again.stderr
    assert picture(cache) == clean.picture
    assert before.items() <= clean.picture.items()
    # Only what is missing is done again.
    assert again.said["slices_built"] == clean.said["slices"] - len(done)  # type: ignore[operator]
    shutil.rmtree(cache)
    return True


# What becomes visible does so in these parts; the rest is staging, indexes and courtesies.
@pytest.mark.parametrize(("part", "samples"), [("", 6), ("slices", 8), ("stores", 4)])
def test_death_at_sampled_steps_leaves_miss_or_whole(
    zygote: Zygote, clean: Clean, tmp_path: Path, part: str, samples: int
) -> None:
    cache, rng = tmp_path / "cache", random.Random(f"death {part}")
    total = steps(zygote, clean, cache, part)
    died = 0
    for nth in rng.sample(range(1, total + 1), samples):
        died += die_and_recover(zygote, clean, cache, part, nth, rng.choice(["kill", "die"]))
    assert died >= samples - 1


@pytest.mark.soak
@pytest.mark.parametrize("action", ["kill", "die"])
def test_death_at_every_step_leaves_miss_or_whole(
    zygote: Zygote, smallest: Clean, tmp_path: Path, action: str
) -> None:
    findings, died = Findings(), 0
    for nth in range(1, steps(zygote, smallest, tmp_path / "counted", "") + 1):
        with findings.of(f"step {nth}"):
            died += die_and_recover(zygote, smallest, tmp_path / str(nth), "", nth, action)
    findings.conclude()
    print(f"{died} deaths")
    assert died >= findings.tried - 3  # the number of calls varies by a look or two
