"""Seekable copies: compressed files and JSON arrays as lines that can be read at any offset.

A copy is a directory of zstd frames of 128 KiB of content each, every frame with its own checksum,
and a table of where each frame ends. Its key is the content: .gz and .zst of the same lines share
a copy and its index.
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

from tokenmill._core.fingerprint import checksum, key
from tokenmill._core.process import RecentValues
from tokenmill._core.sealed import SealedKind
from tokenmill.errors import CorruptionError, SourceError
from tokenmill.sources.bytefile import SourceBytes, digest_of
from tokenmill.sources.index import Integers, Shelf
from tokenmill.sources.limits import (
    FRAME,
    FRAMES_KEPT,
    FREE_EXPANSION,
    INDEX_FORMAT,
    KIB,
    MAX_ARRAY_GAP,
    MAX_DECOMPRESSED,
    MAX_EXPANSION,
    MAX_ROW,
    MIB,
)
from tokenmill.sources.scan import BOM, WHITE_SPACE, Bytes

_KIND = SealedKind("seekable copy", "copy.json", ("table.bin", "frames.zst"))
_LEVEL = 1  # the copy is a cache: speed before size

_GZIP_INPUT = 16 * KIB  # bytes fed at once: a byte can become 1032
_ZSTD_INPUT = 2 * KIB  # bytes fed at once: a block of 4 bytes can become 128 KiB
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31  # deflate inside a gzip wrapper, its checksum and length verified


class CopyDocument(msgspec.Struct, frozen=True, kw_only=True):
    format: int
    frame: Annotated[int, msgspec.Meta(ge=1)]
    bytes: int
    frames: int
    content: str  # xxh3-128 of the content
    table: str  # checksum of table.bin


def write_copy(content: Iterable[bytes], shelf: Shelf, *, repair: bool = False) -> str:
    compressor: Any = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
    hashed = xxhash.xxh3_128()
    size, ends = 0, [0]

    def frame(data: bytearray) -> bytes:
        compressed: bytes = compressor.compress(bytes(data))
        ends.append(ends[-1] + len(compressed))
        return compressed

    def frames() -> Iterator[bytes]:
        nonlocal size
        held = bytearray()
        for piece in content:
            hashed.update(piece)
            size += len(piece)
            held += piece
            while len(held) >= FRAME:
                yield frame(held[:FRAME])
                del held[:FRAME]
        if held:
            yield frame(held)

    with _KIND.stage(shelf.root) as draft:
        draft.write("frames.zst", frames())
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
        draft.write("table.bin", table)
        name = key({"what": "copy", "format": INDEX_FORMAT, "content": digest, "bytes": size})
        place = shelf.place(name)
        is_whole = partial(_is_whole, place, digest) if repair else None
        draft.publish(place, msgspec.to_builtins(document), is_whole=is_whole)
    return name


def _is_whole(directory: Path, content: str) -> bool:
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
        remedy = f"open {path} with rehash=True to have this copy of it made again"
        self._sealed = sealed = replace(_KIND, remedy=remedy).admit(directory)
        document = sealed.convert(CopyDocument)
        self._ends = np.frombuffer(sealed.read("table.bin", document.table), dtype="<i8")
        frames = sealed.require("frames.zst", size=int(self._ends[-1]) if len(self._ends) else 0)
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
        return self._sealed.refusal(message, "frames.zst")

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
            raise self._corrupt(f"frame {number} has {len(data)} bytes, should have {expected}")
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
        """A published copy does not change."""


# --- compressed files ---------------------------------------------------------------------------


def decompressed(file: SourceBytes, compression: str) -> Iterator[bytes]:
    """Yield the content of a .gz or .zst file; several members or frames are one content.

    Raises:
        SourceError: Truncated, damaged, followed by other data, or beyond the limits. It names the
            byte of the compressed file.
    """
    total = 0
    for consumed, piece in _pieces(file, compression):
        total += len(piece)
        if total > FREE_EXPANSION and total > MAX_EXPANSION * consumed:
            raise _refused(
                file, consumed, f"grows more than {MAX_EXPANSION} times its size: refused as a bomb"
            )
        if total > MAX_DECOMPRESSED:
            raise _refused(file, consumed, f"holds more than {MAX_DECOMPRESSED} bytes")
        if piece:
            yield piece


def _refused(file: SourceBytes, offset: int, message: str) -> SourceError:
    return SourceError(f"the compressed file {message}", path=file.path, offset=offset)


def _pieces(file: SourceBytes, compression: str) -> Iterator[tuple[int, bytes]]:
    """Yield the number of compressed bytes read and the next piece."""
    new: Callable[[], Any]
    if compression == "gz":
        from isal import igzip_lib, isal_zlib

        errors: Any = (isal_zlib.error, igzip_lib.IsalError)
        new, step = partial(isal_zlib.decompressobj, _GZIP_WBITS), _GZIP_INPUT
    else:  # the library bounds the window at 128 MiB
        errors, step = zstandard.ZstdError, _ZSTD_INPUT
        new = zstandard.ZstdDecompressor().decompressobj
    decoder, position, begun = new(), 0, False
    while data := file.pread(step, position):
        position += len(data)
        while data:
            begun = True
            try:
                piece = decoder.decompress(data)
            except errors as error:
                raise _refused(file, position - len(data), f"is damaged: {error}") from error
            yield position, piece
            data = b""
            if decoder.eof:
                data, decoder, begun = decoder.unused_data, new(), False
                if compression == "gz":
                    data, position = _next_member(file, data, position)
    if begun or position == 0:
        raise _refused(file, position, "is truncated")


def _next_member(file: SourceBytes, rest: bytes, position: int) -> tuple[bytes, int]:
    """Return what follows a gzip member: another one, or zeros up to the end of the file."""
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
    JSON treats alike. So the offset and length of a row are those of its element. Brackets are
    counted, not matched: ``{"a": 1]`` is an element, and a bad row. An empty element is a bad row
    too, and makes the content one byte longer.

    Raises:
        SourceError: The array is truncated or followed by text, or an element is over the limit.
    """

    def refused(message: str, offset: int) -> SourceError:
        return SourceError(message, path=path, offset=offset)

    source = iter(pieces)
    buffer = _read(source, MAX_ARRAY_GAP)
    text = buffer.removeprefix(BOM).lstrip(WHITE_SPACE)
    base = len(buffer) - len(text) + 1  # offset of the buffer in the file, behind the bracket
    if not text.startswith(b"["):
        raise refused("no array begins here", base - 1)
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
        if len(buffer) > MAX_ROW + 2 * MAX_ARRAY_GAP:
            raise refused(f"an element has more than {MAX_ROW} bytes", base)
        # Twice as much each time: a long element is not searched again for each piece of it.
        more = _read(source, max(MIB, len(buffer)))
        if not more:
            raise refused("the array is not closed: the file is truncated", base)
        buffer += more
    for rest in chain([buffer], source):
        if text := rest.lstrip(WHITE_SPACE):
            raise refused("text behind the array", base + len(rest) - len(text))
        base += len(rest)
        yield b"\n" * len(rest)


def _read(pieces: Iterator[bytes], wanted: int) -> bytes:
    read = []
    while wanted > 0 and (piece := next(pieces, b"")):
        read.append(piece)
        wanted -= len(piece)
    return b"".join(read)


def _element_line(element: bytes) -> bytes:
    """An element with the white space around it and the byte behind it, as a line."""
    body = element.strip(WHITE_SPACE)
    before = len(element) - len(element.lstrip(WHITE_SPACE))
    behind = len(element) - before - len(body) + 1
    if not body:
        return b"\n" * before + b",\n"  # a row that is no JSON
    return b"\n" * before + body.replace(b"\n", b"\t") + b"\n" * behind


def _element_stops(data: Bytes) -> tuple[list[int], bool]:
    """Offsets behind the elements of a buffer that begins between two, and if the array ends.

    These are the commas between elements, and the bracket that closes the array.
    """
    structure = np.flatnonzero(_STRUCTURE[data])
    structure = structure[np.searchsorted(_quotes(data), structure) % 2 == 0]  # outside of strings
    characters = data[structure]
    depth = 1 + np.cumsum(_DEPTH[characters], dtype=np.int64)
    closing = np.flatnonzero(depth == 0)[:1]
    upto = int(closing[0]) if len(closing) else len(structure)
    between = (characters[:upto] == ord(",")) & (depth[:upto] == 1)
    stops = [*structure[:upto][between].tolist(), *structure[closing].tolist()]
    return stops, len(closing) > 0


def _quotes(data: Bytes) -> Integers:
    quotes = np.flatnonzero(data == ord('"'))
    after = quotes[(quotes > 0) & (data[quotes - 1] == ord("\\"))]
    if not len(after):
        return quotes
    # A quote is escaped when an odd number of backslashes stands before it.
    slashes = np.flatnonzero(data == ord("\\"))
    run_starts = slashes[np.flatnonzero(np.diff(slashes, prepend=-2) != 1)]
    run_of = run_starts[np.searchsorted(run_starts, after, side="right") - 1]
    return np.setdiff1d(quotes, after[(after - run_of) % 2 == 1], assume_unique=True)
