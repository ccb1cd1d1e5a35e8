"""Seekable copies of compressed files and JSON arrays: lines that can be read at any offset.

A copy is a directory with zstd frames, each with 128 KiB of content and a checksum, and a table of
frame ends. Its key is the digest of the content: .gz and .zst of the same lines share a copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
import zstandard

from tokenmill._core.artifact import ArtifactKind
from tokenmill._core.fingerprint import checksum, key
from tokenmill._core.process import RecentValues
from tokenmill.errors import CorruptionError, SourceError
from tokenmill.sources.bytefile import SourceBytes, digest_of
from tokenmill.sources.index import IndexCache, Integers
from tokenmill.sources.limits import (
    FRAME,
    FRAMES_KEPT,
    FREE_EXPANSION,
    INDEX_FORMAT,
    KIB,
    MAX_ARRAY_GAP,
    MAX_DECOMPRESSED,
    MAX_ELEMENT,
    MAX_EXPANSION,
    MIB,
)
from tokenmill.sources.scan import BOM, WHITE_SPACE, Bytes

_KIND = ArtifactKind("seekable copy", "copy.json", ("table.bin", "frames.zst"))
_LEVEL = 1  # speed matters more than size in a cache

_GZIP_INPUT = 16 * KIB  # bytes fed at once: one byte can expand to 1032
_ZSTD_INPUT = 2 * KIB  # bytes fed at once: a block of 4 bytes can expand to 128 KiB
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31  # deflate inside a gzip wrapper, its checksum and length verified


class CopyDocument(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    frame: Annotated[int, msgspec.Meta(ge=1)]
    bytes: int
    frames: int
    content: str  # xxh3-128 of the content
    table: str  # checksum of table.bin


def write_copy(content: Iterable[bytes], index_cache: IndexCache, *, repair: bool = False) -> str:
    compressor: Any = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    hashed = xxhash.xxh3_128()
    size, ends = 0, [0]

    def frame(data: bytearray) -> bytes:
        compressed: bytes = compressor.compress(bytes(data))
        ends.append(ends[-1] + len(compressed))
        return compressed

    def frames() -> Iterator[bytes]:
        nonlocal size
        buffer = bytearray()
        for piece in content:
            hashed.update(piece)
            size += len(piece)
            buffer += piece
            while len(buffer) >= FRAME:
                yield frame(buffer[:FRAME])
                del buffer[:FRAME]
        if buffer:
            yield frame(buffer)

    with _KIND.stage(index_cache.root) as writer:
        writer.write("frames.zst", frames())
        table = np.array(ends[1:], dtype="<i8").tobytes()
        digest = hashed.hexdigest()
        document = CopyDocument(
            format=INDEX_FORMAT,
            frame=FRAME,
            bytes=size,
            frames=len(ends) - 1,
            content=digest,
            table=checksum(table),
        )
        writer.write("table.bin", table)
        name = key({"what": "copy", "format": INDEX_FORMAT, "content": digest, "bytes": size})
        path = index_cache.path(name)
        is_intact = partial(_is_intact, path, digest) if repair else None
        writer.publish(path, msgspec.to_builtins(document), is_intact=is_intact)
    return name


def _is_intact(directory: Path, content: str) -> bool:
    try:
        copy = CopyFile(directory, str(directory))
        return digest_of(copy, 0, copy.size) == content
    except CorruptionError:
        return False


class CopyFile:
    """A copy, read by offset in the content; errors name the original file."""

    def __init__(self, directory: Path, path: str) -> None:
        self.path = path
        self._fd = -1
        remedy = f"remove {directory} to rebuild this copy"
        self._artifact = artifact = replace(_KIND, remedy=remedy).open(directory)
        document = artifact.convert(CopyDocument)
        table = artifact.read("table.bin", 8 * document.frames, document.table)
        self._ends = np.frombuffer(table, dtype="<i8")
        frames = artifact.require("frames.zst", size=int(self._ends[-1]) if len(self._ends) else 0)
        try:
            self._fd = os.open(frames, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._corrupt(str(error)) from error
        self.size = document.bytes
        self._frame = document.frame
        self._kept = RecentValues(FRAMES_KEPT * document.frame)
        self._local = threading.local()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _corrupt(self, message: str) -> CorruptionError:
        return self._artifact.corruption_error(message, "frames.zst")

    def _content(self, number: int) -> bytes:
        kept: bytes | None = self._kept.get(number)
        if kept is not None:
            return kept
        start = int(self._ends[number - 1]) if number else 0
        length = int(self._ends[number]) - start
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        expected = min(self._frame, self.size - number * self._frame)
        try:
            data: bytes = decompressor.decompress(os.pread(self._fd, length, start))
        except (zstandard.ZstdError, OSError) as error:
            raise self._corrupt(f"frame {number}: {error}") from error
        if len(data) != expected:
            raise self._corrupt(f"frame {number} has {len(data)} bytes, expected {expected}")
        self._kept.put(number, data)
        return data

    def pread(self, length: int, offset: int) -> bytes:
        end = min(offset + length, self.size)
        if offset >= end:
            return b""
        first, last = offset // self._frame, (end - 1) // self._frame
        if first == last:
            base = first * self._frame
            return self._content(first)[offset - base : end - base]
        data = b"".join(self._content(number) for number in range(first, last + 1))
        return data[offset - first * self._frame : end - first * self._frame]

    def check(self) -> None:
        """Do nothing: a published copy does not change."""


# --- compressed files ---------------------------------------------------------------------------


def decompressed(file: SourceBytes, compression: str) -> Iterator[bytes]:
    """Yield the content of a .gz or .zst file; members and frames are concatenated.

    A `SourceError` has the byte offset in the compressed file.
    """
    total = 0
    for consumed, piece in _pieces(file, compression):
        total += len(piece)
        if total > FREE_EXPANSION and total > MAX_EXPANSION * consumed:
            raise _refused(
                file, consumed, f"expands more than {MAX_EXPANSION} times; this may be a zip bomb"
            )
        if total > MAX_DECOMPRESSED:
            raise _refused(file, consumed, f"has more than {MAX_DECOMPRESSED} decompressed bytes")
        if piece:
            yield piece


def _refused(file: SourceBytes, offset: int, message: str) -> SourceError:
    return SourceError(f"the compressed file {message}", path=file.path, offset=offset)


def _pieces(file: SourceBytes, compression: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number of compressed bytes read so far and the next decompressed piece."""
    new: Callable[[], Any]
    if compression == "gz":
        from isal import igzip_lib, isal_zlib

        errors: Any = (isal_zlib.error, igzip_lib.IsalError)
        new, step = partial(isal_zlib.decompressobj, _GZIP_WBITS), _GZIP_INPUT
    else:  # the library limits the window to 128 MiB
        errors, step = zstandard.ZstdError, _ZSTD_INPUT
        new = zstandard.ZstdDecompressor().decompressobj
    decoder, position, is_open = new(), 0, False
    while data := file.pread(step, position):
        position += len(data)
        while data:
            is_open = True
            try:
                piece = decoder.decompress(data)
            except errors as error:
                raise _refused(file, position - len(data), f"is damaged: {error}") from error
            yield position, piece
            data = b""
            if decoder.eof:
                data, decoder, is_open = decoder.unused_data, new(), False
                if compression == "gz":
                    data, position = _next_member(file, data, position)
    if is_open or position == 0:
        raise _refused(file, position, "is truncated")


def _next_member(file: SourceBytes, rest: bytes, position: int) -> tuple[bytes, int]:
    """Return the start of the next gzip member, or nothing if only zeros follow."""
    if not rest or (rest[0] != 0 and len(rest) < len(_GZIP_MAGIC)):
        more = file.pread(_GZIP_INPUT, position)
        rest, position = rest + more, position + len(more)
    if rest.startswith(_GZIP_MAGIC) or not rest:
        return rest, position
    start = position - len(rest)
    while not rest.strip(b"\0"):
        rest = file.pread(_GZIP_INPUT, position)
        position += len(rest)
        if not rest:
            return b"", position
    raise _refused(file, start, "is followed by other data")


# --- JSON arrays --------------------------------------------------------------------------------

_DEPTH = np.zeros(256, dtype=np.int8)
_DEPTH[[ord("["), ord("{")]] = 1
_DEPTH[[ord("]"), ord("}")]] = -1
_STRUCTURE = np.zeros(256, dtype=bool)
_STRUCTURE[[ord(character) for character in "[]{},"]] = True


def array_lines(pieces: Iterable[bytes], path: str) -> Iterator[bytes]:
    """Yield the content of a JSON array as lines of the same length.

    Bytes between elements become line breaks, and line breaks inside an element become tabs, which
    are equivalent in JSON. So a row has the offset and length of its element. Brackets are counted,
    not matched: ``{"a": 1]`` is an element and becomes a bad row. An empty element becomes a bad
    row too, and makes the content one byte longer.
    """

    def refused(message: str, offset: int) -> SourceError:
        return SourceError(message, path=path, offset=offset)

    source = iter(pieces)
    buffer = _read(source, MAX_ARRAY_GAP)
    text = buffer.removeprefix(BOM).lstrip(WHITE_SPACE)
    base = len(buffer) - len(text) + 1  # offset of the buffer in the file, after the bracket
    if not text.startswith(b"["):
        raise refused("expected the start of a JSON array", base - 1)
    yield b"\n" * base
    buffer, is_first = text[1:], True
    while True:
        stops, is_closed = _element_stops(np.frombuffer(buffer, dtype=np.uint8))
        begins = [0, *(stop + 1 for stop in stops)]
        elements = [buffer[begin:stop] for begin, stop in zip(begins, stops, strict=False)]
        if is_first and is_closed and len(elements) == 1 and not elements[0].strip(WHITE_SPACE):
            yield b"\n" * (len(elements[0]) + 1)  # "[]"
        else:
            yield b"".join(map(_element_line, elements))
        base, buffer = base + begins[-1], buffer[begins[-1] :]
        is_first = is_first and not elements
        if is_closed:
            break
        if len(buffer) > MAX_ELEMENT + 2 * MAX_ARRAY_GAP:
            raise refused(f"an element has more than {MAX_ELEMENT} bytes", base)
        # The buffer doubles, so that a long element is not searched again for every piece.
        more = _read(source, max(MIB, len(buffer)))
        if not more:
            raise refused("the array has no closing bracket; the file is truncated", base)
        buffer += more
    for rest in chain([buffer], source):
        if text := rest.lstrip(WHITE_SPACE):
            raise refused("text after the array", base + len(rest) - len(text))
        base += len(rest)
        yield b"\n" * len(rest)


def _read(pieces: Iterator[bytes], size: int) -> bytes:
    read = []
    while size > 0 and (piece := next(pieces, b"")):
        read.append(piece)
        size -= len(piece)
    return b"".join(read)


def _element_line(element: bytes) -> bytes:
    """Return an element, the white space around it and the byte after it as a line."""
    body = element.strip(WHITE_SPACE)
    before = len(element) - len(element.lstrip(WHITE_SPACE))
    after = len(element) - before - len(body) + 1
    if not body:
        return b"\n" * before + b",\n"  # not valid JSON, so it becomes a bad row
    return b"\n" * before + body.replace(b"\n", b"\t") + b"\n" * after


def _element_stops(data: Bytes) -> tuple[list[int], bool]:
    """Return the end of each element in a buffer, and whether the array ends in it.

    The buffer starts between two elements. Ends are commas and the closing bracket of the array.
    """
    structure = np.flatnonzero(_STRUCTURE[data])
    structure = structure[np.searchsorted(_quotes(data), structure) % 2 == 0]  # outside of strings
    characters = data[structure]
    depth = 1 + np.cumsum(_DEPTH[characters], dtype=np.int64)
    closing = np.flatnonzero(depth == 0)[:1]
    end = int(closing[0]) if len(closing) else len(structure)
    is_separator = (characters[:end] == ord(",")) & (depth[:end] == 1)
    stops = [*structure[:end][is_separator].tolist(), *structure[closing].tolist()]
    return stops, len(closing) > 0


def _quotes(data: Bytes) -> Integers:
    quotes = np.flatnonzero(data == ord('"'))
    after = quotes[(quotes > 0) & (data[quotes - 1] == ord("\\"))]
    if not len(after):
        return quotes
    # A quote is escaped if an odd number of backslashes precedes it.
    slashes = np.flatnonzero(data == ord("\\"))
    run_starts = slashes[np.flatnonzero(np.diff(slashes, prepend=-2) != 1)]
    run_of = run_starts[np.searchsorted(run_starts, after, side="right") - 1]
    return np.setdiff1d(quotes, after[(after - run_of) % 2 == 1], assume_unique=True)
