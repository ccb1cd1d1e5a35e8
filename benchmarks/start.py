"""Start-up time: preparing one row.

One conversation, Qwen3 (150k tokens) or Gemma 3 (250k), in a process that has used the tokenizer
before (*warm*), in a new process with the tokenizer in the cache, and in a new process with an
empty cache, which loads AutoTokenizer. Every run prepares another row, so that none is a cache hit.
The peer is a new process that loads AutoTokenizer and encodes the same row.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.data import shared
from benchmarks.measure import tokenmill, watched
from benchmarks.report import Report, seconds

REPEAT = 5

PEER = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
with open(sys.argv[2]) as file:
    tokenizer.apply_chat_template(json.loads(file.readline())["messages"])
"""


def run(report: Report) -> None:
    tokenizer = str(shared() / "tokenizers" / "qwen3")
    # An installed package has compiled modules; the first run compiles ours.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        home = Path(directory)

        def new_process(cache: str, model: str = tokenizer) -> float:
            command = tokenmill("prepare", str(_row(home)), "--tokenizer", model, "--json",
                                "--cache-dir", str(home / cache))  # fmt: skip
            return watched(command, env).seconds

        new_process("compiled")
        first = min(new_process(f"empty-{number}") for number in range(REPEAT))
        report.figure("one row, first use of the tokenizer", first, "s", at_most=4)
        known = min(new_process("compiled") for _ in range(REPEAT))
        report.figure("one row, known tokenizer, new process", known, "s", at_most=1.2)
        large = str(shared() / "tokenizers" / "gemma3")
        known_large = min(new_process("compiled", large) for _ in range(REPEAT))
        report.figure("the same, 250k vocabulary", known_large, "s", at_most=2.5)
        peer = [sys.executable, "-c", PEER, tokenizer, str(_row(home))]
        spent = min(watched(peer, env).seconds for _ in range(REPEAT))
        report.figure("AutoTokenizer and one row, new process", spent, "s")
        report.ratio("one row, new process / AutoTokenizer alone", ours=known, peer=spent)
        warm = 1000 * _warm(home, tokenizer)
        report.figure("one row, known tokenizer, warm process", warm, "ms", at_most=100)


def _row(home: Path) -> Path:
    """Write a file with a new conversation."""
    number = len(list(home.glob("*.jsonl")))
    path = home / f"{number}.jsonl"
    messages = [
        {"role": "user", "content": f"Hello number {number}, how are you?"},
        {"role": "assistant", "content": "Fine, thank you."},
    ]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return path


def _warm(home: Path, tokenizer: str) -> float:
    import tokenmill as tm

    def prepare(row: Path) -> None:
        tm.prepare(row, tokenizer=tokenizer, cache_dir=home / "compiled")

    prepare(_row(home))
    rows = [_row(home) for _ in range(2 * REPEAT)]
    return min(seconds(lambda row=row: prepare(row)) for row in rows)  # type: ignore[misc]
