"""Preference pairs to tokens, compared with TRL's own preparation of the same rows.

Pairs come from alpaca_eval_en: every question with its own answer as chosen and the answer of the
next row as rejected, as messages. TRL's `DPOTrainer` renders and encodes every row three times
(prompt, both sides) through `datasets.map`, here in one process and on a sample; ours renders and
encodes each side once. Both tokenizers are loaded in advance. Megabytes of rows per second.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data import corpora, shared, stratified
from benchmarks.measure import one_core
from benchmarks.peers import as_messages, load_auto
from benchmarks.report import Report, seconds

EVERY = 4  # rows of the corpus that become pairs
PEER_EVERY = 8  # of the pairs, for the slow peer


def run(report: Report) -> None:
    with one_core(), tempfile.TemporaryDirectory() as directory:
        _measure(report, Path(directory))


def _pairs() -> list[dict[str, Any]]:
    rows = [as_messages(row) for row in stratified(corpora(["alpaca_eval_en.jsonl"]), EVERY)]
    answered = [messages for messages in rows if messages[-1]["role"] == "assistant"]
    return [
        {"prompt": one[:-1], "chosen": one[-1:], "rejected": other[-1:]}
        for one, other in zip(answered, answered[1:] + answered[:1], strict=True)
        if one[-1] != other[-1]
    ]


def _measure(report: Report, directory: Path) -> None:
    import datasets

    from tokenmill._core.collector import without_collector
    from tokenmill.build.pipeline import Pipeline
    from tokenmill.build.recipe import Recipe
    from tokenmill.sources.block import read_block
    from tokenmill.sources.rows import open_rows
    from tokenmill.tokenizers.loading import load

    datasets.disable_progress_bars()
    rows = _pairs()
    source = directory / "pairs.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = str(shared() / "tokenizers" / "qwen3")
    recipe = Recipe(sources=(str(source),), tokenizer=tokenizer)
    pipeline = Pipeline(recipe, load(tokenizer, backend="file"))
    opened = open_rows(str(source), cache_dir=directory / "cache")
    kept: list[int] = []

    def ours() -> None:
        for block in opened.blocks():
            with without_collector():  # as a worker does
                columns, _ = pipeline.run(read_block(block))
            kept.append(len(columns.row) // 2)

    size = source.stat().st_size
    spent = seconds(ours)
    report.figure("pairs, one process", size / spent / 1e6, "MB/s", note=f"{sum(kept)} pairs")
    sample = rows[::PEER_EVERY]
    sampled = sum(len(json.dumps(row)) + 1 for row in sample)
    peer_tokenizer = load_auto(tokenizer)
    peer = seconds(lambda: _trl(peer_tokenizer, sample))
    report.figure("TRL's own preparation, one process", sampled / peer / 1e6, "MB/s")
    report.ratio("ours / TRL's preparation", ours=spent / size, peer=peer / sampled, at_least=15)


def _trl(tokenizer: Any, rows: list[dict[str, Any]]) -> Any:
    """Run `DPOTrainer._prepare_dataset` without a model."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer.__new__(DPOTrainer)
    trainer._tokenizer = tokenizer
    config = DPOConfig(output_dir="unused", max_length=None, report_to=[], bf16=False, use_cpu=True)
    return trainer._prepare_dataset(Dataset.from_list(rows), tokenizer, config, "train")
