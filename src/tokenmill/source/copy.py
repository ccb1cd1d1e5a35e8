"""A seekable copy: content that cannot be read at an offset, in frames that can.

Compressed files are laid down once as zstd frames of 128 KiB of content each, every frame with its
own checksum, and a table of where each frame ends. The copy is a function of the content: .gz and
.zst of the same lines share it, and so does its index.

`make_copy` writes one; a `CopyFile` reads one as a `ByteFile`, keeping a handful of frames.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard

from tokenmill.errors import CorruptionError
from tokenmill.files import Staging
from tokenmill.fingerprint import canonical, checksum, key
from tokenmill.source.bytefile import ByteFile
from tokenmill.source.decompress import decompressed
from tokenmill.source.limits import FRAME, FRAMES_KEPT, INDEX_FORMAT
from tokenmill.source.shelf import Shelf, require_artefact

_LEVEL = 1  # the copy is a cache: speed before size


class CopyDocument(msgspec.Struct, frozen=True, kw_only=True):
    """copy.json."""

    format: int
    frame: int
    bytes: int
    frames: int
    content: str  # xxh3-128 of the content
    table: str  # checksum of table.bin


def make_copy(file: ByteFile, compression: str, shelf: Shelf, *, repair: bool = False) -> str:
    """Decompress a file into a copy; returns the copy's key."""
    return write_copy(decompressed(file, compression), shelf, repair=repair)


def write_copy(content: Iterable[bytes], shelf: Shelf, *, repair: bool = False) -> str:
    """Lay content down as a copy; returns its key."""
    frames = _Frames()
    with Staging(shelf.root) as staging:
        staging.write("copy/frames.zst", frames.compressed(content))
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
        staging.write("copy/table.bin", table)
        plain = msgspec.to_builtins(document)
        sealed = {"copy": plain, "check": checksum(canonical(plain))}
        staging.write("copy/copy.json", canonical(sealed))
        name = key(
            {"what": "copy", "format": INDEX_FORMAT, "content": digest, "bytes": frames.bytes}
        )
        if repair and shelf.has(name) and not _is_whole(shelf.place(name), digest):
            shelf.set_aside(name)
        shelf.publish(staging, staging.path / "copy", name)
    return name


class _Frames:
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
        hashed = xxhash.xxh3_128()
        for offset in range(0, copy.size, FRAME):
            hashed.update(copy.pread(FRAME, offset))
    except CorruptionError:
        return False
    return bool(hashed.hexdigest() == content)


class CopyFile:
    """A copy, read by offset in the decompressed content.

    Args:
        directory: The artefact.
        path: What to call the content in errors: the original file.
    """

    def __init__(self, directory: Path, path: str) -> None:
        self.path = path
        self._directory = directory
        self._fd = -1
        require_artefact(directory, ("copy.json", "table.bin", "frames.zst"))
        try:
            sealed = msgspec.json.decode((directory / "copy.json").read_bytes())
            document = msgspec.convert(sealed["copy"], CopyDocument)
            table = (directory / "table.bin").read_bytes()
            whole = checksum(canonical(sealed["copy"])) == sealed["check"]
            if not whole or checksum(table) != document.table or document.frame < 1:
                raise self._corrupt("its documents do not match their checksums")
            self._fd = os.open(directory / "frames.zst", os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._fd).st_size
        except (OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
            if isinstance(error, CorruptionError):
                raise
            raise self._corrupt(str(error)) from error
        self.size = document.bytes
        self._frame = document.frame
        self._ends = np.frombuffer(table, dtype="<i8")
        expected = int(self._ends[-1]) if len(self._ends) else 0
        if size != expected:
            raise self._corrupt(f"its frames should have {expected} bytes, have {size}")
        self._kept: dict[int, bytes] = {}
        self._local = threading.local()

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def _corrupt(self, message: str) -> CorruptionError:
        return CorruptionError(
            f"the copy of {self.path} is damaged: {message}; open with rehash=True to replace it",
            path=self._directory,
        )

    def _content(self, number: int) -> bytes:
        """One decompressed frame."""
        kept = self._kept.get(number)
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
        self._keep(number, data)
        return data

    def _keep(self, number: int, data: bytes) -> None:
        # Without a lock: single operations on a dict are atomic, and losing a frame is harmless.
        self._kept[number] = data
        while len(self._kept) > FRAMES_KEPT:
            try:
                self._kept.pop(next(iter(self._kept)), None)
            except (StopIteration, RuntimeError):
                break

    def pread(self, length: int, offset: int) -> bytes:
        """Read from one or several frames."""
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
        """Read into a reused buffer."""
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
