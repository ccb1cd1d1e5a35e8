"""What the tests of the build and of the command line are made of: rows, files, small slices."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tokenmill.build.calls import run_recipe
from tokenmill.build.outcome import Prepared
from tokenmill.sources import scan as cut
from tokenmill.store import Store

EXAMPLES = Path(str(resources.files("tokenmill") / "examples"))
TOKENIZER = EXAMPLES / "tokenizer"
WORDS = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "inlet")

INLINE: dict[str, Any] = {"tokenizer_backend": "file", "executor": "inline", "progress": False}
"""Arguments that keep a preparation in this process and off transformers."""


def run(source: Any, **given: Any) -> Prepared:
    return run_recipe(source, str(TOKENIZER), **(INLINE | given))


def prepare(source: Any, **given: Any) -> Store:
    return tm.prepare(source, str(TOKENIZER), **(INLINE | given))


def conversation(number: int, words: int = 12) -> dict[str, Any]:
    """A conversation of its own for every number."""
    rng = random.Random(number)
    question = " ".join(rng.choices(WORDS, k=words))
    answer = " ".join(rng.choices(WORDS, k=words))
    return {
        "id": number,
        "messages": [
            {"role": "user", "content": f"{number}: {question}?"},
            {"role": "assistant", "content": f"{answer}."},
        ],
    }


def conversations(count: int, first: int = 0, words: int = 12) -> list[dict[str, Any]]:
    return [conversation(number, words) for number in range(first, first + count)]


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A JSONL file; strings are written as they stand, so that a line can be bad."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def small_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of about 8 KiB instead of 8 MiB: the same rule with other numbers."""
    monkeypatch.setattr(cut, "CUT_MIN", 6 << 10)
    monkeypatch.setattr(cut, "CUT_MEAN", 2 << 10)
    monkeypatch.setattr(cut, "CUT_MAX", 16 << 10)
    monkeypatch.setattr(cut, "_SHARE", type(cut._SHARE)((1 << 64) // (2 << 10)))


def files_of(directory: Path, part: str) -> dict[str, bytes]:
    """Every file of one part of a cache, by relative name; proof.json is exempt from identity."""
    root = directory / part
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "proof.json"
    }
