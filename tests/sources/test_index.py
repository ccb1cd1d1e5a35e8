"""Tests of the row index: reuse, validity and repair."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import environment, python
from tests.sources.make import as_lines, jsonl, jsonl_gz, parquet, wait_until_stable
from tokenmill.errors import CacheError, CorruptionError
from tokenmill.sources.bytefile import Signature
from tokenmill.sources.limits import RACY_COARSE_NS, RACY_NS, STARTS_PER_PAGE
from tokenmill.sources.rows import Rows, open_rows

ROWS = [{"n": number, "text": "x" * (number % 90)} for number in range(40_000)]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which scanned paths are appended."""
    from tokenmill.sources import rows as opening

    seen: list[str] = []

    class Counted(opening.LineScan):
        def __init__(self, file: object) -> None:
            seen.append(file.path)  # type: ignore[attr-defined]
            super().__init__(file)  # type: ignore[arg-type]

    monkeypatch.setattr(opening, "LineScan", Counted)
    return seen


def test_second_open_of_a_stable_file_reads_nothing(tmp_path: Path, scans: list[str]) -> None:
    path = jsonl(ROWS, tmp_path)
    wait_until_stable()
    assert len(open_rows(path)) == len(ROWS)
    assert len(scans) == 1
    assert open_rows(path)[39_999] == ROWS[39_999]
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    assert open_rows(link)[7] == ROWS[7]
    assert len(scans) == 1
    assert open_rows(path, force_recache=True)[7] == ROWS[7]
    assert len(scans) == 2


def test_second_open_of_a_new_file_reads_it_again(
    tmp_path: Path, scans: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one clock tick, a file can change again with the same mtime."""
    path = jsonl(ROWS[:10], tmp_path)
    with monkeypatch.context() as patch:  # the machine may be slow
        patch.setattr("tokenmill.sources.bytefile.RACY_NS", 3600 * 10**9)
        open_rows(path)
        open_rows(path)
    assert len(scans) == 2
    wait_until_stable()
    open_rows(path)
    open_rows(path)
    assert len(scans) == 3


def test_signature_is_stable_by_mtime_and_ctime_at_their_resolution() -> None:
    now = 1_700_000_000_123_456_789
    fine = now - RACY_NS - 1
    assert Signature(1, fine, fine, 1).is_stable(now)
    assert not Signature(1, fine, now - RACY_NS, 1).is_stable(now)  # mtime set back, ctime new
    assert not Signature(1, now - RACY_NS, fine, 1).is_stable(now)
    whole_second = now - now % 1_000_000_000 - 1_000_000_000
    assert not Signature(1, whole_second, whole_second, 1).is_stable(now)
    older = whole_second - RACY_COARSE_NS
    assert Signature(1, older, older, 1).is_stable(now)
    assert not Signature(1, now + 10**12, fine, 1).is_stable(now)  # from the future


@pytest.mark.parametrize("restore", [False, True])
def test_open_same_size_edit_gives_new_rows_and_digest(tmp_path: Path, restore: bool) -> None:
    path = jsonl([{"a": 1}], tmp_path)
    wait_until_stable()
    before = open_rows(path)
    status = path.stat()
    digest = before.files[0].digest
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    if restore:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = open_rows(path)
    assert after[0] == {"a": 2}
    assert after.files[0].digest != digest


def test_key_is_the_content_not_path_or_time(tmp_path: Path) -> None:
    first, second = jsonl(ROWS[:50], tmp_path / "a"), jsonl(ROWS[:50], tmp_path / "b")
    os.utime(second, (1, 1))
    one, two = open_rows(first), open_rows(second)
    assert one.files[0].digest == two.files[0].digest
    assert [block.digest for block in one.blocks()] == [block.digest for block in two.blocks()]
    other = jsonl(ROWS[:49], tmp_path / "c")
    assert open_rows(other).files[0].digest != one.files[0].digest


def artefacts(cache: Path, name: str) -> list[Path]:
    return sorted((cache / "rows").glob(f"*/{name}"))


WAYS: dict[str, Callable[[Rows], object]] = {
    "single": lambda rows: [rows[n] for n in range(len(rows))],
    "raw": lambda rows: [rows.raw(n) for n in range(len(rows))],
    "origin": lambda rows: [rows.origin(n) for n in range(len(rows))],
    "batch": lambda rows: rows.batch(range(len(rows))),
    "stream": list,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["index.json", "table.bin", "starts.bin"])
def test_index_damaged_anywhere_is_refused_whichever_way_one_reads(
    name: str, way: str, tmp_path: Path, own_cache: Path
) -> None:
    rows = ROWS[: STARTS_PER_PAGE + 1000]
    path = jsonl(rows, tmp_path)
    wait_until_stable()
    open_rows(path)
    (target,) = artefacts(own_cache, name)
    whole = target.read_bytes()
    chance = random.Random(way)
    damages = [whole[:-1], whole + b"\0", b""]
    for _ in range(12):
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        damages.append(bytes(flipped))
    for damaged in damages:
        target.write_bytes(damaged)
        with pytest.raises(CorruptionError):
            WAYS[way](open_rows(path))
    assert list(open_rows(path, force_recache=True)) == rows
    assert list(open_rows(path)) == rows
    assert (own_cache / "quarantine").is_dir()


def test_index_damaged_behind_the_page_of_a_row_is_refused(tmp_path: Path, own_cache: Path) -> None:
    """A page's last row ends where the next page says."""
    path = jsonl(ROWS[: STARTS_PER_PAGE + 9], tmp_path)
    wait_until_stable()
    open_rows(path)
    (target,) = artefacts(own_cache, "starts.bin")
    damaged = bytearray(target.read_bytes())
    damaged[8 * STARTS_PER_PAGE] ^= 1
    target.write_bytes(damaged)
    rows = open_rows(path)
    for read in (rows.raw, rows.__getitem__, rows.origin):
        with pytest.raises(CorruptionError):
            read(STARTS_PER_PAGE - 1)


def test_damaged_or_dangling_notes_cause_a_scan(
    tmp_path: Path, own_cache: Path, scans: list[str]
) -> None:
    path = jsonl(ROWS[:20], tmp_path)
    wait_until_stable()
    open_rows(path)
    (note,) = artefacts(own_cache, "note.json")
    whole = note.read_bytes()
    hostile = json.loads(whole)
    hostile["record"]["index"] = "../../../../etc"
    for content in (b"", whole[:-3], whole.replace(b"20", b"21"), json.dumps(hostile).encode()):
        note.write_bytes(content)
        assert list(open_rows(path)) == ROWS[:20]
        note.write_bytes(content)
    assert len(scans) == 5
    note.write_bytes(whole)
    (index,) = artefacts(own_cache, "index.json")
    index.parent.rename(own_cache / "other")
    assert list(open_rows(path)) == ROWS[:20]


def test_hit_needs_no_write_and_a_miss_goes_private(tmp_path: Path, own_cache: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; the next test refuses by force")
    path, other = jsonl(ROWS[:30], tmp_path / "a"), jsonl(ROWS[:31], tmp_path / "b")
    wait_until_stable()
    open_rows(path)
    own_cache.chmod(0o500)
    (own_cache / "rows").chmod(0o500)
    assert list(open_rows(path)) == ROWS[:30]
    assert list(open_rows(other)) == ROWS[:31]


def test_cache_that_cannot_be_written_goes_private_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(ROWS[:30], tmp_path / "a")
    wait_until_stable()
    code = """
import errno, os, pickle, sys, subprocess
real = os.open
def refusing(path, flags, *rest, **options):
    if flags & os.O_CREAT and "forbidden" in str(path):
        raise OSError(errno.EROFS, "Read-only file system", path)
    return real(path, flags, *rest, **options)
os.open = refusing
from pathlib import Path
from tokenmill.sources.rows import Rows, open_rows
Path("forbidden").mkdir()
rows = open_rows(sys.argv[1], cache_dir="forbidden")
assert len(rows) == 30 and rows[29]["n"] == 29
again = open_rows(sys.argv[1], cache_dir="forbidden")
data = pickle.dumps(again)
child = subprocess.run([sys.executable, "-c",
    "import pickle, sys; print(pickle.load(sys.stdin.buffer)[5]['n'])"], input=data,
    capture_output=True, check=True)
assert child.stdout.strip() == b"5", child
from tokenmill.sources.index import existing_private_index_cache
print(existing_private_index_cache().root)
"""
    done = python(code, str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    private = Path(done.stdout.strip())
    assert private.name.startswith("tokenmill-")
    assert not private.exists()
    assert not list((tmp_path / "forbidden").glob("rows/*"))


OPENER = """
import sys, time
from tokenmill.sources.rows import Rows, open_rows
while time.time() < float(sys.argv[3]):
    time.sleep(0.001)
rows = open_rows(sys.argv[1], cache_dir=sys.argv[2], force_recache=len(sys.argv) > 4)
print(len(rows), rows.files[0].digest, sum(row["n"] for row in rows))
"""


@pytest.mark.slow
def test_concurrent_openers_of_one_index_agree(tmp_path: Path) -> None:
    path = jsonl(ROWS, tmp_path)
    cache = tmp_path / "cache"
    start = str(time.time() + 1.0)
    openers = [
        subprocess.Popen(
            [sys.executable, "-c", OPENER, str(path), str(cache), start, *(["-"] * (n % 2))],
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(4)
    ]
    outputs = {opener.communicate(timeout=60)[0] for opener in openers}
    assert [opener.returncode for opener in openers] == [0] * 4
    (output,) = outputs
    assert output.split()[0] == str(len(ROWS))
    assert len(artefacts(cache, "index.json")) == 1
    assert not list((cache / "staging").iterdir())


def test_killed_indexer_leaves_no_visible_files(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    path.write_bytes(as_lines(ROWS) * 40)
    cache = tmp_path / "cache"
    chance = random.Random(7)
    killed = 0
    for _ in range(4):
        opener = subprocess.Popen(
            [sys.executable, "-c", OPENER, str(path), str(cache), "0", "-"],
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
        deadline = time.time() + 20
        while not list(cache.glob("staging/*/*/starts.bin")) and time.time() < deadline:
            if opener.poll() is not None:
                break
            time.sleep(0.002)
        time.sleep(chance.random() * 0.2)
        if opener.poll() is None:
            opener.send_signal(signal.SIGKILL)
            killed += 1
        opener.wait()
        rows = open_rows(path, cache_dir=cache)
        assert (len(rows), rows[-1]) == (40 * len(ROWS), ROWS[-1])
    assert killed >= 1
    for index in artefacts(cache, "index.json"):
        assert sorted(part.name for part in index.parent.iterdir()) == [
            "index.json",
            "starts.bin",
            "table.bin",
        ]


def test_import_is_light_and_lines_need_no_codec() -> None:
    code = """
import sys, tempfile, pathlib
import tokenmill.sources
from tokenmill.sources.rows import open_rows; from tokenmill.sources.block import read_block
heavy = {"pyarrow", "zstandard", "isal", "datasets", "torch", "transformers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
with tempfile.TemporaryDirectory() as where:
    path = pathlib.Path(where, "a.jsonl")
    path.write_text('{"a": 1}')
    assert list(open_rows(path, cache_dir=where + "/cache")) == [{"a": 1}]
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


def looked_at(path: Path) -> object:
    rows = open_rows(path)
    return rows[3], rows.files


@pytest.mark.parametrize("make", [jsonl, jsonl_gz, parquet], ids=lambda make: make.__name__)
def test_symbolic_link_out_of_the_cache_is_not_followed(
    make: Callable[..., Path], tmp_path: Path, own_cache: Path
) -> None:
    """For notes, indexes and copies, as directories and as files."""
    path = make([{"n": number} for number in range(10)], tmp_path)
    wait_until_stable()
    assert list(open_rows(path)) == [{"n": number} for number in range(10)]
    assert open_rows(path).files
    outside = tmp_path / "outside"
    parts = sorted((own_cache / "rows").rglob("*"))
    for part in [own_cache / "rows", *parts]:
        shutil.move(part, outside)
        part.symlink_to(outside)
        with pytest.raises(CacheError, match="symbolic link leads out of the cache"):
            looked_at(path)
        part.unlink()
        shutil.move(outside, part)
    assert len(parts) >= 2
    assert open_rows(path)[3] == {"n": 3}
