"""Who makes an executor closes it; one that was given stays its giver's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tokenmill as tm
from tests.build.making import TOKENIZER, conversations, write_rows
from tokenmill.build.calls import explain_recipe, prepare_part
from tokenmill.build.tasks import InlineExecutor
from tokenmill.errors import TokenmillError

WORDS: dict[str, Any] = {"tokenizer_backend": "file"}


class Watched(InlineExecutor):
    """Stands for Ray's: works here, and tells whether it was let go."""

    made: list[Watched]

    def __init__(self, num_workers: int | None = None) -> None:
        super().__init__()
        self.closed = False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    module = ModuleType("tokenmill.integrations.ray")
    module.RayExecutor = Watched  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenmill.integrations.ray", module)
    Watched.made = []
    return Watched.made


def prompts(source: Path, **given: Any) -> Any:
    return tm.PromptDataset(source, prompt_key="messages", apply_chat_template=True, **given)


def part(source: Path, **given: Any) -> Any:
    return prepare_part(source, part="1/2", **given)


VERBS: dict[str, Callable[..., Any]] = {
    "prepare": tm.prepare, "prepare_part": part, "why": explain_recipe, "lint": tm.lint,
    "prompts": prompts,
}  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_executor_made_from_a_name_is_closed(
    verb: str, made: list[Watched], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "chat.jsonl", conversations(5))
    VERBS[verb](source, tokenizer=TOKENIZER, executor="ray", cache_dir=tmp_path / "cache", **WORDS)
    assert [one.closed for one in made] == [True]
    mine = Watched()
    VERBS[verb](source, tokenizer=TOKENIZER, executor=mine, cache_dir=tmp_path / "more", **WORDS)
    assert not mine.closed


@pytest.mark.parametrize("verb", VERBS)
def test_executor_is_closed_where_the_call_fails(
    verb: str, made: list[Watched], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "chat.jsonl", conversations(5))
    with pytest.raises(TokenmillError):
        VERBS[verb](
            source, tokenizer=tmp_path / "none.json", executor="ray", cache_dir=tmp_path, **WORDS
        )
    assert [one.closed for one in made] == [True]
