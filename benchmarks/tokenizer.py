"""Texts to ids and masks in one process, compared with `tokenizers`.

Texts are conversations of alpaca_eval_en and smilechat_zh in Qwen's markup, about 8 MB each, the
size of a slice; the tokenizer is loaded in advance. The share of proof and masks is the cost of
exactness on top of the ids.
"""

from __future__ import annotations

import os

from benchmarks.data import corpora, shared, stratified
from benchmarks.measure import one_core
from benchmarks.report import Report, seconds

SLICE_BYTES = 8 << 20
PEER_BYTES = 1 << 20  # the peer is many times slower; its speed does not depend on the amount


def _rows(
    path: object, limit: int
) -> tuple[list[str], list[list[tuple[int, int]]], list[list[int]]]:
    texts, spans, ends, size = [], [], [], 0
    for row in stratified([path], 1):
        text, trained, turns = "", [], []
        for message in row["messages"]:
            text += f"<|im_start|>{message['role']}\n"
            start = len(text)
            text += f"{message['content']}<|im_end|>"
            if message["role"] == "assistant":
                trained.append((start, len(text)))
            text += "\n"
            turns.append(len(text))
        texts.append(text)
        spans.append(trained)
        ends.append(turns)
        size += len(text.encode())
        if size > limit:
            break
    return texts, spans, ends


def run(report: Report) -> None:
    with one_core():
        _measure(report)


def _measure(report: Report) -> None:
    from tokenmill.tokenizers.encoder import Encoder
    from tokenmill.tokenizers.loading import load

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load(shared() / "tokenizers" / "qwen3", backend="file")
    encoder = Encoder(tokenizer)
    report.figure("fastokens is used", float(encoder.engine.name == "fastokens"), "")
    for path in corpora():
        name = os.path.basename(str(path)).split(".")[0]
        texts, spans, ends = _rows(path, SLICE_BYTES)
        size = sum(len(text.encode()) for text in texts)
        ours = seconds(lambda t=texts, s=spans, e=ends: encoder.encode(t, s, e), repeat=5)
        ids = seconds(lambda t=texts: encoder.engine.encode(t), repeat=5)
        report.figure(f"{name}: ids, proof, masks, audit", size / ours / 1e6, "MB/s")
        report.figure(f"{name}: ids alone (engine)", size / ids / 1e6, "MB/s")
        few, amount = [], 0
        for text in texts:
            few.append(text)
            amount += len(text.encode())
            if amount > PEER_BYTES:
                break
        peer = seconds(
            lambda t=few: tokenizer.reference.encode_batch(t, add_special_tokens=False), repeat=2
        )
        report.ratio(
            f"{name}: ours / tokenizers.encode_batch", ours=ours / size, peer=peer / amount,
            at_least=10, note=f"peer {amount / peer / 1e6:.2f} MB/s, ids only",
        )  # fmt: skip
