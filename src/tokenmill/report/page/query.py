"""Finding rows of a whole store for a served page: filters, order, text.

In goes a URL's query, out come row numbers of the store; `serve` calls it. A `Query` says what is
wanted; a `RowFinder` answers with row numbers. Source, length and trained share are decided on the
stored columns at once, drift class and numbers on what `RowFacts` read, roles on the stored turns.
Text is looked for in the rows that are left, piece by piece of the store, and *bounded*: one
request reads a stated number of tokens at most and says how far it came, so that a page can go on
from there and no request holds the server. Text means the row as the model sees it, control tokens
included; upper and lower case are alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import UsageError
from tokenmill.report.row_facts import UNJUDGED, RowFacts
from tokenmill.report.row_lookup import row_weights, trained_shares
from tokenmill.rollouts.verdict import CLASSES
from tokenmill.tokenizer import Tokenizer

SCANNED_TOKENS = 20_000_000  # per request; about a second
REMEMBERED = 8  # answers kept, so that paging through one does not find it again
LONGEST_TEXT = 1000  # characters to look for
ORDERS = ("row", "longest", "shortest", "least-trained", "most-trained", "drift")
NUMBER_ORDERS = ("highest", "lowest")
"""Of a number, as ``highest:reward``; rows without it come last in both."""

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Query:
    """What is wanted; None and the empty text want everything."""

    source: int | None = None
    role: str | None = None
    least: int | None = None
    most: int | None = None
    share_least: float | None = None
    share_most: float | None = None
    text: str = ""
    start: int = 0
    order: str = "row"
    changed: bool = False
    drift: str | None = None
    number: str | None = None
    number_least: float | None = None
    number_most: float | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Query:
        """A query out of a URL."""
        order = given.get("order", "row")
        if order not in ORDERS and order.partition(":")[0] not in NUMBER_ORDERS:
            known = [*ORDERS, *(f"{name}:NUMBER" for name in NUMBER_ORDERS)]
            raise UsageError(f"order must be one of {', '.join(known)}")
        drift = given.get("drift") or None
        if drift not in (None, *CLASSES, UNJUDGED):
            raise UsageError(f"drift is one of {', '.join((*CLASSES, UNJUDGED))}")
        text = given.get("text", "")
        if len(text) > LONGEST_TEXT:
            raise UsageError(f"text has at most {LONGEST_TEXT} characters")
        return cls(
            source=whole(given, "source"),
            role=given.get("role") or None,
            least=whole(given, "least"),
            most=whole(given, "most"),
            share_least=_share(given, "share_least"),
            share_most=_share(given, "share_most"),
            text=text.lower(),
            start=whole(given, "start") or 0,
            order=order,
            changed=given.get("changed") == "1",
            drift=drift,
            number=given.get("number") or None,
            number_least=_finite(given, "number_least"),
            number_most=_finite(given, "number_most"),
        )


def whole(given: Mapping[str, str], name: str) -> int | None:
    """A whole number from 0 out of a URL, or None."""
    text = given.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise UsageError(f"{name} is a whole number, not {text!r}")
    return int(text)


def _finite(given: Mapping[str, str], name: str, kind: str = "a number") -> float | None:
    text = given.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError as error:
        raise UsageError(f"{name} is {kind}") from error
    if value is not None and not math.isfinite(value):
        raise UsageError(f"{name} is {kind}")
    return value


def _share(given: Mapping[str, str], name: str) -> float | None:
    value = _finite(given, name, "a number from 0 to 1")
    if value is not None and not 0 <= value <= 1:
        raise UsageError(f"{name} is a number from 0 to 1")
    return value


@dataclass(frozen=True)
class FoundRows:
    """Row numbers, and how far a search for text came."""

    rows: Rows
    searched: int
    """Rows up to this number were looked at; the store's length when all were."""


class RowFinder:
    """Finds rows of one store.

    Args:
        facts: What is known of its rows.
        tokenizer: Its tokenizer.
        changed: Gives the rows that a comparison found changed; None: there is no comparison.
    """

    def __init__(
        self,
        facts: RowFacts,
        tokenizer: Tokenizer,
        changed: Callable[[], list[int]] | None = None,
    ) -> None:
        self._facts = facts
        self._store = facts.store
        self._tokenizer = tokenizer
        self._changed = changed
        self.find = lru_cache(REMEMBERED)(self._find)

    def _find(self, query: Query) -> FoundRows:
        """The rows that a query wants."""
        kept = np.ones(len(self._store), bool)
        if query.changed and self._changed is not None:
            kept[:] = False
            kept[self._changed()] = True
        lengths = self._store.lengths
        for bound, fits in ((query.least, np.greater_equal), (query.most, np.less_equal)):
            if bound is not None:
                kept &= fits(lengths, bound)
        shares = trained_shares(self._store)
        # Shares are asked in whole percent; a hair of tolerance keeps 0.3 <= 3/10 true.
        if query.share_least is not None:
            kept &= shares >= query.share_least - 1e-9
        if query.share_most is not None:
            kept &= shares <= query.share_most + 1e-9
        if query.source is not None:
            kept &= self._of_source(query.source)
        if query.drift is not None:
            kept &= self._drift() == (CLASSES.index(query.drift) if query.drift in CLASSES else -1)
        if query.number_least is not None:
            kept &= self._number(query.number) >= query.number_least
        if query.number_most is not None:
            kept &= self._number(query.number) <= query.number_most
        if query.role is not None:
            kept &= self._with_role(query.role)
        searched = len(self._store)
        if query.text:
            searched = self._search(query, kept)
        rows: Rows = np.flatnonzero(kept)
        if query.order != "row":
            rows = rows[np.argsort(self._weights(query.order)[rows], kind="stable")]
        return FoundRows(rows, searched)

    def _weights(self, order: str) -> NDArray[np.float64]:
        """By what rows are sorted, the smaller the earlier; NaN comes last."""
        direction, _, name = order.partition(":")
        if direction in NUMBER_ORDERS:
            weights = self._number(name)
            return -weights if direction == "highest" else weights
        return (
            -self._drift().astype(np.float64)
            if order == "drift"
            else row_weights(self._store, order)
        )

    def _drift(self) -> NDArray[np.int8]:
        if self._facts.drift is None:
            raise UsageError("no drift classes: this is not a store of recorded rollouts")
        return self._facts.drift

    def _number(self, name: str | None) -> NDArray[np.float64]:
        known = self._facts.numbers
        if name not in known:
            raise UsageError(f"no number {name!r} per row; there are {', '.join(known) or 'none'}")
        return known[name]

    def _of_source(self, source: int) -> NDArray[np.bool_]:
        mine = self._store.table["source"] == source
        return np.repeat(mine, self._store.table["rows"].astype(np.int64))

    def _with_role(self, role: str) -> NDArray[np.bool_]:
        having = np.zeros(len(self._store), bool)
        for at, entry in enumerate(self._store.table):
            reader = self._store.slice_at(at)
            if role not in reader.record.roles:
                continue
            _, bounds, roles = reader.all_turns()
            mine = np.flatnonzero(roles == reader.record.roles.index(role))
            rows = np.searchsorted(bounds, mine, side="right") - 1
            having[int(entry["first_row"]) + rows] = True
        return having

    def _search(self, query: Query, kept: NDArray[np.bool_]) -> int:
        """Clear the rows without the text; returns the row before which it stopped."""
        kept[: query.start] = False
        spent = 0
        for row in np.flatnonzero(kept).tolist():
            if spent > SCANNED_TOKENS:
                kept[row:] = False
                return row
            ids = self._store[row].input_ids
            spent += len(ids)
            kept[row] = query.text in self.text(ids).lower()
        return len(self._store)

    def text(self, ids: NDArray[np.int32]) -> str:
        """The text of tokens, as it stands in the row."""
        if len(ids) and int(ids.max()) < len(self._tokenizer.table):
            _, data = self._tokenizer.table.joined(ids)
            return bytes(data).decode("utf-8", "replace")
        return b"".join(self._tokenizer.pieces(ids)).decode("utf-8", "replace")
