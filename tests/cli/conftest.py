"""Source files, and one store for all commands that read."""

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
    """Seven good rows and three bad ones with different reasons."""
    return write_rows(tmp_path / "dirty.jsonl", [*conversations(7), *DIRTY])


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 20 rows with a kept column, and 3 rejected rows."""
    directory = tmp_path_factory.mktemp("cli")
    source = write_rows(directory / "chat.jsonl", [*conversations(20), *DIRTY])
    prepared = run_recipe(
        str(source), str(TOKENIZER), cache_dir=directory / "cache", keep_columns=("id",), **INLINE
    )
    return prepared.path
