"""The shared corpora: paths of real conversation files, and samples of their rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conftest import unpack_shared

CHAT = ("alpaca_eval_en.jsonl", "smilechat_zh.jsonl")


def shared() -> Path:
    """Return the directory of the unpacked shared data."""
    directory = unpack_shared()
    if directory is None:
        raise SystemExit("This benchmark needs ../shared/data, which is missing.")
    return directory


def corpora(names: Sequence[str] = CHAT) -> list[Path]:
    return [shared() / "corpora" / name for name in names]


def stratified(paths: Sequence[Path], every: int) -> list[dict[str, Any]]:
    """Return every n-th row of each file, a sample with the same mix of lengths."""
    rows = []
    for path in paths:
        with open(path, "rb") as lines:
            rows += [json.loads(line) for n, line in enumerate(lines) if n % every == 0]
    return rows


def raw_bytes(rows: Sequence[dict[str, Any]]) -> int:
    """Return the size of rows as JSON lines."""
    return sum(len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in rows)
