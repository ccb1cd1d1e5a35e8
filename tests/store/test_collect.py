"""Collecting: two phases, a grace period, and never a wrong row."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.programs import environment
from tests.store.making import commit, flip, make_columns, make_store, publish
from tokenmill import Store, open_store
from tokenmill._core import fingerprint
from tokenmill.errors import CorruptionError, MissingFileError, UsageError
from tokenmill.store import CacheLayout
from tokenmill.store import collect as collecting
from tokenmill.store.collect import collect, survey
from tokenmill.store.commit import Placement

DAY = 86_400.0


def stray_slice(root: Path) -> str:
    return publish(root, make_columns([5, 6], seed=9), "stray")


def commit_slice(root: Path, key: str) -> Store:
    return commit(root, [Placement(key, 0, 0, 1, 0)])


def files(root: Path) -> set[str]:
    return {
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.parent.name != "gc"
    }


def test_calls_mark_first_and_remove_after_the_grace_only(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([3, 4])])
    needed = files(tmp_path)
    key = stray_slice(tmp_path)
    before = files(tmp_path)
    size = sum((tmp_path / name).stat().st_size for name in before - needed)
    slice_name = [f"slices/{key}"]
    steps = [  # time, dry run, what is marked, what is removed
        (0.0, True, slice_name, []),
        (0.0, False, slice_name, []),
        (DAY - 1, False, [], []),
        (DAY, True, [], slice_name),
        (DAY, False, [], slice_name),
        (3 * DAY, False, [], []),
    ]
    for number, (now, dry_run, marked, removed) in enumerate(steps):
        done = collect(tmp_path, grace_s=DAY, dry_run=dry_run, now=1000.0 + now)
        assert (done.marked, done.removed) == (marked, removed), number
        assert done.freed_bytes == (size if removed else 0)
        assert files(tmp_path) == (before if number < 4 else needed)
        assert store.verify() > 0
    with pytest.raises(UsageError, match="no such store"):
        collect(tmp_path, stores=["f" * 40])


def test_reused_slices_are_unmarked(tmp_path: Path) -> None:
    key = stray_slice(tmp_path)
    collect(tmp_path, grace_s=DAY, now=0.0)
    store = commit_slice(tmp_path, key)
    later = collect(tmp_path, grace_s=DAY, now=2 * DAY)
    assert later.removed == []
    # Given up once more, it has its whole grace period again.
    given_up = collect(tmp_path, stores=[store.key], grace_s=DAY, now=2 * DAY)
    assert given_up.removed == []
    assert f"slices/{key}" in given_up.marked


def test_store_committed_while_collecting_keeps_its_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = stray_slice(tmp_path)
    collect(tmp_path, grace_s=0, now=0.0)
    looked = collecting._read_marks

    def commit_meanwhile(root: Path) -> dict[str, float]:
        commit_slice(root, key)
        return looked(root)

    monkeypatch.setattr(collecting, "_read_marks", commit_meanwhile)
    assert collect(tmp_path, grace_s=0, now=1.0).removed == []
    (path,) = CacheLayout(tmp_path).stores.iterdir()
    store = open_store(path)
    assert len(store) == 2
    assert store.verify() > 0


def run_with_removal(work: Callable[[], object], number: int, remove: Callable[[], None]) -> bool:
    """Call `work`; remove files before its n-th system call. Return whether there was one."""
    calls = 0

    def before_call(frame: FrameType, event: str, function: Any) -> None:
        nonlocal calls
        if event == "c_call" and function.__module__ in ("posix", "_io"):
            calls += 1
            if calls == number:
                sys.setprofile(None)
                remove()

    sys.setprofile(before_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls >= number


@pytest.mark.filterwarnings("ignore:.*proof.json. cannot be read")
@pytest.mark.parametrize("work", ["list", "mark", "remove"])
def test_store_removed_by_another_gc_is_left_out_of_a_listing_or_collection(
    tmp_path: Path, work: str
) -> None:
    whole, root = tmp_path / "whole", tmp_path / "cache"
    for name in ("kept", "removed"):
        make_store(whole, [make_columns([3, 4])], name=name)
    (whole / "rollouts" / "old").mkdir(parents=True)
    kept, removed = (fingerprint.key([name, 0]) for name in ("kept", "removed"))
    gone = next(
        p for p in (whole / "stores").iterdir() if removed in (p / "state.json").read_text()
    )

    def remove() -> None:
        for path in (root / "stores" / gone.name, root / "slices" / removed[:2]):
            if kept[:2] != path.name:
                shutil.rmtree(path)

    def survey_into(listed: list[dict[str, Any]]) -> None:
        listed.append(survey(root))

    number, happened = 0, True
    while happened:
        number += 5
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole, root)
        listed: list[dict[str, Any]] = []
        if work == "list":
            happened = run_with_removal(partial(survey_into, listed), number, remove)
        else:
            collect(root, grace_s=0, now=0.0) if work == "remove" else None
            again = partial(collect, root, grace_s=0, now=time.time() + DAY)
            happened = run_with_removal(again, number, remove)
            assert all(open_store(path).verify() for path in (root / "stores").iterdir())
        assert not [entry for one in listed for entry in one["entries"] if "error" in entry]
    assert number > 50


def test_slices_removed_by_gc_are_called_missing(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([3, 4])])
    for now in (0.0, 1.0):
        collect(tmp_path, stores=[store.key], grace_s=0, now=now)
    with pytest.raises(MissingFileError, match="missing; `tokenmill prepare` rebuilds") as caught:
        store[0]
    assert "corrupt" not in f"{type(caught.value).__name__} {caught.value}".lower()


def test_removed_store_takes_the_slices_that_only_it_needs(tmp_path: Path) -> None:
    kept = make_store(tmp_path, [make_columns([3, 4])], name="kept")
    given_up = make_store(tmp_path, [make_columns([5, 6], seed=1)], name="given up")
    alone = next(given_up.slice_keys())
    for now in (0.0, DAY):
        done = collect(tmp_path, stores=[given_up.key], grace_s=DAY, now=now)
    assert sorted(done.removed) == sorted([f"stores/{given_up.key}", f"slices/{alone}"])
    assert not given_up.path.exists()
    assert [entry["key"] for entry in survey(tmp_path)["entries"]] == [kept.key]
    assert kept.verify() > 0


def test_older_than_removes_by_age(tmp_path: Path) -> None:
    old, new = (make_store(tmp_path, [make_columns([3, 4])], name=name) for name in ("old", "new"))
    now = time.time()
    os.utime(old.path, (now - 10 * DAY, now - 10 * DAY))
    marked = collect(tmp_path, older_than_s=5 * DAY, now=now).marked
    assert {f"stores/{old.key}", f"stores/{new.key}"} & set(marked) == {f"stores/{old.key}"}


def test_store_that_cannot_be_read_stops_the_collection(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([3, 4])])
    stray_slice(tmp_path)
    collect(tmp_path, grace_s=0, now=0.0)
    before = files(tmp_path)
    flip(store.path / "slices.bin", 7)
    with pytest.raises(CorruptionError):
        collect(tmp_path, grace_s=0, now=1.0)
    assert files(tmp_path) == before


def test_only_staging_of_dead_processes_is_removed(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from tokenmill._core.publish import Staging;"
        "s = Staging(Path(sys.argv[1])).__enter__(); s.write('x', b'1' * 99);"
        "print(s.path.name, flush=True); sys.stdin.read(); os._exit(9)"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as writer:
        assert writer.stdout is not None
        name = writer.stdout.readline().strip()
        for now in (0.0, DAY):
            assert collect(tmp_path, grace_s=0, now=now).removed == [], "its writer lives"
        writer.communicate("")
    assert collect(tmp_path, grace_s=DAY, now=DAY).marked == [f"staging/{name}"]
    assert collect(tmp_path, grace_s=DAY, now=2 * DAY).removed == [f"staging/{name}"]
    assert not (tmp_path / "staging" / name).exists()


def test_damaged_marks_restart_the_grace_period(tmp_path: Path) -> None:
    key = stray_slice(tmp_path)
    collect(tmp_path, now=0.0)
    (tmp_path / "gc" / "marks.json").write_bytes(b"{")
    again = collect(tmp_path, grace_s=DAY, now=5 * DAY)
    assert (again.marked, again.removed) == ([f"slices/{key}"], [])


def test_empty_and_missing_caches_are_fine(tmp_path: Path) -> None:
    found = survey(tmp_path / "none")
    assert (found["entries"], found["bytes"], set(found["parts"].values())) == ([], 0, {0})
    done = collect(tmp_path / "none", dry_run=True)
    assert (done.marked, done.removed) == ([], [])
    assert not (tmp_path / "none").exists()


def test_reader_within_the_grace_sees_every_row_and_later_a_typed_error(tmp_path: Path) -> None:
    """The store is marked and collected while it is being read."""
    slices = [make_columns([4 + n % 5 for n in range(40)], seed=seed) for seed in range(6)]
    wanted = [row.input_ids.tolist() for row in make_store(tmp_path / "twin", slices)]
    store = make_store(tmp_path, slices)
    collect(tmp_path, stores=[store.key], grace_s=DAY, now=0.0)
    seen = []
    for number, row in enumerate(store):
        seen.append(row.input_ids.tolist())
        if number % 50 == 0:
            collect(tmp_path, stores=[store.key], grace_s=DAY, now=DAY - 1)
    assert seen == wanted
    late = open_store(store.path)
    seen = [late[0].input_ids.tolist()]
    assert collect(tmp_path, stores=[store.key], grace_s=DAY, now=DAY).removed
    with pytest.raises(CorruptionError):
        seen.extend(late[number].input_ids.tolist() for number in range(1, len(late)))
    assert seen == wanted[: len(seen)], "what was served before the error is right"
    with pytest.raises(FileNotFoundError):
        open_store(store.path)
