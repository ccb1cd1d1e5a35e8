"""Tests of files that change while they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.sampling import sampled
from tests.sources.make import COLUMNAR_MAKERS, jsonl, wait_until_stable
from tokenmill.errors import SourceChanged
from tokenmill.sources.block import read_block
from tokenmill.sources.limits import STARTS_PER_PAGE
from tokenmill.sources.rows import Rows, open_rows

ROWS = [{"n": number, "text": f"text {number}"} for number in range(STARTS_PER_PAGE + 2000)]


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b'{"n": 1}\n')


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite_in_place(path: Path) -> None:
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data.replace(b"text", b"TEXT"))


def scramble(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"x" * size)


def rewrite_and_restore_mtime(path: Path) -> None:
    status = path.stat()
    rewrite_in_place(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"text", b"TEXT"))
    other.replace(path)


CHANGES = [append, truncate, rewrite_in_place, rewrite_and_restore_mtime, replace, os.unlink]
READS: list[Callable[[Rows], object]] = [
    lambda rows: rows[5],
    lambda rows: rows.raw(7),
    lambda rows: rows.batch([7, len(ROWS) - 1]),
    list,
    lambda rows: list(rows.scan()),
]


@pytest.mark.parametrize(("change", "opened"), sampled(product(CHANGES, (True, False)), 2))
def test_reading_after_any_change_is_source_changed(
    change: Callable[[Path], None], opened: bool, tmp_path: Path
) -> None:
    for number, read in enumerate(READS):
        path = jsonl(ROWS, tmp_path / str(number))
        wait_until_stable() if number == 0 else None
        rows = open_rows(path)
        if opened:
            assert rows[-1] == ROWS[-1]  # in another page of the index than the rows read below
        change(path)
        for _ in range(2):
            with pytest.raises(SourceChanged):
                read(rows)


@pytest.mark.parametrize("change", [truncate, scramble], ids=lambda change: change.__name__)
def test_row_that_became_unreadable_is_source_changed_not_bad(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    """Also in a page of the index that was checked before the change."""
    path = jsonl(ROWS[:2000], tmp_path)
    rows = open_rows(path)
    assert rows[1999] == ROWS[1999]
    change(path)
    with pytest.raises(SourceChanged):
        rows[1999]
    with pytest.raises(SourceChanged):
        rows.batch([1998, 1999])


@pytest.mark.parametrize(
    ("make", "change"), sampled(product(COLUMNAR_MAKERS, CHANGES), 2), ids=lambda it: it.__name__
)
def test_columnar_after_any_change_is_source_changed(
    make: Callable[..., Path], change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = make(ROWS, tmp_path)
    rows = open_rows(path)
    blocks = list(rows.blocks())
    change(path)
    for read in (lambda: list(rows), lambda: rows[3], lambda: read_block(blocks[0])):
        with pytest.raises(SourceChanged):
            read()


@pytest.mark.parametrize("make", [jsonl, *COLUMNAR_MAKERS], ids=lambda make: make.__name__)
@pytest.mark.parametrize("change", [truncate, rewrite_in_place, replace])
def test_change_in_the_middle_of_a_stream_is_source_changed(
    make: Callable[..., Path], change: Callable[[Path], None], tmp_path: Path
) -> None:
    rows = [{"n": number, "text": "text" * 100} for number in range(2000)]
    stream = iter(open_rows(make(rows, tmp_path)))
    assert next(stream) == rows[0]
    change(next(tmp_path.glob("rows.*")))
    with pytest.raises(SourceChanged):
        list(stream)


@pytest.mark.parametrize("change", [*CHANGES[1:5]], ids=lambda change: change.__name__)
def test_block_of_other_bytes_is_source_changed(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    path = jsonl(ROWS, tmp_path)
    (block,) = open_rows(path).blocks()
    change(path)
    with pytest.raises(SourceChanged) as raised:
        read_block(block)
    assert raised.value.path == str(path)


def test_block_of_an_appended_file_still_has_its_bytes(tmp_path: Path) -> None:
    path = jsonl(ROWS, tmp_path)
    (block,) = open_rows(path).blocks()
    append(path)
    assert list(read_block(block).values) == ROWS


@pytest.mark.parametrize("touch", [lambda path: os.utime(path), lambda path: path.chmod(0o600),
                                   lambda path: os.link(path, path.with_name("twin"))],
                         ids=["touch", "chmod", "link"])  # fmt: skip
def test_reading_continues_after_a_touch(touch: Callable[[Path], None], tmp_path: Path) -> None:
    path = jsonl(ROWS, tmp_path)
    rows = open_rows(path)
    assert rows[0] == ROWS[0]
    touch(path)
    assert [rows[n] for n in range(0, len(ROWS), 7)] == ROWS[::7]
    assert rows.batch([3, 4]) == ROWS[3:5]
    assert list(rows) == ROWS


def test_scan_of_a_growing_file_is_source_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.sources import rows as opening

    path = jsonl(ROWS, tmp_path)
    real = opening.write_index

    def growing(*arguments: object, **options: object) -> object:
        document = real(*arguments, **options)  # type: ignore[arg-type]
        append(path)
        return document

    monkeypatch.setattr(opening, "write_index", growing)
    with pytest.raises(SourceChanged):
        open_rows(path)
