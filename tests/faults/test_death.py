"""A process that dies at any step leaves no store or a complete one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import EVERY, Findings, Zygote, fault
from tests.faults.world import committed, image, prepare_arguments


def steps(zygote: Zygote, clean: Clean, cache: Path, part: str) -> int:
    armed = fault(EVERY, cache / part, 1 << 40, "count")
    outcome = zygote.one(prepare_arguments(clean.sources, cache), fault=armed)
    assert outcome.exit == 0, outcome.stderr
    assert image(cache) == clean.image
    shutil.rmtree(cache)
    return outcome.seen


def die_and_recover(
    zygote: Zygote, clean: Clean, cache: Path, part: str, nth: int, action: str
) -> bool:
    """One death; False when the command made fewer calls and so got away."""
    arguments = prepare_arguments(clean.sources, cache)
    died = zygote.one(arguments, fault=fault(EVERY, cache / part, nth, action))
    if died.exit == 0 and died.seen < nth:
        shutil.rmtree(cache)
        return False
    assert died.exit == -9, (nth, died)
    zygote.read_back(cache)
    before, done = image(cache), committed(cache)
    again = zygote.one(arguments)
    assert again.exit == 0, again.stderr
    assert image(cache) == clean.image
    assert before.items() <= clean.image.items()
    # Only what is missing is done again.
    assert again.result["slices_built"] == clean.result["slices"] - len(done)  # type: ignore[operator]
    shutil.rmtree(cache)
    return True


# What becomes visible does so in these parts; the rest is staging, indexes and courtesies.
@pytest.mark.parametrize(
    ("part", "samples"),
    [("", 2), ("slices", 3), ("stores", 2), pytest.param("", None, marks=pytest.mark.soak)],
)
def test_death_at_any_step_leaves_miss_or_whole(
    zygote: Zygote, clean: Clean, smallest: Clean, tmp_path: Path, part: str, samples: int | None
) -> None:
    world, rng = clean if samples else smallest, random.Random(f"death {part}")
    total = steps(zygote, world, tmp_path / "counted", part)
    numbers = range(1, total + 1)
    findings, died = Findings(), 0
    for nth in rng.sample(numbers, samples) if samples else numbers:
        for action in (rng.choice(["kill", "die"]),) if samples else ("kill", "die"):
            with findings.of(f"step {nth}, {action}"):
                cache = tmp_path / f"{nth}-{action}"
                died += die_and_recover(zygote, world, cache, part, nth, action)
    findings.conclude()
    assert died >= findings.tried - (1 if samples else 6)  # calls vary by a look or two
