"""Variables that a row itself gives its template: ``chat_template_kwargs``, as TRL's rows have it.

Oracles: a plain jinja2 template, and a renderer whose spec has the same variables for all rows.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, write_rows
from tests.chat.conversations import DATE, SPECIAL, zoo
from tests.chat.loop_oracle import OracleTemplate
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.render import MAX_TEMPLATES, clear_templates
from tokenmill.data.prompts import PromptSettings, open_prompts
from tokenmill.integrations.trainers import VERBATIM
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.loading import load

HEEDED = re.compile(r"enable_thinking|reasoning_effort|\bthinking is\b|thinking_budget")
TEMPLATE = (
    "{% if language is defined %}[{{ language }}]{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
    "{% endif %}"
)
SAID: list[dict[str, Any] | None] = [
    None, {"enable_thinking": False}, {"enable_thinking": True, "language": "de"},
    {"reasoning_effort": "high", "enable_thinking": False, "thinking": True},
]  # fmt: skip
MESSAGES = [
    {"role": "user", "content": "What is up?"},
    {"role": "assistant", "content": "<think>\nLook.\n</think>\n\nThe sky."},
    {"role": "user", "content": "And down?"},
    {"role": "assistant", "content": "The ground."},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ROWS: dict[str, dict[str, Any]] = {
    "messages": {"messages": MESSAGES},
    "tools": {"messages": MESSAGES, "tools": TOOLS},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Up?"}, {"from": "gpt", "value": "Sky."}]
    },
    "alpaca": {"instruction": "Name a colour.", "output": "Blue."},
    "prompt and completion": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:2]},
    "preference": {"prompt": MESSAGES[:3], "chosen": MESSAGES[3:], "rejected": "Nothing."},
    "kto": {"prompt": MESSAGES[:3], "completion": MESSAGES[3:], "label": True},
}


def outcome(renderer: Renderer, row: dict[str, Any]) -> Any:
    made = renderer.render([row])
    rejected = [(part, error.reason, error.message) for _, part, error in made.rejected]
    return made.texts, made.spans, made.turns, rejected


@pytest.mark.parametrize("expand", ["none", "append"])
@pytest.mark.parametrize("how", ["auto", "jinja2"])
def test_row_is_rendered_as_if_the_spec_had_its_variables(
    how: str, expand: str, shared: Path
) -> None:
    templates = {"ours": TEMPLATE, **zoo(shared)}
    heeding = [name for name, source in zoo(shared).items() if HEEDED.search(source)]
    rng = random.Random(f"{how} {expand}")
    differ = 0
    for name in ("ours", rng.choice(heeding)):
        expected: dict[str, Any] = {}
        for said in SAID:
            clear_templates()
            spec = ChatSpec(date=DATE, expand=expand, chat_template_kwargs=said)
            alone = Renderer(spec, templates[name], SPECIAL, renderer=how)
            plain = OracleTemplate(templates[name], {**SPECIAL, **(said or {})})
            for form, row in ROWS.items():
                if expand == "none" or form not in ("preference", "kto"):
                    expected[json.dumps([form, said])] = found = outcome(alone, row)
                    if form == "tools" and expand == "none" and found[0]:
                        assert found[0][-1] == plain.plain(MESSAGES, TOOLS)
        own = Renderer(ChatSpec(date=DATE, expand=expand), templates[name], SPECIAL, renderer=how)
        for asked in rng.sample([*expected, *expected], 2 * len(expected)):
            form, said = json.loads(asked)
            got = outcome(own, {**ROWS[form], "chat_template_kwargs": said})
            assert got == expected[asked], (name, form, said)
        differ += (
            len({repr(found) for asked, found in expected.items() if '"messages"' in asked}) > 1
        )
    assert differ  # otherwise no variable had an effect


def test_more_variables_than_cached_templates() -> None:
    rows = [
        {"messages": MESSAGES[:2], "chat_template_kwargs": {"language": f"l{number}"}}
        for number in range(3 * MAX_TEMPLATES)
    ]
    made = Renderer(ChatSpec(), TEMPLATE, SPECIAL).render([*rows, *rows])
    assert [text.partition("<")[0] for text in made.texts] == [
        f"[{row['chat_template_kwargs']['language']}]" for row in [*rows, *rows]
    ]
    assert made.notes["rows_traced"] == len(made.texts) == 2 * len(rows)


WRONG: dict[str, Any] = {
    "list": [1], "number": 3, "no JSON": "{", "JSON of a list": "[1]", "messages": {"messages": []},
    "template": {"chat_template": "x"}, "tokens": {"tokenize": False}, "bytes": {"x": b"y"},
    "deep": {"x": json.loads("[" * 80 + "]" * 80)}, "big": {"x": 1 << 70},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_invalid_variables_reject_only_their_row(wrong: str) -> None:
    rows = [{"messages": MESSAGES}, {"messages": MESSAGES, "chat_template_kwargs": WRONG[wrong]}]
    made = Renderer(ChatSpec(), TEMPLATE, SPECIAL).render(rows)
    [(number, _, error)] = made.rejected
    assert (made.source, number, error.reason) == ([0], 1, "bad_shape")
    assert "chat_template_kwargs" in error.message


@pytest.mark.parametrize("kind", ["jsonl", "text", "parquet"])
def test_variables_of_rows_in_files(kind: str, tmp_path: Path) -> None:
    said = [{"language": "de"}, None, {"language": "fr", "enable_thinking": True}, {}]
    rows = [{"messages": MESSAGES[:2], "chat_template_kwargs": one} for one in said]
    if kind == "parquet":  # which writes null for missing values
        source = tmp_path / "rows.parquet"
        table = pa.Table.from_pylist(rows)
        assert table.column("chat_template_kwargs").to_pylist()[0]["enable_thinking"] is None
        pq.write_table(table, source)
    else:
        texts = [json.dumps(one) for one in said]
        written = [
            {**row, "chat_template_kwargs": text} if kind == "text" else row
            for row, text in zip(rows, texts, strict=True)
        ]
        source = write_rows(tmp_path / "rows.jsonl", written)
    store = tm.prepare(
        source, tokenizer=TOKENIZER, chat_template=TEMPLATE, cache_dir=tmp_path / "cache",
        chat_template_kwargs={"language": "en"}, **INLINE,
    )  # fmt: skip
    tokenizer = load(TOKENIZER, backend="file")
    heads = [tokenizer.decode(row.input_ids.tolist())[:4] for row in store]
    assert heads == ["[de]", "[en]", "[fr]", "[en]"]


def test_lint_renders_with_the_variables_of_rows(tmp_path: Path) -> None:
    template = "{% if strict is defined and strict %}{{ raise_exception('no') }}{% endif %}"
    rows = [{"messages": MESSAGES, "chat_template_kwargs": {"strict": n == 1}} for n in range(3)]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    found = tm.lint(
        source, tokenizer=TOKENIZER, tokenizer_backend="file", chat_template=template + TEMPLATE,
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    [refused] = [one for one in found.findings if one.rule == "template_error"]
    assert refused.count == 1


@pytest.mark.parametrize("convention", ["", VERBATIM])
def test_prompts_use_variables_of_rows(convention: str, tmp_path: Path) -> None:
    said = [{"language": "de"}, None, {"enable_thinking": False}, {"language": "fr"}]
    rows = [{"prompt": MESSAGES[:1], "chat_template_kwargs": one} for one in said]
    prompts = open_prompts(
        PromptSettings(convention=convention),
        write_rows(tmp_path / "rows.jsonl", rows), TOKENIZER, tokenizer_backend="file",
        prompt_key="prompt", apply_chat_template=True, chat_template=TEMPLATE, max_length=1000,
        cache_dir=tmp_path / "cache", num_workers=0,
    )  # fmt: skip
    heeded = said if not convention else [None] * len(said)
    expected = [OracleTemplate(TEMPLATE, {**SPECIAL, **(one or {})}) for one in heeded]
    texts = [one.plain(MESSAGES[:1], add_generation_prompt=True) for one in expected]
    assert [prompt.prompt for prompt in prompts] == texts
    encoder = Encoder(load(TOKENIZER, backend="file"))
    lengths = [len(encoder.encode([text]).ids) for text in texts]
    assert [prompt.length for prompt in prompts] == lengths
