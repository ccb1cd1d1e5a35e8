"""Tests of Parquet and Arrow: values, damage, ranges, single rows."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sources.make import COLUMNAR_MAKERS, parquet, wait_until_stable
from tokenmill._core.process import RecentValues
from tokenmill.errors import RowError, SourceError, SourceMissing, UsageError
from tokenmill.sources.block import read_block
from tokenmill.sources.rows import open_rows
from tokenmill.sources.tables import RowGroup, plan_ranges

ROWS = [{"n": number, "text": f"text {number}"} for number in range(3000)]


def written(columns: dict[str, Any], directory: Path, kind: str = "parquet") -> Path:
    table = pa.table(columns)
    path = directory / f"values.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_values_are_converted_to_json_as_documented(kind: str, tmp_path: Path) -> None:
    moment = datetime.datetime(2026, 11, 15, 12, 30, 1, 500, tzinfo=datetime.timezone.utc)
    columns = {
        "image": pa.array([{"bytes": b"\xff\x00", "path": None}]),
        "day": pa.array([datetime.date(2026, 11, 15)]),
        "at": pa.array([moment], pa.timestamp("us", "UTC")),
        "fine": pa.array([1_500_000_000_000_001_000], pa.timestamp("ns")),
        "took": pa.array([datetime.timedelta(seconds=1.5)]),
        "price": pa.array([decimal.Decimal("1.10")]),
        "map": pa.array([[("a", 1), ("b", None)]], pa.map_(pa.string(), pa.int64())),
        "word": pa.array(["x"]).dictionary_encode(),
        "large": pa.array([2**64 - 1], pa.uint64()),
        "half": pa.array([0.5], pa.float32()),
        "items": pa.array([[1, None, 3]]),
        "nothing": pa.array([None], pa.null()),
    }
    expected = {
        "image": {"bytes": "/wA="},
        "day": "2026-11-15",
        "at": "2026-11-15T12:30:01.000500+00:00",
        "fine": "2017-07-14T02:40:00.000001",
        "took": 1.5,
        "price": "1.10",
        "map": {"a": 1},
        "word": "x",
        "large": 2**64 - 1,
        "half": 0.5,
        "items": [1, None, 3],
    }
    rows = open_rows(written(columns, tmp_path, kind))
    assert list(rows) == [expected]
    assert rows[0] == expected
    assert list(rows[0]) == list(expected)  # in the order of the schema


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_rows_without_json_form_are_bad_rows(kind: str, tmp_path: Path) -> None:
    columns = {
        "score": pa.array([1.0, float("nan"), 2.0, float("inf"), 3.0]),
        "fine": pa.array([0, 0, 1, 0, 0], pa.timestamp("ns")),
    }
    rows = open_rows(written(columns, tmp_path, kind))
    outcomes = [value for _, value in rows.scan()]
    bad = [n for n, value in enumerate(outcomes) if isinstance(value, RowError)]
    assert bad == [1, 2, 3]
    for number in bad:
        assert (outcomes[number].row, outcomes[number].reason) == (number, "bad_json")
        with pytest.raises(RowError, match="no JSON form") as raised:
            rows[number]
        assert str(raised.value) == str(outcomes[number])
        with pytest.raises(RowError):
            rows.raw(number)
    assert rows[4] == {"score": 3.0, "fine": "1970-01-01T00:00:00"}
    (block,) = rows.blocks()
    assert [str(value) for value in read_block(block).values] == [str(v) for v in outcomes]


def test_text_that_is_not_utf8_is_a_bad_row(tmp_path: Path) -> None:
    text = pa.array([b"good", b"\xff", b"fine"]).cast(pa.binary())
    table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, text.buffers())})
    path = tmp_path / "bytes.arrow"
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    outcomes = [value for _, value in open_rows(path).scan()]
    assert outcomes[0] == {"text": "good"}
    assert outcomes[2] == {"text": "fine"}
    assert isinstance(outcomes[1], RowError)


def test_columns_that_cannot_be_rows_are_usage_errors(tmp_path: Path) -> None:
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])])
    path = tmp_path / "union.arrow"
    table = pa.table({"u": union})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(UsageError, match="no JSON form"):
        open_rows(path)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(UsageError, match="same name"):
        open_rows(tmp_path / "twice.parquet")


@pytest.mark.parametrize("make", COLUMNAR_MAKERS, ids=lambda make: make.__name__)
def test_truncated_file_is_a_source_error(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(ROWS[:50], tmp_path)
    data = path.read_bytes()
    for length in sorted({1, 5, 8, 100, len(data) // 2, len(data) - 8, len(data) - 1}):
        path.write_bytes(data[:length])
        with pytest.raises(SourceError):
            open_rows(path)


@pytest.mark.parametrize("make", COLUMNAR_MAKERS, ids=lambda make: make.__name__)
def test_flipped_bytes_are_rows_or_typed_errors(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(ROWS[:50], tmp_path)
    data = path.read_bytes()
    chance = random.Random(23)
    for _ in range(60):
        flipped = bytearray(data)
        flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            for _, _value in open_rows(path).scan():
                pass
        except (SourceError, UsageError):
            continue


groups = st.lists(st.builds(RowGroup, st.integers(0, 400), st.integers(0, 60 << 20)), max_size=12)


@given(groups, st.integers(1 << 10, 16 << 20))
def test_plan_ranges_partition_rows_and_respect_groups(made: list[RowGroup], target: int) -> None:
    made = [group if group.rows else RowGroup(0, 0) for group in made]
    ranges = list(plan_ranges(made, target))
    rows = [row for first, last, _ in ranges for row in range(first, last)]
    assert rows == list(range(sum(group.rows for group in made)))
    bounds = {0}
    for group in made:
        bounds.add(max(bounds) + group.rows)
    for first, last, size in ranges:
        inside = [bound for bound in bounds if first < bound < last]
        if inside:  # several complete groups
            assert {first, last} <= bounds
            assert size <= target
        else:  # within one group; rows are not split, so a range may exceed the target by one row
            assert size * (last - first - 1) // (last - first) <= target


def test_blocks_of_a_large_group_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_row_blocks(monkeypatch)
    path = tmp_path / "one.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    blocks = list(open_rows(path).blocks())
    assert len(blocks) > 5
    decoded = decodings(monkeypatch)
    assert [value for block in blocks for value in read_block(block).values] == ROWS
    assert decoded == [0]
    assert read_block(blocks[2]).values == ROWS[blocks[2].first_row :][: blocks[2].rows]


def input_and_output() -> tuple[int, int]:
    """Return the bytes that this process has read and written."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"]), int(counts["wchar"])


FOOTER = 64 << 10  # bytes that pyarrow reads at the end of a file


def test_single_row_reads_its_row_group_at_most_and_writes_nothing(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.sources import columnar

    chance = random.Random(7)
    many = [{"n": number, "text": chance.randbytes(1000).hex()} for number in range(2000)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(many), path, row_group_size=200)
    groups = pq.ParquetFile(path).metadata
    largest = max(groups.row_group(n).total_byte_size for n in range(groups.num_row_groups))
    wait_until_stable()
    open_rows(path)
    monkeypatch.setattr(columnar, "content_digest", None)  # the file must not be hashed
    before = sorted(own_cache.rglob("*"))
    for position in (0, 999, 1234, 1999):
        rows = open_rows(path)
        read, written = input_and_output()
        value = rows[position]
        read_after, written_after = input_and_output()
        assert value == many[position]
        assert read_after - read <= largest + 4 * FOOTER < path.stat().st_size // 5
        assert written_after == written
        assert rows.raw(position) == json.dumps(many[position], separators=(",", ":")).encode()
        assert rows.origin(position) == (str(path), position, None, None, len(rows.raw(position)))
    assert sorted(own_cache.rglob("*")) == before


def test_first_row_of_a_large_group_reads_only_its_beginning(tmp_path: Path) -> None:
    chance = random.Random(7)
    many = [{"text": chance.randbytes(1500).hex()} for _ in range(6000)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(many), path)
    rows = open_rows(path)
    read, _ = input_and_output()
    assert rows[0] == many[0]
    assert input_and_output()[0] - read < path.stat().st_size // 2


def decodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which decoded groups are appended."""
    from tokenmill.sources import tables

    decoded: list[int] = []
    for kind in (tables.ParquetTable, tables.ArrowTable):

        def counted(self: Any, group: int, real: Any = kind.group_batches) -> Any:
            decoded.append(group)
            return real(self, group)

        monkeypatch.setattr(kind, "group_batches", counted)
    return decoded


MANY = [{"n": number, "text": f"text {number}"} for number in range(20_000)]
DRAWN = [random.Random(5).randrange(len(MANY)) for _ in range(300)]


@pytest.fixture
def groups_of_5000(tmp_path: Path) -> Path:
    path = tmp_path / "many.parquet"
    pq.write_table(pa.Table.from_pylist(MANY), path, row_group_size=5000)
    return path


def test_groups_are_decoded_once_while_they_are_cached(
    groups_of_5000: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = decodings(monkeypatch)
    rows = open_rows(groups_of_5000)
    assert [rows[number] for number in range(0, 20_000, 500)] == MANY[::500]
    assert decoded == [0, 1, 2, 3]
    assert [rows[number] for number in DRAWN] == [MANY[number] for number in DRAWN]
    assert rows.batch(DRAWN) == [MANY[number] for number in DRAWN]
    decoded.clear()
    assert [rows.raw(number) for number in DRAWN] == [
        json.dumps(MANY[number], separators=(",", ":")).encode() for number in DRAWN
    ]
    assert decoded == []


def test_cached_groups_are_bounded_and_rows_correct_over_the_bound(
    groups_of_5000: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.sources import tables

    bound = 100_000  # bytes; a group has some 130,000
    kept = RecentValues(bound)
    monkeypatch.setattr(tables, "_decoded", kept)
    rows = open_rows(groups_of_5000)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(rows.__getitem__, DRAWN)) == [MANY[number] for number in DRAWN]
    assert 0 < kept.bytes <= bound
    assert rows.batch(DRAWN) == [MANY[number] for number in DRAWN]
    decoded = decodings(monkeypatch)
    assert len(rows.batch(range(0, 20_000, 7))) == 2858
    assert sorted(decoded) == [0, 1, 2, 3]  # one pass with any bound


def test_digests_of_contents_and_blocks_do_not_change(tmp_path: Path) -> None:
    """They are part of the keys of slices and stores."""
    from tokenmill.sources.bytefile import LocalFile
    from tokenmill.sources.columnar import content_digest, range_digest

    (tmp_path / "some").write_bytes(b"PAR1" + bytes(range(256)) * 5000)
    file = LocalFile(str(tmp_path / "some"))
    content = content_digest(file, "parquet")
    assert content == "5c8a15f823bf1fa09c4476d5f31f6426808350d1"
    assert content_digest(file, "arrow") == "2293e570fbf79594ff2d9f58fd58b6458047364f"
    assert range_digest(content, 0, 1024) == "03b26cdf48571575b6e1ad4c71b05bd6"
    sizes = [(1000, 3 << 20), (1000, 6 << 20), (2000, 20 << 20), (7, 100)]
    made = [RowGroup(*size) for size in sizes]
    assert [(first, last) for first, last, _ in plan_ranges(made)] == [
        (0, 1000),
        (1000, 2000),
        (2000, 2666),
        (2666, 3333),
        (3333, 4000),
        (4000, 4007),
    ]


def few_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenmill.sources import columnar

    monkeypatch.setattr(columnar, "plan_ranges", lambda groups: plan_ranges(groups, 4 << 10))


def hashes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which hashed files are appended."""
    from tokenmill.sources import columnar

    hashed: list[str] = []
    real = columnar.content_digest

    def counted(file: Any, kind: str) -> str:
        hashed.append(file.path)
        return real(file, kind)

    monkeypatch.setattr(columnar, "content_digest", counted)
    return hashed


@pytest.mark.parametrize("stamp", ["fresh", "ahead"])
@pytest.mark.parametrize("make", COLUMNAR_MAKERS, ids=lambda make: make.__name__)
def test_file_with_a_recent_timestamp_is_hashed_once_not_for_every_block(
    make: Callable[..., Path], stamp: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few_row_blocks(monkeypatch)
    path = make(ROWS, tmp_path)
    with monkeypatch.context() as patch:
        if stamp == "ahead":
            wait_until_stable()
            os.utime(path, (2**32, 2**32))  # as written by a machine whose clock is ahead
        else:
            patch.setattr("tokenmill.sources.bytefile.RACY_NS", 10**12)  # also on a slow machine
        blocks = list(open_rows(path).blocks())
    assert len(blocks) > 5
    assert not blocks[0].is_stable
    wait_until_stable()
    hashed = hashes(monkeypatch)
    assert [value for block in blocks for value in read_block(block).values] == ROWS
    assert len(hashed) == 1


def test_digest_is_cached_once_the_timestamp_is_old_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = parquet(ROWS, tmp_path)
    rows = open_rows(path)
    wait_until_stable()
    (block,) = rows.blocks()
    assert block.is_stable
    hashed = hashes(monkeypatch)
    assert read_block(block).values == ROWS
    assert [file.digest for file in open_rows(path).files] == [file.digest for file in rows.files]
    assert hashed == []


def test_empty_shards_are_allowed_but_a_source_without_rows_is_missing(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    table = pa.Table.from_pylist(ROWS[:3])
    pq.write_table(table.slice(0, 0), tmp_path / "d" / "0.parquet")
    with pytest.raises(SourceMissing, match="no rows"):
        open_rows(tmp_path / "d")
    pq.write_table(table, tmp_path / "d" / "1.parquet")
    assert list(open_rows(tmp_path / "d")) == ROWS[:3]


def test_edit_with_an_unchanged_timestamp_is_not_served_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller has hashed the file and must get its new content."""
    from tokenmill.sources import columnar

    path = parquet(ROWS[:50], tmp_path)
    [before] = open_rows(path).blocks()
    assert read_block(before).values == ROWS[:50]
    parquet(ROWS[50:100], tmp_path)
    digest = columnar.range_digest("new", 0, 50)
    after = msgspec.structs.replace(before, content="new", digest=digest)
    monkeypatch.setattr(columnar, "_open_unchanged", lambda block: None)
    assert read_block(after).values == ROWS[50:100]


def test_number_of_suspended_decoders_is_bounded(tmp_path: Path) -> None:
    from tokenmill.sources import tables

    for number in range(12):
        pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / f"{number:02}.parquet")
    rows = open_rows(tmp_path)
    assert [rows[number * len(ROWS)]["n"] for number in range(12)] == [0] * 12
    assert 0 < len(tables._decoders) <= 8
    assert rows[2000] == ROWS[2000]
