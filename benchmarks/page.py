"""The inspector page: seconds and bytes of ``inspect --html`` over a store of 20,000 rows.

The store contains real conversations (English, then Chinese; Qwen3's tokenizer). The command runs
in its own process, start-up included. There is no peer with a page for a whole store.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from benchmarks.data import corpora, shared
from benchmarks.measure import tokenmill, watched
from benchmarks.report import Report
from tokenmill.build.calls import run_recipe

ROWS = 20_000


def first_rows(target: Path, rows: int) -> Path:
    """Write the first conversations of the shared corpora to one file."""
    left = rows
    with open(target, "wb") as file:
        for path in corpora():
            with open(path, "rb") as lines:
                for line in lines:
                    if not left:
                        return target
                    file.write(line)
                    left -= 1
    return target


def run(report: Report, rows: int = ROWS) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as name:
        directory = Path(name)
        source = first_rows(directory / "chat.jsonl", rows)
        prepared = run_recipe(
            str(source),
            str(shared() / "tokenizers" / "qwen3"),
            tokenizer_backend="file",
            cache_dir=directory / "cache",
            progress=False,
        )
        target = directory / "page.html"
        command = tokenmill("inspect", str(prepared.path), "--html", str(target),
                            "--cache-dir", str(directory / "cache"), "--json")  # fmt: skip
        done = watched(command, env={**os.environ, "TOKENMILL_CACHE_DIR": str(directory / "cache")})
        detail = json.loads(done.stdout)
        note = f"{detail['rows']:,} rows"
        report.figure("inspect --html", done.seconds, "s", at_most=10, note=note)
        size = target.stat().st_size / 1e6
        report.figure("its page", size, "MB", at_most=15, note=note)
        share = 100 * detail["rows_in_page"] / max(1, detail["rows"])
        report.figure("rows of the store in it", share, "%")
        report.figure("peak memory of writing it", done.parent_peak / (1 << 20), "MiB")
