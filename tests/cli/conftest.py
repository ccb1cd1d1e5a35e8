"""Sources, and one store that the reading commands share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.build.making import INLINE, TOKENIZER, conversations, write_rows
from tokenmill.build.calls import run_recipe

DIRTY = ['{"messages": [', '{"messages": 7}', '{"messages": [{"role": "user", "content": "?"}]}']


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "chat.jsonl", conversations(20))


@pytest.fixture
def dirty(tmp_path: Path) -> Path:
    """Seven good rows and three bad ones, each bad in its own way."""
    return write_rows(tmp_path / "dirty.jsonl", [*conversations(7), *DIRTY])


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 20 rows with a carried column and 3 rejected rows, for commands that read."""
    room = tmp_path_factory.mktemp("cli")
    source = write_rows(room / "chat.jsonl", [*conversations(20), *DIRTY])
    prepared = run_recipe(
        str(source), str(TOKENIZER), cache_dir=room / "cache", carry=("id",), **INLINE
    )
    return prepared.path
