"""The cycle collector in a build: it never looks at rows, and stays what the program made it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.build.making import INLINE, TOKENIZER, conversations, small_cuts, write_rows
from tokenmill import prepare
from tokenmill.sources.block import BlockRows


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_rows_are_dead_before_the_collector_may_look(
    is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    source = write_rows(tmp_path / "chat.jsonl", conversations(100))
    alive: list[int] = []
    enable = gc.enable

    def watched() -> None:
        alive.append(sum(type(thing) is BlockRows for thing in gc.get_objects()))
        enable()

    monkeypatch.setattr(gc, "enable", watched)
    try:
        if not is_on:
            gc.disable()
        prepare(source, str(TOKENIZER), cache_dir=tmp_path / "cache", **INLINE)
        assert gc.isenabled() is is_on
    finally:
        enable()
    assert not any(alive)
    assert bool(alive) is is_on
