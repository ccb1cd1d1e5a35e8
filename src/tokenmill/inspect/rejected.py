"""Summarize the rejected rows of a store, and write them to a file."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenmill._core.origin import Origin
from tokenmill._core.publish import writing_errors
from tokenmill.chat import ChatSpec
from tokenmill.errors import public_path
from tokenmill.inspect.row import SourceExcerpts
from tokenmill.store import Store

_TURN = re.compile(r"\bturn (\d+)\b")
_MAX_ROW_BYTES = 16 << 20  # of a row that is written to the file


@dataclass
class RejectedInFile:
    """The rows of one file that were rejected for one reason."""

    path: str
    source_rows: int  # of the file, in this store
    count: int
    first: Origin
    detail: str  # about the first


def rejected_by_file(store: Store) -> dict[str, list[RejectedInFile]]:
    """Return the rejected rows by reason and file; the most frequent ones first."""
    documents = store.manifest["document"].get("sources", [])
    rows: dict[str, int] = {}
    for path, document in zip(store.sources, documents, strict=True):
        rows[path or "?"] = rows.get(path or "?", 0) + document["rows"]
    found: dict[str, dict[str, RejectedInFile]] = {}
    for origin, reason, detail in store.rejected_rows():
        path = origin.path or "?"
        files = found.setdefault(reason, {})
        if path not in files:
            shown = public_path(path)
            files[path] = RejectedInFile(shown, rows.get(path, 0), 0, origin, detail)
        files[path].count += 1
    reasons = sorted(found, key=lambda reason: (-store.rejected[reason], reason))
    return {
        reason: sorted(found[reason].values(), key=lambda file: -file.count) for reason in reasons
    }


def write_rejected(store: Store, path: Path, cache_dir: str | None = None) -> int:
    """Write place, reason, turn and text of rejected rows to a JSONL file; return their number."""
    recipe = store.manifest["document"]["recipe"]
    columns = ChatSpec(columns=recipe.get("columns")).message_columns
    excerpts = SourceExcerpts(store, cache_dir, fetch=True)
    with writing_errors(path), open(path, "wb") as file:
        for origin, reason, detail in store.rejected_rows():
            text = excerpts.excerpt(origin, _MAX_ROW_BYTES)["text"]
            number, message = None, None
            named = _TURN.search(detail)
            if named is not None and text is not None:
                number = int(named[1])
                with suppress(msgspec.DecodeError, AttributeError, IndexError):
                    row = msgspec.json.decode(text)
                    turns = [row[name] for name in columns if isinstance(row.get(name), list)]
                    message = turns[0][number]
            location = {**origin.location, "path": public_path(origin.path or "?")}
            document = {**location, "reason": reason, "detail": detail, "turn": number}
            file.write(msgspec.json.encode(document | {"message": message, "text": text}) + b"\n")
    return sum(store.rejected.values())
