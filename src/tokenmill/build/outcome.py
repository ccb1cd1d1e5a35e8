"""What a preparation came to.

`Prepared` is the store together with the account of how it was made or found; `summary` is the
object that ``tokenmill prepare --json`` prints. `Unfinished` is what one part of a preparation came
to while slices of other parts are missing: there is no store yet. `Prepared.judge` applies what the
caller said about bad rows: it is part of no key, so a hit is judged exactly as a build.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenmill.build.plan import Share
from tokenmill.build.proof import Account, audit_total, require_counter
from tokenmill.build.recipe import RunOptions
from tokenmill.errors import RowError, SourceError
from tokenmill.origin import Origin, nothing_left
from tokenmill.store import Store
from tokenmill.store.manifest import units_out


@dataclass
class Prepared:
    """A store and how it came to be.

    Attributes:
        store: The store, open.
        hit: Whether it was there already.
        account: What workers did in this run.
        seconds: From the call to the open store.
        options: What the caller said about rejected rows, among other things.
    """

    store: Store
    hit: bool
    account: Account
    seconds: float
    options: RunOptions

    @property
    def path(self) -> Path:
        return self.store.path

    def copied_to(self, target: Path, *, embed_media: bool = False) -> Prepared:
        """The same, with a self-contained copy of the store in place of the cache's."""
        from tokenmill.store.transfer import copy_store

        paths = [str(path) for path in self.store.sources]
        copied = copy_store(self.store, target, embed_media=embed_media)
        return replace(self, store=Store(copied, paths=paths))

    def summary(self) -> dict[str, Any]:
        """The object that ``tokenmill prepare --json`` prints."""
        totals, proof = self.store.manifest["totals"], self.store.proof
        return {
            "path": str(self.path),
            "key": self.store.key,
            "hit": self.hit,
            "source_rows": totals["source_rows"],
            "rows_in": totals["rows_in"],
            "rows_out": units_out(totals),
            "rejected": totals["rejected"],
            "tokens": totals["tokens"],
            "trained_tokens": totals["trained_tokens"],
            "slices": totals["slices"],
            "slices_built": self.account.slices_built,
            "slices_derived": self.account.slices_derived,
            "seconds": round(self.seconds, 3),
            "engine": proof.get("engine"),
            "renderer": proof.get("renderer"),
            "audited_rows": audit_total(proof.get("audited_rows")),
            "audit_mismatches": audit_total(proof.get("audit_mismatches")),
        }

    def judge(self) -> None:
        """Turn rejected rows into an error where the caller asked for it, or where no row is left.

        Raises:
            RowError: The first rejected row, with ``on_bad_row="raise"``.
            SourceError: No row is left, or more were rejected than ``max_rejected`` allows.
        """
        totals, limit = self.store.manifest["totals"], self.options.max_rejected
        count, source = totals["rows_in"] - units_out(totals), self.store.sources[0]
        reasons = ", ".join(f"{number:,} {why}" for why, number in totals["rejected"].items())
        if count and self.options.on_bad_row == "raise":
            origin, reason, detail = next(iter(self.store.rejected_rows()))
            raise RowError(
                f"{detail} ({reason}; {count:,} rows in all)",
                reason=reason,
                **origin.location,
            )
        if not totals["rows"]:
            raise nothing_left("row", totals["rejected"], self.store.rejected_rows(), source)
        if limit is None:
            return
        share = isinstance(limit, float)
        if count > (limit * totals["rows_in"] if share else limit):
            raise SourceError(
                f"{count:,} of {totals['rows_in']:,} rows rejected ({reasons}), more than "
                f"max_rejected={f'{limit:.4g}' if share else limit} allows",
                path=source,
            )

    def examples(self, most: int) -> dict[str, list[tuple[Origin, str]]]:
        """The first rejected rows of each reason, with what was said of them."""
        wanted = {why: min(most, n) for why, n in self.store.rejected.items()}
        found: dict[str, list[tuple[Origin, str]]] = {why: [] for why in wanted}
        missing = sum(wanted.values())
        for origin, why, detail in self.store.rejected_rows():
            if not missing:
                break
            if len(found[why]) < wanted[why]:
                found[why].append((origin, detail))
                missing -= 1
        return found

    def remarks(self) -> Iterator[str]:
        """What a person should know beside the counts."""
        proof = self.store.proof
        if self.hit:  # whoever builds is told by the build itself
            yield from proof.get("notices", ())
        rendered = proof.get("notes", {}).get("render", {})
        for counter, text in REMARKS.items():
            if rendered.get(counter):
                yield f"{rendered[counter]:,} {text}"


@dataclass(frozen=True)
class Unfinished:
    """A share that is done while others are not.

    Attributes:
        share: Which one.
        key: Key of the store that is to be.
        source_rows: Rows of all sources.
        missing: Slices that nobody has published yet.
        account: What workers did in this run.
        seconds: From the call to the end of the share.
    """

    share: Share
    key: str
    source_rows: int
    missing: int
    account: Account
    seconds: float

    def summary(self) -> dict[str, Any]:
        """What is known of it, under the names of `Prepared.summary`."""
        return {
            "path": None,
            "key": self.key,
            "hit": False,
            "source_rows": self.source_rows,
            "slices": self.account.slices,
            "slices_built": self.account.slices_built,
            "slices_derived": self.account.slices_derived,
            "seconds": round(self.seconds, 3),
            "engine": self.account.name("encode"),
            "renderer": self.account.name("render"),
        }


REMARKS = {
    "trimmed_trailing": "conversations ended with a user turn, which was cut (trailing='trim')",
    "trimmed_tool_turns": "conversations lost tool results after their last assistant turn",
    "null_as_empty": "conversations have null contents on which the template fails or prints None;"
    " they were rendered as empty text",
    "arguments_as_text": "conversations have calls whose arguments the template takes as JSON text"
    " and not as objects",
    "prompts_differ": "groups whose prompt the template writes differently for different answers;"
    " their prompt_tokens is None",
    "rows_without_closer": "rows whose template closes no turn: nothing tells the model to stop",
}
"""Counter of the render room → what it says to a person."""

for _counter in REMARKS:
    require_counter("render", _counter)
