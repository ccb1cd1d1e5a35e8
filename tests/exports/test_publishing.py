"""Exports are atomic, replace nothing, and use bounded memory."""

from __future__ import annotations

import errno
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.cli.harness import Shell
from tests.programs import python
from tests.store.making import make_columns, make_store
from tokenmill.data.packs import Pack
from tokenmill.errors import CacheError, UsageError
from tokenmill.exports.export_files import FORMATS, SUFFIXES
from tokenmill.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    columns = [make_columns([50] * 60, extra={"id": [str(n) for n in range(60)]})]
    return make_store(tmp_path_factory.mktemp("cache"), columns)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def options(name: str) -> dict[str, Any]:
    return {"pack": Pack(128)} if name == "packed-parquet" else {}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("single", [True, False])
def test_equal_export_is_reused_and_other_files_are_kept(
    store: Store, tmp_path: Path, name: str, single: bool
) -> None:
    out = tmp_path / ("out" + SUFFIXES.get(name, "") if single else "directory")
    first = tm.export(store, name, out, **options(name))
    again = tm.export(store, name, out, **options(name))
    assert (first.found, again.found) == (False, True)
    assert (again.rows, again.bytes, again.files) == (first.rows, first.bytes, first.files)
    for path in [out] if out.is_file() else sorted(out.iterdir()):
        content = path.read_bytes()
        for wrong in (content + b"\n", content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
            path.write_bytes(wrong)
            with pytest.raises(UsageError, match="not this export"):
                tm.export(store, name, out, **options(name))
            assert path.read_bytes() == wrong
        path.write_bytes(content)
    assert [path.name for path in tmp_path.iterdir()] == [out.name], "staging directory left"


def test_other_files_at_the_target_raise(store: Store, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "a.parquet").mkdir()
    (tmp_path / "a.parquet" / "x").write_text("mine")
    (tmp_path / "dangling.parquet").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "a.parquet", "dangling.parquet"):
        with pytest.raises(UsageError, match="not this export"):
            tm.export(store, "parquet", tmp_path / name)
    exported = tm.export(store, "megatron", tmp_path / "megatron")
    (exported.path / "more").write_text("mine")
    with pytest.raises(UsageError, match="not this export"):
        tm.export(store, "megatron", exported.path)
    (tmp_path / "empty").mkdir()
    assert tm.export(store, "parquet", tmp_path / "empty").files == 1


@pytest.mark.parametrize("name", FORMATS)
def test_full_disk_raises_and_leaves_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real, written = os.write, 0

    def full(descriptor: int, data: Any) -> int:
        nonlocal written
        written += len(data)
        if written > 3000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    with monkeypatch.context() as patched:
        patched.setattr("tokenmill._core.publish.os.write", full)
        with pytest.raises(CacheError, match="disk is full"):
            tm.export(store, name, tmp_path / "out", **options(name))
    assert not any(tmp_path.iterdir())
    assert not tm.export(store, name, tmp_path / "out", **options(name)).found


KILLED = """
import os, signal, sys
import tokenmill as tm
from tokenmill.exports import export_files
real = export_files._stream
def dying(plan, table, samples):
    yield next(real(plan, table, samples))
    os.kill(os.getpid(), signal.SIGKILL)
export_files._stream = dying
tm.export(tm.open_store(sys.argv[1]), "parquet", sys.argv[2])
"""


def test_killed_export_leaves_no_target_and_can_be_repeated(store: Store, tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    done = python(KILLED, store.path, out)
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    assert not tm.export(store, "parquet", out).found


PEAK = """
import resource, sys
import tokenmill as tm
store = tm.open_store(sys.argv[1])
tm.export(tm.concat([store] * int(sys.argv[4])), sys.argv[2], sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["parquet", pytest.param("megatron", marks=pytest.mark.soak)])
def test_memory_does_not_grow_with_rows(tmp_path: Path, name: str) -> None:
    # 4 and 16 times a store of 2.5 MB; only a block is in memory.
    base = make_store(tmp_path / "cache", [make_columns([500] * 1000)])
    peaks = []
    for times in (4, 16):
        done = python(PEAK, base.path, name, tmp_path / f"out-{times}", times)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) << 10)
    assert peaks[1] - peaks[0] < 16 << 20


def test_command_prints_path_rows_and_bytes(
    shell: Shell, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in FORMATS:
        more = ("--length", "128") if name == "packed-parquet" else ()
        out = tmp_path / f"out-{name}"
        exported = shell("export", store.path, "--format", name, "--out", out, *more, "--json").json
        size = sum(path.stat().st_size for path in out.iterdir())
        assert (exported["path"], exported["bytes"]) == (str(out), size)
        assert exported["rows"] == (30 if name == "packed-parquet" else len(store))
        shown = shell("export", store.path, "--format", name, *more)
        assert shown.code == 0
        default = Path(shown.out.strip())
        assert default.parent == tmp_path
        assert default.name.startswith(store.key[:12])
        assert default.suffix == SUFFIXES.get(name, "")
        assert "exist already" in shell("export", store.path, "--format", name, *more).err


def test_command_writes_splits_columns_and_padded_packs(
    shell: Shell, store: Store, tmp_path: Path
) -> None:
    shares = ("--split", "train=0.75", "--split", "validation=0.25", "--split-seed", "3")
    columns = ("--also", "id", "--also", "length")
    call = ("export", store.path, "--format", "hf", "--out", tmp_path / "a", *shares, *columns)
    exported = shell(*call, "--json").json
    assert exported["rows"] == len(store)
    dataset = pytest.importorskip("datasets").load_from_disk(str(tmp_path / "a"))
    views = store.split({"train": 0.75, "validation": 0.25}, seed=3)
    for name, view in views.items():
        assert [r["id"] for r in dataset[name]] == [row.extra["id"] for row in view]
    one = shell("export", store.path, "--format", "hf", "--out", tmp_path / "b", "--split", "train")
    assert (one.code, len(list((tmp_path / "b" / "train").iterdir()))) == (0, 3)
    for wrong, message in (("train", "NAME=SHARE"), ("train=x", "NAME=SHARE"),
                        ("train=0.5", "add up"), ("train=0.7", "twice")):  # fmt: skip
        both = ("--split", wrong, *(("--split", "train=0.3") if wrong != "train=0.5" else ()))
        out = ("--out", tmp_path / "c", "--json")
        refused = shell("export", store.path, "--format", "hf", *out, *both)
        assert (refused.code, refused.error["type"]) == (2, "UsageError"), wrong
        assert message in refused.error["message"]
    packs = ("--format", "packed-parquet", "--layout", "megatron-bridge", "--length", "256")
    call = ("export", store.path, *packs, "--pad-multiple", "16", "--out", tmp_path / "p")
    assert shell(*call).code == 0
    starts = pq.read_table(tmp_path / "p", columns=["seq_start_id"])["seq_start_id"].to_pylist()
    assert {b - a for row in starts for a, b in pairwise(row)} == {65}


def test_wrong_command_exits_with_2(shell: Shell, store: Store, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("mine")
    export = ("export", store.path, "--json", "--format")
    refused = shell(*export, "parquet", "--out", tmp_path / "a.parquet")
    assert (refused.code, refused.error["path"]) == (2, str(tmp_path / "a.parquet"))
    unknown = shell(*export, "csv", "--out", tmp_path / "b")
    assert (unknown.code, unknown.error["type"]) == (2, "UsageError")
    missing = shell("export", tmp_path / "no", "--format", "arrow", "--out", tmp_path / "b")
    assert missing.code == 1
