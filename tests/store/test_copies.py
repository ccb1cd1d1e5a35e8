"""Self-contained copies: same rows, movable, independent of the original."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.store.making import commit, make_columns, make_store, mtimes, publish
from tokenmill import Store, open_store
from tokenmill._core import publish as publishing
from tokenmill.errors import CacheError, UsageError
from tokenmill.store.commit import Placement
from tokenmill.store.record import RejectedRow
from tokenmill.store.transfer import copy_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    bad = RejectedRow(2, 0, 2, 200, 99, "bad_shape", "no messages")
    columns = make_columns([3, 7], rejected=[bad], extra={"id": ["1", "2"]})
    return make_store(tmp_path / "cache", [columns, make_columns([5], seed=1)])


def rows(store: Store) -> list[object]:
    return [
        (row.input_ids.tolist(), row.loss_mask.tolist(), row.origin, row.turns, row.extra)
        for row in store
    ]


def test_copy_moved_without_its_cache_serves_the_same(store: Store, tmp_path: Path) -> None:
    wanted, rejected = rows(store), list(store.rejected_rows())
    target = tmp_path / "a" / "b" / "copy"
    assert copy_store(store, target) == target
    assert [path.name for path in target.parent.iterdir()] == ["copy"], "no staging left"
    assert b".." not in (target / "state.json").read_bytes()
    assert str(tmp_path).encode() not in (target / "manifest.json").read_bytes()
    assert not any(path.is_symlink() for path in target.rglob("*"))
    shutil.rmtree(tmp_path / "cache")
    moved = shutil.move(target, tmp_path / "moved")
    copy = open_store(moved, verify="open")
    assert copy.key == store.key
    assert rows(copy) == wanted
    assert list(copy.rejected_rows()) == rejected
    assert copy.manifest["document"] == store.manifest["document"]
    assert copy.manifest["totals"] == store.manifest["totals"]


def test_copy_of_a_copy_is_the_copy(store: Store, tmp_path: Path) -> None:
    first = copy_store(store, tmp_path / "one")
    second = copy_store(open_store(first), tmp_path / "two")
    for path in sorted(first.rglob("*")):
        if path.is_file():
            assert (second / path.relative_to(first)).read_bytes() == path.read_bytes()
    assert open_store(second).verify() > 0


def test_target_may_be_empty_or_the_same_copy_but_nothing_else(
    store: Store, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    copy_store(store, empty)
    before = mtimes(empty)
    copy_store(store, empty)
    assert mtimes(empty) == before
    other = make_store(tmp_path / "other", [make_columns([2])], name="other")
    with pytest.raises(UsageError, match="not " + other.key[:12]):
        copy_store(other, empty)
    used = tmp_path / "used"
    used.mkdir()
    (used / "diary.txt").write_text("mine")
    file = tmp_path / "file"
    file.write_text("mine")
    for taken in (used, file):
        with pytest.raises(UsageError, match="not a copy"):
            copy_store(store, taken)
    assert (used / "diary.txt").read_text() == "mine"
    assert len(open_store(empty)) == 3


def test_file_system_without_hard_links_gets_copies(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    wanted = rows(store)
    with monkeypatch.context() as patch:
        patch.setattr(publishing.os, "link", refused)
        copy = copy_store(store, tmp_path / "copy")
    [record, *_] = sorted((tmp_path / "cache" / "slices").rglob("*.json"))
    counterpart = copy / record.relative_to(tmp_path / "cache")
    assert counterpart.stat().st_ino != record.stat().st_ino
    assert rows(open_store(copy, verify="open")) == wanted


def test_disk_that_is_full_leaves_no_target(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publishing.os, "link", full)
        with pytest.raises(CacheError, match="the disk is full"):
            copy_store(store, tmp_path / "full" / "copy")
    assert os.listdir(tmp_path / "full") == []
    assert store.verify() > 0


def test_equal_slices_are_copied_once(tmp_path: Path) -> None:
    key = publish(tmp_path / "cache", make_columns([3, 4]), "once")
    placements = [Placement(key, 0, 0, 1, 0), Placement(key, 0, 2, 3, 200)]
    twice = commit(tmp_path / "cache", placements)
    copy = open_store(copy_store(twice, tmp_path / "copy"))
    assert len(copy) == 4
    assert len(list((tmp_path / "copy" / "slices").rglob("*.json"))) == 1
    assert rows(copy) == rows(twice)
