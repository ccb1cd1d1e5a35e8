"""Compare the rows of two stores: the same source row under two recipes.

Rows are *partners* when they were made of the same bytes (the digest of the source row, and the
turn number with ``expand``); equal rows are paired in order. Where no bytes agree, the row of the
same file name and row number is the partner: its source was edited. Partners are aligned token by
token, on ids where both stores have one tokenizer, else on the tokens' bytes.
"""

from __future__ import annotations

import os
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.build.plan import differences
from tokenmill.report.lookup import rows_of_source_row
from tokenmill.report.page.rows import row_with_pieces
from tokenmill.report.row import RowFacts, store_tokenizer
from tokenmill.store import Store
from tokenmill.tokenizer import Tokenizer

MAX_ALIGNED_TOKENS = 4000  # of a differing stretch; the work grows with its square
MAX_SURVEYED_ROWS = 100_000  # some seconds


class Partner(NamedTuple):
    """The row of the other store."""

    row: int
    by: str  # ``content`` or ``origin``


class _RowsByDigest:
    """Rows of one store by the digest of their source row."""

    def __init__(self, store: Store) -> None:
        wanted = ("digest", "part")
        chunks = [columns for _, columns in store.columns(wanted)]
        empty = np.zeros(0, np.uint64)
        self.digests = np.concatenate([empty, *(chunk["digest"] for chunk in chunks)])
        self.parts = np.concatenate([np.zeros(0, np.int32), *(c["part"] for c in chunks)])
        self.order = np.argsort(self.digests, kind="stable")
        self.sorted = self.digests[self.order]

    def rows(self, digest: np.uint64, part: int) -> NDArray[np.int64]:
        """Rows made of such bytes, in order."""
        first = np.searchsorted(self.sorted, digest, side="left")
        last = np.searchsorted(self.sorted, digest, side="right")
        rows: NDArray[np.int64] = self.order[first:last]
        equal: NDArray[np.int64] = rows[self.parts[rows] == part]
        return equal


class StoreComparison:
    """What changed between two stores."""

    def __init__(self, ours: Store, theirs: Store, tokenizer: Tokenizer) -> None:
        self.ours = ours
        self.theirs = theirs
        self._our_facts, self._their_facts = RowFacts(ours), RowFacts(theirs)
        self._tokenizer = tokenizer
        self._one_tokenizer = _identity(ours) == _identity(theirs)

    @cached_property
    def _their_tokenizer(self) -> Tokenizer:
        return self._tokenizer if self._one_tokenizer else store_tokenizer(self.theirs)

    @cached_property
    def _our_contents(self) -> _RowsByDigest:
        return _RowsByDigest(self.ours)

    @cached_property
    def _their_contents(self) -> _RowsByDigest:
        return _RowsByDigest(self.theirs)

    def partner(self, row: int) -> Partner | None:
        """The other store's row made of the same source row."""
        digest, part = self._our_contents.digests[row], int(self._our_contents.parts[row])
        equal = self._their_contents.rows(digest, part)
        if len(equal):
            place = int(np.searchsorted(self._our_contents.rows(digest, part), row))
            return Partner(int(equal[place]), "content") if place < len(equal) else None
        origin = self.ours[row].origin
        name = os.path.basename(origin.path or "")
        for source, path in enumerate(self.theirs.sources):
            if path is None or os.path.basename(path) != name:
                continue
            for other in rows_of_source_row(self.theirs, source, origin.row, by_line=False):
                taken = len(
                    self._our_contents.rows(
                        self._their_contents.digests[other], int(self._their_contents.parts[other])
                    )
                )
                if int(self._their_contents.parts[other]) == part and not taken:
                    return Partner(other, "origin")
        return None

    def row(self, number: int) -> dict[str, Any]:
        """Both rows, aligned, with what changed."""
        ours = row_with_pieces(self._our_facts, number, self._tokenizer)
        partner = self.partner(number)
        if partner is None:
            why = "no row of the other store was made of this source row"
            return {"ours": ours, "theirs": None, "note": why}
        theirs = row_with_pieces(self._their_facts, partner.row, self._their_tokenizer)
        mine, other = self.ours[number], self.theirs[partner.row]
        our_ids, their_ids = mine.input_ids.tolist(), other.input_ids.tolist()
        our_pieces = self._tokenizer.pieces(our_ids)
        their_pieces = self._their_tokenizer.pieces(their_ids)
        if self._one_tokenizer:
            steps, aligned = align(our_ids, their_ids)
        else:
            steps, aligned = align(our_pieces, their_pieces)
        mask_tokens = sum(
            int(np.count_nonzero(mine.loss_mask[a0:a1] != other.loss_mask[b0:b1]))
            for kind, a0, a1, b0, b1 in steps
            if kind == "equal"
        )
        return {
            "ours": ours,
            "theirs": theirs,
            "by": partner.by,
            "steps": steps,
            "aligned": aligned,
            "changed": {
                "text": b"".join(our_pieces) != b"".join(their_pieces),
                "ids": our_ids != their_ids,
                "mask": mask_tokens > 0,  # of tokens that both have; new ones are changed ids
                "mask_tokens": mask_tokens,
            },
            "note": "" if partner.by == "content" else "same place, other bytes: it was edited",
        }

    @cached_property
    def survey(self) -> dict[str, Any]:
        """What changed over the first rows of the store, and which rows."""
        surveyed = min(len(self.ours), MAX_SURVEYED_ROWS)
        counts = dict.fromkeys(("same", "ids", "mask_only", "missing"), 0)
        changed, matched = [], 0
        for number in range(surveyed):
            partner = self.partner(number)
            if partner is None:
                counts["missing"] += 1
                changed.append(number)
                continue
            matched += 1
            mine, other = self.ours[number], self.theirs[partner.row]
            if not np.array_equal(mine.input_ids, other.input_ids):
                counts["ids"] += 1
                changed.append(number)
            elif not np.array_equal(mine.loss_mask, other.loss_mask):
                counts["mask_only"] += 1
                changed.append(number)
            else:
                counts["same"] += 1
        whole = surveyed == len(self.ours)
        return {
            **counts,
            "surveyed": surveyed,
            "of": len(self.ours),
            "only_theirs": len(self.theirs) - matched if whole else None,
            "rows": changed,
        }

    def document(self) -> dict[str, Any]:
        """What a page says of the comparison as a whole; the survey is asked for apart."""
        return {
            "path": str(self.theirs.path),
            "key": self.theirs.key,
            "totals": self.theirs.manifest["totals"],
            "one_tokenizer": self._one_tokenizer,
            "differs": differences(
                self.ours.manifest["document"], self.theirs.manifest["document"]
            ),
        }


def align(ours: list[Any], theirs: list[Any]) -> tuple[list[list[Any]], bool]:
    """Edit steps ``[kind, a0, a1, b0, b1]`` between two sequences, and whether all was aligned.

    A differing middle that is too long to be aligned stays one step.
    """
    shorter = min(len(ours), len(theirs))
    head = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    tail = 0
    while tail < shorter - head and ours[-1 - tail] == theirs[-1 - tail]:
        tail += 1
    a_end, b_end = len(ours) - tail, len(theirs) - tail
    steps: list[list[Any]] = [["equal", 0, head, 0, head]] if head else []
    aligned = max(a_end, b_end) - head <= MAX_ALIGNED_TOKENS
    if a_end > head or b_end > head:
        if aligned:
            matcher = SequenceMatcher(None, ours[head:a_end], theirs[head:b_end], autojunk=False)
            steps += [
                [kind, a0 + head, a1 + head, b0 + head, b1 + head]
                for kind, a0, a1, b0, b1 in matcher.get_opcodes()
            ]
        else:
            steps.append(["replace", head, a_end, head, b_end])
    if tail:
        steps.append(["equal", a_end, len(ours), b_end, len(theirs)])
    return steps, aligned


def _identity(store: Store) -> str:
    return str(store.manifest["tokenizer"]["identity"])
