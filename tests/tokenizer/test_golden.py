"""golden/ids: what transformers renders and encodes for real rows, for ten tokenizers."""

from __future__ import annotations

import datetime as real_datetime
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tokenmill.tokenizer import Encoder, load

BACKENDS = {"phi-3-mini": "transformers"}
FILES = {"chatglm3": "tokenizer.json"}  # its directory names tokens that the file lacks
NAMES = [
    "chatglm3", "command-r-plus", "deepseek-v3", "gemma3", "gpt-oss", "llama3.1", "mistral-nemo",
    "phi-3-mini", "qwen2.5", "qwen3",
]  # fmt: skip


class _PinnedDate(real_datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> real_datetime.datetime:
        return real_datetime.datetime(2026, 11, 15, 12, tzinfo=tz)


def golden_texts(
    directory: Path, rows: list[dict[str, Any]], template: Any, special_tokens: dict[str, str]
) -> list[str]:
    """The rendered texts, each checked against the golden file's digest of it."""
    from transformers.utils import chat_template_utils as utils

    texts = []
    for row in rows:
        chosen = template
        if isinstance(template, dict):
            chosen = template[
                "tool_use" if row.get("tools") and "tool_use" in template else "default"
            ]
        text = utils.render_jinja_template(
            conversations=[row["messages"]],
            tools=row.get("tools"),
            chat_template=chosen,
            **special_tokens,
        )[0][0]
        assert hashlib.sha256(text.encode()).hexdigest() == row["text_sha256"]
        texts.append(text)
    return texts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", ["auto", "hf"])
def test_ids_of_golden_rows_equal_transformers(
    name: str, engine: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import chat_template_utils as utils

    monkeypatch.setattr(utils, "datetime", _PinnedDate)
    directory = shared / "tokenizers" / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = load(directory / FILES.get(name, ""), backend=BACKENDS.get(name, "file"))
        with (shared / "golden" / "ids" / f"{name}.jsonl").open() as lines:
            rows = [json.loads(line) for line in lines]
        rows = [row for row in rows if "error" not in row]
        texts = golden_texts(directory, rows, tokenizer.template, tokenizer.special_tokens)
    encoder = Encoder(tokenizer, engine)
    if engine == "auto":  # fastokens knows all of them but the Metaspace that AutoTokenizer makes
        assert encoder.engine.name == ("hf" if name == "phi-3-mini" else "fastokens")
    encoded = encoder.encode(texts)
    assert encoded.rejected == []
    assert encoded.notes["mismatches"] == 0
    wanted = [row["ids"] for row in rows]
    got = [encoded.row(number)[0].tolist() for number in range(len(rows))]
    assert got == wanted
    assert np.array_equal(encoded.trained, encoded.lengths)
