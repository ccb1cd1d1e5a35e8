"""Rows for display, columns over all rows of a store, and lookup of rows by rule or origin."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill._core.origin import Origin
from tokenmill.build.plan import SliceKeys
from tokenmill.data.order import FeistelOrder
from tokenmill.data.view import as_view
from tokenmill.errors import TokenmillError, UsageError, check_one_of
from tokenmill.rl.verdict import CLASSES
from tokenmill.sources.rows import Rows, open_rows
from tokenmill.store import EXTRA, Media, Sidecar, Store

MAX_REFERENCE = 200  # characters of an image's reference
MAX_GROUP_ROWS = 256  # of a recorded group; more rows share a label rather than a prompt
MAX_FINDINGS = 40  # of one row
MAX_FINDING_TEXT = 400  # characters
UNCHECKED = "unchecked"

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_numbers = msgspec.json.Decoder(list[float | None])


@dataclass(frozen=True)
class RowView:
    number: int
    ids: list[int]
    pieces: list[str]  # see `_texts`
    mask: list[int]
    kinds: list[str]  # see `token_kinds`
    turns: list[tuple[str, int, int]]  # role, first token, end
    origin: Origin
    extra: dict[str, Any]
    sidecars: dict[str, float | list[float]]  # per row or per token; includes loss weights
    media: list[Media]

    def document(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in vars(self).items() if name != "number"},
            "row": self.number,
            "turns": [list(turn) for turn in self.turns],
            "origin": self.origin._asdict(),
            "media": [media_document(media) for media in self.media],
        }


def view_row(store: Store, number: int) -> RowView:
    row, tokenizer = store[number], store.tokenizer
    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    kinds = token_kinds(mask, tokenizer.is_special(ids).tolist())
    return RowView(
        number=number if number >= 0 else len(store) + number,
        ids=ids,
        pieces=_texts(tokenizer.pieces(ids), kinds),
        mask=mask,
        kinds=kinds,
        turns=row.turns,
        origin=row.origin,
        extra=row.extra,
        sidecars=attached_to(store.sidecars, number)
        | ({"loss_weights": row.weights.tolist()} if store.has_weights else {}),
        media=row.media,
    )


def token_kinds(mask: Sequence[int], special: Sequence[bool]) -> list[str]:
    """Return the kind of each token; ``end_of_turn`` is a control token that ends trained text."""
    kinds = []
    for at, (trained, control) in enumerate(zip(mask, special, strict=True)):
        if not control:
            kinds.append("trained" if trained else "untrained")
        elif not trained:
            kinds.append("special")
        else:
            kinds.append("end_of_turn" if at + 1 == len(mask) or not mask[at + 1] else "control")
    return kinds


def _texts(pieces: Sequence[bytes], kinds: Sequence[str]) -> list[str]:
    r"""Return the text of each token; a character of several tokens is in the last of them.

    Bytes that are no character within tokens of one kind are shown as ``\xe4``.
    """
    texts: list[str] = []
    for _, run in groupby(zip(kinds, pieces, strict=True), itemgetter(0)):
        *before, last = (piece for _, piece in run)
        decoder = getincrementaldecoder("utf-8")("backslashreplace")
        texts += [*map(decoder.decode, before), decoder.decode(last, final=True)]
    return texts


def media_document(media: Media) -> dict[str, Any]:
    names = ("start", "count", "width", "height", "digest")
    return {
        **{name: getattr(media, name) for name in names},
        "grid": None if media.grid is None else list(media.grid),
        "reference": media.reference[:MAX_REFERENCE],
    }


def attached_to(sidecars: Sequence[Sidecar], number: int) -> dict[str, float | list[float]]:
    attached = {}
    for label, sidecar in labelled(sidecars):
        values = sidecar[number]
        attached[label] = values if isinstance(values, float) else values.tolist()
    return attached


def labelled(sidecars: Sequence[Sidecar]) -> list[tuple[str, Sidecar]]:
    """Return sidecars with their names; the producer distinguishes sidecars of one name."""
    counts = Counter(sidecar.name for sidecar in sidecars)
    return [
        (one.name if counts[one.name] == 1 else f"{one.name} {one.producer}", one)
        for one in sidecars
    ]


def answer_name(label: bool | None, place: int, size: int) -> str:
    if label is None:
        return f"rank {place + 1}" if size > 1 else ""
    good, bad = ("chosen", "rejected") if size == 2 else ("wanted", "unwanted")
    return good if label else bad


class RowGroups:
    """Groups of rows; a group with more than ``max_rows`` rows has no members."""

    def __init__(self, group_of: Int64, max_rows: int | None = None) -> None:
        self.group_of = group_of
        self._max_rows = len(group_of) if max_rows is None else max_rows
        self._order = np.argsort(group_of, kind="stable")
        count = int(group_of.max(initial=-1)) + 1
        self._bounds = np.searchsorted(group_of[self._order], np.arange(count + 1))

    @classmethod
    def stored(cls, store: Store) -> RowGroups:
        view = as_view(store)
        starts = view.group_starts(np.arange(view.group_count + 1, dtype=np.int64))
        return cls(np.repeat(np.arange(view.group_count), np.diff(starts)))

    @classmethod
    def recorded(cls, names: Sequence[str], steps: Sequence[str]) -> RowGroups:
        """Group rollouts by equal ``group`` and ``step``, given as JSON texts."""
        known: dict[tuple[str, str] | int, int] = {}
        numbers = (
            known.setdefault(row if name == "null" else (name, step), len(known))
            for row, (name, step) in enumerate(zip(names, steps, strict=True))
        )
        return cls(np.fromiter(numbers, np.int64, len(names)), MAX_GROUP_ROWS)

    def members(self, group: int) -> Int64:
        rows: Int64 = self._order[self._bounds[group] : self._bounds[group + 1]]
        return rows if len(rows) <= self._max_rows else rows[:0]

    def with_groups(self, rows: Int64) -> Int64:
        complete: dict[int, None] = {}
        for row, group in zip(rows.tolist(), self.group_of[rows].tolist(), strict=True):
            if row not in complete:
                complete |= dict.fromkeys(self.members(group).tolist() or [row])
        return np.fromiter(complete, np.int64, len(complete))


class RowFacts:
    def __init__(self, store: Store) -> None:
        self.store = store

    @cached_property
    def extra(self) -> tuple[str, ...]:
        return tuple(self.store.slice_at(0).record.extra) if len(self.store.table) else ()

    @cached_property
    def numbers(self) -> dict[str, Float64]:
        """Extra columns and per-row sidecars with only numbers; null becomes NaN."""
        numbers = {}
        first = self.store[0].extra_json if len(self.store) else {}
        for name, text in first.items():
            # The first row excludes most text columns without reading them.
            column = self._number(name) if _as_numbers([text]) is not None else None
            if column is not None and not np.isnan(column).all():
                numbers[name] = column
        for label, sidecar in labelled(self.store.sidecars):
            if sidecar.per == "row" and label not in numbers:
                numbers[label] = np.asarray(sidecar.values, np.float64)
        return numbers

    @cached_property
    def drift(self) -> NDArray[np.int8] | None:
        """Index of each row's class in `CLASSES`, or -1; None if the rows are not rollouts."""
        if not {"drift", "findings"} <= set(self.extra):
            return None
        known = {json.dumps(name): place for place, name in enumerate(CLASSES)}
        return np.array([known.get(text, -1) for text in self._texts("drift")], np.int8)

    @cached_property
    def groups(self) -> RowGroups | None:
        if self.store.has_groups:
            return RowGroups.stored(self.store)
        if self.drift is None or not {"group", "step"} <= set(self.extra):
            return None
        return RowGroups.recorded(self._texts("group"), self._texts("step"))

    def drift_of(self, number: int) -> str | None:
        place = -1 if self.drift is None else int(self.drift[number])
        return None if place < 0 else CLASSES[place]

    def numbers_of(self, number: int) -> dict[str, float | None]:
        """Return the numbers of one row; None if not finite, which JSON does not support."""
        values = {name: float(column[number]) for name, column in self.numbers.items()}
        return {name: value if np.isfinite(value) else None for name, value in values.items()}

    def _texts(self, name: str) -> list[str]:
        column = EXTRA + name
        return [text for _, columns in self.store.columns([column]) for text in columns[column]]

    def _number(self, name: str) -> Float64 | None:
        column = EXTRA + name
        parts = [np.empty(0)]
        for _, columns in self.store.columns([column]):
            values = _as_numbers(columns[column])
            if values is None:
                return None
            parts.append(values)
        return np.concatenate(parts)


def _as_numbers(texts: Sequence[str]) -> Float64 | None:
    try:
        return np.array(_numbers.decode(f"[{','.join(texts)}]"), np.float64)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def findings_of(extra: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of a rollout, the most severe first; ignore anything malformed."""
    listed = extra.get("findings")
    findings = []
    for one in listed if isinstance(listed, list) else []:
        if not isinstance(one, dict):
            continue
        texts = {
            name: value[:MAX_FINDING_TEXT] if isinstance(value := one.get(name), str) else ""
            for name in ("kind", "expected", "found", "detail")
        }
        places = {
            name: value if type(value := one.get(name)) is int and value >= 0 else None
            for name in ("turn", "token")
        }
        drift = one.get("class")
        findings.append({"class": drift if drift in CLASSES else None, **texts, **places})
    severity = {name: place for place, name in enumerate(CLASSES)}
    findings.sort(key=lambda one: -severity.get(str(one["class"]), -1))
    return findings[:MAX_FINDINGS]


# Rows by rule or by address. An *address* is the text of an `Origin`: ``file:line``, or
# ``file#row`` for formats without lines. The file may be the end of a path.

RULES = ("longest", "shortest", "least-trained", "rejected", "random")
EXCERPT_BYTES = 2048


Rejected = tuple[Origin, str, str]  # origin, reason, detail


def rows_by_rule(store: Store, rule: str, count: int, seed: int = 0) -> list[int]:
    if rule == "rejected":
        raise UsageError(("rule", rule), " selects no rows of the store")
    check_one_of("rule", rule, RULES)
    rows = len(store)
    count = min(count, rows)
    if rule == "random" and rows:
        return list(map(int, FeistelOrder(rows, seed).indices(0, np.arange(count))))
    return list(map(int, np.argsort(row_weights(store, rule), kind="stable")[:count]))


def row_weights(store: Store, order: str) -> Float64:
    weights: Float64 = store.lengths.astype(np.float64)
    if order in ("least-trained", "most-trained"):
        weights = store.trained / np.maximum(weights, 1)
    return -weights if order in ("longest", "most-trained") else weights


def rows_at_address(store: Store, address: str) -> tuple[list[int], list[Rejected]]:
    """Return rows and rejected rows from the source row at ``file:line`` or ``file#row``."""
    match = re.fullmatch(r"(.+?)([:#])(\d+)", address, re.DOTALL)
    if match is None:
        message = f" must be file:line, or file#row (rows count from 0), got {address!r}"
        raise UsageError(("origin",), message)
    sources = sources_named(store, match[1])
    number, by_line = int(match[3]), match[2] == ":"
    rows = [
        row
        for source in sources
        for row in rows_of_source_row(store, source, number, by_line=by_line)
    ]
    path = store.sources[sources[0]]
    rejected = [
        row
        for row in store.rejected_rows()
        if row[0].path == path and (row[0].line if by_line else row[0].row) == number
    ]
    if not rows and not rejected:
        unit = "line" if by_line else "row"
        raise UsageError(("origin", address), f": no row of this store comes from that {unit}")
    return rows, rejected


def sources_named(store: Store, name: str) -> list[int]:
    paths = [path or "" for path in store.sources]
    exact = [number for number, path in enumerate(paths) if path == name]
    ending = [number for number, path in enumerate(paths) if path.endswith(f"/{name}")]
    for numbers in (exact, ending):
        distinct = sorted({paths[number] for number in numbers})
        if len(distinct) == 1:
            return numbers
        if distinct:
            several = ", ".join(distinct[:5])
            raise UsageError(f"{name!r} matches several sources of this store: {several}")
    known = ", ".join(paths[:5]) + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")
    raise UsageError(f"this store has no source {name!r}; its sources are {known}")


def rows_of_source_row(store: Store, source: int, number: int, *, by_line: bool) -> list[int]:
    first, column = ("line", "line_in_slice") if by_line else ("source_row", "row_in_slice")
    slices = np.flatnonzero(store.table["source"] == source)
    starts = store.table[first][slices]
    rows: list[int] = []
    # A source may be listed twice, so its slices need not be sorted.
    for at in slices[(starts <= number) & (starts > 0 if by_line else True)]:
        entry = store.table[at]
        is_match = store.slice_at(int(at)).column(column) == number - int(entry[first])
        rows += (int(entry["first_row"]) + np.flatnonzero(is_match)).tolist()
    return rows


class SourceExcerpts:
    """Reads excerpts of a store's source rows; ``fetch`` allows remote sources.

    A store may come from anybody and contains the paths of its sources. So only local files are
    opened unless ``fetch`` is set, and only bytes of blocks that the store was built from are
    shown; the keys of its slices contain their digests.
    """

    def __init__(self, store: Store, cache_dir: str | None = None, *, fetch: bool = False) -> None:
        self._store = store
        self._cache_dir = cache_dir
        self._fetch = fetch
        # By path: the rows, the first row of every block, and whether the store has its slice.
        self._opened: dict[str, tuple[Rows, list[int], list[bool]] | str] = {}

    def excerpt(self, origin: Origin, max_bytes: int = EXCERPT_BYTES) -> dict[str, Any]:
        """Return ``{text, bytes, cut, note}``; the note gives the reason if text is None."""
        if origin.path is None:
            return no_excerpt("this store does not contain the paths of its source files")
        # A path that is not a local file may be a URL or a hub dataset.
        if not self._fetch and not os.path.lexists(origin.path):
            return no_excerpt("the source is not on this machine; --fetch-sources downloads it")
        opened = self._open(origin.path)
        if isinstance(opened, str):
            return no_excerpt(opened)
        rows, firsts, known = opened
        try:
            there = rows.origin(origin.row)
            raw = rows.raw(origin.row)
        except (TokenmillError, IndexError) as error:
            return no_excerpt(f"the source no longer has this row: {error}")
        same = len(raw) == origin.length and there.offset == origin.offset
        if not same or not known[bisect_right(firsts, origin.row) - 1]:
            return no_excerpt("not shown: the source changed after the build")
        text = raw[:max_bytes].decode("utf-8", "backslashreplace")
        return {"text": text, "bytes": len(raw), "cut": max(0, len(raw) - max_bytes), "note": ""}

    def _open(self, path: str) -> tuple[Rows, list[int], list[bool]] | str:
        if path not in self._opened:
            try:
                rows = open_rows(path, cache_dir=self._cache_dir)
                blocks = list(rows.blocks())
                slices, keys = self._slice_keys
                known = [not keys.isdisjoint(slices.in_store(block)) for block in blocks]
                self._opened[path] = rows, [block.first_row for block in blocks], known
            except (TokenmillError, OSError) as error:
                self._opened[path] = f"cannot read the source: {error}"
        return self._opened[path]

    @cached_property
    def _slice_keys(self) -> tuple[SliceKeys, set[str]]:
        manifest = self._store.manifest
        recipe = manifest["document"].get("recipe", {})
        return SliceKeys(recipe, manifest["tokenizer"]["identity"]), set(self._store.slice_keys())


def no_excerpt(note: str) -> dict[str, Any]:
    return {"text": None, "bytes": 0, "cut": 0, "note": note}
