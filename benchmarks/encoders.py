"""Rows of Python encoders compared with SkyRL's tokenization by the same encoder, in one process.

``TOKENMILL_TEST_ENCODERS`` is the directory of `tests.chat.encoder_oracle`; without it, only
mistral-common is measured. Rows with several answers are encoded once with the prompt and once
with the answer for each of them, as SkyRL's path for the last message does: its path for every
message puts messages after others that most encoders refuse. Ratios are of processor time.
"""

from __future__ import annotations

import copy
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chat.encoder_oracle import DeepSeek, Encoder, conversations, encoders

from benchmarks.data import shared
from benchmarks.measure import one_core
from benchmarks.peers import load_auto
from benchmarks.report import Report

ROWS = {"alpaca_eval_en": 300, "smilechat_zh": 60}
TURNS = 3  # ours and the peer in turn, each on new rows
SKIPPED = ("thinking", "v2", "v7")  # the same work as others
TIMES_TEXT = 3  # minimum ratio of encoders that print text; those that return ids have no bound


def run(report: Report) -> None:
    directory = Path(os.environ.get("TOKENMILL_TEST_ENCODERS") or os.devnull)
    with one_core(), tempfile.TemporaryDirectory() as work:
        for load in encoders(directory, shared(), Path(work)):
            encoder = load()
            if not any(part in encoder.name.split() for part in SKIPPED):
                for corpus, count in ROWS.items():
                    rows = conversations(shared() / "corpora" / f"{corpus}.jsonl")[:count]
                    rows = [encoder.transform(copy.deepcopy(row)) for row in rows]
                    _measure(report, encoder, corpus, rows)


def _measure(report: Report, encoder: Encoder, corpus: str, rows: list[Any]) -> None:
    from tokenmill.chat import ChatSpec, Renderer
    from tokenmill.tokenizers.encoder import Encoder as Engine
    from tokenmill.tokenizers.loading import load

    tokenizer = load(str(encoder.model), **encoder.options)
    spec = ChatSpec(expand=encoder.expand)
    renderer = Renderer(spec, tokenizer.template, tokenizer.special_tokens, tokenizer=tokenizer)
    engine = Engine(tokenizer)
    auto = load_auto(str(encoder.model)) if isinstance(encoder, DeepSeek) else None

    def ours(rows: list[Any]) -> None:
        made = renderer.render(rows)
        engine.encode(made.texts, made.spans, made.ends, None, made.coded)

    def ids(messages: list[Any], prompt: bool) -> list[int]:
        encoded = encoder.serve(messages, prompt)
        return auto(encoded, add_special_tokens=False)["input_ids"] if auto else encoded

    def peer(rows: list[Any]) -> None:
        for row in rows:
            messages = row["messages"]
            for k in (k for k, one in enumerate(messages) if one["role"] == "assistant"):
                ids(messages[:k], True)
                ids(messages[: k + 1], False)

    spent = {ours: 0.0, peer: 0.0}
    for work in spent:
        work(rows[:1])  # loads what is loaded on first use
    for turn in range(TURNS):
        for work in spent:
            spent[work] += _seconds(work, rows[turn::TURNS])
    report.ratio(
        f"{encoder.name}, {corpus}: against SkyRL's way", ours=spent[ours], peer=spent[peer],
        at_least=TIMES_TEXT if auto else None,
    )  # fmt: skip


def _seconds(work: Callable[[list[Any]], Any], rows: list[Any]) -> float:
    start = time.process_time()
    work(rows)
    return time.process_time() - start
