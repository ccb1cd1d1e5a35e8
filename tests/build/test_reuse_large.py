"""Reuse at the real slice size: one row at the head of a file of many slices."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.build.making import TOKENIZER
from tokenmill import prepare
from tokenmill.build.calls import run_recipe

ROWS = 46_000  # of about a kilobyte: some 45 MB, five or six slices


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_row_at_the_head_rebuilds_at_most_three_slices(tmp_path: Path) -> None:
    rng = random.Random(5)
    words = [b"".join(rng.choices([b"an", b"be", b"co", b"du"], k=3)) for _ in range(64)]
    filler = b" ".join(rng.choices(words, k=1 << 16))
    source = tmp_path / "large.jsonl"
    with open(source, "wb") as file:
        for number in range(ROWS):
            at = rng.randrange(len(filler) - 1024)
            file.write(b'{"text": "%d %s"}\n' % (number, filler[at : at + 960]))
    given = {"tokenizer_backend": "file", "num_workers": 2, "progress": False}
    first = run_recipe(str(source), str(TOKENIZER), **given)
    slices = first.summary()["slices"]
    assert slices >= 4
    assert first.account.slices_built == slices
    data = source.read_bytes()
    source.write_bytes(b'{"text": "a row that came later"}\n' + data)
    after = run_recipe(str(source), str(TOKENIZER), **given)
    assert len(after.store) == ROWS + 1
    assert 1 <= after.account.slices_built <= 3
    assert after.store[1].input_ids.tolist() == first.store[0].input_ids.tolist()
    assert after.store[ROWS].origin.line == ROWS + 1
    assert prepare(str(source), str(TOKENIZER), **given).key == after.store.key
