"""Failing calls, full disks and lost replies while files are written."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import CALLS, Findings, Zygote, fault, require_mounts, run_mounted
from tests.faults.world import image, prepare_arguments, write_sources
from tests.sampling import sampled

FAILURES = [
    ("open", errno.ENOSPC), ("write", errno.EIO), ("open", errno.EIO), ("open", errno.EMFILE),
    ("write", errno.ENOSPC), ("fsync", errno.EIO), ("close", errno.EDQUOT), ("link", errno.ENOSPC),
    ("rename", errno.EIO), ("mkdir", errno.ENOSPC),
]  # fmt: skip
NAMES = [f"{call} {errno.errorcode[code]}" for call, code in FAILURES]


def calls_made(
    zygote: Zygote, clean: Clean, directory: Path, calls: Sequence[str] = CALLS
) -> dict[str, int]:
    found = {}
    for call in calls:
        cache = directory / call
        armed = fault(call, cache, 1 << 40, "count")
        outcome = zygote.one(prepare_arguments(clean.sources, cache), fault=armed)
        assert outcome.exit == 0, outcome.stderr
        found[call] = outcome.seen
    return found


@pytest.fixture(scope="module")
def counts(
    zygote: Zygote, clean: Clean, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, int]:
    return calls_made(zygote, clean, tmp_path_factory.mktemp("counted"))


def fail_and_recover(
    zygote: Zygote, clean: Clean, cache: Path, nth: int, call: str, code: int, *, sticky: bool
) -> str | None:
    """One failure; returns the type of the error, or None where the command got over it."""
    arguments = prepare_arguments(clean.sources, cache)
    failed = zygote.one(arguments, fault=fault(call, cache, nth, "error", code, sticky=sticky))
    where = f"{call} number {nth}, {errno.errorcode[code]}"
    assert failed.exit in (0, 1), (where, failed.stderr)
    assert failed.stdout, (where, failed.stderr)  # an error that was not translated is a traceback
    assert failed.exit == 0 or failed.error in ("CacheError", "CorruptionError"), (where, failed)
    zygote.read_back(cache)
    before = image(cache)
    assert before.items() <= clean.image.items(), where
    again = zygote.one(arguments)
    assert again.exit == 0, (where, again.stderr)
    assert image(cache) == clean.image, where
    return failed.error


@pytest.mark.parametrize(("call", "code"), sampled(FAILURES[2:], 2), ids=NAMES[2:])
def test_call_that_fails_at_a_sampled_step_is_a_typed_error(
    zygote: Zygote, clean: Clean, counts: dict[str, int], tmp_path: Path, call: str, code: int
) -> None:
    cache, total = tmp_path / "cache", counts[call]
    rng = random.Random(f"{call} {code}")
    for nth in [*(rng.randrange(1, total + 1) for _ in range(8)), total]:
        sticky = rng.random() < 0.5
        if fail_and_recover(zygote, clean, cache, nth, call, code, sticky=sticky):
            return  # one is enough, unless it did not matter
        shutil.rmtree(cache)
    pytest.fail("no failure mattered")


@pytest.mark.soak
@pytest.mark.parametrize(("call", "code"), FAILURES, ids=NAMES)
def test_call_that_fails_at_every_step_is_a_typed_error(
    zygote: Zygote, smallest: Clean, tmp_path: Path, call: str, code: int
) -> None:
    findings, total = Findings(), calls_made(zygote, smallest, tmp_path / "counted", [call])[call]
    for nth in range(1, total + 1):
        for sticky in (False, True):
            cache = tmp_path / f"{nth}-{sticky}"
            with findings.of(f"{nth}, sticky {sticky}"):
                fail_and_recover(zygote, smallest, cache, nth, call, code, sticky=sticky)
            shutil.rmtree(cache, ignore_errors=True)
    findings.conclude()


@pytest.mark.parametrize(
    ("action", "code"), [("short", 0), ("error", errno.EINTR)], ids=["short writes", "interrupted"]
)
def test_writes_that_are_short_or_interrupted_are_finished(
    zygote: Zygote, clean: Clean, tmp_path: Path, action: str, code: int
) -> None:
    cache = tmp_path / "cache"
    for nth in (1, 7):
        armed = fault("write", cache, nth, action, code, sticky=action == "short")
        outcome = zygote.one(prepare_arguments(clean.sources, cache), fault=armed)
        assert outcome.exit == 0, outcome.stderr
        assert image(cache) == clean.image
        shutil.rmtree(cache)


@pytest.mark.parametrize("call", ["link", "rename"])
def test_lost_reply_is_recognised_as_own_success(
    zygote: Zygote, clean: Clean, counts: dict[str, int], tmp_path: Path, call: str
) -> None:
    cache, total = tmp_path / "cache", counts[call]
    chosen = random.Random(3).sample(range(1, total), 2)
    for nth in {*chosen, total}:  # the last rename is the store's own
        armed = fault(call, cache, nth, "lost", errno.EEXIST)
        outcome = zygote.one(prepare_arguments(clean.sources, cache), fault=armed)
        assert outcome.exit == 0, (nth, outcome.stderr)
        assert image(cache) == clean.image
        assert not list((cache / "quarantine").glob("*"))
        shutil.rmtree(cache)


@pytest.mark.parametrize(
    "options", ["size=2m", "size=64m,nr_inodes=150"], ids=["no space left", "no inodes left"]
)
def test_full_disk_is_a_typed_error_and_other_stores_stay(
    zygote: Zygote, clean: Clean, tmp_path: Path, options: str
) -> None:
    require_mounts()
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copytree(clean.cache, tmp_path / "cache.old")
    larger = write_sources(tmp_path / "more", files=24, rows=150, seed=9)
    mount = f"mount -t tmpfs -o {options} none {cache} && cp -a {cache}.old/. {cache}/"
    arguments = prepare_arguments(larger, cache)
    outcome = run_mounted(zygote, mount, arguments, after=f"cp -a {cache} {cache}.after")
    assert outcome.exit == 1, outcome.stderr
    assert outcome.error == "CacheError"
    assert "disk is full" in outcome.result["error"]["message"]
    after = tmp_path / "cache.after"
    found = zygote.read_back(after)
    assert found["stores"] == 1
    assert clean.image.items() <= image(after).items()
