"""Tests of compressed files: complete, truncated, with flipped bits, and zip bombs."""

from __future__ import annotations

import contextlib
import gzip
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.sources.make import as_lines
from tokenmill.errors import CorruptionError, SourceError
from tokenmill.sources import limits
from tokenmill.sources.bytefile import LocalFile
from tokenmill.sources.copy import CopyFile, decompressed, write_copy
from tokenmill.sources.index import IndexCache
from tokenmill.sources.rows import open_rows

ROWS = [{"n": number, "text": f"row {number} {number * 7919 % 1000}"} for number in range(300)]
Compress = Callable[[bytes], bytes]


def checked_zstd(data: bytes) -> bytes:
    compressed: bytes = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    return compressed


CODECS: list[tuple[str, Compress]] = [("gz", gzip.compress), ("zst", checked_zstd)]
codecs = pytest.mark.parametrize(("suffix", "compress"), CODECS, ids=["gz", "zst"])
no_deadline = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def content(path: Path, suffix: str) -> bytes:
    return b"".join(decompressed(LocalFile(str(path)), suffix))


@codecs
def test_truncated_anywhere_is_a_source_error(
    suffix: str, compress: Compress, tmp_path: Path
) -> None:
    data = compress(as_lines(ROWS))
    path = tmp_path / f"cut.jsonl.{suffix}"
    for length in [*range(1, 30), *range(30, len(data), 37), *range(len(data) - 12, len(data))]:
        path.write_bytes(data[:length])
        with pytest.raises(SourceError, match=r"truncated|damaged"):
            content(path, suffix)
    path.write_bytes(data)
    assert content(path, suffix) == as_lines(ROWS)
    path.write_bytes(data[:-1])
    with pytest.raises(SourceError, match="truncated"):
        open_rows(path)
    assert not list((tmp_path / "tokenmill-cache").glob("rows/*"))


@codecs
def test_flipped_bits_never_give_other_content(
    suffix: str, compress: Compress, tmp_path: Path
) -> None:
    expected = as_lines(ROWS)
    data = compress(expected)
    chance = random.Random(11)
    path = tmp_path / f"flip.jsonl.{suffix}"
    refused = 0
    for _ in range(300):
        flipped = bytearray(data)
        flipped[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        try:
            assert content(path, suffix) == expected  # header fields are not checked
        except SourceError:
            refused += 1
    assert refused > 200


@codecs
@no_deadline
@given(noise=st.binary(max_size=200), cut=st.integers(0, 200))
def test_random_bytes_in_a_stream_are_content_or_a_source_error(
    suffix: str, compress: Compress, tmp_path: Path, noise: bytes, cut: int
) -> None:
    path = tmp_path / f"noise.jsonl.{suffix}"
    for data in (noise, compress(b"x" * 50)[:cut] + noise, compress(b"y" * 50) + noise):
        path.write_bytes(data or b"\0")
        with contextlib.suppress(SourceError):
            content(path, suffix)


@codecs
def test_zip_bomb_is_refused_at_the_limit(
    suffix: str, compress: Compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"bomb.jsonl.{suffix}"
    path.write_bytes(compress(b"\n" * (8 << 20)))
    assert len(content(path, suffix)) == 8 << 20
    monkeypatch.setattr("tokenmill.sources.copy.FREE_EXPANSION", 1 << 20)
    monkeypatch.setattr("tokenmill.sources.copy.MAX_EXPANSION", 100)
    seen: list[int] = []
    with pytest.raises(SourceError, match="more than 100 times"):
        seen.extend(map(len, decompressed(LocalFile(str(path)), suffix)))
    assert sum(seen) <= 4 << 20
    monkeypatch.setattr("tokenmill.sources.copy.MAX_EXPANSION", 10**9)
    monkeypatch.setattr("tokenmill.sources.copy.MAX_DECOMPRESSED", 2 << 20)
    with pytest.raises(SourceError, match="more than 2097152 decompressed bytes"):
        content(path, suffix)


def test_data_after_the_last_gzip_member_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tail.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}\n") + bytes(70_000) + b"x")
    with pytest.raises(SourceError, match="followed by other data"):
        content(path, "gz")


@no_deadline
@given(
    st.lists(st.binary(max_size=400), max_size=12),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 900)), max_size=10),
)
def test_copy_any_read_equals_the_content(
    tmp_path: Path, pieces: list[bytes], reads: list[tuple[int, int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenmill.sources.copy.FRAME", 64)
        index_cache = IndexCache(tmp_path / "cache")
        copy = CopyFile(index_cache.path(write_copy(iter(pieces), index_cache)), "original")
    data = b"".join(pieces)
    assert copy.size == len(data)
    for offset, length in reads:
        assert copy.pread(length, offset) == data[offset : offset + length]


def test_copy_damaged_anywhere_is_corruption_and_force_recache_repairs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(as_lines(ROWS)))
    rows = open_rows(path)
    (frames,) = (tmp_path / "tokenmill-cache" / "rows").glob("*/frames.zst")
    whole = frames.read_bytes()
    refused = 0
    for position in range(0, len(whole), max(1, len(whole) // 40)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        frames.write_bytes(damaged)
        try:
            assert list(open_rows(path)) == ROWS
        except CorruptionError:
            refused += 1
    assert refused >= 38
    frames.write_bytes(whole[:-1])
    with pytest.raises(CorruptionError, match=f"remove {frames.parent} to rebuild"):
        list(open_rows(path))
    assert list(open_rows(path, force_recache=True)) == ROWS
    frames.write_bytes(whole[:-1])
    shutil.rmtree(frames.parent)
    assert list(open_rows(path)) == ROWS
    assert limits.FRAME == 128 << 10
    del rows
