"""What a preparation came to.

`Prepared` is the store together with the account of how it was made or found; `summary` is the
object that ``tokenmill prepare --json`` prints. `check_rejected` applies what the caller said about
bad rows: it is part of no key, so a hit is judged exactly as a build.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from tokenmill.build.proof import Account
from tokenmill.build.recipe import RunOptions
from tokenmill.errors import RowError, SourceError
from tokenmill.origin import Origin
from tokenmill.store import Store


@dataclass
class Prepared:
    """A store and how it came to be.

    Attributes:
        store: The store, open.
        hit: Whether it was there already.
        account: What workers did in this run.
        seconds: From the call to the open store.
    """

    store: Store
    hit: bool
    account: Account
    seconds: float

    @property
    def path(self) -> Path:
        """Where the store lies."""
        return self.store.path

    def copied_to(self, target: Path) -> Prepared:
        """The same, with a self-contained copy of the store in place of the cache's."""
        from tokenmill.store.copies import copy_store

        paths = [str(path) for path in self.store.sources]
        return replace(self, store=Store(copy_store(self.store, target), paths=paths))

    def summary(self) -> dict[str, Any]:
        """The object that ``tokenmill prepare --json`` prints."""
        totals, proof = self.store.manifest["totals"], self.store.proof
        return {
            "path": str(self.path),
            "key": self.store.key,
            "hit": self.hit,
            "source_rows": totals["source_rows"],
            "rows_in": totals["rows_in"],
            "rows_out": totals["rows"],
            "rejected": totals["rejected"],
            "tokens": totals["tokens"],
            "trained_tokens": totals["trained_tokens"],
            "slices": totals["slices"],
            "slices_built": self.account.slices_built,
            "slices_derived": self.account.slices_derived,
            "seconds": round(self.seconds, 3),
            "engine": proof.get("engine"),
            "renderer": proof.get("renderer"),
            "audited_rows": proof.get("audited_rows"),
            "audit_mismatches": proof.get("audit_mismatches"),
        }

    def examples(self, reason: str, most: int) -> Iterator[tuple[Origin, str]]:
        """The first rejected rows of one reason."""
        found = (
            (origin, detail) for origin, why, detail in self.store.rejected_rows() if why == reason
        )
        return islice(found, most)

    def remarks(self) -> Iterator[str]:
        """What a person should know beside the counts."""
        rendered = self.store.proof.get("notes", {}).get("render", {})
        for note, text in REMARKS.items():
            if rendered.get(note):
                yield f"{rendered[note]:,} {text}"


REMARKS = {
    "trailing_user": "conversations end with a user turn (trailing='reject' or 'trim')",
    "trailing_tool_trimmed": "conversations lost tool results after their last assistant turn",
    "rows_without_closer": "rows whose template closes no turn: nothing tells the model to stop",
    "slices_redone": "slices were rendered again by the reference: the fast engine differed",
}


def check_rejected(prepared: Prepared, options: RunOptions) -> None:
    """Turn rejected rows into an error where the caller asked for it."""
    totals = prepared.store.manifest["totals"]
    count = totals["rows_in"] - totals["rows"]
    reasons = ", ".join(f"{number:,} {why}" for why, number in totals["rejected"].items())
    if count and options.on_bad_row == "raise":
        origin, reason, detail = next(iter(prepared.store.rejected_rows()))
        raise RowError(
            f"{detail} ({reason}; {count:,} rows in all)",
            reason=reason,
            path=origin.path,
            row=origin.row,
            line=origin.line,
            offset=origin.offset,
        )
    if not totals["rows"]:
        raise SourceError(
            f"no row left: all {count:,} were rejected ({reasons})", path=prepared.store.sources[0]
        )
    limit = options.max_rejected
    if limit is None:
        return
    allowed = limit * totals["rows_in"] if isinstance(limit, float) else limit
    if count > allowed:
        raise SourceError(
            f"{count:,} of {totals['rows_in']:,} rows rejected ({reasons}), more than "
            f"--max-rejected allows",
            path=prepared.store.sources[0],
        )
