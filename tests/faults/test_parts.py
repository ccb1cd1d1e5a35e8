"""``--part i/n``: shares of a build in processes that know nothing of each other, some dead."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tests.faults.conftest import Clean
from tests.faults.tools import EVERY, Zygote, fault
from tests.faults.world import TOKENIZER, committed, image, prepare_arguments
from tokenmill.build.calls import run_recipe
from tokenmill.build.plan import Partition
from tokenmill.errors import SourceError, UsageError

PARTS = 8


def part_run(clean: Clean, cache: Path, part: str, **more: object) -> dict[str, object]:
    return {"arguments": prepare_arguments(clean.sources, cache, "--part", part), **more}


@given(st.integers(1, 40), st.integers(0, 200), st.sampled_from([0, 1]))
def test_shares_divide_the_slices(count: int, slices: int, first: int) -> None:
    shares = [Partition(number, count) for number in range(first, count + first)]
    taken = [[n for n in range(slices) if share.has(n)] for share in shares]
    assert sorted(itertools.chain(*taken)) == list(range(slices))
    assert max(map(len, taken)) - min(map(len, taken)) <= 1


@pytest.mark.parametrize("value", ["3/8", " 3/8 ", (3, 8), [3, 8]])
def test_part_is_parsed_from_text(value: object) -> None:
    assert Partition.of(value) == Partition(3, 8)


@pytest.mark.parametrize(
    "value", ["0/0", "9/8", "1/0", "8", "a/b", "1/2/3", "-1/2", "1.0/2", "١/٢", "", (1,), (1.0, 2),
              (True, 2), ("1", "2"), 3, None],
)  # fmt: skip
def test_bad_part_is_refused_with_its_value(value: object) -> None:
    with pytest.raises(UsageError, match="part must be"):
        Partition.of(value)


def test_eight_parts_of_which_two_are_killed_and_rerun_give_the_same_store(
    zygote: Zygote, clean: Clean, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    runs = [part_run(clean, cache, f"{n}/{PARTS}") for n in range(1, PARTS + 1)]
    # The second dies while it builds its slice, the fifth while it publishes it.
    runs[1]["fault"] = fault("link", cache / "slices", 1, "kill")
    runs[4]["fault"] = fault("link", cache / "slices", 3, "kill")
    outcomes = zygote.run(*runs)  # all at once, so they also index the rows at once
    assert [outcome.exit for outcome in outcomes] == [0, -9, 0, 0, -9, 0, 0, 0]
    assert not list((cache / "stores").glob("*"))
    done = [outcome.result for outcome in outcomes if outcome.exit == 0]
    assert all(result["complete"] is False and result["path"] is None for result in done)
    assert {result["key"] for result in done} == {clean.result["key"]}
    assert len(committed(cache)) == 4
    zygote.read_back(cache)

    again = zygote.run(runs[1] | {"fault": ""}, runs[4] | {"fault": ""})
    assert [outcome.exit for outcome in again] == [0, 0], again
    assert sum(outcome.result["slices_built"] for outcome in again) == 2
    finished = [outcome.result for outcome in again if outcome.result["complete"]]
    assert finished
    assert all(result["path"] == str(cache / "stores" / result["key"]) for result in finished)
    assert image(cache) == clean.image
    late = zygote.one(prepare_arguments(clean.sources, cache, "--part", "3/8"))
    assert late.result["hit"] is True
    assert late.result["complete"] is True
    assert late.result["slices_missing"] == 0


@pytest.mark.parametrize("seed", range(2))
def test_parts_of_any_number_and_overlap_dying_anywhere_end_in_the_same_store(
    zygote: Zygote, clean: Clean, tmp_path: Path, seed: int
) -> None:
    rng, cache = random.Random(seed), tmp_path / "cache"
    for _ in range(3):
        runs = []
        for _ in range(3):
            count = rng.randrange(1, 5)
            part = f"{rng.randrange(1, count + 1)}/{count}"
            nth = int(rng.paretovariate(0.35)) + rng.randrange(150)
            runs.append(part_run(clean, cache, part, fault=fault(EVERY, cache, nth, "kill")))
        for outcome in zygote.run(*runs):
            assert outcome.exit in (0, -9), outcome.stderr
        zygote.read_back(cache)
        assert image(cache).items() <= clean.image.items()
    for number in (1, 2, 3):
        outcome = zygote.one(prepare_arguments(clean.sources, cache, "--part", f"{number}/3"))
        assert outcome.exit == 0, outcome.stderr
    assert outcome.result["complete"] is True
    assert image(cache) == clean.image


def test_last_part_rebuilds_a_slice_of_another_part(
    zygote: Zygote, clean: Clean, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert zygote.one(prepare_arguments(clean.sources, cache, "--part", "1/2")).exit == 0
    tokens = next((cache / "slices").rglob("*.meta.arrow"))
    tokens.write_bytes(tokens.read_bytes()[:-1])
    outcome = zygote.one(prepare_arguments(clean.sources, cache, "--part", "2/2"))
    assert outcome.exit == 0, outcome.stderr
    assert outcome.result["complete"] is True
    assert image(cache) == clean.image


def test_python_gets_the_store_from_the_last_part_only(clean: Clean, tmp_path: Path) -> None:
    def part(value: object, **more: object) -> tm.Store | None:
        outcome = run_recipe(
            [clean.sources], TOKENIZER, part=value, tokenizer_backend="file", executor="inline",
            cache_dir=tmp_path, progress=False, **more,
        )  # type: ignore[arg-type] # fmt: skip
        return getattr(outcome, "store", None)

    assert part((2, 2)) is None
    # The limit of rejected rows applies to the whole store, so only the last part checks it.
    with pytest.raises(SourceError, match=r"1 rows rejected in total"):
        part("1/2", max_rejected=0)
    store = part("1/2")
    assert store is not None
    assert store.key == clean.result["key"]
    with pytest.raises(UsageError, match="parts share the cache"):
        part("1/2", disable_cache=True)
