"""The inspector page: seconds and bytes of ``inspect --html`` over a store of 20,000 rows.

The store is made of real conversations (English and, to fill up, Chinese; Qwen3's tokenizer), so
that texts, lengths and vocabulary are what a page really has to carry. The command runs as a user
runs it, in a process of its own, start-up included. No peer offers a page over a whole store, so
there is nothing to put beside it; the bounds are those that were promised.
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
    """The first so many conversations of the shared corpora, in one file."""
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
    """Write the page and look at it from outside."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        room = Path(directory)
        source = first_rows(room / "chat.jsonl", rows)
        prepared = run_recipe(
            str(source),
            str(shared() / "tokenizers" / "qwen3"),
            tokenizer_backend="file",
            cache_dir=room / "cache",
            progress=False,
        )
        target = room / "page.html"
        command = tokenmill("inspect", str(prepared.path), "--html", str(target),
                            "--cache-dir", str(room / "cache"), "--json")  # fmt: skip
        done = watched(command, env={**os.environ, "TOKENMILL_CACHE_DIR": str(room / "cache")})
        told = json.loads(done.stdout)
        note = f"{told['rows']:,} rows"
        report.figure("inspect --html", done.seconds, "s", at_most=10, note=note)
        size = target.stat().st_size / 1e6
        report.figure("its page", size, "MB", at_most=15, note=note)
        share = 100 * told["rows_in_page"] / max(1, told["rows"])
        report.figure("rows of the store in it", share, "%")
        report.figure("peak memory of writing it", done.parent_peak / (1 << 20), "MiB")
