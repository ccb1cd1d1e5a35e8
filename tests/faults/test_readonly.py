"""A hit needs no write, a miss raises an error; file modes follow the cache directory."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import Outcome, Zygote, fault, require_mounts, run_mounted
from tests.faults.world import image, prepare_arguments, write_sources


def run_read_only(zygote: Zygote, cache: Path, arguments: list[str]) -> Outcome:
    mount = f"mount --bind {cache} {cache} && mount -o remount,ro,bind {cache}"
    return run_mounted(zygote, mount, arguments)


def test_hit_on_a_read_only_mount_works_and_a_miss_is_a_clear_error(
    zygote: Zygote, clean: Clean, cache: Path, tmp_path: Path
) -> None:
    require_mounts()
    hit = run_read_only(zygote, cache, prepare_arguments(clean.sources, cache))
    assert hit.exit == 0, hit.stderr
    assert hit.result["hit"] is True
    other = write_sources(tmp_path / "other", files=2, seed=5)
    empty = tmp_path / "empty"
    empty.mkdir()
    for place in (cache, empty):
        miss = run_read_only(zygote, place, prepare_arguments(other, place))
        assert miss.exit == 1, miss.stderr
        assert miss.error == "CacheError"
        assert "read-only" in miss.result["error"]["message"]
        assert "--cache-dir" in miss.result["error"]["message"]


def test_hit_writes_nothing_at_all(zygote: Zygote, tmp_path: Path) -> None:
    sources, cache = write_sources(tmp_path / "sources"), tmp_path / "cache"
    arguments = prepare_arguments(sources, cache)
    time.sleep(2.1)  # until their state counts as come to rest
    first = zygote.one(arguments)
    assert first.exit == 0, first.stderr
    before = state_of(tmp_path)
    # Not in the cache, nor anywhere else: every call that makes or changes a file would end it.
    calls = "write,fsync,link,rename,mkdir"
    hit = zygote.one(arguments, fault=fault(calls, tmp_path, 1, "kill"))
    assert hit.exit == 0, hit.stderr
    assert hit.result["hit"] is True
    assert state_of(tmp_path) == before


def state_of(directory: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in [directory, *sorted(directory.rglob("*"))]:
        status = path.lstat()
        found[str(path)] = status.st_mtime_ns, status.st_ctime_ns
    return found


@pytest.mark.parametrize("mode", [0o2775, 0o755], ids=["group may write", "owner alone"])
def test_modes_come_from_the_root_whatever_the_umask(
    zygote: Zygote, clean: Clean, tmp_path: Path, mode: int
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    for umask, sources in ((0o077, clean.sources), (0o000, write_sources(tmp_path / "b", 2, 2, 3))):
        outcome = zygote.one(prepare_arguments(sources, cache), umask=umask)
        assert outcome.exit == 0, outcome.stderr
    wrong = []
    for path in cache.rglob("*"):
        if path.is_symlink():
            continue
        expected = mode & (0o3777 if path.is_dir() else 0o666)
        actual = stat.S_IMODE(path.stat().st_mode)
        if actual != expected:
            wrong.append((str(path.relative_to(cache)), oct(actual), oct(expected)))
    assert wrong == []


def test_second_user_of_a_group_builds_on_what_the_first_left(
    zygote: Zygote, open_directory: Path
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to act as two users")
    cache = open_directory / "cache"
    cache.mkdir()
    os.chown(cache, 12345, 12399)
    cache.chmod(0o2775)
    sources = write_sources(open_directory / "sources", files=4)
    half = [sources / f"part-{n:03}.jsonl" for n in range(2)]
    runs = [(12345, half), (12346, [sources]), (12345, [sources])]
    built = []
    for user, chosen in runs:
        (outcome,) = zygote.run(
            {
                "call": "tests.faults.test_readonly:as_user",
                "argument": [user, 12399, [str(path) for path in chosen], str(cache)],
                "umask": 0o077,
            }
        )
        assert outcome.exit == 0, outcome.stderr
        built.append(outcome.result["slices_built"])
    assert built == [2, 2, 0]
    assert len(image(cache)) == 3 * 4 + 2 * 9


@pytest.fixture
def open_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tokenmill-users-") as name:
        os.chmod(name, 0o755)
        yield Path(name)


def as_user(argument: list[Any]) -> int:
    from tokenmill.cli import main

    user, group, paths, cache = argument
    sources = [Path(path) for path in paths]
    # First for itself: what is imported on the way may lie where the other user cannot go.
    with tempfile.TemporaryDirectory() as own, contextlib.redirect_stdout(io.StringIO()):
        main(prepare_arguments(sources, Path(own)))
    os.setgroups([group])
    os.setgid(group)
    os.setuid(user)
    return main(prepare_arguments(sources, Path(cache)))
