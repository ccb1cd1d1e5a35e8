"""Tests of block cuts: stable under insertion and independent of buffer sizes."""

from __future__ import annotations

import hashlib
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sources.make import as_lines
from tokenmill.sources.block import read_block
from tokenmill.sources.limits import CUT_MAX, CUT_MEAN, CUT_MIN
from tokenmill.sources.rows import open_rows
from tokenmill.sources.scan import Cutter, first_qualified, row_hashes

WORD = (1 << 64) - 1


def reference_hash(row: bytes) -> int:
    """Return the documented hash of a short row, in Python integers."""
    mixed = len(row) * 0x9E3779B97F4A7C15
    for number, start in enumerate(range(0, len(row), 8)):
        weight = hashlib.blake2b(b"tokenmill cut %d" % number, digest_size=8).digest()
        word = int.from_bytes(row[start : start + 8], "little")
        mixed += word * (int.from_bytes(weight, "little") | 1)
    mixed &= WORD
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & WORD
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & WORD
    return mixed ^ mixed >> 31


@given(st.lists(st.binary(max_size=256), min_size=1, max_size=20))
def test_row_hash_short_rows_equal_documented_mix(rows: list[bytes]) -> None:
    lengths = np.array([len(row) for row in rows])
    starts = np.cumsum(lengths) - lengths
    hashes = row_hashes(b"".join(rows) + b"whatever", starts, lengths)
    assert hashes.tolist() == [reference_hash(row) for row in rows]


def test_row_hash_golden_values_do_not_change() -> None:
    """A changed hash would move every cut and change every slice key."""
    rows = [b"", b"{}", b'{"a": 1}', b'{"text": "' + b"x" * 300 + b'"}', b"y" * 100_000]
    lengths = np.array([len(row) for row in rows])
    starts = np.cumsum(lengths) - lengths
    hashes = row_hashes(b"".join(rows) + bytes(8), starts, lengths)
    assert [f"{value:016x}" for value in hashes.tolist()] == [
        "0000000000000000",
        "13d697d39c76f4a2",
        "608fbc84deafb835",
        "2e3d037b35b7bc79",
        "27fcfad2146763e3",
    ]


line_sizes = st.lists(
    st.one_of(st.integers(1, 200_000), st.integers(1, CUT_MAX * 2), st.just(CUT_MAX)),
    min_size=1,
    max_size=200,
)


def plan(sizes: list[int], qualified: set[int], portions: list[int]) -> list[int]:
    stops = np.cumsum(sizes)
    starts = stops - sizes
    cutter, cuts, first = Cutter(), [], 0
    for size in [*portions, len(sizes)]:
        last = min(first + size, len(sizes))

        def first_of(lo: int, hi: int, first: int = first) -> int:
            return next((n for n in range(lo, hi) if n + first in qualified), -1)

        cuts += [first + n for n in cutter.feed(starts[first:last], stops[first:last], first_of)]
        first = last
    return cuts


@settings(deadline=None)
@given(line_sizes, st.randoms(use_true_random=False), st.lists(st.integers(0, 50), max_size=12))
def test_cutter_any_portions_bounded_and_equal(
    sizes: list[int], chance: random.Random, portions: list[int]
) -> None:
    qualified = {n for n in range(len(sizes)) if chance.random() < 0.05}
    cuts = plan(sizes, qualified, [])
    assert plan(sizes, qualified, portions) == cuts
    stops = np.cumsum(sizes).tolist()
    bounds = [0, *cuts, len(sizes)]
    for number, (first, last) in enumerate(pairwise(bounds)):
        begin = stops[first] - sizes[first]
        size = stops[last - 1] - begin
        assert size <= CUT_MAX or last - first == 1
        if number + 2 < len(bounds):
            cut = last
            assert size >= CUT_MIN or size + sizes[cut] > CUT_MAX
            # No earlier line was allowed to start a block.
            for line in range(first + 1, cut):
                assert not (line in qualified and stops[line] - sizes[line] - begin >= CUT_MIN)


def test_first_qualified_expected_spacing_independent_of_row_size() -> None:
    """About one row in CUT_MEAN bytes qualifies, for short and for long rows."""
    chance = random.Random(5)
    for size in (60, 240, 3000):
        count = 40_000_000 // size
        rows = [b"%d" % chance.getrandbits(60) for _ in range(count)]
        rows = [row + b"z" * (size - len(row)) for row in rows]
        buffer = b"".join(rows) + bytes(8)
        starts, lengths = np.arange(count) * size, np.full(count, size)
        found, position = 0, 0
        while (position := first_qualified(buffer, starts, lengths, position, count)) >= 0:
            found, position = found + 1, position + 1
        assert 8 <= found <= 34  # 19 expected


def test_first_qualified_is_the_first_of_several() -> None:
    """A row of CUT_MEAN bytes always qualifies."""
    buffer = bytes(3 * CUT_MEAN)
    starts, lengths = np.arange(3) * CUT_MEAN, np.full(3, CUT_MEAN)
    assert [first_qualified(buffer, starts, lengths, lo, 3) for lo in range(4)] == [0, 1, 2, -1]


def test_blocks_insertion_at_head_and_append_move_few_cuts(tmp_path: Path) -> None:
    """Rows of one size that differ only in a counter are a hard case for a hash."""
    filler = "lorem ipsum " * 40
    rows = [{"messages": [{"role": "user", "content": f"{filler}{n:07}{filler}"}]} for n in
            range(60_000)]  # fmt: skip
    data = as_lines(rows)
    assert len(data) > 60_000_000
    digests = {}
    versions = {
        "plain": data,
        "head": as_lines([{"messages": []}]) + data,
        "tail": data + as_lines([{"messages": [1]}]),
        "without": data[data.index(b"\n") + 1 :],
    }
    for name, content in versions.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(content)
        blocks = list(open_rows(path).blocks())
        digests[name] = [block.digest for block in blocks]
        assert sum(block.length for block in blocks) == len(content)
        assert all(block.length <= CUT_MAX for block in blocks)
        path.unlink()
    assert 5 <= len(digests["plain"]) <= 10
    for name in ("head", "tail", "without"):
        assert len(set(digests[name]) - set(digests["plain"])) <= 2
    assert digests["tail"][:-1] == digests["plain"][:-1]


def test_line_larger_than_a_block_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("lines", "parse", "block"):
        monkeypatch.setattr(f"tokenmill.sources.{module}.MAX_ROW", 2 * CUT_MAX)
    small, large = b'{"a": 1}\n', b'{"b": "' + b"x" * (CUT_MAX + 5) + b'"}\r\n'
    path = tmp_path / "large.jsonl"
    path.write_bytes(small * 3 + large + b"\n" + small * 2)
    rows = open_rows(path)
    blocks = list(rows.blocks())
    assert [(block.first_row, block.rows, block.first_line) for block in blocks] == [
        (0, 3, 1),
        (3, 1, 4),
        (4, 2, 5),
    ]
    assert len(rows[3]["b"]) == CUT_MAX + 5
    assert rows.origin(4).line == 6
    assert [len(read_block(block).raw) for block in blocks] == [3, 1, 2]
