"""Many builders of one key, with and without locks, some of them killed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.conftest import Clean, build_cleanly
from tests.faults.tools import EVERY, Outcome, Zygote, fault
from tests.faults.world import image, prepare_arguments

BUILDERS, MANY = 8, 120


@pytest.fixture(scope="module")
def many(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return build_cleanly(zygote, tmp_path_factory.mktemp("many"), MANY, rows=1)


def check_all_succeeded(outcomes: list[Outcome], clean: Clean, cache: Path) -> int:
    """Every builder succeeded with the same store; returns the slices that they built in all."""
    for outcome in outcomes:
        assert outcome.exit == 0, outcome.stderr
        assert outcome.result["key"] == clean.result["key"]
    assert image(cache) == clean.image
    return sum(outcome.result["slices_built"] for outcome in outcomes)


@pytest.mark.parametrize(
    ("ranks", "most"), [(False, 1.3), pytest.param(True, 1.2, marks=pytest.mark.soak)]
)
def test_eight_builders_of_one_key_share_the_work(
    zygote: Zygote, many: Clean, tmp_path: Path, ranks: bool, most: float
) -> None:
    """In random orders, and beginning with their own blocks where a launcher numbered them."""
    arguments = prepare_arguments(many.sources, tmp_path / "cache")
    around = [
        {"WORLD_SIZE": str(BUILDERS), "RANK": str(n)} if ranks else {} for n in range(BUILDERS)
    ]
    outcomes = zygote.run(*({"arguments": arguments, "environment": one} for one in around))
    built = check_all_succeeded(outcomes, many, tmp_path / "cache")
    assert MANY <= built <= most * MANY


def test_only_the_first_rank_of_a_machine_builds(
    zygote: Zygote, many: Clean, tmp_path: Path
) -> None:
    arguments = prepare_arguments(many.sources, tmp_path / "cache", "--executor", "local")
    ranks = [{"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": str(n)} for n in range(3)]
    outcomes = zygote.run(*({"arguments": arguments, "environment": one} for one in ranks))
    check_all_succeeded(outcomes, many, tmp_path / "cache")
    assert [outcome.result["slices_built"] for outcome in outcomes] == [MANY, 0, 0]


@pytest.mark.slow
def test_builders_without_locks_agree(zygote: Zygote, clean: Clean, tmp_path: Path) -> None:
    if zygote.shim is None:
        pytest.skip("needs gcc, to compile the shim that makes locks a no-op")
    cache = tmp_path / "cache"
    run = {
        "arguments": prepare_arguments(clean.sources, cache),
        "environment": {"TOKENMILL_NO_LOCKS": "1"},
    }
    built = check_all_succeeded(zygote.run(*[run] * 4), clean, cache)
    assert built >= clean.result["slices"]  # type: ignore[operator]
    zygote.read_back(cache)


def kill_randomly(
    zygote: Zygote, clean: Clean, cache: Path, rng: random.Random, environment: dict[str, str]
) -> None:
    arguments = prepare_arguments(clean.sources, cache)
    runs: list[dict[str, object]] = []
    for _ in range(rng.randrange(1, 4)):
        nth = int(rng.paretovariate(0.35)) + rng.randrange(200)
        armed = fault(EVERY, cache, nth, "kill")
        runs.append({"arguments": arguments, "fault": armed, "environment": environment})
    seen = image(cache)
    for outcome in zygote.run(*runs):
        assert outcome.exit in (0, -9), outcome.stderr
    zygote.read_back(cache)
    after = image(cache)
    # A visible digest never changes.
    assert seen.items() <= after.items() <= clean.image.items()


@pytest.mark.parametrize("times", [2, pytest.param(100, marks=pytest.mark.soak)])
def test_random_deaths_of_builders_never_change_a_visible_digest(
    zygote: Zygote, clean: Clean, tmp_path: Path, times: int
) -> None:
    rng = random.Random(77)
    for number in range(times):
        cache = tmp_path / str(number)
        environment = {"TOKENMILL_NO_LOCKS": "1"} if number % 2 else {}
        for _ in range(3):
            kill_randomly(zygote, clean, cache, rng, environment)
        outcome = zygote.one(prepare_arguments(clean.sources, cache))
        assert outcome.exit == 0, outcome.stderr
        assert image(cache) == clean.image
