"""The length index on disk: one number per source row, published whole under ``rows/<key>/``.

A `LengthIndex` is an opened directory: ``lengths.bin`` (little-endian int32 per row of the source),
``rejected.jsonl`` (one line per row that is no prompt: row number, reason, detail) and
``prompts.json``, the sealed record: the whole key document, counts, the checksums of the other two
files, and the chat template, so that serving needs no tokenizer. A length is the number of tokens,
`REJECTED` for a row that is no prompt, or `NO_LENGTH` for messages that no template renders.

Opening checks the record against its seal and the document against the caller's, then both files
against their checksums: a truncated, flipped or swapped part is a `CorruptionError` before a
prompt is served. Publishing is one rename; whoever comes second must have made the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.errors import CacheError, CorruptionError, NonDeterminismError
from tokenmill.files import Staging, is_network, require_inside

RECORD = "prompts.json"
LENGTHS = "lengths.bin"
REJECTIONS = "rejected.jsonl"
REJECTED = -1  # the row is no prompt
NO_LENGTH = -2  # messages that are served as they are: nothing to count, never filtered

_REMEDY = "remove the directory to have it made again"

Int32Array = npt.NDArray[np.int32]


class Rejection(NamedTuple):
    """A row that is no prompt.

    Attributes:
        row: Its number in the source, from 0.
        reason: One of `tokenmill.errors.REASONS`.
        detail: What was said of it.
    """

    row: int
    reason: str
    detail: str


class LengthIndex:
    """An index, opened and checked.

    Args:
        directory: ``rows/<key>``.
        document: What the index must be of; None believes the directory's own, whose key must
            then be its name.

    Raises:
        CorruptionError: It is not what was written, or of something else.
        CacheError: It is not there.
    """

    def __init__(self, directory: Path, document: Any = None) -> None:
        self.directory = directory
        for name in (RECORD, LENGTHS, REJECTIONS):
            require_inside(directory / name, directory.parent.parent)
        self.record = _read_record(directory)
        stated = self.record["document"]
        if document is None:
            if fingerprint.key(stated) != directory.name:
                raise CorruptionError("an index of other rows lies here", path=directory / RECORD)
        elif fingerprint.canonical(stated) != fingerprint.canonical(document):
            raise CorruptionError(
                "an index of other rows lies under this key", path=directory / RECORD
            )
        rows = self.rows
        for name, size in ((LENGTHS, 4 * rows), (REJECTIONS, None)):
            _check_file(directory / name, self.record["checksums"][name], size)
        self.lengths: Int32Array = _mapped(directory / LENGTHS, "<i4")

    @property
    def rows(self) -> int:
        """Rows of the source."""
        return int(self.record["rows"])

    @property
    def rejected(self) -> dict[str, int]:
        """Rows that are no prompts, by reason."""
        return dict(self.record["rejected"])

    @property
    def template(self) -> str | dict[str, str] | None:
        """The chat template that prompts are rendered with."""
        template: str | dict[str, str] | None = self.record["template"]
        return template

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens that the template may print."""
        return dict(self.record["special_tokens"])

    def rejections(self) -> Iterator[Rejection]:
        """Every row that is no prompt, in order."""
        path = self.directory / REJECTIONS
        try:
            with open(path, "rb") as lines:
                for line in lines:
                    yield Rejection(*msgspec.json.decode(line))
        except (OSError, msgspec.MsgspecError, TypeError) as error:
            raise CorruptionError(f"cannot be read ({error}); {_REMEDY}", path=path) from error


def publish_index(
    root: Path,
    place: Path,
    document: Any,
    serving: dict[str, Any],
    parts: Iterable[tuple[Int32Array, Iterable[Rejection]]],
) -> None:
    """Publish an index, unless there is one.

    Args:
        root: The cache directory.
        place: ``rows/<key>`` in it.
        document: The key document.
        serving: What serving needs beside lengths: template and special_tokens.
        parts: Lengths and rejections of consecutive rows; rejections counted from the start.

    Raises:
        NonDeterminismError: Another made other bytes for this key.
    """
    counts: dict[str, int] = {}
    rows = 0
    name = place.name

    with Staging(root) as staging:
        lines = staging.path / "lines"

        def lengths() -> Iterator[bytes]:
            nonlocal rows
            with open(lines, "wb") as said:  # private to this process; published below
                for part, rejections in parts:
                    rows += len(part)
                    for rejection in rejections:
                        counts[rejection.reason] = counts.get(rejection.reason, 0) + 1
                        said.write(fingerprint.canonical(list(rejection)) + b"\n")
                    yield part.astype("<i4").tobytes()

        staged = staging.write(f"{name}/{LENGTHS}", lengths()).parent
        with open(lines, "rb") as said:
            staging.write(f"{name}/{REJECTIONS}", iter(lambda: said.read(1 << 20), b""))
        lines.unlink()
        record = {
            "document": document,
            "rows": rows,
            "rejected": dict(sorted(counts.items())),
            "checksums": {file: _checksum(staged / file) for file in (LENGTHS, REJECTIONS)},
            **serving,
        }
        staging.write(f"{name}/{RECORD}", _sealed(record))
        if not staging.publish(staged, place):
            theirs = _read_record(place)
            if theirs["checksums"] != record["checksums"]:
                raise NonDeterminismError(
                    "another builder measured other lengths for the same prompts", path=place
                )


def _sealed(record: dict[str, Any]) -> bytes:
    encoded = fingerprint.canonical(record)
    return fingerprint.canonical({"record": record, "seal": fingerprint.checksum(encoded)}) + b"\n"


def _read_record(directory: Path) -> dict[str, Any]:
    path = directory / RECORD
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        if directory.is_dir():
            raise CorruptionError(f"missing; {_REMEDY}", path=path) from error
        raise CacheError(
            "the length index is gone; make the PromptDataset again", path=directory
        ) from error
    except OSError as error:
        raise CacheError(f"cannot be read: {error.strerror}", path=path) from error
    try:
        sealed = msgspec.json.decode(data, type=dict[str, Any])
        record: dict[str, Any] = sealed["record"]
        for member in ("document", "rows", "rejected", "checksums", "template", "special_tokens"):
            record[member]
        whole = _sealed(record) == data
    except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"not a length index ({error}); {_REMEDY}", path=path) from error
    if not whole:
        raise CorruptionError(f"not the bytes that were written; {_REMEDY}", path=path)
    return record


def _check_file(path: Path, checksum: str, size: int | None) -> None:
    try:
        actual_size = path.stat().st_size
        if size is not None and actual_size != size:
            raise CorruptionError(f"{actual_size} bytes, expected {size}; {_REMEDY}", path=path)
        actual = _checksum(path)
    except OSError as error:
        raise CorruptionError(f"cannot be read: {error.strerror}; {_REMEDY}", path=path) from error
    if actual != checksum:
        raise CorruptionError(f"checksum {actual}, expected {checksum}; {_REMEDY}", path=path)


def _checksum(path: Path) -> str:
    return fingerprint.checksum(np.ascontiguousarray(_mapped(path, "u1")).data)


def _mapped(path: Path, dtype: str) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    if is_network(path):
        return np.fromfile(path, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
