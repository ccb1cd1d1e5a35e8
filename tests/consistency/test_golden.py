"""Streams of this release equal those of every earlier one.

``python -m tests.consistency.test_golden DIRECTORY`` writes golden_streams.json. A change of it
breaks the resume of runs under way: it needs a bump of ORDER_VERSION or PACKING_VERSION and a
"Changed" in the changelog.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.consistency.cases import CASES, loader_of, run_of
from tests.consistency.corpus import Corpus, build

GOLDEN = Path(__file__).with_name("golden_streams.json")


def stream(corpus: Corpus, name: str) -> list[dict[str, Any]]:
    epochs = []
    for epoch in (0, 2):
        loader = loader_of(corpus, name)
        loader.set_epoch(epoch)
        iterator = run_of(loader, name)
        batches = [
            [[list(piece) for piece in sample] for sample in corpus.samples(next(iterator))]
            for _ in range(5)
        ]
        state = {key: value for key, value in loader.state_dict().items() if key != "dataset"}
        epochs.append({"batches": batches, "state": state})
    return epochs


def test_every_stream_has_a_golden_one() -> None:
    assert sorted(json.loads(GOLDEN.read_text())) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_stream_equals_the_golden_one(corpus: Corpus, name: str) -> None:
    assert stream(corpus, name) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    build(root := Path(sys.argv[1]))
    lines = [f" {json.dumps(name)}: {json.dumps(stream(Corpus(root), name))}" for name in CASES]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
