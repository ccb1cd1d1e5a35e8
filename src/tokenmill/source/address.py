"""How a source is spelled, and what part of it is meant.

An *address* is ``path``, ``path@[a:b]``, ``directory@split`` or ``directory@split[a:b]``, where
the path may be a file, a directory or a glob, here or at a URL (``s3://bucket/*.jsonl@[:1000]``).
A dataset of the hub is ``owner/name``, with ``@revision`` and ``:split`` or ``:config/split``
behind it as far as needed (``owner/name@v1.2:train[:1000]``), or the same after
``hf://datasets/``; a path behind that names a file in the dataset instead.

The slice has Python's meaning on the concatenation of everything the path leads to: open ends,
negative bounds, bounds beyond the end. A bound may be a percentage (``train[10%:20%]``), rounded
to the closest row as `datasets` does. Steps are refused. Other splits belong to directories made by
``save_to_disk``.

A file whose own name looks like an address wins over the reading as one.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from tokenmill.errors import UsageError
from tokenmill.files.remote import is_remote, local_path

_SLICED = re.compile(
    r"^(?P<path>.*)@(?P<split>[A-Za-z0-9_][\w.\-]*)?(?P<slice>\[[^\[\]]*\])$", re.S
)
_SPLIT = re.compile(r"^(?P<path>.+)@(?P<split>[A-Za-z0-9_][\w\-]*)$", re.S)
_HUB = re.compile(
    r"^(?P<scheme>hf://datasets/)?(?P<repo>(?(scheme)(?:\w[\w.\-]*/)?|\w[\w.\-]*/)\w[\w.\-]*)"
    r"(?:@(?P<revision>refs/[\w./\-]+|[\w.\-]+))?"
    r"(?::(?P<split>[\w.\-]+(?:/[\w.\-]+)?))?"
    r"(?:@?(?P<slice>\[[^\[\]]*\]))?$"
)
FAMILIES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_BOUND = re.compile(r"^(?P<number>-?\d+(?:_\d+)*)(?P<percent>%?)$")


@dataclass(frozen=True, slots=True)
class Bound:
    """One end of a slice: a row number, or a percentage of the rows."""

    number: int
    percent: bool = False

    def rows(self, total: int) -> int:
        """The bound in rows, still possibly negative."""
        return round(self.number * total / 100.0) if self.percent else self.number


@dataclass(frozen=True, slots=True)
class Selection:
    """A slice of a concatenation."""

    start: Bound | None = None
    stop: Bound | None = None

    def resolve(self, total: int) -> tuple[int, int]:
        """First row and behind the last row, of a number of rows."""
        start = None if self.start is None else self.start.rows(total)
        stop = None if self.stop is None else self.stop.rows(total)
        first, last, _ = slice(start, stop).indices(total)
        return first, max(first, last)


@dataclass(frozen=True, slots=True)
class HubName:
    """A dataset of the hub, as it was asked for."""

    repo: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """A path with the split and slice that were asked of it."""

    path: str
    split: str | None = None
    selection: Selection | None = None
    hub: HubName | None = None


def parse_address(text: str) -> Address:
    """Read an address.

    Raises:
        UsageError: It is empty, or its slice is none.
    """
    if not text:
        raise UsageError("the source is an empty string")
    if os.path.lexists(text):
        return Address(text)
    hub = _in_hub(text)
    if hub is not None:
        return hub
    text = local_path(text)
    sliced = _SLICED.match(text)
    if sliced:
        if not sliced["path"]:
            raise UsageError(f"{text!r}: a path must stand before the @")
        return Address(sliced["path"], sliced["split"], parse_selection(sliced["slice"], text))
    split = _SPLIT.match(text)
    if split and (is_remote(split["path"]) or os.path.isdir(split["path"])):
        return Address(split["path"], split["split"])
    return Address(text)


def _in_hub(text: str) -> Address | None:
    """The reading as a dataset of the hub; None when it is none."""
    match = _HUB.match(text)
    if match is None:
        return None
    owner, _, name = match["repo"].rpartition("/")
    known = os.path.splitext(name)[1].lower() in FAMILIES | COMPRESSIONS
    if not match["scheme"] and (known or os.path.isdir(owner) or set(owner) == {"."}):
        return None  # a file that is missing here, not a dataset elsewhere
    selection = parse_selection(match["slice"], text) if match["slice"] else None
    hub = HubName(match["repo"], match["revision"])
    return Address(text, match["split"], selection, hub)


def parse_selection(text: str, context: str) -> Selection:
    """Read ``[a:b]``."""
    parts = text[1:-1].split(":")
    if len(parts) == 3:
        raise UsageError(f"{context!r}: a slice has no step, write [start:stop]")
    if len(parts) != 2:
        raise UsageError(f"{context!r}: write a slice as [start:stop], either may be left out")
    return Selection(_bound(parts[0], context), _bound(parts[1], context))


def _bound(text: str, context: str) -> Bound | None:
    text = text.strip()
    if not text:
        return None
    match = _BOUND.match(text)
    if match is None:
        raise UsageError(f"{context!r}: {text!r} is neither a row number nor a percentage")
    number, percent = int(match["number"]), bool(match["percent"])
    if percent and abs(number) > 100:
        raise UsageError(f"{context!r}: {text} is more than the whole")
    return Bound(number, percent)
