"""A metadata file without end or of many gigabytes is refused before it fills the memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import warnings
from pathlib import Path

import fsspec
import pytest

import tokenmill as tm
from tests.remote.servers import Handler, RangeServer, serving
from tests.store.making import make_columns, make_store
from tokenmill._core import paths, remote
from tokenmill._core.artifact import ArtifactKind
from tokenmill._core.paths import read_bounded
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.store import Store

LIMIT = 1 << 20
SPARSE = 20 << 30  # bytes of a sparse file, which occupies no disk


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "cache", [make_columns([3, 4, 5])])


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (paths, remote):
        monkeypatch.setattr(module, "MAX_METADATA_BYTES", LIMIT)


class EndlessServer(RangeServer):
    """Every file is white space without end; `sent` counts its bytes."""

    sent = 0

    def answer(self, handler: Handler) -> bool:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        piece = b"%x\r\n" % (64 << 10) + b" " * (64 << 10) + b"\r\n"
        with contextlib.suppress(ConnectionError):
            while True:
                handler.wfile.write(piece)
                self.sent += len(piece)


def grow(path: Path) -> None:
    path.chmod(0o644)
    os.truncate(path, SPARSE)


def test_sparse_manifest_is_refused(store: Store) -> None:
    grow(store.path / "manifest.json")
    program = (
        "import resource, sys, tokenmill as tm\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try: tm.open_store(sys.argv[1])\n"
        "except tm.errors.CorruptionError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, store.path], capture_output=True, text=True, check=True
    )
    assert "manifest.json: more than 268435456 bytes" in done.stdout


def test_device_without_end_is_not_read() -> None:
    assert read_bounded(Path("/dev/zero")) == b""


def test_sparse_proof_is_a_warning(store: Store) -> None:
    grow(store.path / "proof.json")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert store[0].origin is not None
        assert Store(store.path).proof == {}
    assert any("more than" in str(one.message) for one in caught)


def test_sparse_commit_record_is_refused(store: Store) -> None:
    (record,) = (store.path.parent.parent / "slices").rglob("*.json")
    grow(record)
    with pytest.raises(CorruptionError, match="more than"):
        Store(store.path)[0]


def test_sparse_summary_is_refused(tmp_path: Path) -> None:
    kind = ArtifactKind("note", "")
    (tmp_path / "notes").mkdir()
    kind.write(tmp_path, tmp_path / "notes" / "a", {"x": 1})
    grow(tmp_path / "notes" / "a")
    with pytest.raises(CorruptionError, match="more than"):
        kind.open(tmp_path / "notes" / "a")


def test_endless_manifest_over_http_is_refused(tmp_path: Path, low_limit: None) -> None:
    with serving(EndlessServer(tmp_path)) as web:
        with pytest.raises(CorruptionError, match=f"manifest.json: more than {LIMIT} bytes"):
            tm.open_store(web.url("store"), cache_dir=tmp_path / "blocks")
        assert web.sent < 64 * LIMIT  # buffers of the sockets, not the whole body


def test_long_manifest_of_a_file_system_is_refused(tmp_path: Path, low_limit: None) -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/long/manifest.json", b" " * (LIMIT + 2))
    with pytest.raises(CorruptionError, match=f"manifest.json: more than {LIMIT} bytes"):
        tm.open_store("memory://long", cache_dir=tmp_path / "blocks")


def test_store_whose_manifest_would_be_too_long_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.store.manifest.MAX_METADATA_BYTES", 100)
    with pytest.raises(UsageError, match="more than the limit of 100; prepare fewer source files"):
        make_store(tmp_path / "cache", [make_columns([3])])
