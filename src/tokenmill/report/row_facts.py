"""What is known of every row of a store beside its tokens: numbers, drift classes, groups.

`RowFacts` reads it once, when somebody asks, as columns over all rows: the page filters and orders
by them, and draws them over steps. A *number* is what is carried or attached per row and is a
number (or null) in every row: a reward, a step. A *drift class* is the verdict on a recorded
rollout, one of `CLASSES`. Rows stand together in *groups*: answers of a preference group, which
the store keeps one after another (`StoredGroups`), or rollouts that carry the same ``group`` and
``step``, wherever they are (`RecordedGroups`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill.dataset import as_view, rows_of_groups
from tokenmill.report.row import labelled
from tokenmill.rollouts.verdict import CLASSES
from tokenmill.store import CARRIED, Store

MOST_TOGETHER = 256  # rows of one recorded group; what more rows carry is a label, not a prompt
LONGEST_NAME = 80  # characters of a group's name
MOST_FINDINGS = 40  # of one row
LONGEST_TEXT = 400  # characters of a finding's texts
UNJUDGED = "unjudged"

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

_numbers = msgspec.json.Decoder(list[float | None])


class StoredGroups:
    """Groups as the store keeps them: their rows stand one after another."""

    def __init__(self, store: Store) -> None:
        self._view = as_view(store)

    def of(self, rows: Int64) -> Int64:
        return self._view.groups_of(rows)

    def members(self, group: int) -> Int64:
        first, stop = self._view.group_starts(np.asarray([group, group + 1])).tolist()
        return np.arange(first, stop)

    def whole(self, rows: Int64) -> Int64:
        """Rows with all others of their groups, each group once."""
        groups = list(dict.fromkeys(self.of(rows).tolist()))
        return rows_of_groups(self._view, np.asarray(groups, dtype=np.int64))[0]


class RecordedGroups:
    """Groups by what rows carry: the same ``group`` and ``step``.

    Args:
        names: JSON texts of each row's group; ``null`` stands alone.
        steps: JSON texts of each row's step.
    """

    def __init__(self, names: Sequence[str], steps: Sequence[str]) -> None:
        known: dict[tuple[str, str] | int, int] = {}
        self._of = np.fromiter(
            (
                known.setdefault(row if name == "null" else (name, step), len(known))
                for row, (name, step) in enumerate(zip(names, steps, strict=True))
            ),
            np.int64,
            len(names),
        )
        self._order = np.argsort(self._of, kind="stable")
        self._bounds = np.searchsorted(self._of[self._order], np.arange(len(known) + 1))

    def of(self, rows: Int64) -> Int64:
        """The group of each row, counted as they come."""
        return self._of[rows]

    def members(self, group: int) -> Int64:
        """The rows of a group; none where they are too many to be answers to one prompt."""
        found: Int64 = self._order[self._bounds[group] : self._bounds[group + 1]]
        return found if len(found) <= MOST_TOGETHER else found[:0]

    def whole(self, rows: Int64) -> Int64:
        """Rows with all others of their groups, each row once."""
        found: dict[int, None] = {}
        for row, group in zip(rows.tolist(), self._of[rows].tolist(), strict=True):
            if row not in found:
                found |= dict.fromkeys(self.members(group).tolist() or [row])
        return np.fromiter(found, np.int64, len(found))


class RowFacts:
    """Columns over all rows of a store, each read when it is asked for."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Names of what rows carry."""
        return tuple(self.store.slice_at(0).record.carried) if len(self.store.table) else ()

    @cached_property
    def numbers(self) -> dict[str, Float64]:
        """By name a number for each row, NaN where there is none."""
        found = {}
        first = self.store[0].carried_json if len(self.store) else {}
        for name, text in first.items():
            # Most columns are told by one row: text is not read through to see that it is none.
            column = self._number(name) if _as_numbers([text]) is not None else None
            if column is not None and not np.isnan(column).all():
                found[name] = column
        for label, sidecar in labelled(self.store.sidecars):
            if sidecar.per == "row" and label not in found:
                found[label] = np.asarray(sidecar.values, np.float64)
        return found

    @cached_property
    def drift(self) -> NDArray[np.int8] | None:
        """The place of each row's class in `CLASSES`, -1 where it has none; None: no rollouts."""
        if not {"drift", "findings"} <= set(self.carried):
            return None
        known = {json.dumps(name): place for place, name in enumerate(CLASSES)}
        return np.array([known.get(text, -1) for text in self._texts("drift")], np.int8)

    @cached_property
    def groups(self) -> StoredGroups | RecordedGroups | None:
        """Which rows stand together; None where none do."""
        if self.store.has_groups:
            return StoredGroups(self.store)
        if self.drift is None or not {"group", "step"} <= set(self.carried):
            return None
        return RecordedGroups(self._texts("group"), self._texts("step"))

    def drift_of(self, number: int) -> str | None:
        """The class of one row."""
        place = -1 if self.drift is None else int(self.drift[number])
        return None if place < 0 else CLASSES[place]

    def numbers_of(self, number: int) -> dict[str, float | None]:
        """The numbers of one row that are finite; JSON knows no others."""
        found = {name: float(column[number]) for name, column in self.numbers.items()}
        return {name: value if np.isfinite(value) else None for name, value in found.items()}

    def _texts(self, name: str) -> list[str]:
        column = CARRIED + name
        return [text for _, found in self.store.columns([column]) for text in found[column]]

    def _number(self, name: str) -> Float64 | None:
        """A carried column as numbers; None at the first slice in which it is anything else."""
        column = CARRIED + name
        parts = [np.empty(0)]
        for _, found in self.store.columns([column]):
            values = _as_numbers(found[column])
            if values is None:
                return None
            parts.append(values)
        return np.concatenate(parts)


def _as_numbers(texts: Sequence[str]) -> Float64 | None:
    """What JSON texts say, null as NaN; None where one is not a number."""
    try:
        return np.array(_numbers.decode(f"[{','.join(texts)}]"), np.float64)
    except (msgspec.ValidationError, msgspec.DecodeError):
        return None


def findings_of(carried: dict[str, Any]) -> list[dict[str, Any]]:
    """What a judge found in a row, the gravest first, bounded and of known types.

    Rows may carry anything under this name; what is not a finding is left out.
    """
    listed = carried.get("findings")
    found = []
    for one in listed if isinstance(listed, list) else []:
        if not isinstance(one, dict):
            continue
        texts = {
            name: value[:LONGEST_TEXT] if isinstance(value := one.get(name), str) else ""
            for name in ("kind", "expected", "found", "detail")
        }
        places = {
            name: value if type(value := one.get(name)) is int and value >= 0 else None
            for name in ("turn", "token")
        }
        drift = one.get("class")
        found.append({"class": drift if drift in CLASSES else None, **texts, **places})
    gravity = {name: place for place, name in enumerate(CLASSES)}
    found.sort(key=lambda one: -gravity.get(str(one["class"]), -1))
    return found[:MOST_FINDINGS]


def group_name(value: Any) -> str:
    """What a recorded group is called."""
    return (value if isinstance(value, str) else json.dumps(value))[:LONGEST_NAME]
