"""Tests of processes and threads: small pickles, start methods, open files, memory."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import threading
from pathlib import Path

import pytest

from tests.programs import python
from tests.sampling import sampled
from tests.sources.make import TEXT_MAKERS, as_lines, jsonl, parquet, wait_until_stable
from tokenmill.errors import SourceChanged, SourceError
from tokenmill.sources.limits import OPEN_FILES
from tokenmill.sources.rows import Rows, open_rows

ROWS = [{"n": number, "text": f"text {number}"} for number in range(500)]
PICKLE_LIMIT = 16 << 10  # bytes


def total(rows: Rows) -> int:
    """Read a view in every way."""
    return sum(row["n"] for row in rows) + rows[3]["n"] + sum(r["n"] for r in rows.batch([9, 1]))


@pytest.mark.parametrize("method", sampled(["fork", "forkserver", "spawn"], 2))
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_view_in_worker_reads_the_same(method: str, tmp_path: Path, own_cache: Path) -> None:
    sources = [jsonl(ROWS, tmp_path / "a")]
    sources += [
        make(ROWS, tmp_path / make.__name__) for make in TEXT_MAKERS if "z" in make.__name__
    ]
    sources.append(parquet(ROWS, tmp_path / "p"))
    views = [open_rows(source)[10:400:3] for source in sources]
    expected = total(views[0])
    assert [total(view) for view in views] == [expected] * len(views)
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        assert pool.map(total, views) == [expected] * len(views)
    del own_cache


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 24, 150])
def test_pickle_any_number_of_files_is_small_and_opens_without_scanning(
    files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("with a rather long name " * 5)
    for number in range(files):
        path = directory / f"{number:05}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b'{"n": %d}\n{"n": %d}' % (2 * number, 2 * number + 1))
    rows = open_rows(directory)
    data = pickle.dumps(rows[1:])
    assert len(data) < PICKLE_LIMIT

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("scanned again")

    monkeypatch.setattr("tokenmill.sources.rows.describe", refuse)
    monkeypatch.setattr("tokenmill.sources.rows.discover", refuse)
    again = pickle.loads(data)
    assert len(again) == 2 * files - 1
    assert again[-1] == {"n": 2 * files - 1}
    assert len(pickle.dumps(pickle.loads(pickle.dumps(again)))) < PICKLE_LIMIT


def test_pickle_of_a_changed_file_is_source_changed(tmp_path: Path) -> None:
    path = jsonl(ROWS, tmp_path)
    data = pickle.dumps(open_rows(path))
    path.write_bytes(as_lines(ROWS[:-1]))
    with pytest.raises(SourceChanged):
        pickle.loads(data)[0]


def test_pickle_whose_list_is_damaged_is_a_source_error(tmp_path: Path, own_cache: Path) -> None:
    for number in range(30):
        jsonl(ROWS[:2], tmp_path / "many").rename(tmp_path / "many" / f"{number}.jsonl")
    data = pickle.dumps(open_rows(tmp_path / "many"))
    (listing,) = (own_cache / "rows").glob("*/files.json")
    listing.write_bytes(listing.read_bytes().replace(b"many", b"mani"))
    with pytest.raises(SourceError, match="damaged"):
        pickle.loads(data)


def test_pickle_opens_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jsonl(ROWS, tmp_path)
    monkeypatch.chdir(tmp_path)
    rows = open_rows("rows.jsonl")
    assert rows.origin(0).path == "rows.jsonl"
    data = pickle.dumps(rows)
    monkeypatch.chdir("/")
    again = pickle.loads(data)
    assert (again[4], again.origin(4).path) == (ROWS[4], "rows.jsonl")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_descriptors_many_files_stay_bounded(tmp_path: Path) -> None:
    count = OPEN_FILES + 60
    expected = []
    for number in range(count):
        rows = [{"n": number, "k": k} for k in range(3)]
        expected += rows
        jsonl(rows, tmp_path / "many").rename(tmp_path / "many" / f"{number:05}.jsonl")
    before = descriptors()
    opened = open_rows(tmp_path / "many")
    assert descriptors() <= before + 2
    chance = random.Random(1)
    for _ in range(2 * count):
        index = chance.randrange(len(expected))
        assert opened[index] == expected[index]
        assert descriptors() <= before + 2 * OPEN_FILES + 4
    assert list(opened) == expected
    del opened
    assert descriptors() <= before + 4


def test_threads_share_a_view(tmp_path: Path) -> None:
    files = []
    for number in range(OPEN_FILES + 20):
        rows = [{"f": number, "k": k} for k in range(5)]
        files.append(jsonl(rows, tmp_path / str(number)))
    files.append(TEXT_MAKERS[7](ROWS, tmp_path / "gz"))
    opened = open_rows(files)
    expected = list(opened)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(200):
                index = chance.randrange(len(expected))
                assert opened[index] == expected[index]
                chosen = [chance.randrange(len(expected)) for _ in range(5)]
                assert opened.batch(chosen) == [expected[n] for n in chosen]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


GROWTH = """
import resource, sys
from tokenmill.sources.rows import open_rows; from tokenmill.sources.block import read_block
import msgspec, numpy, xxhash

def private() -> int:
    with open("/proc/self/smaps_rollup") as table:
        return sum(int(line.split()[1]) for line in table if line.startswith("Private_Dirty"))

def peak() -> int:
    with open("/proc/self/status") as table:
        return next(int(line.split()[1]) for line in table if line.startswith("VmHWM"))

before = peak()
rows = open_rows(sys.argv[1], cache_dir=sys.argv[2])
opened = peak() - before
start = private()
for n in range(0, len(rows), 997):
    rows[n]
for row in rows:
    pass
print(opened, private() - start)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    """A loose bound; the benchmark has the tight one."""
    grown = []
    for count in (1, 8):
        path = tmp_path / f"{count}.jsonl"
        line = b'{"text": "some text of a row", "label": 3, "metadata": {"k": 17}}\n'
        path.write_bytes(line * (100_000 * count))
        done = python(GROWTH, str(path), str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        grown.append([int(field) for field in done.stdout.split()])
    (small_open, small_read), (large_open, large_read) = grown
    assert large_open < 32 << 10  # KiB
    assert large_open - small_open < 8 << 10
    assert large_read < 16 << 10
    assert large_read - small_read < 8 << 10


def test_batch_reads_are_coalesced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.sources.bytefile import LocalFile

    path = jsonl(ROWS, tmp_path)
    wait_until_stable()
    rows = open_rows(path)
    rows[0]
    calls: list[int] = []
    real = LocalFile.pread

    def counted(self: LocalFile, length: int, offset: int) -> bytes:
        calls.append(length)
        return real(self, length, offset)

    monkeypatch.setattr(LocalFile, "pread", counted)
    chosen = [400, 3, 2, 1, 399, 2, -1]
    assert rows.batch(chosen) == [ROWS[n] for n in chosen]
    assert len(calls) == 1


def test_file_that_outlives_its_module_is_closed_without_a_message(tmp_path: Path) -> None:
    keep = (
        "import sys; from tokenmill.sources import bytefile; sys.kept = bytefile;"
        "bytefile.kept = bytefile.LocalFile(sys.argv[1])"
    )
    done = python(keep, str(jsonl(ROWS, tmp_path)))
    assert (done.returncode, done.stderr) == (0, "")
