"""Checksummed cache artifacts: write once, verify on open.

An artifact is a directory of data files and one *summary*, which holds a *record* (what this is,
counts, checksums of the data files) and its own checksum; or a summary alone.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from tokenmill._core import fingerprint
from tokenmill._core.paths import is_network, require_inside
from tokenmill._core.publish import (
    Buffer,
    NewFile,
    Staging,
    make_directory,
    sync_directory,
    write_file,
    writing_errors,
)
from tokenmill.errors import CacheError, CorruptionError, SourceError

if TYPE_CHECKING:
    import numpy.typing as npt  # heavy for whoever only recalls a memo

Record = TypeVar("Record")

_DAMAGE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ESTALE)


@contextlib.contextmanager
def reading_errors(path: os.PathLike[str], remedy: str) -> Iterator[None]:
    """Translate an OSError met while reading what was published.

    A file that is missing or damaged is corrupt, and may be rebuilt. Missing permission or too many
    open files say nothing about it: that is a `CacheError`.
    """
    try:
        yield
    except CorruptionError:
        raise
    except FileNotFoundError as error:
        raise CorruptionError(f"missing; {remedy}", path=path) from error
    except SourceError as error:  # of a remote store
        raise CacheError(error.message, path=path, offset=error.offset) from error
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        if error.errno in _DAMAGE:
            raise CorruptionError(f"{message}; {remedy}", path=path) from error
        raise CacheError(message, path=path) from error


def file_checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def require_file(path: Path, size: int | None, checksum: str | None, remedy: str) -> Path:
    """Return the path if the file has the stated size and checksum; None is not compared."""
    with reading_errors(path, remedy):
        if size is not None:
            require_size(path, path.stat().st_size, size, remedy)
        if checksum is not None:
            require_checksum(path, file_checksum(path), checksum, remedy)
    return path


def require_size(path: os.PathLike[str], actual: int, expected: int, remedy: str) -> None:
    if actual != expected:
        raise CorruptionError(
            f"{actual} bytes, expected {expected}; {remedy}",
            path=path,
            offset=min(actual, expected),
        )


def require_checksum(path: os.PathLike[str], actual: str, expected: str, remedy: str) -> None:
    if actual != expected:
        raise CorruptionError(f"checksum is {actual}, expected {expected}; {remedy}", path=path)


def map_array(path: Path, dtype: str) -> npt.NDArray[Any]:
    """Read a flat file as an array: mapped, or read where maps are unsafe."""
    import numpy as np

    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    if is_network(path):
        return np.fromfile(path, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def quarantine(root: Path, path: Path) -> None:
    """Move a damaged file or directory away; who has it open keeps it."""
    aside = root / "quarantine"
    with writing_errors(path):
        make_directory(aside, root)
        with contextlib.suppress(FileNotFoundError):  # another was quicker
            os.rename(path, aside / f"{path.name}.{secrets.token_hex(8)}")
            sync_directory(path.parent)


@dataclass(frozen=True)
class SealedKind:
    """A kind of artifact.

    The summary is canonical JSON ``{"checksum": …, "record": …}`` and a line feed. Where the record
    is bytes (``raw``), it is the checksum, a line feed and the record.
    """

    name: str  # for messages
    summary: str  # file name; "" where that is all there is, without a directory
    files: tuple[str, ...] = ()  # names of its data files
    remedy: str = "remove the directory to have it made again"
    raw: bool = False

    def summary_of(self, place: Path) -> Path:
        return place / self.summary if self.summary else place

    def encode(self, record: Any) -> bytes:
        data = record if self.raw else fingerprint.canonical(record)
        checksum = fingerprint.checksum(data)
        if self.raw:
            return checksum.encode() + b"\n" + data
        return fingerprint.canonical_of_parsed({"checksum": checksum, "record": record}) + b"\n"

    def _decode(self, data: bytes) -> Any:
        """Return the record, or None if `encode` would give other bytes."""
        if self.raw:
            record: Any = data.partition(b"\n")[2]
        else:
            record = msgspec.json.decode(data, type=dict[str, Any])["record"]
        return record if self.encode(record) == data else None

    @contextlib.contextmanager
    def stage(self, root: Path, *, beside: Path | None = None) -> Iterator[Draft]:
        """Begin an artifact in a cache, or ``beside`` a target outside; see `Staging`."""
        with Staging(root, beside=beside) as staging:
            yield Draft(self, staging)

    def write(self, root: Path, place: Path, record: Any) -> None:
        """Publish an artifact that is a summary alone, also in place of a damaged one."""
        with self.stage(root) as draft:
            draft.publish(place, record, is_whole=lambda: not self._is_broken(place, root))

    def _is_broken(self, place: Path, root: Path) -> bool:
        try:
            self.admit(place, root)
        except CorruptionError:
            return True
        except CacheError:
            pass
        return False

    def admit(self, place: Path, root: Path | None = None) -> Sealed:
        """Verify the summary at a place; ``root`` is the cache, None: two above.

        A damaged one is a `CorruptionError`, an absent one or a link out of the cache a CacheError.
        """
        self._require_inside(place, root)
        return self._admitted(place)

    def _require_inside(self, place: Path, root: Path | None) -> None:
        for path in (self.summary_of(place), *(place / name for name in self.files)):
            require_inside(path, root or place.parent.parent)

    def _admitted(self, place: Path) -> Sealed:
        summary = self.summary_of(place)
        try:
            with reading_errors(summary, self.remedy):
                data = summary.read_bytes()
        except CorruptionError as error:
            if place.exists():
                raise
            message = f"the {self.name} is gone; open what it was made of again"
            raise CacheError(message, path=place) from error
        try:
            record, why = self._decode(data), "not the bytes that were written"
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
            record, why = None, f"not the summary of a {self.name} ({error})"
        if record is None:
            raise CorruptionError(f"{why}; {self.remedy}", path=summary)
        return Sealed(self, place, record)

    def admit_or_none(self, place: Path, root: Path | None = None) -> Any:
        """Return the record at a place; None where it is absent or damaged."""
        self._require_inside(place, root)
        # Mostly it is absent. From Python 3.12 on, an error that went through a context manager
        # keeps every caller's variables until cycles are collected, a caller's store among them.
        if not os.path.exists(self.summary_of(place)):
            return None
        try:
            return self._admitted(place).record
        except (CorruptionError, CacheError):
            return None


@dataclass(frozen=True)
class Sealed:
    """An artifact whose summary was verified."""

    kind: SealedKind
    directory: Path
    record: Any

    def refusal(self, message: str, name: str = "") -> CorruptionError:
        path = self.directory / name if name else self.kind.summary_of(self.directory)
        return CorruptionError(f"{message}; {self.kind.remedy}", path=path)

    def convert(self, kind: type[Record]) -> Record:
        try:
            return msgspec.convert(self.record, kind)
        except msgspec.ValidationError as error:
            raise self.refusal(f"not the record of a {self.kind.name} ({error})") from error

    def require_document(self, document: Any) -> None:
        stated = fingerprint.canonical_of_parsed(self.record["document"])
        if stated != fingerprint.canonical(document):
            raise self.refusal(f"a {self.kind.name} of something else lies under this key")

    def require(self, name: str, *, size: int | None = None, checksum: str | None = None) -> Path:
        return require_file(self.directory / name, size, checksum, self.kind.remedy)

    def read(self, name: str, checksum: str) -> bytes:
        with reading_errors(self.directory / name, self.kind.remedy):
            data = (self.directory / name).read_bytes()
        found = fingerprint.checksum(data)
        require_checksum(self.directory / name, found, checksum, self.kind.remedy)
        return data

    def array(self, name: str, dtype: str, count: int, checksum: str) -> npt.NDArray[Any]:
        path = self.require(name, size=count * int(dtype[2:]), checksum=checksum)
        return map_array(path, dtype)


@dataclass(frozen=True)
class Draft:
    kind: SealedKind
    staging: Staging
    checksums: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[NewFile]:
        with NewFile(self._path(name)) as file:
            yield file
        self.checksums[name] = file.checksum

    def write(self, name: str, chunks: Buffer | Iterable[Buffer]) -> Path:
        file = write_file(self._path(name), chunks)
        self.checksums[name] = file.checksum
        return file.path

    def _path(self, name: str) -> Path:
        self.staging.make(self.staging.path / "sealed")
        return self.staging.path / "sealed" / name

    def publish(
        self, place: Path, record: Any, *, is_whole: Callable[[], bool] | None = None
    ) -> bool:
        """Write the summary, then make the whole visible; return whether ours is.

        ``is_whole`` is called where there is one already: one that is not goes to quarantine.
        """
        summary = self.kind.summary_of(Path("sealed"))
        self.staging.write(str(summary), self.kind.encode(record))
        if is_whole is not None and place.exists() and not is_whole():
            quarantine(self.staging.root, place)
        return self.staging.publish(self.staging.path / "sealed", place)


def publish_files(root: Path, place: Path, files: Mapping[str, bytes]) -> None:
    """Publish a directory of files that are checksummed already, or named by their content."""
    with Staging(root) as staging:
        for name, data in files.items():
            staging.write(f"files/{name}", data)
        if files:
            staging.publish(staging.path / "files", place)
