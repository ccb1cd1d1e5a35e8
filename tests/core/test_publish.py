"""Publishing: one contract, tried over each of the three ways a file can become visible.

The ways are a hard link, a rename that does not replace, and a plain rename after a look; the
latter two are reached by taking the better ones away, as a file system without them would.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenmill._core import publish as module
from tokenmill._core.publish import Staging, copy_or_link, publish_directory, publish_file
from tokenmill.errors import CacheError

WAYS = ("link", "guarded rename", "plain rename")


def refusing(code: int) -> Callable[..., Any]:
    """Return a system call that fails."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def succeed_then_fail(code: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a system call that succeeds but reports an error, like a repeated request."""

    def lose_reply(*arguments: Any, **more: Any) -> None:
        real(*arguments, **more)
        raise OSError(code, os.strerror(code))

    return lose_reply


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "link":
        monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    if request.param == "plain rename":
        monkeypatch.setattr(module, "_rename_without_replacing", refusing(errno.ENOSYS))
    return str(request.param)


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    path = tmp_path / "staged"
    path.write_bytes(b"ours")
    return path


@pytest.mark.usefixtures("way")
def test_publish_file_uses_a_free_name_and_never_replaces(tmp_path: Path) -> None:
    target = tmp_path / "target"
    for name in ("first", "second"):
        (tmp_path / name).write_text(name)
    assert publish_file(tmp_path / "first", target) is True
    before = target.stat()
    assert publish_file(tmp_path / "second", target) is False
    assert os.path.samestat(before, target.stat())
    assert target.read_text() == "first"


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOENT])
def test_publish_file_with_a_lost_reply_is_ours(
    way: str, code: int, tmp_path: Path, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "link":
        # A link keeps the staged name, so its repetition fails only because the target exists.
        monkeypatch.setattr(os, "link", succeed_then_fail(errno.EEXIST, os.link))
    elif way == "guarded rename":
        real = module._rename_without_replacing
        monkeypatch.setattr(module, "_rename_without_replacing", succeed_then_fail(code, real))
    else:
        monkeypatch.setattr(os, "rename", succeed_then_fail(code, os.rename))
    target = tmp_path / "target"
    assert publish_file(staged, target) is True
    assert target.read_bytes() == b"ours"


@pytest.mark.usefixtures("way")
def test_publish_file_without_source_or_directory_is_an_error(tmp_path: Path, staged: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"theirs")
    for source, name in ((tmp_path / "absent", target), (staged, tmp_path / "none" / "target")):
        with pytest.raises(FileNotFoundError):
            publish_file(source, name)
    assert (staged.read_bytes(), target.read_bytes()) == (b"ours", b"theirs")


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_publish_of_a_removed_staged_file_is_an_error(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing staged file is not a lost reply if another process published the target."""
    staged, target = tmp_path / "staged", tmp_path / "target"
    for path in (staged, target):
        if kind == "directory":
            path.mkdir()
        else:
            path.write_bytes(b"x")

    def too_late(*_: Any) -> None:
        os.replace(staged, tmp_path / "trash")
        raise FileNotFoundError(errno.ENOENT, "gone")

    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    monkeypatch.setattr(module, "_rename_without_replacing", too_late)
    if kind == "file":
        with pytest.raises(FileNotFoundError):
            publish_file(staged, target)
    else:
        monkeypatch.setattr(os, "rename", too_late)
        with pytest.raises(FileNotFoundError):
            publish_directory(staged, target)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ESTALE])
def test_publish_file_that_fails_publishes_nothing(
    code: int, tmp_path: Path, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refusing(code))
    with pytest.raises(OSError) as caught:
        publish_file(staged, tmp_path / "target")
    assert caught.value.errno == code
    assert not (tmp_path / "target").exists()


def test_publish_file_syncs_the_directory_for_winner_and_loser(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    real = module.sync_directory
    monkeypatch.setattr(module, "sync_directory", lambda path: (synced.append(path), real(path))[1])
    (tmp_path / "published").mkdir()
    for turn in (1, 2):
        source = tmp_path / f"staged-{turn}"
        source.write_bytes(b"x")
        assert publish_file(source, tmp_path / "published" / "target") is (turn == 1), way
        assert synced == [tmp_path / "published"] * turn


@pytest.fixture
def staged_directory(tmp_path: Path) -> Path:
    path = tmp_path / "staged"
    (path / "inner" / "most").mkdir(parents=True)
    (path / "manifest").write_bytes(b"ours")
    (path / "inner" / "most" / "data").write_bytes(b"deep")
    return path


def test_publish_directory_is_complete_at_a_free_name(
    tmp_path: Path, staged_directory: Path
) -> None:
    target, taken = tmp_path / "target", tmp_path / "taken"
    taken.mkdir()
    (taken / "manifest").write_bytes(b"theirs")
    assert publish_directory(staged_directory, taken) is False
    assert {path.name: path.read_bytes() for path in taken.iterdir()} == {"manifest": b"theirs"}
    assert publish_directory(staged_directory, target) is True
    assert (target / "manifest").read_bytes() == b"ours"
    assert (target / "inner" / "most" / "data").read_bytes() == b"deep"
    assert not staged_directory.exists()


@pytest.mark.parametrize("code", [errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT])
def test_publish_directory_with_a_lost_reply_is_ours(
    code: int, tmp_path: Path, staged_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "rename", succeed_then_fail(code, os.rename))
    assert publish_directory(staged_directory, tmp_path / "target") is True
    assert (tmp_path / "target" / "manifest").read_bytes() == b"ours"


def test_publish_directory_syncs_content_before_and_name_after(
    tmp_path: Path, staged_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    rename, sync = os.rename, module.sync_directory
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b))[1])
    monkeypatch.setattr(
        module, "sync_directory", lambda path: (events.append(path.name), sync(path))[1]
    )
    publish_directory(staged_directory, tmp_path / "target")
    assert events == ["staged", "inner", "most", "rename", tmp_path.name]


def test_publish_directory_over_a_file_is_an_error(tmp_path: Path, staged_directory: Path) -> None:
    (tmp_path / "target").write_bytes(b"a file")
    with pytest.raises(NotADirectoryError):
        publish_directory(staged_directory, tmp_path / "target")
    assert (staged_directory / "manifest").exists()
    assert (tmp_path / "target").read_bytes() == b"a file"


def test_failed_staging_publish_has_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Staging(tmp_path) as staging:
        staged = staging.write("a", b"x")
        monkeypatch.setattr(os, "link", refusing(errno.ENOSPC))
        with pytest.raises(
            CacheError, match="disk is full; free space or choose another dir"
        ) as caught:
            staging.publish(staged, tmp_path / "slices" / "a")
    assert caught.value.path == str(tmp_path / "slices" / "a")
    assert not (tmp_path / "slices" / "a").exists()


def test_copy_or_link_gives_the_same_bytes_either_way(
    tmp_path: Path, staged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_or_link(staged, tmp_path / "linked")
    assert (tmp_path / "linked").samefile(staged)
    monkeypatch.setattr(os, "link", refusing(errno.EXDEV))
    copy_or_link(staged, tmp_path / "copied")
    assert not (tmp_path / "copied").samefile(staged)
    assert (tmp_path / "copied").read_bytes() == b"ours"
    monkeypatch.undo()
    with pytest.raises(FileExistsError):
        copy_or_link(staged, tmp_path / "copied")
