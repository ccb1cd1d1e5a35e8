"""Sealed directories: what a cache keeps beside its stores, and how it is believed again.

Row indexes, seekable copies, length indexes, selection indexes, parts, notes and copies of
tokenizers are all the same thing: a directory of *data files* and one *summary*, which holds a
*record* (what this is, counts, checksums of the data files) and is protected against damage itself.
A memo is such a summary without a directory. The rooms that keep one declare a `SealedKind` and use
it two ways:

- `SealedKind.stage` gives a `Draft`: data files are written into a staging directory, their
  checksums counted on the way; `Draft.publish` writes the summary last and makes the whole visible
  by one rename. Where another was first, that one stays: a key has one content. Only one that is
  found broken goes to quarantine for it.
- `SealedKind.admit` gives a `Sealed`: files that no link leads out of the cache, a summary that is
  the bytes that were written, and a record. Its methods compare data files with what the record
  states, at once or when they are used. Whatever does not fit is a `CorruptionError` that names
  the file and says what to do; `SealedKind.admit_or_none` is for what is then simply made again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill import fingerprint
from tokenmill.errors import CacheError, CorruptionError, SourceError
from tokenmill.files.kind import is_network
from tokenmill.files.publish import (
    Buffer,
    HashedFile,
    Staging,
    make_directory,
    sync_directory,
    writing_errors,
)
from tokenmill.files.root import require_inside
from tokenmill.fingerprint import canonical, canonical_of_parsed

Record = TypeVar("Record")

_READ_BYTES = 1 << 20
_DAMAGE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ESTALE)


@contextlib.contextmanager
def reading_errors(path: os.PathLike[str], remedy: str) -> Iterator[None]:
    """Translate an OSError met while reading what was published.

    A file that is gone, is no file or cannot be read from the disk is corrupt, and may be moved
    out of the way and rebuilt. That this process may not read it or has too many files open says
    nothing against the file, so that is a `CacheError`, and nobody touches it.
    """
    try:
        yield
    except CorruptionError:
        raise
    except FileNotFoundError as error:
        raise CorruptionError(f"missing; {remedy}", path=path) from error
    except SourceError as error:  # of a store elsewhere
        raise CacheError(error.message, path=path, offset=error.offset) from error
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        if error.errno in _DAMAGE:
            raise CorruptionError(f"{message}; {remedy}", path=path) from error
        raise CacheError(message, path=path) from error


def require_file(path: Path, size: int | None, stated: str | None, remedy: str) -> None:
    """Compare a file with the size and the checksum that are stated of it, where they are."""
    hasher = xxhash.xxh3_128()
    with reading_errors(path, remedy):
        actual = path.stat().st_size
        if size is not None and actual != size:
            raise CorruptionError(
                f"{actual} bytes, expected {size}; {remedy}", path=path, offset=min(actual, size)
            )
        if stated is None:
            return
        with open(path, "rb") as file:
            while piece := file.read(_READ_BYTES):
                hasher.update(piece)
    if hasher.hexdigest() != stated:
        raise CorruptionError(
            f"checksum is {hasher.hexdigest()}, expected {stated}; {remedy}", path=path
        )


def map_array(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The whole of a flat file as an array: mapped, or read where maps are unsafe."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    if is_network(path):
        return np.fromfile(path, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def quarantine(root: Path, path: Path) -> None:
    """Move a broken file or directory where nobody reads it; whoever has it open keeps it."""
    aside = root / "quarantine"
    with writing_errors(path):
        make_directory(aside, root)
        with contextlib.suppress(FileNotFoundError):  # another was quicker
            os.rename(path, aside / f"{path.name}.{secrets.token_hex(8)}")
            sync_directory(path.parent)


class Form(Protocol):
    """How a summary holds its record; decoding gives None, or raises, where it is damaged."""

    def encode(self, record: Any) -> bytes:
        """The bytes of the summary."""

    def decode(self, data: bytes) -> Any:
        """The record in them."""


@dataclass(frozen=True)
class JsonForm:
    """Canonical JSON, ``{record: …, seal: checksum of the record}`` or the bare record.

    A bare record is one whose every member is compared with something else.

    Attributes:
        record: The member that holds the record; "" for a bare one.
        seal: The member that holds its checksum.
        end: What follows the document.
    """

    record: str = ""
    seal: str = ""
    end: bytes = b""

    def encode(self, record: Any) -> bytes:
        """The bytes of the summary."""
        data = canonical(record)
        if self.record:
            sealed = {self.record: record, self.seal: fingerprint.checksum(data)}
            data = canonical_of_parsed(sealed)
        return data + self.end

    def decode(self, data: bytes) -> Any:
        """The record; only the very bytes that `encode` gives are one."""
        document = msgspec.json.decode(data, type=dict[str, Any])
        record = document[self.record] if self.record else document
        return record if self.encode(record) == data else None


class BytesForm:
    """A line with the checksum of everything behind it; the record is those bytes."""

    def encode(self, record: bytes) -> bytes:
        """The bytes of the summary."""
        return fingerprint.checksum(record).encode() + b"\n" + record

    def decode(self, data: bytes) -> bytes | None:
        """What stands behind the line."""
        seal, _, record = data.partition(b"\n")
        return record if seal == fingerprint.checksum(record).encode() else None


@dataclass(frozen=True)
class SealedKind:
    """What the sealed directories of one kind look like.

    Attributes:
        name: What one is called in messages.
        summary: Name of its summary; "" where the summary alone is all there is, without a
            directory.
        form: How the summary holds the record.
        files: Names of its data files.
        remedy: What to do about a damaged one.
    """

    name: str
    summary: str
    form: Form
    files: tuple[str, ...] = ()
    remedy: str = "remove the directory to have it made again"

    def summary_of(self, place: Path) -> Path:
        """Where the summary of one is."""
        return place / self.summary if self.summary else place

    @contextlib.contextmanager
    def stage(self, root: Path) -> Iterator[Draft]:
        """Begin one for a cache directory; what was not published is gone afterwards."""
        with Staging(root) as staging:
            yield Draft(self, staging)

    def write(self, root: Path, place: Path, record: Any) -> None:
        """Publish one that has no data files, also in place of a broken one."""
        with self.stage(root) as draft:
            draft.publish(
                place, record, is_whole=lambda: self.admit_or_none(place, root) is not None
            )

    def admit(self, place: Path, root: Path | None = None) -> Sealed:
        """Believe what lies at a place, as far as its summary goes.

        Args:
            place: The directory.
            root: The cache that it may not lead out of; None: two above.

        Raises:
            CorruptionError: It is not what was written.
            CacheError: It is not there at all, cannot be read, or a link leads out of the cache.
        """
        summary = self.summary_of(place)
        for name in (summary, *(place / file for file in self.files)):
            require_inside(name, root or place.parent.parent)
        if not place.exists():
            raise CacheError(f"the {self.name} is gone; open what it was made of again", path=place)
        with reading_errors(summary, self.remedy):
            data = summary.read_bytes()
        try:
            record = self.form.decode(data)
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
            message = f"not the summary of a {self.name} ({error}); {self.remedy}"
            raise CorruptionError(message, path=summary) from error
        if record is None:
            raise CorruptionError(f"not the bytes that were written; {self.remedy}", path=summary)
        return Sealed(self, place, record)

    def admit_or_none(self, place: Path, root: Path | None = None) -> Any:
        """The record of what lies at a place; None where it is absent or damaged.

        Raises:
            CacheError: A link leads out of the cache.
        """
        require_inside(self.summary_of(place), root or place.parent.parent)
        try:
            return self.admit(place, root).record
        except (CorruptionError, CacheError):
            return None


@dataclass(frozen=True)
class Sealed:
    """A directory whose summary was admitted.

    Attributes:
        kind: What it is one of.
        directory: Where it is.
        record: What its summary says.
    """

    kind: SealedKind
    directory: Path
    record: Any

    def refusal(self, message: str, name: str = "") -> CorruptionError:
        """The error for one of its files, or for its summary, that is not what was written."""
        path = self.directory / name if name else self.kind.summary_of(self.directory)
        return CorruptionError(f"{message}; {self.kind.remedy}", path=path)

    def convert(self, kind: type[Record]) -> Record:
        """The record as a type; a seal guards against accidents, not against other members."""
        try:
            return msgspec.convert(self.record, kind)
        except msgspec.ValidationError as error:
            raise self.refusal(f"not the record of a {self.kind.name} ({error})") from error

    def require_document(self, document: Any) -> None:
        """Refuse one that was made of something else than what its record must name."""
        if canonical_of_parsed(self.record["document"]) != canonical(document):
            raise self.refusal(f"a {self.kind.name} of something else lies under this key")

    def require(self, name: str, *, size: int | None = None, checksum: str | None = None) -> Path:
        """A data file, if it has this size and this checksum."""
        require_file(self.directory / name, size, checksum, self.kind.remedy)
        return self.directory / name

    def read(self, name: str, checksum: str) -> bytes:
        """The bytes of a small data file."""
        with reading_errors(self.directory / name, self.kind.remedy):
            data = (self.directory / name).read_bytes()
        found = fingerprint.checksum(data)
        if found != checksum:
            raise self.refusal(f"checksum is {found}, expected {checksum}", name)
        return data

    def array(self, name: str, dtype: str, count: int, checksum: str) -> npt.NDArray[Any]:
        """A data file as an array of so many numbers."""
        size = count * np.dtype(dtype).itemsize
        return map_array(self.require(name, size=size, checksum=checksum), dtype)


@dataclass(frozen=True)
class Draft:
    """A sealed directory in the making.

    Attributes:
        kind: What it will be one of.
        staging: Where it is made.
        checksums: Of the data files written so far.
    """

    kind: SealedKind
    staging: Staging
    checksums: dict[str, str] = field(default_factory=dict)

    @property
    def directory(self) -> Path:
        """Where its files are until they are published."""
        return self.staging.path / "sealed"

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[HashedFile]:
        """A data file that grows piece by piece."""
        self.staging.make(self.directory)
        with HashedFile(self.directory / name) as file:
            yield file
        self.checksums[name] = file.checksum

    def write(self, name: str, chunks: Buffer | Iterable[Buffer]) -> Path:
        """Write a data file."""
        with self.open(name) as file:
            for chunk in (chunks,) if isinstance(chunks, Buffer) else chunks:
                file.write(chunk)
        return file.path

    def publish(
        self, place: Path, record: Any, *, is_whole: Callable[[], bool] | None = None
    ) -> bool:
        """Write the summary, then make the whole visible; True when it is ours that is.

        Args:
            place: Where to.
            record: What the summary says.
            is_whole: Asked where there is one already: one that is not goes to quarantine.
        """
        summary = self.kind.summary_of(Path(self.directory.name))
        self.staging.write(os.fspath(summary), self.kind.form.encode(record))
        if is_whole is not None and place.exists() and not is_whole():
            quarantine(self.staging.root, place)
        return self.staging.publish(self.directory, place)


def publish_files(root: Path, place: Path, files: Mapping[str, bytes]) -> None:
    """Publish a directory of files that are sealed already, or named by their content."""
    with Staging(root) as staging:
        for name, data in files.items():
            staging.write(f"files/{name}", data)
        if files:
            staging.publish(staging.path / "files", place)
