"""Rendering and proving compared with the peers' rendering: real chat, one process, Qwen3."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.data import shared
from benchmarks.report import Report, seconds
from tokenmill.chat import ChatSpec, Renderer

SAMPLE = 20  # peers get every n-th row


def run(report: Report) -> None:
    directory = shared()
    template = (directory / "tokenizers" / "qwen3" / "chat_template.jinja").read_text()
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    for name in ("alpaca_eval_en", "smilechat_zh"):
        raw = (directory / "corpora" / f"{name}.jsonl").read_bytes().split(b"\n")
        rows = [msgspec.json.decode(line) for line in raw if line]
        megabytes = sum(map(len, raw)) / 1e6
        measure(report, name, rows, megabytes, template, special)


def measure(
    report: Report,
    name: str,
    rows: list[Any],
    megabytes: float,
    template: str,
    special: dict[str, str],
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    renderer = Renderer(ChatSpec(trailing="trim"), template, special)

    def ours() -> None:
        for first in range(0, len(rows), 4000):
            renderer.render(rows[first : first + 4000])

    def peer() -> None:
        for row in rows[::SAMPLE]:
            render_jinja_template([row["messages"]], chat_template=template, **special)

    took = seconds(ours, repeat=2)
    peers = seconds(peer) * SAMPLE
    report.figure(f"{name}: rendered and proven", megabytes / took, "MB/s")
    report.ratio(f"{name}: against transformers' render alone", ours=took, peer=peers)
    printing = renderer.engine_seconds
    ours()
    spent = renderer.engine_seconds - printing
    report.figure(f"{name}: share of the paths in it", 100 * spent / took, "%")
