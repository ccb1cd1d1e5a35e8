"""The bridge by small cases: closers, cut turns, other stop tokens, other wording, memory."""

from __future__ import annotations

import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import tokenizers
import tokenmill as tm
from tests.chat.templates import CHATML, HABITS, RETURNING, THINKING, TRIMMING, UNCLOSED
from tests.rl.rollouts import TOKENIZER, tokenizer_of
from tokenmill.chat.trace import TracedTemplate

USER = {"role": "user", "content": "What is the weather?"}
AGAIN = {"role": "user", "content": "And now?"}
RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "sunny"}
LOOK = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [LOOK]}
# Prints the name of the function whose answer a tool message is (gpt-oss).
NAMING = (
    "{% set ns = namespace(name=none) %}{% for m in messages %}"
    "{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    "<|im_start|>assistant\n<call>{{ ns.name }}</call><|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>{{ ns.name }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens a list of results before the first one after a call, where nothing closes a turn (Hy3).
LISTING = (
    "{% set ns = namespace(first=true) %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if ns.first %}<results>\n{% endif %}{% set ns.first = false %}"
    "<result>{{ m.content }}</result>\n"
    "{% else %}{% if m.tool_calls %}{% set ns.first = true %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% endif %}"
    "{% if m.role != 'assistant' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Prints results only in the turn that called, before its content (Gemma 4 E2B).
INSIDE = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>"
    "{% for r in messages[loop.index:] %}{% if r.role == 'tool' %}<r>{{ r.content }}</r>{% endif %}"
    "{% endfor %}{% endif %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A turn is closed by a blank line, which no token marks (RWKV).
BLANK_LINE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Prints reasoning with the last turn alone, and content as it is.
REASONING_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Opens thinking in the generation prompt, and knows of none otherwise.
OPENING = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
# Untraceable: a recursive loop.
RECURSIVE = (
    "{% for m in messages recursive %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Rollout:
    def __init__(self, template: str, **options: Any) -> None:
        self.bridge = tm.Bridge(tokenizer_of(template), **options)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.bridge.tokenizer.reference.encode(text).ids
        return ids

    def text(self, ids: list[int]) -> str:
        return self.bridge.tokenizer.decode(ids)

    def after(self, text: str, *answer: dict[str, Any], **options: Any) -> str:
        """Return the text that the bridge appends to a text sampled after `USER`."""
        given = self.bridge.prompt([USER]) + self.ids(text)
        found = self.bridge.extend(given, answer or [AGAIN], **options)
        assert found[: len(given)] == given
        return self.text(found[len(given) :])


NEXT = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
RETURNED = "<|start|>user<|message|>And now?<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("template", "sampled", "appended"),
    [
        (CHATML, "Sunny.<|im_end|>", NEXT),
        (CHATML, "Sunny.", "<|im_end|>" + NEXT),  # cut off
        (CHATML, "Sunny.<|im_end|>\n", NEXT.removeprefix("\n")),  # a host that adds the line's end
        (CHATML, "Sunny.</s>", "<|im_end|>" + NEXT),  # stopped by another token: part of the turn
        (CHATML, "<think>\nHm", "<|im_end|>" + NEXT),  # cut off in its thoughts
        (BLANK_LINE, "Sunny.\n\n", "user: And now?\n\nassistant:"),
        (BLANK_LINE, "Sunny.", "\n\nuser: And now?\n\nassistant:"),
        (UNCLOSED, "Sunny.", "<|user|>\nAnd now?<|assistant|>\n"),
        (OPENING, "Hm.\n</think>\n\nSunny.<|im_end|>", NEXT + "<think>\n"),
        (RETURNING, "Sunny.", "<|end|>" + RETURNED),
        (RETURNING, "Sunny.<|end|>", RETURNED),
    ],
)
def test_end_of_turn_is_printed_once(template: str, sampled: str, appended: str) -> None:
    assert Rollout(template).after(sampled) == appended


def test_turn_that_the_template_prints_differently_keeps_its_ids() -> None:
    rollout = Rollout(TRIMMING)
    given = rollout.bridge.prompt([USER]) + rollout.ids("  Sunny. <|eot_id|>")
    found = rollout.bridge.extend(given, [AGAIN])
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    appended = header.format("user") + "And now?<|eot_id|>" + header.format("assistant")
    assert (found[: len(given)], rollout.text(found[len(given) :])) == (given, appended)
    # And so on: what stands is the template's prompt but for those words.
    given = found + rollout.ids(" Rain.")
    found = rollout.bridge.extend(given, [AGAIN])
    assert rollout.text(found[len(given) :]) == "<|eot_id|>" + appended


def test_null_content_of_a_message_is_empty() -> None:
    rollout = Rollout(CHATML)
    ids = rollout.bridge.prompt([{"role": "system", "content": None}, USER]) + rollout.ids(" ")
    ids = rollout.bridge.extend(ids, [AGAIN], sampled={"role": "assistant", "content": None})
    ids = rollout.bridge.extend(ids + rollout.ids("Yes."), [AGAIN])
    assert "None" not in rollout.text(ids)
    prompt = next(reversed(rollout.bridge._prompts.values()))
    assert [message["content"] for message in prompt.messages[:3]] == [None, USER["content"], None]


def test_sampled_tokens_are_never_encoded_again() -> None:
    """A text in single letters, and bytes that were cut inside a character."""
    rollout = Rollout(CHATML)
    letters = [i for letter in "Sunny weather" for i in rollout.ids(letter)]
    cut = rollout.ids("é")[:-1] or rollout.ids("👋")[:-1]
    assert cut
    assert letters != rollout.ids("Sunny weather")
    for sampled in (letters, cut):
        given = rollout.bridge.prompt([USER]) + sampled
        found = rollout.bridge.extend(np.array(given), [AGAIN])
        assert found[: len(given)] == given
        assert rollout.text(found[len(given) :]) == "<|im_end|>" + NEXT


def test_whitespace_that_a_token_strips_is_encoded_as_in_the_whole() -> None:
    """phi-3: ``<|end|>`` takes the line's end behind it, which then has no token."""
    template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    template += "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    made = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    made.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True), "<|user|>"])
    bridge = tm.Bridge(made, chat_template=template)
    given = bridge.prompt([USER]) + made.encode("Sunny.<|end|>").ids
    turns = [USER, {"role": "assistant", "content": "Sunny."}, AGAIN]
    whole = "".join(f"<|{turn['role']}|>\n{turn['content']}<|end|>\n" for turn in turns)
    assert bridge.extend(given, [AGAIN]) == made.encode(whole + "<|assistant|>\n").ids


def test_text_after_text_is_encoded_as_in_the_whole() -> None:
    """A tokenizer that invents a space before the first word, and no other."""
    letters = sorted({*map(chr, range(32, 127)), "\n", "▁"})
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bridge = tm.Bridge(made, chat_template=BLANK_LINE)
    given = bridge.prompt([USER])
    whole = f"user: {USER['content']}\n\nassistant: Sunny.\n\nuser: And now?\n\nassistant:"
    ids = made.encode(whole).ids
    assert ids[: len(given)] == given
    cut = len(made.encode(whole[: whole.index("Sunny.") + len("Sunny.")]).ids)
    assert bridge.extend(ids[:cut], [AGAIN]) == ids


THOUGHT = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("template", "text", "sampled", "gone", "after"),
    [
        (THINKING, "Hm.\n</think>\n\nSunny.<|im_end|>", None, "Hm.",
         "<|im_start|>assistant\nSunny.<|im_end|>\n"),
        # Its text as it is would go on; as servers read it, in whatever words, it is shortened.
        (REASONING_LAST, "<think>Hm.</think>Sunny.<|im_end|>", None, "Hm.", "Sunny.<|im_end|>"),
        (REASONING_LAST, "<think> Hm. </think>Sunny.<|im_end|>", THOUGHT, "Hm.",
         "Sunny.<|im_end|>"),
        (RETURNING, "Sunny.<|return|>", None, "<|return|>", "<|message|>Sunny.<|end|>"),
    ],
)  # fmt: skip
def test_rewritten_turn_raises_with_both_texts(
    template: str, text: str, sampled: Any, gone: str, after: str
) -> None:
    with pytest.raises(tm.errors.BridgeError, match="would rewrite turn 1") as caught:
        Rollout(template).after(text, sampled=sampled)
    assert gone in caught.value.before
    assert (caught.value.turn, caught.value.after) == (1, after)


def test_answer_that_is_printed_in_the_turn_of_the_call_is_appended() -> None:
    rollout = Rollout(HABITS["looks ahead"])
    turn = {**CALL, "tool_calls": [{**LOOK, "function": {"name": "look", "arguments": {}}}]}
    as_printed = '<call>{"name": "look", "arguments": {}}</call><|end|>'
    appended = rollout.after(as_printed, RESULT, sampled=turn)
    assert appended == "<|tool|>sunny<|end|><|assistant|>"
    assert rollout.after(as_printed.replace(": ", ":"), RESULT, sampled=turn) == appended


def test_answer_that_depends_on_the_call_or_its_id_requires_the_message() -> None:
    text = "<call>look</call><|im_end|>"
    by_id = NAMING.replace("m.tool_calls[0].function.name %}", "m.tool_calls[0].id %}").replace(
        "<|im_start|>{{ ns.name }}", "<|im_start|>{{ ns.name == m.tool_call_id }}"
    )
    for template, answer in ((NAMING, RESULT), (by_id, {"role": "tool", "content": "sunny"})):
        with pytest.raises(tm.errors.UsageError, match="as sampled"):
            Rollout(template).after(text, answer)
    appended = Rollout(NAMING).after(text, RESULT, sampled=CALL)
    assert appended == "\n<|im_start|>look\nsunny<|im_end|>\n<|im_start|>assistant\n"


def test_answer_that_is_printed_only_after_a_call_requires_the_message() -> None:
    """Gemma 4 prints results inside the turn of the call, and nothing after a text."""
    rollout = Rollout(HABITS["looks ahead"].replace("m.role == 'assistant'", "m.tool_calls"))
    ids = rollout.bridge.prompt([USER]) + rollout.ids("Looking.<|end|>")
    with pytest.raises(tm.errors.UsageError, match="as sampled"):
        rollout.bridge.extend(ids, [RESULT, AGAIN])
    with pytest.raises(tm.errors.UsageError, match="empty"):
        rollout.bridge.extend(ids, [])
    with pytest.raises(tm.errors.UsageError, match="at least one message"):
        rollout.bridge.prompt([])


def test_error_of_the_template_is_a_bridge_error() -> None:
    refusing = "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}" + CHATML
    with pytest.raises(tm.errors.BridgeError, match="too long"):
        Rollout(refusing).after("Sunny.<|im_end|>")


def test_answer_in_a_list_opened_by_a_call_requires_the_message() -> None:
    rollout = Rollout(LISTING)
    ids = rollout.bridge.prompt([USER]) + rollout.ids("Looking.")
    ids = rollout.bridge.extend(ids, [RESULT])  # the first list is opened in any case
    ids += rollout.ids("Again.")
    with pytest.raises(tm.errors.UsageError, match="as sampled"):
        rollout.bridge.extend(ids, [RESULT])


def test_text_alone_does_not_show_results_that_only_a_call_prints() -> None:
    for content in ("sunny", ""):
        with pytest.raises(tm.errors.UsageError, match="as sampled"):
            Rollout(INSIDE).after("<call>look</call>", {**RESULT, "content": content}, AGAIN)


def test_message_with_text_that_was_not_sampled_raises() -> None:
    turn = {"role": "assistant", "content": "Sunny and warm."}
    with pytest.raises(tm.errors.UsageError, match="was not sampled"):
        Rollout(CHATML).after("Sunny", sampled=turn)


def test_untraceable_template_works() -> None:
    rollout = Rollout(RECURSIVE)
    assert rollout.after("Sunny.<|im_end|>") == NEXT
    assert rollout.after("Sunny.") == "<|im_end|>" + NEXT
    assert "sunny" in rollout.after("Looking.<|im_end|>", RESULT)
    turn = {"role": "assistant", "content": "Looking."}
    assert "sunny" in rollout.after("Looking.<|im_end|>", RESULT, sampled=turn)


@pytest.mark.parametrize("renderer", ["auto", "jinja2"])
def test_path_that_differs_from_the_reference_is_found(
    renderer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = TracedTemplate.follow

    def lie(self: TracedTemplate, *given: Any, **options: Any) -> Any:
        run = honest(self, *given, **options)
        run.text += "?"
        return run

    monkeypatch.setattr(TracedTemplate, "follow", lie)
    assert Rollout(CHATML, renderer=renderer).after("Sunny.<|im_end|>") == NEXT


def test_invalid_calls_raise() -> None:
    rollout = Rollout(CHATML)
    prompt = rollout.bridge.prompt([USER])
    given: Any
    for given, answer, words in (
        (prompt, AGAIN, "Nothing was sampled"),
        (prompt[1:], AGAIN, "do not begin with a prompt"),
        ([*prompt, 5], CALL, "as sampled"),
        ([10**6], AGAIN, "ids\\[0\\] is"),
        (["a"], AGAIN, "list of integers"),
    ):
        with pytest.raises(tm.errors.UsageError, match=words):
            rollout.bridge.extend(given, [answer])
    with pytest.raises(tm.errors.RowError, match="only user and assistant"):
        tm.Bridge(
            tokenizer_of(CHATML), chat_template="{{ raise_exception('only user and assistant') }}"
        ).prompt([USER])
    with pytest.raises(tm.errors.UsageError, match="Set chat_template"):
        tm.Bridge(rollout.bridge.tokenizer.reference)


def test_rollouts_with_a_common_prefix_are_distinguished() -> None:
    """A group of answers to one prompt, then a tree: every branch has its own conversation."""
    rollout = Rollout(CHATML)
    prompt = rollout.bridge.prompt([USER])
    branches = {}
    for name in ("one", "two"):
        given = prompt + rollout.ids(f"Branch {name}.<|im_end|>")
        branches[name] = rollout.bridge.extend(given, [{**AGAIN, "content": name}])
    for name, ids in branches.items():
        given = ids + rollout.ids("Yes.")
        text = rollout.text(rollout.bridge.extend(given, [AGAIN]))
        assert text.count(f"Branch {name}.") == text.count(f"<|im_start|>user\n{name}") == 1


def test_prompt_of_another_process_is_remembered_if_its_text_is_equal() -> None:
    rollout, other = Rollout(CHATML), Rollout(CHATML)
    given = rollout.bridge.prompt([USER]) + rollout.ids("Sunny.<|im_end|>")
    ids = rollout.bridge.extend(given, [AGAIN])
    talk = [USER, {"role": "assistant", "content": "Sunny."}, AGAIN]
    other.bridge.remember(ids, talk)
    given = ids + rollout.ids("Rain.")
    assert other.bridge.extend(given, [AGAIN]) == rollout.bridge.extend(given, [AGAIN])
    with pytest.raises(tm.errors.UsageError, match="not the prompt of this conversation"):
        other.bridge.remember(ids[:-1], talk)


def test_least_recently_used_prompt_is_dropped() -> None:
    rollout = Rollout(CHATML, remembered=2)
    prompts = [rollout.bridge.prompt([{**USER, "content": str(n)}]) for n in range(3)]
    sampled = rollout.ids("Yes.")
    assert rollout.bridge.extend(prompts[2] + sampled, [AGAIN])
    with pytest.raises(tm.errors.UsageError, match="remember"):
        rollout.bridge.extend(prompts[0] + sampled, [AGAIN])


def test_caller_may_change_messages_afterwards() -> None:
    rollout = Rollout(CHATML)
    user = dict(USER)
    given = rollout.bridge.prompt([user]) + rollout.ids("Sunny.")
    user["content"] = "other"
    assert rollout.text(rollout.bridge.extend(given, [AGAIN])).count("weather") == 1


def test_pickled_bridge_works_without_prompts() -> None:
    rollout = Rollout(TRIMMING, chat_template_kwargs={"x": 1}, remembered=5)
    prompt = rollout.bridge.prompt([USER])
    counterpart = pickle.loads(pickle.dumps(rollout.bridge))
    with pytest.raises(tm.errors.UsageError, match="do not begin with a prompt"):
        counterpart.extend([*prompt, 7], [AGAIN])
    assert counterpart.prompt([USER]) == prompt


def test_threads_share_a_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout(CHATML)
    inside: list[int] = []
    crowded: list[list[int]] = []
    honest = TracedTemplate.follow

    def slow(self: TracedTemplate, *given: Any, **options: Any) -> Any:
        inside.append(threading.get_ident())
        time.sleep(0.002)  # let other threads run
        if len(inside) > 1:
            crowded.append(list(inside))
        run = honest(self, *given, **options)
        inside.remove(threading.get_ident())
        return run

    monkeypatch.setattr(TracedTemplate, "follow", slow)

    def run(number: int) -> str:
        ids = rollout.bridge.prompt([{**USER, "content": f"n{number}"}])
        for turn in range(4):
            ids = rollout.bridge.extend(ids + rollout.ids(f"a{turn}.<|im_end|>"), [AGAIN])
        return rollout.text(ids)

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(run, range(4)))
    assert not crowded  # one thread records paths at a time
    turns = "".join(f"a{turn}.<|im_end|>{NEXT}" for turn in range(4))
    opening = "<|im_start|>user\nn{}<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [opening.format(number) + turns for number in range(4)]


def test_is_append_only_depends_on_the_conversation() -> None:
    talk = [USER, {"role": "assistant", "content": "Sunny.", "reasoning_content": "Hm."}]
    for template, expected in ((CHATML, True), (THINKING, False), (RETURNING, False)):
        bridge = Rollout(template).bridge
        assert bridge.is_append_only([*talk, AGAIN]) is expected
        assert bridge.is_append_only(talk)  # no message follows
    found = Rollout(THINKING).bridge.rewrite([*talk, AGAIN])
    assert found is not None
    assert (found.turn, "Hm." in found.before, "Hm." in found.after) == (1, True, False)


def test_tools_default_to_those_of_the_bridge() -> None:
    template = "{% if tools %}{{ tools[0].function.name }}\n{% endif %}" + CHATML
    look = {"type": "function", "function": {"name": "look", "parameters": {}}}
    seek = {"type": "function", "function": {"name": "seek", "parameters": {}}}
    rollout = Rollout(template, tools=[look])
    assert rollout.text(rollout.bridge.prompt([USER])).startswith("look\n")
    ids = rollout.bridge.prompt([USER], [seek]) + rollout.ids("Yes.")
    assert rollout.text(rollout.bridge.extend(ids, [AGAIN])).startswith("seek\n")
