"""Rows to measure on: the shared corpora, or a skip that says so.

`corpora` gives the paths of real conversation files; `stratified` takes every n-th row of each, so
that a slow peer works on a sample with the same mix of lengths. Both speak of *kept* rows where a
benchmark counts megabytes: what a preparation rejects is not work done.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import unpack_shared

CHAT = ("alpaca_eval_en.jsonl", "smilechat_zh.jsonl")


def shared() -> Path:
    """The unpacked shared data."""
    directory = unpack_shared()
    if directory is None:
        raise SystemExit("this benchmark needs ../shared/data, which is not beside this checkout")
    return directory


def corpora(names: Sequence[str] = CHAT) -> list[Path]:
    """Paths of the named corpora."""
    return [shared() / "corpora" / name for name in names]


def stratified(paths: Sequence[Path], every: int) -> list[dict[str, Any]]:
    """Every n-th row of each file, parsed."""
    rows = []
    for path in paths:
        with open(path, "rb") as lines:
            rows += [json.loads(line) for n, line in enumerate(lines) if n % every == 0]
    return rows


def raw_bytes(rows: Sequence[dict[str, Any]]) -> int:
    """Bytes of rows as JSON lines."""
    return sum(len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in rows)
