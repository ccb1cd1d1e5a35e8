"""Compressed files as a bounded stream of bytes.

`decompressed` reads a .gz (isal) or .zst (zstandard) file and yields its content in pieces of
bounded size. Files of several members or frames, one after the other, are one content; zeros
behind the last gzip member are padding. A stream that stops early, fails its checksum, is followed
by something else, or grows beyond any honest ratio is a `SourceError` that names the byte of the
compressed file where it happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenmill.errors import SourceError
from tokenmill.source.bytefile import ByteFile
from tokenmill.source.limits import (
    FREE_EXPANSION,
    KIB,
    MAX_DECOMPRESSED,
    MAX_EXPANSION,
    MIB,
)

_GZIP_INPUT = 64 * KIB  # bytes fed at once; the output is bounded by the decoder itself
_ZSTD_INPUT = 2 * KIB  # bytes fed at once: a block of 4 bytes can become 128 KiB
_OUTPUT = 1 * MIB  # bytes asked of the gzip decoder at once
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WBITS = 31  # deflate inside a gzip wrapper, its checksum and length verified


def decompressed(file: ByteFile, compression: str) -> Iterator[bytes]:
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


def _refused(file: ByteFile, offset: int, message: str) -> SourceError:
    return SourceError(f"the compressed file {message}", path=file.path, offset=offset)


def _gzip(file: ByteFile) -> Iterator[tuple[int, bytes]]:
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


def _next_member(file: ByteFile, rest: bytes, position: int) -> tuple[bytes, int]:
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


def _zstd(file: ByteFile) -> Iterator[tuple[int, bytes]]:
    """(compressed bytes read, next piece) of a zstd file."""
    import zstandard

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
