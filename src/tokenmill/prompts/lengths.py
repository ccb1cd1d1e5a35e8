"""The length index on disk: one number per source row, sealed under ``rows/<key>/``.

A `LengthIndex` is an opened directory: ``lengths.bin`` (little-endian int32 per row of the source),
``rejected.jsonl`` (one line per row that is no prompt: row number, reason, detail) and
``prompts.json``, the summary: the whole key document, counts, the checksums of the other two
files, and the chat template, so that serving needs no tokenizer. A length is the number of tokens,
`REJECTED` for a row that is no prompt, or `NO_LENGTH` for messages that no template renders.

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
from tokenmill.files.sealed import JsonForm, SealedKind

LENGTHS = "lengths.bin"
REJECTIONS = "rejected.jsonl"
REJECTED = -1  # the row is no prompt
NO_LENGTH = -2  # messages that are served as they are: nothing to count, never filtered

_FORM = JsonForm("record", "seal", end=b"\n")
_KIND = SealedKind("length index", "prompts.json", _FORM, (LENGTHS, REJECTIONS))

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


class _Record(msgspec.Struct, frozen=True):
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
        template: The chat template that prompts are rendered with.
        special_tokens: Those that it may print.

    Raises:
        CorruptionError: It is not what was written, or of something else.
        CacheError: It is not there.
    """

    def __init__(self, directory: Path, document: Any = None) -> None:
        self.directory = directory
        self._sealed = sealed = _KIND.admit(directory)
        record = sealed.convert(_Record)
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
        self._rejected = record.rejected
        self.template = record.template
        self.special_tokens = record.special_tokens

    @property
    def rejected(self) -> dict[str, int]:
        """Rows that are no prompts, by reason; the caller's own."""
        return dict(self._rejected)

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
            theirs = _KIND.admit(place).convert(_Record)
            if theirs.checksums != draft.checksums:
                raise NonDeterminismError(
                    "another builder measured other lengths for the same prompts", path=place
                )
