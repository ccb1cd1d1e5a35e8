"""Tests of staging: complete files or errors, modes of the root, no files left over."""

from __future__ import annotations

import array
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.programs import python
from tokenmill._core.publish import (
    Staging,
    make_directory,
    sync_directory,
    write_file,
)
from tokenmill.errors import CacheError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Iterator[Any]:
    """Set the umask of the process; restore it afterwards."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@given(chunks=st.lists(st.binary(max_size=40), max_size=6), most=st.integers(1, 9))
def test_write_file_with_short_writes_is_complete(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes], most: int
) -> None:
    path = tmp_path_factory.mktemp("short") / "file"
    write = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, view: write(descriptor, view[:most]))
        assert write_file(path, chunks).size == sum(map(len, chunks))
    assert path.read_bytes() == b"".join(chunks)


def test_write_file_accepts_any_buffer_and_never_replaces(tmp_path: Path) -> None:
    numbers = memoryview(array.array("i", [1, 2, 3]))
    buffers: list[Any] = [b"xyz", bytearray(b"xyz"), numbers]
    for number, buffer in enumerate(buffers):
        path = tmp_path / f"{number}"
        assert write_file(path, buffer).size == len(bytes(buffer))
        with pytest.raises(CacheError, match="File exists"):
            write_file(path, b"new")
        assert path.read_bytes() == bytes(buffer)


@pytest.mark.parametrize("below", [".", "cache"])
def test_file_in_place_of_the_cache_is_a_clear_error(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match="a file is in place of a directory; choose"):
        Staging(tmp_path / "file" / below).write("a", b"data")


@pytest.mark.parametrize("call", ["write", "fsync", "close", "open"])
@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "quota"), (errno.EIO, "run the command again")],
)
def test_write_file_failing_at_any_call_is_a_cache_error(
    call: str, code: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_close = os.close

    def fail(*arguments: Any) -> None:
        if call == "close":
            real_close(*arguments)  # a failed close has closed
        raise OSError(code, os.strerror(code))

    published = tmp_path / "published"
    with Staging(tmp_path) as staging:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(CacheError, match=remedy) as caught:
                staging.publish(staging.write("a", b"data"), published)
        assert caught.value.path == str(staging.path / "a")
        assert isinstance(caught.value.__cause__, OSError)
    assert not published.exists()
    assert not staging.path.exists()


def test_write_file_ends_if_no_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda descriptor, view: 0)
    with pytest.raises(CacheError, match="no bytes were written"):
        write_file(tmp_path / "a", b"data")


def test_write_file_detects_a_short_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def lose(descriptor: int) -> None:
        fsync(descriptor)
        os.ftruncate(descriptor, 2)

    monkeypatch.setattr(os, "fsync", lose)
    with pytest.raises(CacheError, match="wrote 4 bytes, but the file has 2"):
        write_file(tmp_path / "a", b"data")


def test_write_file_beyond_a_real_limit_is_a_cache_error(tmp_path: Path) -> None:
    """With a real short write and a real error of the kernel."""
    program = """
import resource, sys
from pathlib import Path
from tokenmill.errors import CacheError
from tokenmill._core.publish import Staging
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
root = Path(sys.argv[1])
try:
    with Staging(root) as staging:
        staging.publish(staging.write("a", [bytes(70_000)] * 3), root / "slices" / "a")
except CacheError as error:
    print(type(error.__cause__).__name__, error.__cause__.errno)
"""
    answer = python(program, tmp_path)
    assert answer.stdout.split() == ["OSError", str(errno.EFBIG)], answer.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_staging_is_removed_also_after_an_error(tmp_path: Path) -> None:
    def failing_work(staging: Staging) -> None:
        with staging:
            assert staging.write("deep/er/a", b"data").exists()
            raise KeyError

    staging = Staging(tmp_path)
    with pytest.raises(KeyError):
        failing_work(staging)
    assert staging.path.parent == tmp_path / "staging"
    assert not staging.path.exists()


@pytest.mark.parametrize(
    ("root_mode", "file_mode"), [(0o755, 0o644), (0o775, 0o664), (0o700, 0o600), (0o2775, 0o664)]
)
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_modes_come_from_the_root_not_from_the_umask(
    root_mode: int, file_mode: int, mask: int, tmp_path: Path, umask: Any
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(root_mode)
    umask(mask)
    with Staging(root) as staging:
        assert staging.publish(staging.write("a", b"x"), root / "slices" / "ab" / "a")
        staging.write("store/inner/manifest", b"x")
        write_file(staging.path / "store" / "table", b"x")
        assert staging.publish(staging.path / "store", root / "stores" / "k")
    for path in root.rglob("*"):
        assert oct(mode(path)) == oct(root_mode if path.is_dir() else file_mode), path


def test_modes_beside_a_target_come_from_the_umask(tmp_path: Path, umask: Any) -> None:
    tmp_path.chmod(0o1777)  # like /tmp
    umask(0o027)
    target = tmp_path / "out"
    with Staging(target.parent, beside=target) as staging:
        assert staging.path.parent == tmp_path
        staging.write("inner/a", b"x")
        assert staging.publish(staging.path, target)
    found = {path.relative_to(tmp_path).as_posix(): oct(mode(path)) for path in tmp_path.rglob("*")}
    assert found == {"out": "0o750", "out/inner": "0o750", "out/inner/a": "0o640"}


def test_make_directory_tolerates_a_concurrent_mkdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.mkdir

    def overtaken(self: Path, *arguments: Any, **more: Any) -> None:
        real(self, *arguments, **more)
        if not more:
            raise FileExistsError

    monkeypatch.setattr(Path, "mkdir", overtaken)
    make_directory(tmp_path / "a" / "b", tmp_path)
    assert (tmp_path / "a" / "b").is_dir()


def test_make_directory_through_a_link_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "cache", tmp_path / "outside"
    (root / "inside").mkdir(parents=True)
    (outside / "ab").mkdir(parents=True)
    (root / "slices").symlink_to(outside)
    (root / "stores").symlink_to(root / "inside")
    with Staging(root) as staging:
        staged = staging.write("a", b"x")
        for target in ("slices/a", "slices/ab/a", "slices/new/a"):
            with pytest.raises(CacheError, match="leads out of the cache"):
                staging.publish(staged, root / target)
        assert staging.publish(staged, root / "stores" / "a")
    assert [path.name for path in outside.rglob("*")] == ["ab"]


def test_root_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    with Staging(tmp_path / "cache") as staging:
        assert staging.publish(staging.write("a", b"x"), tmp_path / "cache" / "slices" / "a")
    assert (tmp_path / "disk" / "slices" / "a").read_bytes() == b"x"


def test_sync_directory_where_it_is_not_supported_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = errno.EINVAL

    def refuse(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    sync_directory(tmp_path)
    code = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        sync_directory(tmp_path)
