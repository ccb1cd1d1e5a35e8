"""Variables of templates: what of them is in the key, and what cannot be one."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversations, write_rows
from tokenmill._core.fingerprint import own_order
from tokenmill.data.prompt_rows import PromptSpec
from tokenmill.errors import UsageError
from tokenmill.tokenizers.loading import load

SHOWN = "{{ x | tojson }}{% for k in x %}{{ k }},{% endfor %}"
TEMPLATE = SHOWN + (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SORTED: dict[str, Any] = {"b": [{"d": 1, "e": 2}], "c": 3}
TURNED: dict[str, Any] = {"c": 3, "b": [{"e": 2, "d": 1}]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "chat.jsonl", conversations(3))


def test_order_inside_a_variable_is_served_as_it_was_given(source: Path, tmp_path: Path) -> None:
    given = {**INLINE, "chat_template": TEMPLATE, "cache_dir": tmp_path / "cache"}
    stores = [
        tm.prepare(source, TOKENIZER, chat_template_kwargs={"z": 1, "x": x}, **given)
        for x in (SORTED, TURNED)
    ]
    assert stores[0].key != stores[1].key
    decode = load(TOKENIZER, backend="file").decode
    first, second = (decode(s[0].input_ids.tolist()).partition("<|im_start|>")[0] for s in stores)
    assert first == '{"b": [{"d": 1, "e": 2}], "c": 3}b,c,'
    assert second == '{"c": 3, "b": [{"e": 2, "d": 1}]}c,b,'


def test_order_is_in_the_key_only_where_it_can_be_seen(source: Path) -> None:
    def document(kwargs: dict[str, Any]) -> dict[str, Any]:
        return tm.Recipe((str(source),), TOKENIZER, chat_template_kwargs=kwargs).document()

    assert document({"x": SORTED, "a": 1}) == document({"a": 1, "x": SORTED})
    assert "chat_template_kwargs_order" not in document({"x": SORTED, "a": 1})
    assert document({"x": TURNED}) != document({"x": SORTED})
    assert document({"x": TURNED, "a": 1}) == document({"a": 1, "x": TURNED})
    assert own_order({"x": {"a": {"z": 1, "y": 2}}}) is not None
    assert own_order({"z": 1, "x": [1, {"é": 1, "ü": 2}]}) is None


def test_order_inside_a_variable_of_prompts_is_in_their_key(source: Path, tmp_path: Path) -> None:
    made = [
        tm.PromptDataset(
            source, TOKENIZER, prompt_key="messages", tokenizer_backend="file",
            chat_template=TEMPLATE, apply_chat_template=True, apply_chat_template_kwargs={"x": x},
            cache_dir=tmp_path / "cache", num_workers=0,
        )
        for x in (SORTED, TURNED)
    ]  # fmt: skip
    assert made[0].key != made[1].key
    assert [str(one[0].prompt)[:6] for one in made] == ['{"b": ', '{"c": ']


class Text(str):
    pass


class Colour(enum.IntEnum):
    RED = 1


NESTED: dict[str, Any] = {}
NESTED["x"] = NESTED
WRONG: dict[str, Any] = {
    "NaN": float("nan"), "infinity": float("inf"), "bytes": b"x", "number as name": {1: 2},
    "lone surrogate": "\ud800", "surrogate in a name": {"\ud800": 1}, "big": 1 << 64,
    "small": -(1 << 63) - 1, "text of its own": Text("x"), "name of its own": {Text("x"): 1},
    "enumeration": Colour.RED, "array": np.zeros(2), "numpy number": np.float64(1),
    "set": {1}, "object": object(), "cycle": NESTED,
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("around", ["bare", "list", "mapping"])
def test_what_is_not_plain_is_refused_where_it_is_given(wrong: str, around: str) -> None:
    value = {"bare": WRONG[wrong], "list": [0, WRONG[wrong]], "mapping": {"y": WRONG[wrong]}}
    given = {"x": value[around]}
    for make in (
        lambda: tm.Recipe(("a.jsonl",), TOKENIZER, chat_template_kwargs=given),
        lambda: PromptSpec(apply_chat_template_kwargs=given),
    ):
        with pytest.raises(UsageError, match=r"chat_template_kwargs"):
            make()


def test_names_of_columns_are_texts() -> None:
    for role in ("messages", "tools", "text", "prompt", "completion"):
        with pytest.raises(UsageError, match="columns"):
            tm.Recipe(("a.jsonl",), TOKENIZER, columns={role: "\ud800"})
    with pytest.raises(UsageError, match="keep_columns"):
        tm.Recipe(("a.jsonl",), TOKENIZER, keep_columns=("\ud800",))
    with pytest.raises(UsageError, match="prompt_key"):
        PromptSpec(prompt_key="\ud800")


def test_edges_that_are_plain_are_taken() -> None:
    given = {"x": {"least": -(1 << 63), "most": (1 << 64) - 1, "pair": (1, 2), "none": None}}
    recipe = tm.Recipe(("a.jsonl",), TOKENIZER, chat_template_kwargs=given)
    # A list and a tuple are one to a key, so they are one to a template.
    assert recipe.chat_template_kwargs == {"x": {**given["x"], "pair": [1, 2]}}
