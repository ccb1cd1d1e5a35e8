"""The length index on disk: one number per source row, sealed under ``rows/<key>/``.

A `LengthIndex` is an opened directory: ``lengths.bin`` (little-endian int32 per row of the source),
``rejected.jsonl`` (one line per row that is no prompt: row number, reason, detail) and
``prompts.json``, the summary: the whole key document, counts, the checksums of the other two
files, and the chat template, so that serving needs no tokenizer. A length is the number of tokens,
`REJECTED` for a row that is no prompt, or `NO_LENGTH` for messages that no template renders and
for every prompt where no tokenizer was given.

While an index is being made, each block of the source has a *part*: the small sealed file
``rows/<part key>/part.bin``, a line of JSON (row count, rejections) and the lengths as int32. Its
key is the content: the spec, the tokenizer's identity and the digest of the block's bytes, so an
appended file measures only its new blocks, and a killed run is taken up where it was. A part that
is damaged or gone is measured again.

`Kept` says which rows a limit keeps: a compare of stored lengths.

Opening checks everything against its checksum and the document against the caller's: a truncated,
flipped or swapped part is a `CorruptionError` before a prompt is served. Whoever publishes second
must have made the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill import fingerprint
from tokenmill.errors import NonDeterminismError
from tokenmill.files.sealed import SealedKind

LENGTHS = "lengths.bin"
REJECTIONS = "rejected.jsonl"
REJECTED = -1  # the row is no prompt
NO_LENGTH = -2  # served as it is, never filtered: messages, or nobody to count tokens
PART_VERSION = 1
PAGE = 4096  # rows per running count of `Kept`: a page is 16 KiB, compared in two microseconds

_KIND = SealedKind("length index", "prompts.json", (LENGTHS, REJECTIONS))
_PART = SealedKind("part of a length index", "part.bin", raw=True)

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


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


Measured = tuple[Int32Array, list[Rejection]]
"""Lengths of a block's rows, and its rejections, numbered within the block."""


class _LengthRecord(msgspec.Struct, frozen=True):
    """What the summary says."""

    document: dict[str, Any]
    rows: int
    rejected: dict[str, int]
    checksums: dict[str, str]
    template: str | dict[str, str] | None
    special_tokens: dict[str, str]


class LengthIndex:
    """An index, opened and checked.

    Args:
        directory: ``rows/<key>``.
        document: What the index must be of; None believes the directory's own, whose key must
            then be its name.

    Attributes:
        rows: Rows of the source.
        lengths: One number for each of them.
        rejected: How many are no prompts, by reason.
        template: The chat template that prompts are rendered with.
        special_tokens: Those that it may print.

    Raises:
        CorruptionError: It is not what was written, or of something else.
        CacheError: It is not there.
    """

    def __init__(self, directory: Path, document: Any = None) -> None:
        self.directory = directory
        self._sealed = sealed = _KIND.admit(directory)
        record = sealed.convert(_LengthRecord)
        if document is not None:
            sealed.require_document(document)
        elif fingerprint.key(record.document) != directory.name:
            raise sealed.refusal("an index of other rows lies here")
        stated = record.checksums
        self.lengths: Int32Array = sealed.array(
            LENGTHS, "<i4", record.rows, stated.get(LENGTHS, "")
        )
        sealed.require(REJECTIONS, checksum=stated.get(REJECTIONS, ""))
        self.rows = record.rows
        self.rejected = record.rejected
        self.template = record.template
        self.special_tokens = record.special_tokens

    def rejections(self) -> Iterator[Rejection]:
        """Every row that is no prompt, in order."""
        path = self.directory / REJECTIONS
        try:
            with open(path, "rb") as lines:
                for line in lines:
                    yield Rejection(*msgspec.json.decode(line))
        except (OSError, msgspec.MsgspecError, TypeError) as error:
            raise self._sealed.refusal(f"cannot be read ({error})", REJECTIONS) from error


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
    with _KIND.stage(root) as draft:
        with draft.open(LENGTHS) as lengths, draft.open(REJECTIONS) as rejected:
            for part, rejections in parts:
                rows += len(part)
                lengths.write(part.astype("<i4").data)
                for rejection in rejections:
                    counts[rejection.reason] = counts.get(rejection.reason, 0) + 1
                    rejected.write(fingerprint.canonical(list(rejection)) + b"\n")
        record = {
            "document": document,
            "rows": rows,
            "rejected": dict(sorted(counts.items())),
            "checksums": draft.checksums,
            **serving,
        }
        if not draft.publish(place, record):
            theirs = _KIND.admit(place).convert(_LengthRecord)
            if theirs.checksums != draft.checksums:
                raise NonDeterminismError(
                    "another builder measured other lengths for the same prompts", path=place
                )


def part_key(shape: str, kind: str, digest: str) -> str:
    """The key of the part that a block becomes."""
    return fingerprint.key({"part": PART_VERSION, "shape": shape, "kind": kind, "digest": digest})


def write_part(root: Path, place: Path, part: Measured) -> None:
    """Publish a part; one that is there and whole stays."""
    lengths, said = part
    body = lengths.astype("<i4").tobytes()
    head = {"rows": len(lengths), "rejected": [list(rejection) for rejection in said]}
    _PART.write(root, place, fingerprint.canonical(head) + b"\n" + body)


def read_part(place: Path, rows: int) -> Measured | None:
    """A part; None where it is missing or not what was written."""
    data = _PART.admit_or_none(place)
    if data is None:
        return None
    try:
        head, _, body = data.partition(b"\n")
        document = msgspec.json.decode(head)
        lengths = np.frombuffer(body, "<i4")
        if len(lengths) != rows or document["rows"] != rows:
            return None
        return lengths, [Rejection(*rejection) for rejection in document["rejected"]]
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError):
        return None


class Kept:
    """The rows that a limit keeps, and the k-th of them, straight from the mapped lengths.

    It keeps one running count per page of `PAGE` rows and nothing per row; finding rows compares a
    page again, which takes microseconds. So another ``max_length`` is one vectorised pass over four
    bytes per row, and nothing is written for it.

    The rule is that of the eager datasets: a prompt is kept when its tokens, counted without added
    special tokens, are at most ``max_length``. Messages that no template renders have no length;
    where the first prompt is such a list, nothing is filtered.

    Args:
        lengths: One per source row, mapped.
        max_length: Most tokens of a prompt; None keeps every prompt.

    Attributes:
        overlong: Prompts that the limit leaves out.
    """

    def __init__(self, lengths: Int32Array, max_length: int | None) -> None:
        self._lengths = lengths
        self._limit = max_length
        prompts = 0
        counts = np.zeros(-(-len(lengths) // PAGE) + 1, dtype=np.int64)
        if max_length is not None and self._first() == NO_LENGTH:
            self._limit = None
        for number in range(len(counts) - 1):
            page = lengths[number * PAGE : (number + 1) * PAGE]
            prompts += int(np.count_nonzero(page != REJECTED))
            counts[number + 1] = np.count_nonzero(self._passes(page))
        self._before = np.cumsum(counts)
        self.overlong = prompts - len(self)

    def _first(self) -> int:
        for start in range(0, len(self._lengths), PAGE):
            page = self._lengths[start : start + PAGE]
            prompts = page[page != REJECTED]
            if prompts.size:
                return int(prompts[0])
        return REJECTED

    def _passes(self, lengths: Int32Array) -> npt.NDArray[np.bool_]:
        passes: npt.NDArray[np.bool_] = lengths != REJECTED
        if self._limit is not None:
            passes &= lengths <= self._limit
        return passes

    def __len__(self) -> int:
        return int(self._before[-1])

    def rows(self, numbers: Int64Array) -> Int64Array:
        """The source rows of kept ones, by their numbers among the kept."""
        pages = np.searchsorted(self._before, numbers, side="right") - 1
        found = np.empty(numbers.shape, dtype=np.int64)
        for page in np.unique(pages).tolist():
            here = pages == page
            start = page * PAGE
            passing = np.flatnonzero(self._passes(self._lengths[start : start + PAGE]))
            found[here] = start + passing[numbers[here] - self._before[page]]
        return found

    def row(self, number: int) -> int:
        """The source row of one: the scalar twin."""
        page = int(np.searchsorted(self._before, number, side="right")) - 1
        start = page * PAGE
        passing = np.flatnonzero(self._passes(self._lengths[start : start + PAGE]))
        return start + int(passing[number - int(self._before[page])])

    def overlong_rows(self) -> Int64Array:
        """The source rows that the limit leaves out, in order."""
        if self._limit is None:
            return np.zeros(0, dtype=np.int64)
        out = (self._lengths != REJECTED) & (self._lengths > self._limit)
        return np.flatnonzero(out)
