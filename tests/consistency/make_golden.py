"""Writes golden_streams.json: what every kind of stream serves first, for all releases to come.

A change here breaks the resume of runs under way: it needs a bump of ORDER_VERSION or
PACKING_VERSION and a "Changed" in the changelog. ``python -m tests.consistency.make_golden
DIRECTORY``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.consistency.cases import CASES, loader_of, run_of
from tests.consistency.corpus import Corpus, build

GOLDEN = Path(__file__).with_name("golden_streams.json")


def streams(corpus: Corpus) -> dict[str, Any]:
    """The first five batches of two epochs of every case, and the state behind them."""
    found = {}
    for name in CASES:
        epochs = []
        for epoch in (0, 2):
            loader = loader_of(corpus, name)
            loader.set_epoch(epoch)
            iterator = run_of(loader, name)
            batches = [
                [[list(piece) for piece in sample] for sample in corpus.samples(next(iterator))]
                for _ in range(5)
            ]
            state = loader.state_dict()
            epochs.append({"batches": batches, "state": {k: v for k, v in state.items()
                                                         if k != "dataset"}})  # fmt: skip
        found[name] = epochs
    return found


if __name__ == "__main__":
    build(Path(sys.argv[1]))
    lines = [
        f" {json.dumps(name)}: {json.dumps(epochs)}"
        for name, epochs in streams(Corpus(Path(sys.argv[1]))).items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
