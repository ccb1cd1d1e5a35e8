"""Contract tests for all cache artifacts.

Selection and length indexes, row indexes, seekable copies, notes and memos are published completely
or not at all, by any number of writers. Damage raises an error with the file and a remedy, or the
artifact counts as absent and is rebuilt. ``artifact.json`` contains the bytes of each in format 1.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.store.making import make_columns, make_store
from tokenmill.data.prompt_lengths import LengthIndex, Rejection, publish_lengths
from tokenmill.data.view import View
from tokenmill.errors import CacheError, CorruptionError
from tokenmill.sources.bytefile import LocalFile
from tokenmill.sources.copy import CopyFile, write_copy
from tokenmill.sources.index import Index, IndexCache, index_key, write_index
from tokenmill.sources.scan import LineScan
from tokenmill.store import Store
from tokenmill.tokenizers.cache import Comparison, read_fact, write_fact

GOLDEN = Path(__file__).with_name("artifact.json")
KEY = "0123456789abcdef0123" * 2
LINES_FILE = Path(__file__).with_name("lines.jsonl")
LINES = LINES_FILE.read_bytes()
DOCUMENT = {"prompts": 1, "sources": ["x"]}
LENGTHS = np.array([4, -1, 9], np.int32)
BAD_ROW = Rejection(1, "bad_shape", "no prompt: é")


def select(root: Path) -> View:
    stores = list((root / "stores").glob("*"))
    store = Store(stores[0]) if stores else make_store(root, [make_columns([3, 4, 5])])
    return store.filter("length > 3")


def make_selection(root: Path) -> Path:
    return root / "rows" / select(root).key


def read_selection(directory: Path) -> Any:
    view = select(directory.parent.parent)
    return [len(row) for row in view], view.lengths.tolist(), view.trained.tolist()


def make_lengths(root: Path) -> Path:
    serving = {"template": "{{ messages }}", "special_tokens": {"eos_token": "</s>"}}
    return publish_lengths(root, DOCUMENT, [(LENGTHS, [BAD_ROW])], serving)


def read_lengths(directory: Path) -> Any:
    index = LengthIndex(directory, DOCUMENT)
    return index.lengths.tolist(), list(index.rejections()), index.rejected, index.template


def make_row_index(root: Path) -> Path:
    document = write_index(IndexCache(root), LineScan(LocalFile(str(LINES_FILE))))
    return IndexCache(root).path(index_key(document.digest))


def read_row_index(directory: Path) -> Any:
    index = Index(directory)
    for page in range(index.pages):
        index.check_page(page)
    return index.document.rows, list(index.starts[:4]), index.block(0).digest


def make_copy(root: Path) -> Path:
    return IndexCache(root).path(write_copy([LINES, LINES], IndexCache(root)))


def read_copy(directory: Path) -> Any:
    return CopyFile(directory, "original").pread(1 << 20, 0)


def make_note(root: Path) -> Path:
    IndexCache(root).write_note(KEY, {"rows": 3, "index": KEY, "path": "é"})
    return IndexCache(root).path(KEY)


def read_note(directory: Path) -> Any:
    return IndexCache(directory.parent.parent).note(directory.name)


def make_memo(root: Path) -> Path:
    write_fact(root, KEY, Comparison("it adds a token"))
    return root / "tokenizers" / "memo" / f"{KEY}.json"


def read_memo(directory: Path) -> Any:
    return read_fact(directory.parents[2], KEY, Comparison)


class Kind(NamedTuple):
    """One kind of artifact.

    Attributes:
        make: Publishes it under a root unless it exists; returns its path.
        read: Returns its content; None if it is damaged and `is_rebuilt`.
        is_rebuilt: Whether a damaged one counts as absent and `make` replaces it.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    is_rebuilt: bool = False


KINDS = {
    "selection index": Kind(make_selection, read_selection),
    "length index": Kind(make_lengths, read_lengths),
    "row index": Kind(make_row_index, read_row_index),
    "copy": Kind(make_copy, read_copy),
    "note": Kind(make_note, read_note, is_rebuilt=True),
    "memo": Kind(make_memo, read_memo, is_rebuilt=True),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the files of an artifact by their paths below the root."""
    root = directory.parents[2] if directory.parent.name == "memo" else directory.parents[1]
    paths = [directory] if directory.is_file() else sorted(directory.rglob("*"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("name", KINDS)
def test_format_1_is_read_and_written(name: str, root: Path) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    directory = KINDS[name].make(root)
    written, expected = files_of(directory), KINDS[name].read(directory)
    assert expected is not None
    assert sorted(written) == sorted(golden)
    if name != "copy":  # compressed bytes depend on the version of zstd
        assert {path: data.hex() for path, data in written.items()} == golden
    for path in written:
        (root / path).unlink()
        (root / path).write_bytes(bytes.fromhex(golden[path]))
    assert KINDS[name].read(directory) == expected


def damages_of(good: bytes) -> list[bytes | None]:
    offsets = range(0, len(good), max(1, len(good) // 40))
    flipped = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in offsets]
    return [*flipped, good[:-1], good + b"\0", b"", None]


@every_kind
def test_any_damage_is_an_error_or_rebuilt(kind: Kind, root: Path) -> None:
    directory = kind.make(root)
    expected, written = kind.read(directory), files_of(directory)
    for path, good in written.items():
        for damage in damages_of(good):
            (root / path).unlink()
            if damage is not None:
                (root / path).write_bytes(damage)
            if kind.is_rebuilt:
                assert kind.read(directory) is None
                assert kind.make(root) == directory
                assert files_of(directory) == written
            else:
                with pytest.raises(CorruptionError, match=r"rebuild|again") as caught:
                    kind.read(directory)
                assert str(caught.value.path).startswith(str(directory))
                (root / path).write_bytes(good)
    assert kind.read(directory) == expected


@pytest.mark.parametrize("name", ["row index", "copy"])
def test_file_that_grew_is_refused_before_it_is_read(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = KINDS[name]
    directory = kind.make(root)
    read = Path.read_bytes
    for grown in directory.rglob("*.bin"):
        size = grown.stat().st_size
        grown.chmod(0o644)
        os.truncate(grown, 20 << 30)  # sparse

        def read_other(path: Path, grown: Path = grown) -> bytes:
            return pytest.fail(f"{path} was read") if path == grown else read(path)

        monkeypatch.setattr(Path, "read_bytes", read_other)
        with pytest.raises(CorruptionError, match=f"{20 << 30} bytes, expected {size}; .*rebuild"):
            kind.read(directory)
        os.truncate(grown, size)


@every_kind
def test_symbolic_link_out_of_the_cache_is_not_followed(
    kind: Kind, root: Path, tmp_path: Path
) -> None:
    directory = kind.make(root)
    for path in files_of(directory):
        shutil.move(root / path, tmp_path / "outside")
        (root / path).symlink_to(tmp_path / "outside")
        try:
            assert kind.read(directory) is None
        except CacheError as error:
            assert "symbolic link leads out of the cache" in str(error)
        (root / path).unlink()
        shutil.move(tmp_path / "outside", root / path)


@every_kind
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "link"])
def test_full_disk_at_any_step_publishes_nothing(
    kind: Kind, call: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(root))  # where selections are written
    directory = kind.make(root)
    complete = files_of(directory)
    real, left = getattr(os, call), 0

    def fail(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    for allowed in range(60):
        shutil.rmtree(directory) if directory.is_dir() else directory.unlink(missing_ok=True)
        left = allowed
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            patch.setattr("tokenmill._core.process.tempfile.tempdir", str(root))
            try:
                kind.make(root)
            except CacheError as error:
                assert "disk is full" in str(error)
        if directory.exists():
            assert files_of(directory) == complete
        if left >= 0:
            break
    assert left >= 0
    kind.make(root)
    assert files_of(directory) == complete


@every_kind
def test_eight_writers_publish_one_artifact_and_no_other_files(kind: Kind, root: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        (directory,) = set(threads.map(lambda _: kind.make(root), range(8)))
    assert kind.read(directory) is not None
    assert not list((root / "staging").iterdir())
    assert not (root / "quarantine").exists()


def test_unreadable_artifact_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_note(tmp_path)
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.parent == directory:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        make_note(tmp_path)
    assert not (tmp_path / "quarantine").exists()
    assert read_note(directory) is not None
