"""Masks follow the row's own generation prompt and the field that each word comes from."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.chat.prompt_oracle import (
    SPECIAL,
    TOOL,
    Oracle,
    call,
    calls,
    conversations,
    marked,
    result,
    says,
    system,
    table,
    templates,
    user,
)
from tokenmill.chat import ChatSpec, Renderer

HEADER = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
NO_THINK = HEADER.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and messages[0].content == '/no_think' %}<think></think>"
    "{% endif %}{{ m.content }}",
) + (
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if messages[0].content == '/no_think' %}<think></think>{% endif %}{% endif %}"
)
WITH_TOOLS = HEADER.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' and tools %}<plan></plan>{% endif %}{{ m.content }}",
) + ("{% if add_generation_prompt %}<|assistant|>{% if tools %}<plan></plan>{% endif %}{% endif %}")
INLINE_RESULT = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}</call>"
    "{% if not loop.last %}<res>{{ messages[loop.index].content }}</res>{% endif %}{% endif %}"
    "<|end|>{% endif %}{% endfor %}" + ASKS
)
SCANNED_RESULT = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}"
    "{{ m.tool_calls[0].function.arguments | tojson }}</call>"
    "{% for i in range(loop.index, messages | length) %}"
    "{% if messages[i].role == 'tool' %}{% set follow = messages[i] %}"
    "<res>{{ follow.content }}</res>{% endif %}{% endfor %}{% endif %}"
    "{{ m.content }}<|end|>{% endif %}{% endfor %}" + ASKS
)
NEXT_CLOSES = (
    "{% for m in messages %}{% if not loop.first %}<|eom|>{% endif %}<|{{ m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|eom|><|assistant|>{% endif %}"
)
BLOCK_WITH_HEADER = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|assistant|>"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}<|{{ m.role }}|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}" + ASKS
)


def mask_of(template: str, messages: list[Any], tools: Any = None, **options: Any) -> str:
    """The text with its trained parts in brackets, or the reason of the rejection."""
    row = {"messages": messages, **({"tools": tools} if tools else {})}
    rendering = Renderer(ChatSpec(**options), template, SPECIAL).render([row])
    if rendering.rejected:
        return rendering.rejected[0][2].reason
    return " ".join(
        marked(text, spans or [])
        for text, spans in zip(rendering.texts, rendering.spans, strict=True)
    )


@pytest.mark.parametrize("expand", ["none", "append", "turns"])
def test_generation_prompt_is_that_of_the_row(expand: str) -> None:
    chat = [system("/no_think"), user(1, "Hi"), says(1, "ans")]
    head = "<|system|>/no_think<|end|><|user|>Hi<|end|><|assistant|><think></think>"
    assert mask_of(NO_THINK, chat, expand=expand) == f"{head}⟦ans<|end|>⟧"
    assert mask_of(NO_THINK, chat[1:]) == "<|user|>Hi<|end|><|assistant|>⟦ans<|end|>⟧"


def test_generation_prompt_may_depend_on_tools() -> None:
    chat = [user(1, "Hi"), says(1, "ans")]
    head = "<|user|>Hi<|end|><|assistant|>"
    assert mask_of(WITH_TOOLS, chat, [TOOL]) == f"{head}<plan></plan>⟦ans<|end|>⟧"
    assert mask_of(WITH_TOOLS, chat) == f"{head}⟦ans<|end|>⟧"


@pytest.mark.parametrize(
    "turn",
    [
        calls(1, "I will use get_weather with city cityA1."),
        calls(1, "I will call list_files now", call(1, "list_files", {})),
        says(1, "It is 42.", reasoning_content="42"),
    ],
)
def test_dropped_field_is_found_although_its_words_are_in_the_text(turn: Any) -> None:
    assert mask_of(HEADER + ASKS, [user(1), turn]) == "template_drops_content"


FIRST_CALL = HEADER.replace(
    "{{ m.content }}",
    "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}",
)
ONLY_VALUES = HEADER.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "({{ c.function.arguments.values() | join }}){% endfor %}",
)
ONLY_IDS = ONLY_VALUES.replace("c.function.name", "c.id").replace(".values() | join", " | tojson")
ONLY_THINKING = HEADER.replace("{{ m.content }}", "{{ m.content }}{{ m.reasoning_content }}")
NO_THINKING = HEADER.replace("m.content }}", "m.content.split('</think>')[-1] }}")
FIRST_TAG_SPLIT = NO_THINKING.replace("')[-1]", "', 1)[-1]")


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        (FIRST_CALL, calls(1, "", call(1, "search_web"), call(1, "search"))),
        (FIRST_CALL, calls(1, "", call(1, "e", {"q": "e"}), call(1, "e", {"q": "e"}))),
        (ONLY_VALUES, calls(1, "", call(1, "f", {"city": "the city of Paris"}))),
        (ONLY_IDS, calls(1, "", call(1, "call"))),
        (ONLY_THINKING, calls(1, "", reasoning_content="I use get_weather with city cityA1")),
        (NO_THINKING, says(1, "<think>42</think>It is 42.")),
        (NO_THINKING, says(1, "It is<think>42</think>It is not 42.")),
        (FIRST_TAG_SPLIT, says(1, "<think>one</think>two<think>three</think>four")),
    ],
)
def test_dropped_field_is_found_although_another_field_contains_it(
    template: str, turn: Any
) -> None:
    following = [result(1), says(9)] if template == ONLY_THINKING else []
    assert mask_of(template + ASKS, [user(1), turn, *following]) == "template_drops_content"


@pytest.mark.parametrize("content", ["b", "", "a b c"])
@pytest.mark.parametrize("template", [INLINE_RESULT, SCANNED_RESULT])
def test_another_message_inside_the_turn_is_not_trained(template: str, content: str) -> None:
    chat = [user(1, "Hi"), calls(1, ""), result(1, content), says(2, "a b c")]
    mask = mask_of(template, chat, [TOOL])
    sampled = '⟦<call>get_weather{"city": "cityA1"}</call>⟧'
    following = "<|assistant|>⟦a b c<|end|>⟧"
    head = "<|user|>Hi<|end|><|assistant|>"
    assert mask == f"{head}{sampled}<res>{content}</res><|end|>{following}"


def test_shared_words_are_checked_in_every_turn_beside_a_result() -> None:
    """The first content, found through a list of all, is part of the last answer's words."""
    leak = "{% if not m.tool_calls and m.role == 'assistant' %}"
    leak += "{{ (messages | map(attribute='content') | list)[0] }}{% endif %}{{ m.content }}<|end|>"
    leaky = SCANNED_RESULT.replace("{{ m.content }}<|end|>", leak)
    chat = [user(1, "b"), calls(1, "text"), result(1, "r"), says(2, "a b c")]
    assert mask_of(leaky, chat, [TOOL]) == "mask_unproven"


def test_own_words_behind_another_message_are_trained() -> None:
    chat = [user(1, "Hi"), calls(1, "text"), result(1, "b"), says(2, "ans")]
    assert mask_of(SCANNED_RESULT, chat, [TOOL]) == (
        '<|user|>Hi<|end|><|assistant|>⟦<call>get_weather{"city": "cityA1"}</call>⟧'
        "<res>b</res>⟦text<|end|>⟧<|assistant|>⟦ans<|end|>⟧"
    )


def test_end_of_turn_token_that_the_next_turn_prints_is_trained_after_a_call() -> None:
    chat = [user(1, "Hi"), calls(1, ""), result(1, "b"), says(2, "ans"), user(3), says(3, "x")]
    mask = mask_of(NEXT_CLOSES, chat, [TOOL])
    assert "</call><|eom|>⟧<|tool|>b" in mask
    assert "⟦ans<|eom|>⟧<|user|>" in mask


def test_header_in_a_generation_block_is_not_trained() -> None:
    chat = [user(1, "Hi"), says(1, "ans")]
    mask = "<|user|>Hi<|end|><|assistant|>⟦ans<|end|>⟧"
    assert mask_of(BLOCK_WITH_HEADER, chat) == mask
    rendering = Renderer(ChatSpec(), BLOCK_WITH_HEADER).render([{"messages": chat}])
    assert rendering.notes["generation_clipped"] == 1


REBUILT = (
    "{% set ns = namespace(l=[]) %}{% for m in messages %}"
    "{% set ns.l = ns.l + [{'role': m.role, 'content': m.content or ''}] %}{% endfor %}"
    "{% set messages = ns.l %}"
)
MERGED = REBUILT.replace("m.content or ''", "'' ~ m.content ~ messages[-1].content")


@pytest.mark.parametrize("content", ["", None, "Hi"])
def test_empty_message_before_a_turn_outside_the_loop_is_not_trained(content: Any) -> None:
    chat = [{"role": "user", "content": content}, says(1, "ans")]
    head = f"<|user|>{content or ''}<|end|><|assistant|>"
    assert mask_of(REBUILT + HEADER + ASKS, chat) == f"{head}⟦ans<|end|>⟧"


def test_generation_block_outside_the_loop_contains_one_answer_without_its_header() -> None:
    chat = [user(1, "Hi"), says(1, "ans")]
    mask = "<|user|>Hi<|end|><|assistant|>⟦ans<|end|>⟧"
    assert mask_of(REBUILT + BLOCK_WITH_HEADER, chat) == mask
    chat = [*chat, user(2, "And"), says(2, "more")]
    assert mask_of(MERGED + BLOCK_WITH_HEADER, chat) == "mask_unproven"


def test_notes_count_the_rule_that_proved_a_row() -> None:
    rows = {
        "proven_by_trace": (HEADER + ASKS, [user(1), says(1)]),
        "proven_by_prompts": (INLINE_RESULT, [user(1), calls(1), result(1), says(2)]),
        "proven_by_generation_blocks": (BLOCK_WITH_HEADER, [user(1), says(1)]),
    }
    for rule, (template, messages) in rows.items():
        notes = Renderer(ChatSpec(), template).render([{"messages": messages}]).notes
        assert {name for name in notes if name.startswith("proven")} == {rule}


def chosen(shared: Path, one_in: int) -> dict[str, Path]:
    found = templates(shared).items()
    return {name: path for name, path in found if zlib.crc32(name.encode()) % one_in == 0}


def check(paths: dict[str, Path]) -> None:
    verdicts = [
        (name, row, verdict) for name, rows in table(paths).items() for row, verdict in rows.items()
    ]
    wrong = [found for found in verdicts if found[2].kind == "wrong"]
    assert not wrong, wrong[:3]
    avoidable = [found for found in verdicts if found[2].kind == "avoidable"]
    right = [found for found in verdicts if found[2].kind == "right"]
    assert len(avoidable) <= 0.005 * len(right) + 1, avoidable[:5]


def test_masks_of_some_shared_templates_are_right(shared: Path) -> None:
    check(chosen(shared, 36))


@pytest.mark.soak
def test_masks_of_all_shared_templates_are_right(shared: Path) -> None:
    check(chosen(shared, 1))


@pytest.mark.parametrize(
    "part", ["gemma4_upstream_E2B", "GLM-5.2", "mistral-common__tests_data_chat_templates_v11"]
)
def test_tool_rows_are_accepted(shared: Path, part: str) -> None:
    paths = {name: path for name, path in templates(shared).items() if part in name}
    assert paths
    for name, path in paths.items():
        oracle = Oracle(path.read_text())
        for row in ("call", "call twice", "calls two", "empty result", "call then user", "long"):
            assert oracle.check(conversations()[row]).kind in ("right", "template"), (name, row)


def test_null_keys_are_dropped_as_transformers_does(shared: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(shared / "wild" / "byte_tokenizer")
    chat = [user(1), {**calls(1), "content": None}, {**result(1), "content": None}, says(2)]
    compared = 0
    for path in chosen(shared, 6).values():
        try:
            renderer = Renderer(ChatSpec(), path.read_text(), tokenizer.special_tokens_map)
            ours = renderer.reference([TOOL]).render(chat, [TOOL])
        except Exception:
            continue
        theirs = tokenizer.apply_chat_template(
            chat, tools=[TOOL], chat_template=path.read_text(), tokenize=False
        )
        assert ours == theirs, path.name
        compared += 1
    assert compared > 10
