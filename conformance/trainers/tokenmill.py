"""tokenmill itself: `tokenmill.prepare` in one process, without a cache.

It encodes with the same transformers tokenizer and prints the date that transformers prints today.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

from conformance.trainers import Prepared

NAME = "tokenmill"
CHECKOUT = None
PATHS = ()
PACKAGE = "tokenmill"
STAND_INS = ()
TRAINS = "every"
HOW = "`tokenmill.prepare`"


def prepare(rows: list[dict[str, Any]], tokenizer: Any, template: str) -> list[Prepared]:
    """Every answer that can be proven; the others with the reason of their rejection."""
    import tokenmill

    options: dict[str, Any] = {"date": datetime.date.today().isoformat()}
    for path in (Path(tokenizer.name_or_path) / "encoding").glob("*.py"):
        options = {"encoder": f"encoding/{path.name}:encode_messages", "trust_remote_code": True,
                   "encoder_kwargs": {"thinking_mode": "chat"}}  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "rows.jsonl"
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        store = tokenmill.prepare(
            str(source),
            tokenizer=tokenizer.name_or_path,
            tokenizer_backend="transformers",
            **options,
            cache_dir=str(Path(directory) / "cache"),
            executor="inline",
        )
        answers: list[Prepared] = ["lost without a word"] * len(rows)
        for origin, reason, detail in store.rejected_rows():
            answers[origin.row] = f"{reason}: {detail}"[:200]
        for row in store:
            answers[row.origin.row] = (row.input_ids.tolist(), row.loss_mask.tolist())
    return answers
