"""Compare the CPU seconds of `prepare` with those of another commit: ``python -m scripts.speed``.

It prepares every kind of row of `benchmarks.kinds` in one process. A first call with another recipe
loads the tokenizer, the template and the engine, so start-up is excluded. The two trees alternate,
and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.data import shared
from benchmarks.kinds import KINDS
from benchmarks.recombined import read_rows, write_rows

from scripts.compare import PROJECT, START, other_tree

PREPARE = """
import sys, time
import tokenmill
source, tokenizer, cache = sys.argv[1:]
call = dict(tokenizer=tokenizer, tokenizer_backend="file", num_workers=0, cache_dir=cache)
tokenmill.prepare(source, turn_end="turn", **call)  # loads the engine; small calls do not
start = time.process_time()
store = tokenmill.prepare(source, **call)
print(time.process_time() - start, len(store))
"""


def seconds(tree: Path, source: Path) -> tuple[float, int]:
    """Return the CPU seconds of preparing a file and the number of rows."""
    tokenizer = shared() / "tokenizers" / "qwen3"
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", PREPARE, str(source), str(tokenizer), cache]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    spent, rows = done.stdout.split()
    return float(spent), int(rows)


def main() -> None:
    """Print the ratio for every kind and write all to ``build/compare/speed.json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commit", default=START, help="the commit to compare with")
    parser.add_argument("--dir", type=Path, default=PROJECT / "build" / "compare")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=16, help="size of the file of each kind")
    options = parser.parse_args()
    before = other_tree(options.dir, options.commit)
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for kind in KINDS:
            source = Path(directory) / "rows.jsonl"
            paths = [shared() / "corpora" / f"{name}.jsonl" for name in kind.corpora]
            corpora = [kind.select(read_rows(path)) for path in paths]
            write_rows(source, corpora, options.megabytes * 1_000_000, kind.rounds)
            old, new = [], []
            for _ in range(options.rounds):
                old.append(seconds(before, source))
                new.append(seconds(PROJECT, source))
            if len({rows for _, rows in old + new}) != 1:
                raise SystemExit(f"{kind.name}: the trees have different rows")
            was, now = (median(spent for spent, _ in runs) for runs in (old, new))
            ratios[kind.name] = was / now
            print(f"{kind.name}: {was:.2f} s before, {now:.2f} s now: {100 * was / now:.0f} %")
    (options.dir / "speed.json").write_text(json.dumps(ratios, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
