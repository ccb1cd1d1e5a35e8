"""Checksummed cache artifacts: write once, verify on open.

An artifact is a directory with data files and one *summary*, or a summary alone. The summary
contains a *record* (description, counts, checksums of the data files) and its own checksum.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from tokenmill._core import fingerprint
from tokenmill._core.paths import is_network, read_bounded, require_inside
from tokenmill._core.publish import (
    Buffer,
    NewFile,
    Staging,
    make_directory,
    sync_directory,
    write_file,
    writing_errors,
)
from tokenmill.errors import CacheError, CorruptionError, MissingFileError, SourceError

if TYPE_CHECKING:
    import numpy.typing as npt  # slow to import, and not needed to read a summary

Record = TypeVar("Record")

_DAMAGE = (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ESTALE)


@contextlib.contextmanager
def reading_errors(
    path: os.PathLike[str], remedy: str, if_missing: str | None = None
) -> Iterator[None]:
    """Translate an OSError raised while reading a published file.

    A damaged file is a `CorruptionError`, a missing one a `MissingFileError`; the cache may rebuild
    it. Missing permission or too many open files do not mean damage: they are a `CacheError`.
    """
    try:
        yield
    except CorruptionError:
        raise
    except FileNotFoundError as error:
        raise MissingFileError(f"missing; {if_missing or remedy}", path=path) from error
    except SourceError as error:  # raised by a remote store
        raise CacheError(error.message, path=path, offset=error.offset) from error
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        if error.errno in _DAMAGE:
            raise CorruptionError(f"{message}; {remedy}", path=path) from error
        raise CacheError(message, path=path) from error


def file_checksum(path: Path) -> str:
    hasher, buffer = xxhash.xxh3_128(), memoryview(bytearray(1 << 18))
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(buffer):
            hasher.update(buffer[:size])
    return hasher.hexdigest()


def require_file(path: Path, size: int | None, checksum: str | None, remedy: str) -> Path:
    """Return the path if the file has this size and checksum; None skips a comparison."""
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
    """Map a flat file as an array; read it where mapping is unsafe."""
    import numpy as np

    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    if is_network(path):
        return np.fromfile(path, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def quarantine(root: Path, path: Path) -> None:
    """Move a damaged file or directory to ``quarantine/``; open descriptors stay valid."""
    directory = root / "quarantine"
    with writing_errors(path):
        make_directory(directory, root)
        with contextlib.suppress(FileNotFoundError):  # another process moved it first
            os.rename(path, directory / f"{path.name}.{secrets.token_hex(8)}")
            sync_directory(path.parent)


@dataclass(frozen=True)
class ArtifactKind:
    """Name and layout of one kind of artifact.

    The summary is canonical JSON ``{"checksum": …, "record": …}`` and a line feed. If the record
    is bytes (``raw``), the summary is the checksum, a line feed and the record.
    """

    name: str  # for messages
    summary: str  # file name; "" if the artifact is a summary alone, without a directory
    files: tuple[str, ...] = ()  # names of the data files
    remedy: str = "remove the directory to rebuild it"
    raw: bool = False

    def summary_of(self, path: Path) -> Path:
        return path / self.summary if self.summary else path

    def encode(self, record: Any) -> bytes:
        data = record if self.raw else fingerprint.canonical(record)
        checksum = fingerprint.checksum(data)
        if self.raw:
            return checksum.encode() + b"\n" + data
        return fingerprint.canonical_of_parsed({"checksum": checksum, "record": record}) + b"\n"

    def _decode(self, data: bytes) -> Any:
        """Return the record, or None if `encode` returns different bytes for it."""
        if self.raw:
            record: Any = data.partition(b"\n")[2]
        else:
            record = msgspec.json.decode(data, type=dict[str, Any])["record"]
        return record if self.encode(record) == data else None

    @contextlib.contextmanager
    def stage(self, root: Path, *, beside: Path | None = None) -> Iterator[ArtifactWriter]:
        """Stage an artifact in a cache, or ``beside`` a target outside; see `Staging`."""
        with Staging(root, beside=beside) as staging:
            yield ArtifactWriter(self, staging)

    def write(self, root: Path, path: Path, record: Any) -> None:
        """Publish an artifact that is a summary alone; replace a damaged one."""
        with self.stage(root) as writer:
            writer.publish(path, record, is_intact=lambda: not self._is_broken(path, root))

    def _is_broken(self, path: Path, root: Path) -> bool:
        try:
            self.open(path, root)
        except CorruptionError:
            return True
        except CacheError:
            pass
        return False

    def open(self, path: Path, root: Path | None = None) -> Artifact:
        """Verify the summary of an artifact in the cache ``root``; None is two levels above."""
        self._require_inside(path, root)
        return self._opened(path)

    def _require_inside(self, path: Path, root: Path | None) -> None:
        for file in (self.summary_of(path), *(path / name for name in self.files)):
            require_inside(file, root or path.parent.parent)

    def _opened(self, path: Path) -> Artifact:
        summary = self.summary_of(path)
        try:
            with reading_errors(summary, self.remedy):
                data = read_bounded(summary)
        except CorruptionError as error:
            if path.exists():
                raise
            message = f"the {self.name} was removed; open its source again"
            raise CacheError(message, path=path) from error
        try:
            record, problem = self._decode(data), "differs from what was written"
        except (msgspec.MsgspecError, ValueError, KeyError, TypeError, RecursionError) as error:
            record, problem = None, f"not the summary of a {self.name} ({error})"
        if record is None:
            raise CorruptionError(f"{problem}; {self.remedy}", path=summary)
        return Artifact(self, path, record)

    def open_or_none(self, path: Path, root: Path | None = None) -> Any:
        """Return the record, or None if the artifact is absent or damaged."""
        self._require_inside(path, root)
        # Usually it is absent. From Python 3.12 on, an error raised through a context manager keeps
        # the variables of all callers, for example a store, alive until cycles are collected.
        if not os.path.exists(self.summary_of(path)):
            return None
        try:
            return self._opened(path).record
        except (CorruptionError, CacheError):
            return None


@dataclass(frozen=True)
class Artifact:
    """An artifact whose summary was verified."""

    kind: ArtifactKind
    directory: Path
    record: Any

    def corruption_error(self, message: str, name: str = "") -> CorruptionError:
        path = self.directory / name if name else self.kind.summary_of(self.directory)
        return CorruptionError(f"{message}; {self.kind.remedy}", path=path)

    def convert(self, kind: type[Record]) -> Record:
        try:
            return msgspec.convert(self.record, kind)
        except msgspec.ValidationError as error:
            raise self.corruption_error(
                f"not the record of a {self.kind.name} ({error})"
            ) from error

    def require_document(self, document: Any) -> None:
        stored = fingerprint.canonical_of_parsed(self.record["document"])
        if stored != fingerprint.canonical(document):
            raise self.corruption_error("the record has another key than its directory")

    def require(self, name: str, *, size: int | None = None, checksum: str | None = None) -> Path:
        return require_file(self.directory / name, size, checksum, self.kind.remedy)

    def read(self, name: str, size: int, checksum: str) -> bytes:
        path = self.require(name, size=size)
        with reading_errors(path, self.kind.remedy):
            data = path.read_bytes()
        actual = fingerprint.checksum(data)
        require_checksum(self.directory / name, actual, checksum, self.kind.remedy)
        return data

    def array(self, name: str, dtype: str, count: int, checksum: str) -> npt.NDArray[Any]:
        path = self.require(name, size=count * int(dtype[2:]), checksum=checksum)
        return map_array(path, dtype)


@dataclass(frozen=True)
class ArtifactWriter:
    kind: ArtifactKind
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
        self.staging.make(self.staging.path / "artifact")
        return self.staging.path / "artifact" / name

    def publish(
        self, path: Path, record: Any, *, is_intact: Callable[[], bool] | None = None
    ) -> bool:
        """Write the summary and publish the artifact; return whether ours is now visible.

        ``is_intact`` checks an existing artifact; a damaged one is moved to quarantine first.
        """
        summary = self.kind.summary_of(Path("artifact"))
        self.staging.write(str(summary), self.kind.encode(record))
        if is_intact is not None and path.exists() and not is_intact():
            quarantine(self.staging.root, path)
        return self.staging.publish(self.staging.path / "artifact", path)


def files_below(root: Path) -> list[tuple[str, Path]]:
    """Return the files of a directory, sorted, with their names in it."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return [(path.relative_to(root).as_posix(), path) for path in paths]


def publish_files(root: Path, path: Path, files: Mapping[str, bytes]) -> None:
    """Publish a directory of files that have their own checksums or are named by content."""
    with Staging(root) as staging:
        for name, data in files.items():
            staging.write(f"files/{name}", data)
        if files:
            staging.publish(staging.path / "files", path)
