"""Seekable copies: compressed files and JSON arrays as lines that can be read at any offset.

A copy is a sealed directory of zstd frames of 128 KiB of content each, every frame with its own
checksum, and a table of where each frame ends. It is a function of the content: .gz and .zst of the
same lines share a copy and its index. `write_copy` writes one, `CopyFile` reads it.

`decompressed` yields the content of a .gz (isal) or .zst (zstandard) file in pieces of bounded
size. Several members or frames are one content; zeros after the last gzip member are padding.

`array_lines` yields the content of a JSON array as lines of the same length: bytes between elements
become line breaks, and line breaks inside an element become tabs, which JSON treats alike (as white
space, or inside a string as an error). So the offset and length of a row are those of its element.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
import zstandard

from tokenmill.errors import CorruptionError, SourceError
from tokenmill.files.process import RecentValues
from tokenmill.files.sealed import SealedKind
from tokenmill.fingerprint import checksum, key
from tokenmill.source.bytefile import SourceBytes, digest_of
from tokenmill.source.index import Integers, Shelf
from tokenmill.source.limits import (
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
from tokenmill.source.scan import BOM, WHITE_SPACE, Bytes

_KIND = SealedKind("seekable copy", "copy.json", ("table.bin", "frames.zst"))
_LEVEL = 1  # the copy is a cache: speed before size

_GZIP_INPUT = 64 * KIB  # bytes fed at once; the output is bounded by the decoder itself
_ZSTD_INPUT = 2 * KIB  # bytes fed at once: a block of 4 bytes can become 128 KiB
_OUTPUT = 1 * MIB  # bytes asked of the gzip decoder at once
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31  # deflate inside a gzip wrapper, its checksum and length verified


class CopyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """copy.json."""

    format: int
    frame: Annotated[int, msgspec.Meta(ge=1)]
    bytes: int
    frames: int
    content: str  # xxh3-128 of the content
    table: str  # checksum of table.bin


def write_copy(content: Iterable[bytes], shelf: Shelf, *, repair: bool = False) -> str:
    """Write content as a copy and return its key."""
    frames = _FrameCutter()
    with _KIND.stage(shelf.root) as draft:
        draft.write("frames.zst", frames.compressed(content))
        table = np.array(frames.ends, dtype="<i8").tobytes()
        digest = frames.hash.hexdigest()
        document = CopyDocument(
            format=INDEX_FORMAT,
            frame=FRAME,
            bytes=frames.bytes,
            frames=len(frames.ends),
            content=digest,
            table=checksum(table),
        )
        draft.write("table.bin", table)
        name = key(
            {"what": "copy", "format": INDEX_FORMAT, "content": digest, "bytes": frames.bytes}
        )
        place = shelf.place(name)
        is_whole = partial(_is_whole, place, digest) if repair else None
        draft.publish(place, msgspec.to_builtins(document), is_whole=is_whole)
    return name


class _FrameCutter:
    def __init__(self) -> None:
        self.ends: list[int] = []
        self.bytes = 0
        self.hash = xxhash.xxh3_128()

    def compressed(self, content: Iterable[bytes]) -> Iterator[bytes]:
        compressor: Any = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        held = bytearray()
        end = 0
        for piece in content:
            self.hash.update(piece)
            self.bytes += len(piece)
            held += piece
            done = 0
            while len(held) - done >= FRAME:
                frame: bytes = compressor.compress(bytes(held[done : done + FRAME]))
                done += FRAME
                end += len(frame)
                self.ends.append(end)
                yield frame
            del held[:done]
        if held:
            frame = compressor.compress(bytes(held))
            self.ends.append(end + len(frame))
            yield frame


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

    def read_into(self, target: memoryview, offset: int) -> int:
        done = 0
        while done < len(target):
            data = self.pread(min(len(target) - done, self._frame), offset + done)
            if not data:
                break
            target[done : done + len(data)] = data
            done += len(data)
        return done

    def check(self) -> None:
        """A published copy does not change."""


# --- compressed files ---------------------------------------------------------------------------


def decompressed(file: SourceBytes, compression: str) -> Iterator[bytes]:
    """Yield the content of a compressed file.

    Raises:
        SourceError: Truncated, damaged, followed by other data, or beyond the limits. It names the
            byte of the compressed file.
    """
    pieces = _gzip(file) if compression == "gz" else _zstd(file)
    total = 0
    for consumed, piece in pieces:
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


def _gzip(file: SourceBytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number of compressed bytes read and the next piece."""
    from isal import igzip_lib, isal_zlib

    errors: Any = (isal_zlib.error, igzip_lib.IsalError)
    decoder: Any = isal_zlib.decompressobj(_GZIP_WBITS)
    position, begun = 0, False
    while data := file.pread(_GZIP_INPUT, position):
        position += len(data)
        while data:
            begun = True
            try:
                piece = decoder.decompress(data, _OUTPUT)
            except errors as error:
                raise _refused(file, position - len(data), f"is damaged: {error}") from error
            yield position, piece
            data = decoder.unconsumed_tail
            while len(piece) == _OUTPUT and not data and not decoder.eof:
                piece = decoder.decompress(b"", _OUTPUT)
                yield position, piece
            if decoder.eof:
                data, position = _next_member(file, decoder.unused_data, position)
                decoder, begun = isal_zlib.decompressobj(_GZIP_WBITS), False
    if begun or position == 0:
        raise _refused(file, position, "is truncated")


def _next_member(file: SourceBytes, rest: bytes, position: int) -> tuple[bytes, int]:
    """Return what follows a member: another one, or padding up to the end of the file."""
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


def _zstd(file: SourceBytes) -> Iterator[tuple[int, bytes]]:
    # The window is bounded by the library's default of 128 MiB.
    decoder: Any = zstandard.ZstdDecompressor().decompressobj()
    position, begun = 0, False
    while data := file.pread(_ZSTD_INPUT, position):
        position += len(data)
        while data:
            begun = True
            try:
                piece = decoder.decompress(data)
            except zstandard.ZstdError as error:
                raise _refused(file, position - len(data), f"is damaged: {error}") from error
            yield position, piece
            data = b""
            if decoder.eof:
                data = decoder.unused_data
                decoder, begun = zstandard.ZstdDecompressor().decompressobj(), False
    if begun or position == 0:
        raise _refused(file, position, "is truncated")


# --- JSON arrays --------------------------------------------------------------------------------

_STEPWISE = 64  # bytes of white space that all spans skip together; what has more goes alone

_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1
_STRUCTURE = np.zeros(256, dtype=bool)
_STRUCTURE[[ord(character) for character in "[]{},"]] = True
_IS_SPACE = np.zeros(256, dtype=bool)
_IS_SPACE[list(WHITE_SPACE)] = True


def array_lines(pieces: Iterable[bytes], path: str) -> Iterator[bytes]:
    """Yield the content of a JSON array as lines of the same length.

    Only an empty element, which is an error of the file, makes the content a byte longer.

    Raises:
        SourceError: The array is truncated or followed by text, or an element or the white space
            between two elements is over the limit.
    """
    source = iter(pieces)
    buffer = next(source, b"")
    while len(buffer) < MAX_ARRAY_GAP and (piece := next(source, b"")):
        buffer += piece
    text = buffer.removeprefix(BOM).lstrip(WHITE_SPACE)
    base = len(buffer) - len(text) + 1  # offset of the buffer in the file, behind the bracket
    if not text.startswith(b"["):
        raise SourceError("no array begins here", path=path, offset=base - 1)
    yield b"\n" * base
    buffer, opens = text[1:], True
    while True:
        found = find_elements(np.frombuffer(buffer, dtype=np.uint8), opens=opens)
        if found.consumed:
            _check_gaps(found, path, base)
            yield _as_lines(buffer[: found.consumed], found)
            base, buffer, opens = base + found.consumed, buffer[found.consumed :], False
        if found.closed:
            break
        if len(buffer) > MAX_ROW + 2 * MAX_ARRAY_GAP:
            raise SourceError(f"an element has more than {MAX_ROW} bytes", path=path, offset=base)
        # Twice as much each time: a long element is not searched for each piece of it.
        wanted, parts = max(MIB, len(buffer)), []
        while wanted > 0 and (piece := next(source, b"")):
            parts.append(piece)
            wanted -= len(piece)
        if not parts:
            raise SourceError(
                "the array is not closed: the file is truncated", path=path, offset=base
            )
        buffer = b"".join([buffer, *parts])
    end = base
    while buffer or (buffer := next(source, b"")):
        if rest := buffer.lstrip(WHITE_SPACE):
            where = base + len(buffer) - len(rest)
            raise SourceError("text behind the array", path=path, offset=where)
        base += len(buffer)
        if base - end > MAX_ARRAY_GAP:
            raise SourceError(
                f"more than {MAX_ARRAY_GAP} bytes behind the array", path=path, offset=end
            )
        yield b"\n" * len(buffer)
        buffer = b""


def _check_gaps(found: Elements, path: str, base: int) -> None:
    begins = np.concatenate([np.zeros(1, dtype=np.int64), found.ends[:-1] + 1])
    if len(found.starts) and int((found.starts - begins).max()) > MAX_ARRAY_GAP:
        raise SourceError(
            f"more than {MAX_ARRAY_GAP} bytes between two elements", path=path, offset=base
        )


def _as_lines(data: bytes, found: Elements) -> bytes:
    lines = np.frombuffer(data.replace(b"\n", b"\t"), dtype=np.uint8).copy()
    is_full = found.starts < found.ends
    steps = np.zeros(len(lines), dtype=np.int8)
    steps[found.starts[is_full]] = 1
    steps[found.ends[is_full]] -= 1
    lines[np.cumsum(steps, dtype=np.int8) == 0] = ord("\n")
    empty = found.starts[~is_full]
    if len(empty):
        lines[empty] = ord(",")  # a row that is no JSON
        lines = np.insert(lines, empty + 1, ord("\n"))
    return lines.tobytes()


class Elements(NamedTuple):
    """The elements that a buffer contains whole."""

    starts: Integers
    ends: Integers
    consumed: int  # bytes up to and including the last comma or bracket
    closed: bool  # the array's bracket was seen


def find_elements(data: Bytes, *, opens: bool = False) -> Elements:
    """Find the complete elements of a buffer that begins outside of any element.

    Brackets are counted, not matched: ``{"a": 1]`` is an element, and a bad row. An element may be
    empty, which is a bad row too. ``opens`` says that the array's bracket stands before the buffer.
    """
    structure = np.flatnonzero(_STRUCTURE[data])
    quotes = _real_quotes(data)
    outside = np.searchsorted(quotes, structure) % 2 == 0
    structure = structure[outside]
    characters = data[structure]
    depth = 1 + np.cumsum(_STEPS[characters], dtype=np.int64)
    closing = np.flatnonzero(depth == 0)
    closed = len(closing) > 0
    upto = int(closing[0]) + 1 if closed else len(structure)
    between = (characters[:upto] == ord(",")) & (depth[:upto] == 1)
    if closed:
        between[-1] = True
    stops = structure[:upto][between]
    if not len(stops):
        return Elements(stops, stops, 0, False)
    begins = np.concatenate([np.zeros(1, dtype=np.int64), stops[:-1] + 1])
    starts, ends = _trimmed(data, begins, stops)
    if opens and closed and len(starts) == 1 and starts[0] == ends[0]:
        starts = ends = starts[:0]  # "[]"
    return Elements(starts, ends, int(stops[-1]) + 1, closed)


def _real_quotes(data: Bytes) -> Integers:
    """Positions of the quotes that begin or end a string."""
    quotes = np.flatnonzero(data == ord('"'))
    if not len(quotes):
        return quotes
    after = quotes[(quotes > 0) & (data[quotes - 1] == ord("\\"))]
    if not len(after):
        return quotes
    # A quote is escaped when an odd number of backslashes stands before it.
    slashes = np.flatnonzero(data == ord("\\"))
    run_starts = slashes[np.flatnonzero(np.diff(slashes, prepend=-2) != 1)]
    run_of = run_starts[np.searchsorted(run_starts, after, side="right") - 1]
    escaped = after[(after - run_of) % 2 == 1]
    return np.setdiff1d(quotes, escaped, assume_unique=True)


def _trimmed(data: Bytes, begins: Integers, stops: Integers) -> tuple[Integers, Integers]:
    """Spans without the white space at their ends; an empty span is at its stop."""
    starts, ends = begins.copy(), stops.copy()
    moving = np.flatnonzero((starts < ends) & _IS_SPACE[data[np.minimum(starts, len(data) - 1)]])
    for _ in range(_STEPWISE):
        starts[moving] += 1
        at = starts[moving]
        moving = moving[(at < ends[moving]) & _IS_SPACE[data[np.minimum(at, len(data) - 1)]]]
        if not len(moving):
            break
    for span in moving.tolist():
        text = data[starts[span] : ends[span]].tobytes()
        starts[span] += len(text) - len(text.lstrip(WHITE_SPACE))
    moving = np.flatnonzero((starts < ends) & _IS_SPACE[data[ends - 1]])
    for _ in range(_STEPWISE):
        ends[moving] -= 1
        moving = moving[(starts[moving] < ends[moving]) & _IS_SPACE[data[ends[moving] - 1]]]
        if not len(moving):
            break
    for span in moving.tolist():
        ends[span] = starts[span] + len(
            data[starts[span] : ends[span]].tobytes().rstrip(WHITE_SPACE)
        )
    return starts, ends
