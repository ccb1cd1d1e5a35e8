"""A seekable copy: content that cannot be read at an offset, in frames that can.

Compressed files are laid down once as zstd frames of 128 KiB of content each, every frame with its
own checksum, and a table of where each frame ends. The copy is a function of the content: .gz and
.zst of the same lines share it, and so does its index.

`write_copy` writes one; a `CopyFile` reads one as a `SourceBytes`, keeping a handful of frames.

`decompressed` reads a .gz (isal) or .zst (zstandard) file and yields its content in pieces of
bounded size. Files of several members or frames, one after the other, are one content; zeros
behind the last gzip member are padding. A stream that stops early, fails its checksum, is followed
by something else, or grows beyond any honest ratio is a `SourceError` that names the byte of the
compressed file where it happened.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
import zstandard

from tokenmill.errors import CorruptionError, SourceError
from tokenmill.files.process import RecentValues
from tokenmill.files.sealed import JsonForm, SealedKind
from tokenmill.fingerprint import checksum, key
from tokenmill.source.bytefile import SourceBytes, digest_of
from tokenmill.source.limits import (
    FRAME,
    FRAMES_KEPT,
    FREE_EXPANSION,
    INDEX_FORMAT,
    KIB,
    MAX_DECOMPRESSED,
    MAX_EXPANSION,
    MIB,
)
from tokenmill.source.shelf import Shelf

_KIND = SealedKind(
    "seekable copy", "copy.json", JsonForm("copy", "check"), ("table.bin", "frames.zst")
)
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
    """Lay content down as a copy; returns its key."""
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
    """Cuts content into frames and compresses them."""

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
    """A copy, read by offset in the content; errors call it by the original file's path."""

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
        """One decompressed frame."""
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


# --- compressed files as a stream ---------------------------------------------------------------


def decompressed(file: SourceBytes, compression: str) -> Iterator[bytes]:
    """The content of a compressed file.

    Raises:
        SourceError: Truncated, damaged, followed by other data, or beyond the limits.
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
    """(compressed bytes read, next piece) of a gzip file."""
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
    """What follows a member: another one, or padding up to the end of the file."""
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
    """(compressed bytes read, next piece) of a zstd file."""
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
