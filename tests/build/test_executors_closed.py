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


class Watched(InlineExecutor):
    """In place of Ray's; works here."""

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
def test_executor_made_from_a_name_is_closed_even_where_the_call_fails(
    verb: str, made: list[Watched], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "chat.jsonl", conversations(5))

    def call(tokenizer: Path, executor: Any, cache: str) -> None:
        given = {"tokenizer_backend": "file", "cache_dir": tmp_path / cache}
        VERBS[verb](source, tokenizer=tokenizer, executor=executor, **given)

    call(TOKENIZER, "ray", "cache")
    with pytest.raises(TokenmillError):
        call(tmp_path / "none.json", "ray", "cache")
    assert [one.closed for one in made] == [True, True]
    mine = Watched()
    call(TOKENIZER, mine, "more")
    assert not mine.closed
