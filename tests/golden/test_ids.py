"""golden/ids: what transformers renders and encodes for 125 real rows, for ten tokenizers.

Rows are prepared as they stand (``train_on="everything"``); a row that the template itself refuses
must be rejected as ``template_error`` and nothing else may be.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm

DATE = "2026-11-15"
TOKENIZERS = (
    "chatglm3",
    "command-r-plus",
    "deepseek-v3",
    "gemma3",
    "gpt-oss",
    "llama3.1",
    "mistral-nemo",
    "phi-3-mini",
    "qwen2.5",
    "qwen3",
)
# AutoTokenizer rebuilds this one; the golden ids are those that a trainer gets from it.
BACKENDS = {"phi-3-mini": "transformers"}
# Its directory names tokens that its tokenizer.json lacks; the golden ids are the file's.
FILES = {"chatglm3": "tokenizer.json"}


def golden_rows(shared: Path, name: str) -> list[dict[str, Any]]:
    lines = (shared / "golden" / "ids" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_prepare_real_rows_gives_the_ids_of_transformers(
    shared: Path, tmp_path: Path, name: str
) -> None:
    golden = golden_rows(shared, name)
    source = tmp_path / "rows.jsonl"
    with open(source, "w") as file:
        for number, row in enumerate(golden):
            kept = {key: row[key] for key in ("messages", "tools") if key in row}
            file.write(json.dumps({**kept, "number": number}) + "\n")
    store = tm.prepare(
        source,
        tokenizer=shared / "tokenizers" / name / FILES.get(name, ""),
        tokenizer_backend=BACKENDS.get(name, "auto"),
        train_on="everything",
        date=DATE,
        carry=["number"],
        executor="inline",
    )
    served = {row.carried["number"]: row for row in store}
    refused = {origin.row: reason for origin, reason, _ in store.rejected_rows()}
    assert refused == {n: "template_error" for n, row in enumerate(golden) if "error" in row}
    wrong = [n for n, row in served.items() if row.input_ids.tolist() != golden[n]["ids"]]
    assert wrong == []
    assert len(served) + len(refused) == len(golden)
    assert all(row.loss_mask.all() for row in served.values())
