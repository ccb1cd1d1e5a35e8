"""Small sources and the arguments that most tests share."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenmill
from tokenmill import PromptDataset
from tokenmill.data import prompts
from tokenmill.data.prompts import PromptSettings

EXAMPLES = Path(tokenmill.__file__).parent / "examples"
TOKENIZER = EXAMPLES / "tokenizer"
PROMPTS = EXAMPLES / "prompts.jsonl"


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """A JSON-lines file; text goes in as it is."""
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def open_prompts(path: Any, **arguments: Any) -> PromptDataset:
    """Open prompts with the bundled tokenizer and measure them in this process."""
    settings = {name: arguments.pop(name) for name in PromptSettings._fields if name in arguments}
    defaults = {"tokenizer": TOKENIZER, "tokenizer_backend": "file", "num_workers": 0}
    return prompts.open_prompts(PromptSettings(**settings), path, **(defaults | arguments))
