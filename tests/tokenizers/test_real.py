"""Real tokenizers: equal ids to transformers on real rows, and parity of the engines.

golden/ids has the texts and ids of transformers for 125 real rows. Loading a tokenizer takes
seconds, so parameters have module scope: pytest then runs all tests of one tokenizer together.
"""

from __future__ import annotations

import datetime as real_datetime
import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.tokenizers.test_engines import random_texts
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.engines import FastokensEngine, HfEngine, first_difference
from tokenmill.tokenizers.loading import load

DATE = "2026-11-15"
# AutoTokenizer changes this one; the golden ids are those of AutoTokenizer.
BACKENDS = {"phi-3-mini": "transformers"}
# Its directory defines tokens that tokenizer.json lacks; the golden ids are those of the file.
FILES = {"chatglm3": "tokenizer.json"}
NAMES = [
    "chatglm3", "command-r-plus", "deepseek-v3", "gemma3", "gpt-oss", "llama3.1", "mistral-nemo",
    "phi-3-mini", "qwen2.5", "qwen3",
]  # fmt: skip
SIMILAR = ["command-r-plus", "deepseek-v3", "gpt-oss", "mistral-nemo", "qwen2.5"]  # to others
OTHERS = ["bert-base-uncased", "gpt-4o-o200k", "smollm2", "t5-small"]  # without golden rows


def in_make_test(names: Sequence[str], *rare: str) -> list[Any]:
    soaked = {*SIMILAR, *rare}
    return [pytest.param(name, marks=pytest.mark.soak if name in soaked else ()) for name in names]


class _PinnedDate(real_datetime.datetime):
    @classmethod
    def now(cls, tz: Any = None) -> real_datetime.datetime:
        return real_datetime.datetime(2026, 11, 15, 12, tzinfo=tz)


def golden_rows(shared: Path, name: str) -> list[dict[str, Any]]:
    lines = (shared / "golden" / "ids" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def golden_texts(
    rows: list[dict[str, Any]], template: Any, special_tokens: dict[str, str]
) -> list[str]:
    from transformers.utils import chat_template_utils as utils

    texts = []
    for row in rows:
        chosen = template
        if isinstance(template, dict):
            tools = row.get("tools") and "tool_use" in template
            chosen = template["tool_use" if tools else "default"]
        [[text], _] = utils.render_jinja_template(
            [row["messages"]], row.get("tools"), chat_template=chosen, **special_tokens
        )
        assert hashlib.sha256(text.encode()).hexdigest() == row["text_sha256"]
        texts.append(text)
    return texts


def corpus_texts(shared: Path, most: int) -> list[str]:
    texts = []
    for path in sorted((shared / "corpora").glob("*.jsonl")):
        with path.open() as lines:
            texts += [line[:3000] for _, line in zip(range(most), lines, strict=False)]
    return texts


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    in_make_test([*NAMES, *OTHERS], "gemma3", "gpt-4o-o200k", "llama3.1", "smollm2"),
    scope="module",
)
def test_fastokens_on_real_and_random_texts_equals_reference(name: str, shared: Path) -> None:
    tokenizer = load(shared / "tokenizers" / name / "tokenizer.json")
    try:
        fast = FastokensEngine(tokenizer)
    except TokenizerError as error:
        assert name in ("bert-base-uncased", "t5-small", "gpt-4o-o200k")
        assert "cannot load" in error.message
        return
    texts = corpus_texts(shared, 3) + random_texts(tokenizer.added_contents, seed=1)
    assert first_difference(fast, HfEngine(tokenizer), texts) is None


@pytest.mark.parametrize("name", in_make_test(NAMES, "gemma3", "llama3.1"), scope="module")
def test_ids_of_golden_rows_equal_transformers(name: str, shared: Path) -> None:
    from transformers.utils import chat_template_utils as utils

    directory = shared / "tokenizers" / name
    # The fixture `monkeypatch` would unload all engines afterwards.
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(utils, "datetime", _PinnedDate)
        warnings.simplefilter("ignore")
        tokenizer = load(directory / FILES.get(name, ""), backend=BACKENDS.get(name, "file"))
        rows = [row for row in golden_rows(shared, name) if "error" not in row]
        texts = golden_texts(rows, tokenizer.template, tokenizer.special_tokens)
    expected = [row["ids"] for row in rows]
    for engine in ("auto", "hf"):
        encoder = Encoder(tokenizer, engine)
        if engine == "auto":  # fastokens does not support the Metaspace that AutoTokenizer makes
            assert encoder.engine.name == ("hf" if name == "phi-3-mini" else "fastokens")
        encoded = encoder.encode(texts)
        assert encoded.rejected == []
        assert encoded.notes["mismatches"] == 0
        actual = [encoded.row(number)[0].tolist() for number in range(len(rows))]
        assert actual == expected, engine
        assert np.array_equal(encoded.trained, encoded.lengths)


@pytest.mark.slow
@pytest.mark.parametrize("name", in_make_test(NAMES, "gemma3", "llama3.1"), scope="module")
def test_prepare_real_rows_gives_the_ids_of_transformers(
    name: str, shared: Path, tmp_path: Path
) -> None:
    """Only rows for which the template raises an error are rejected."""
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
        keep_columns=["number"],
        executor="inline",
    )
    served = {row.extra["number"]: row for row in store}
    refused = {origin.row: reason for origin, reason, _ in store.rejected_rows()}
    assert refused == {n: "template_error" for n, row in enumerate(golden) if "error" in row}
    wrong = [n for n, row in served.items() if row.input_ids.tolist() != golden[n]["ids"]]
    assert wrong == []
    assert len(served) + len(refused) == len(golden)
    assert all(row.loss_mask.all() for row in served.values())
