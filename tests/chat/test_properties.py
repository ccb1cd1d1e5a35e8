"""Random conversations over templates of every habit: proven and right, or rejected."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.chat.conversations import SPECIAL, say
from tests.chat.templates import ALL
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.template import ReferenceTemplate

RENDERERS = {name: Renderer(ChatSpec(), source, SPECIAL) for name, source in ALL.items()}
TURNS = {name: Renderer(ChatSpec(turn_end="turn"), s, SPECIAL) for name, s in ALL.items()}
REFERENCES = {name: ReferenceTemplate(source, SPECIAL, None) for name, source in ALL.items()}

PIECES = st.sampled_from(
    [
        " ",
        "\n",
        "\n\n",
        "\t",
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|im_start|>user\n",
        "</s>",
        "<|over|>",
        "[INST]",
        "\U000f0000",
        "\U0010fffd",
        "\x00\x1e\x00",
        "é",
        "你好",
        "👋🏽",
        "{{ x }}",
        "\x1c",
        "\u2028",
        "<|",
        "|>",
        "0",
        "a b",
        "<|im_start|>assistant\n",
        "\ue000",
        "\ud7ff",
        "x" * 3000,
    ]
)
TEXT = st.lists(PIECES, max_size=5).map("".join)
KEY = "abcdefghij"
PRINTED_WHOLE = ("chatml", "trimming", "inst", "unclosed", "returning", "standing")


@st.composite
def conversations(draw: Any) -> list[dict[str, Any]]:
    """Roles at random; each message has a letter pair of its own, in the middle of odd text."""
    roles = draw(st.lists(st.sampled_from(["user", "assistant", "system"]), min_size=1, max_size=6))
    messages = []
    for index, role in enumerate([*roles, "assistant"]):
        word = f"Q{KEY[index]}Z" if draw(st.integers(0, 9)) else ""
        messages.append({"role": role, "content": f"{draw(TEXT)}{word}{draw(TEXT)}"})
    return messages


def check(name: str, messages: list[dict[str, Any]], renderer: Renderer) -> None:
    rows = [{"messages": messages}] * 2
    result = renderer.render(rows)
    assert len(result.texts) + len(result.rejected) == 2
    for *_, error in result.rejected:
        assert error.reason in (
            "template_error",
            "template_drops_content",
            "mask_unproven",
            "no_trained_tokens",
        )
    answers = [m["content"].strip() for m in messages if m["role"] == "assistant"]
    if name in PRINTED_WHOLE and all(answers) and "system" not in {m["role"] for m in messages}:
        assert not result.rejected, name
    for text, spans, turns in zip(result.texts, result.spans, result.turns, strict=True):
        assert spans
        assert text == REFERENCES[name].render(messages)
        inside = " \x00 ".join(text[a:b] for a, b in spans)
        ends = [end for _, end in turns]
        assert ends == sorted(ends)
        assert ends[-1] == len(text)
        assert [role for role, _ in turns] == [m["role"] for m in messages]
        flat = [position for span in spans for position in span]
        assert flat == sorted(flat)
        if name in PRINTED_WHOLE:
            assert all(answer in inside for answer in answers), name
        for index, message in enumerate(messages):
            word = f"Q{KEY[index]}Z"
            if word in message["content"]:
                thought = "</think>" in message["content"].split(word, 1)[1]
                if message["role"] != "assistant":
                    assert word not in inside, (name, word)
                elif not thought and name != "generation":
                    assert word in inside, (name, word)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(messages=conversations(), name=st.sampled_from(sorted(ALL)))
@example(messages=[{"role": "assistant", "content": ""}], name="chatml")
@example(
    messages=[{"role": "user", "content": "QaZ"}, {"role": "assistant", "content": ""}],
    name="unclosed",
)
def test_random_conversations_are_proven_or_rejected(
    messages: list[dict[str, Any]], name: str
) -> None:
    check(name, messages, RENDERERS[name])
    check(name, messages, TURNS[name])


@settings(max_examples=150, deadline=None)
@given(
    row=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "messages",
                        "role",
                        "content",
                        "text",
                        "tools",
                        "system",
                        "tool_calls",
                        "from",
                        "value",
                        "prompt",
                        "completion",
                        "function",
                        "arguments",
                        "name",
                        "type",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_random_rows_are_rejected_never_raised(row: Any) -> None:
    renderer = RENDERERS["chatml"]
    asked = {"role": "user", "content": row}
    answered = say("a", 1, "y", tool_calls=row)
    talks = [[asked, say("a", 1, "x")], [say("u", 0, "x"), answered]]
    result = renderer.render([row, *({"messages": talk} for talk in talks)])
    assert len(result.texts) + len(result.rejected) == 3
