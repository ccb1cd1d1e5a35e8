"""T02, T04, T05: many builders of one key, with and without locks, killed or stopped (P2, P3, P4).

However many there are and whatever happens to them: one store, the same bytes, and nobody waits
for a dead or stopped one.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import Outcome, Zygote, start_command
from tests.faults.world import committed, picture, prepare_arguments, write_sources
from tokenmill.work import claims as claims_module
from tokenmill.work.claims import Claims

BUILDERS = 8


def check_all_succeeded(outcomes: list[Outcome], clean: Clean, cache: Path) -> int:
    """Every builder succeeded with the same store; returns the slices that they built in all."""
    for outcome in outcomes:
        assert outcome.exit == 0, outcome.stderr
        assert outcome.said["key"] == clean.said["key"]
    assert picture(cache) == clean.picture
    return sum(outcome.said["slices_built"] for outcome in outcomes)


def test_eight_builders_of_one_key_share_the_work(
    zygote: Zygote, clean: Clean, tmp_path: Path
) -> None:
    run = {"arguments": prepare_arguments(clean.sources, tmp_path / "cache")}
    built = check_all_succeeded(zygote.run(*[run] * BUILDERS), clean, tmp_path / "cache")
    assert built <= 1.3 * clean.said["slices"]  # type: ignore[operator]


@pytest.mark.slow
def test_builders_without_locks_agree(zygote: Zygote, clean: Clean, tmp_path: Path) -> None:
    """In a world in which every file lock is granted to whoever asks."""
    if zygote.shim is None:
        pytest.skip("needs gcc, to compile the shim that makes locks a no-op")
    for number in range(2):
        cache = tmp_path / f"cache-{number}"
        if number == 1:  # claims are no locks either: a place where none can be left
            (cache / "staging").mkdir(parents=True)
            (cache / "staging" / "claims").write_text("")
        run = {
            "arguments": prepare_arguments(clean.sources, cache),
            "environment": {"TOKENMILL_NO_LOCKS": "1"},
        }
        built = check_all_succeeded(zygote.run(*[run] * 4), clean, cache)
        assert built >= clean.said["slices"]  # type: ignore[operator]
        zygote.judge(cache)


def kill_randomly(zygote: Zygote, clean: Clean, cache: Path, rng: random.Random) -> None:
    """One to three builders, of which some die at a random step; then one that does not."""
    arguments = prepare_arguments(clean.sources, cache)
    runs: list[dict[str, object]] = []
    for _ in range(rng.randrange(1, 4)):
        calls = "open,write,fsync,close,link,rename,mkdir"
        nth = int(rng.paretovariate(0.35)) + rng.randrange(200)
        runs.append({"arguments": arguments, "fault": f"{calls}|{cache}|{nth}|0|kill|0"})
    seen = picture(cache)
    for outcome in zygote.run(*runs):
        assert outcome.exit in (0, -9), outcome.stderr
    zygote.judge(cache)
    after = picture(cache)
    # A visible digest never changes.
    assert seen.items() <= after.items() <= clean.picture.items()


@pytest.mark.parametrize("seed", range(3))
def test_random_deaths_of_builders_never_change_a_visible_digest(
    zygote: Zygote, clean: Clean, tmp_path: Path, seed: int
) -> None:
    rng, cache = random.Random(seed), tmp_path / "cache"
    for _ in range(3):
        kill_randomly(zygote, clean, cache, rng)
    outcome = zygote.one(prepare_arguments(clean.sources, cache))
    assert outcome.exit == 0, outcome.stderr
    assert picture(cache) == clean.picture


@pytest.mark.soak
def test_hundreds_of_random_deaths_never_change_a_visible_digest(
    zygote: Zygote, lockless: Zygote, clean: Clean, tmp_path: Path
) -> None:
    rng = random.Random(77)
    for number in range(100):
        world, cache = rng.choice([zygote, lockless]), tmp_path / str(number)
        for _ in range(3):
            kill_randomly(world, clean, cache, rng)
        outcome = world.one(prepare_arguments(clean.sources, cache))
        assert outcome.exit == 0, outcome.stderr
        assert picture(cache) == clean.picture


# Claims by themselves.


def claim_of(pid: int, started: int, host: str | None = None) -> str:
    return f'{{"host":"{host or socket.gethostname()}","pid":{pid},"started":{started}}}'


def leave_claim(root: Path, key: str, text: str) -> Path:
    path = root / "staging" / "claims" / key
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(text)
    return path


def test_claim_of_a_live_builder_is_respected_and_given_up_on_leaving(tmp_path: Path) -> None:
    with Claims(tmp_path) as one, Claims(tmp_path) as other:
        assert one.take("a" * 40)
        assert not other.take("a" * 40)
        assert other.take("b" * 40)
        one.release("a" * 40)
        assert other.take("a" * 40)
    assert list((tmp_path / "staging" / "claims").iterdir()) == []


def test_claim_of_a_dead_builder_is_taken_at_once(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    started = claims_module._start_time(sleeper.pid)
    assert started is not None
    leave_claim(tmp_path, "alive", claim_of(sleeper.pid, started))
    leave_claim(tmp_path, "reused", claim_of(sleeper.pid, started - 1))
    leave_claim(tmp_path, "gone", claim_of(2**22 - 1, 1))
    with Claims(tmp_path) as mine:
        assert not mine.take("alive")
        assert mine.take("reused")
        assert mine.take("gone")
        sleeper.kill()
        deadline = time.monotonic() + 10
        # Nobody waits for it, so it stays a zombie: its entry in /proc is still there.
        while not mine.take("alive"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert Path(f"/proc/{sleeper.pid}").exists()
    sleeper.wait()


def test_claim_that_nobody_touches_is_taken_over_after_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims_module, "PATIENCE_S", 0.3)
    paths = [
        leave_claim(tmp_path, "stopped", claim_of(os.getpid(), _own_start())),
        leave_claim(tmp_path, "elsewhere", claim_of(1, 1, "another-machine")),
        leave_claim(tmp_path, "unreadable", "not JSON"),
    ]
    for path in paths:  # a clock that is years ahead must not matter
        os.utime(path, (4e9, 4e9), follow_symlinks=False)
    touched = leave_claim(tmp_path, "touched", claim_of(1, 1, "another-machine"))
    with Claims(tmp_path) as mine:
        assert not any(mine.take(path.name) for path in (*paths, touched))
        for _ in range(8):
            time.sleep(0.05)
            os.utime(touched, follow_symlinks=False)
            assert not mine.take("touched")
        assert all(mine.take(path.name) for path in paths)


def _own_start() -> int:
    started = claims_module._start_time(os.getpid())
    assert started is not None
    return started


def test_live_builder_touches_its_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims_module, "REFRESH_S", 0.02)
    with Claims(tmp_path) as mine:
        assert mine.take("k")
        path = tmp_path / "staging" / "claims" / "k"
        os.utime(path, (1, 1), follow_symlinks=False)
        deadline = time.monotonic() + 10
        while path.lstat().st_mtime == 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_builder_does_not_wait_for_a_stopped_one(
    clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: a builder stopped with claims in its hands holds nobody up."""
    monkeypatch.setattr(claims_module, "PATIENCE_S", 1.0)
    from tests.faults.world import TOKENIZER
    from tokenmill.api import run_recipe

    cache = tmp_path / "cache"
    stopped = subprocess.Popen(["sleep", "600"])
    try:
        stopped.send_signal(signal.SIGSTOP)
        started = claims_module._start_time(stopped.pid)
        assert started is not None
        for key in committed(clean.cache):
            leave_claim(cache, key, claim_of(stopped.pid, started))
        prepared = run_recipe(
            [clean.sources], TOKENIZER, tokenizer_backend="file", executor="inline", cache_dir=cache
        )
        assert prepared.account.slices_built == clean.said["slices"]
        assert picture(cache) == clean.picture
    finally:
        stopped.kill()
        stopped.wait()


@pytest.mark.soak
def test_eight_real_commands_share_the_work(tmp_path: Path) -> None:
    sources, cache = write_sources(tmp_path / "sources", files=60, rows=60), tmp_path / "cache"
    arguments = prepare_arguments(sources, cache, "--executor", "local", "--num-workers", "1")
    running = [start_command(arguments) for _ in range(BUILDERS)]
    outcomes = [Outcome(p.wait(), False, 0, *p.communicate()) for p in running]
    built = sum(outcome.said["slices_built"] for outcome in outcomes)
    print(f"{built} slices built by {BUILDERS} builders of 60")
    assert [outcome.exit for outcome in outcomes] == [0] * BUILDERS
    assert len({outcome.said["path"] for outcome in outcomes}) == 1
    assert len(list((cache / "stores").iterdir())) == 1
    assert built <= 1.3 * 60
