"""Clean rollouts have no findings, and every injected fault is found with its kind and turn.

Under our own append-only template, class, kind and turn must be those of the fault; under released
templates, some of which fold turns into each other, the class must be.
"""

from __future__ import annotations

import contextlib
import copy
import random
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.chat.conversations import ODD
from tests.rl.faults import ANY, INJECTIONS, TOOLS, Injected, conversation
from tests.rl.simulated import Row, World, appending, bundled, encode, released, world_of
from tokenmill.chat import ChatSpec
from tokenmill.errors import RowError
from tokenmill.rl.formats import read_rollouts
from tokenmill.rl.verdict import RolloutChecker, Verdict

# Templates of which only the prompts, turn by turn, say what a sampler saw.
ASKED = ("models/tencent-Hy3", "models/meta-llama-Llama-3.2-3B-Instruct", "tokenizers/phi-3-mini")
# Templates that print more after the last turn than in history, a second end of text or the next
# header. It is unknown whether that was sampled, so a mask that misses it is no fault.
ENDED_TWICE = (
    "models/microsoft-Phi-3.5-mini-instruct", "trl/phi3", "tokenizers/phi-3-mini",
    "models/fireworks-ai-llama-3-firefunction-v2",
)  # fmt: skip
ENDS = ("mask_misses_sampled", "stopped_inside_a_turn")
MESSAGES = ("message_unrecorded", "assistant_doubled")


def judged(judge: RolloutChecker, *rows: Row | None) -> list[Any]:
    """A `Verdict` or `RowError` per row."""
    return judge.check([read_rollouts(row).trajectories[0] for row in rows])


def conversations_for(seed: str, count: int) -> list[tuple[random.Random, list[Row], Any]]:
    found = []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        tools = rng.random() < 0.6
        messages = conversation(rng, tools=tools, thoughts=rng.random() < 0.4)
        found.append((rng, messages, TOOLS if tools else None))
    return found


def found_in(verdict: Verdict | RowError, fault: Injected) -> bool:
    if isinstance(verdict, RowError) or verdict.drift != fault.drift:
        return False
    if fault.kind is None:
        return not verdict.notes
    return any(
        fault.kind in (note.kind, ANY) and (fault.turn is None or note.turn == fault.turn)
        for note in verdict.notes
    )


@pytest.mark.parametrize("name", INJECTIONS)
def test_fault_is_named_by_class_kind_and_turn(name: str) -> None:
    world, judge = appending()
    tried = 0
    for rng, messages, tools in conversations_for(name, 8):
        if name == "thought_dropped":
            messages[-1]["reasoning_content"] = "larch4 inlet77 because amber9 is not flint12"
        clean = world.sample(messages, tools)
        assert clean is not None
        fault = INJECTIONS[name](world, copy.deepcopy(clean), rng)
        if fault is None:
            continue
        tried += 1
        [verdict] = judged(judge, fault.row)
        assert found_in(verdict, fault), (fault, verdict)
        size = len(fault.row["token_ids"])
        assert all(note.token is None or note.token < size for note in verdict.notes)
    assert tried >= 2


def test_clean_rollouts_are_equal_or_retokenized() -> None:
    world, judge = appending()
    for _, messages, tools in conversations_for("clean", 20):
        plain, split = world.sample(messages, tools), world.sample(messages, tools, share=0.4)
        first, second = judged(judge, plain, split)
        assert (first.drift, first.notes) == ("equal", [])
        changed = split["token_ids"] != plain["token_ids"]
        assert second.drift == ("retokenized" if changed else "equal")
        assert [role for role, _ in first.turns] == [message["role"] for message in messages]


def test_note_shows_both_sides_of_the_first_difference() -> None:
    world, judge = appending()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello there"}]
    row = world.sample(messages)
    start = row["loss_mask"].index(1)
    pieces = [bundled().table.piece(number) for number in row["token_ids"]]
    letters = [encode(bundled(), letter)[0] for letter in pieces[start].decode()]
    other = copy.deepcopy(row)
    for name, values in (("token_ids", letters), ("loss_mask", [1] * len(letters)),
                         ("logprobs", [-1.0] * len(letters))):  # fmt: skip
        other[name][start : start + 1] = values
    [verdict] = judged(judge, other)
    [note] = verdict.notes
    assert (note.drift, note.turn, note.token) == ("retokenized", 1, start)
    assert note.expected == f"{row['token_ids'][start]} {pieces[start].decode()!r}"
    assert note.found.startswith(f"{letters[0]} {pieces[start].decode()[0]!r}")
    assert "in 1 places of the sampled text" in note.detail


def test_dropped_thinking_in_the_content_is_found() -> None:
    world, judge = appending()
    thought = "<think>\namber thoughts on inlet and flint\n</think>\n\n"
    messages = [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": f"{thought}One."},
        {"role": "user", "content": "Second?"},
        {"role": "assistant", "content": f"{thought}Two."},
    ]
    seen = [messages[0], {**messages[1], "content": "One."}, *messages[2:]]
    [verdict] = judged(judge, {**world.sample(seen), "messages": messages})
    assert [(note.kind, note.turn) for note in verdict.notes] == [("thought_dropped", 1)]


def test_history_of_the_prompt_needs_no_mask() -> None:
    """A turn before a user's is context; one that leads on by tools alone was sampled."""
    world, judge = appending()
    for roles, drift in ((("user", "user"), "equal"), (("user", "tool"), "structure")):
        messages = [
            {"role": roles[0], "content": "First?"},
            {"role": "assistant", "content": "One."},
            {"role": roles[1], "content": "Second?"},
            {"role": "assistant", "content": "Two."},
        ]
        row = world.sample(messages)
        mask = row["loss_mask"]
        last = len(mask) - mask[::-1].index(0)
        row = {**row, "loss_mask": [0] * last + mask[last:], "logprobs": None}
        first, second = judged(judge, row, {**row, "prompt_length": last})
        assert (first.drift, second.drift) == (drift, "equal")


DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' %}<|im_start|>system
You are a careful model.<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("content", ["go", "Answer briefly.", "You are an expert of tax law."])
def test_system_message_replaced_by_the_default_is_structure(content: str) -> None:
    world, judge = world_of(DEFAULT_SYSTEM, "default_system")
    seen = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello there"}]
    row = world.sample(seen)
    messages = [{"role": "system", "content": content}, *seen]
    [verdict] = judged(judge, {**row, "messages": messages})
    assert ("structure", 0) in [(note.drift, note.turn) for note in verdict.notes], verdict


@pytest.mark.parametrize("contents", [("go5", "79"), ("7", "no"), ("yes", "42 apples")])
def test_swapped_short_observations_are_structure(contents: tuple[str, str]) -> None:
    world, judge = appending()
    call = {"name": "look", "arguments": {"where": "there"}}

    def talk(*results: str) -> list[Row]:
        messages: list[Row] = [{"role": "user", "content": "Look around."}]
        for number, result in enumerate(results):
            calls = [{"id": f"call{number:05d}", "type": "function", "function": call}]
            answer = {"role": "assistant", "content": f"look {number}", "tool_calls": calls}
            name = f"call{number:05d}"
            messages += [answer, {"role": "tool", "tool_call_id": name, "content": result}]
        return [*messages, {"role": "assistant", "content": "Done."}]

    row = world.sample(talk(*contents[::-1]), TOOLS)
    [verdict] = judged(judge, {**row, "messages": talk(*contents)})
    assert verdict.drift == "structure"
    assert {note.turn for note in verdict.notes} == {2, 4}


FIRST = "<think>\namber thoughts on it\n</think>\n\nOne.<|im_end|>"
SECOND = "<think>\nbirch thoughts on it\n</think>\n\nTwo.<|im_end|>"
OPENS = "<|im_start|>user\nFirst?<|im_end|>\n<|im_start|>assistant\n"
BETWEEN = "\n<|im_start|>user\nSecond?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("pieces", "drift", "notes"),
    [
        ([(OPENS, 0), (FIRST, 1), (BETWEEN, 0), (SECOND, 1)], "equal", []),  # thoughts were kept
        ([(OPENS + "One.<|im_end|>" + BETWEEN, 0), (SECOND, 1)], "equal", []),  # none was sampled
        (
            [(OPENS, 0), ("One.<|im_end|>", 1), (BETWEEN, 0), (SECOND, 1)],
            "structure",
            [("thought_dropped", 1)],
        ),
    ],
)
def test_history_that_the_template_rewrites(
    pieces: list[tuple[str, int]], drift: str, notes: list[tuple[str, int]]
) -> None:
    world, _ = world_of(bundled().template)
    judge = RolloutChecker(world.tokenizer, ChatSpec(format="messages"))
    messages = [
        {"role": "user", "content": "First?"},
        {"role": "assistant", "content": "One.", "reasoning_content": "amber thoughts on it"},
        {"role": "user", "content": "Second?"},
        {"role": "assistant", "content": "Two.", "reasoning_content": "birch thoughts on it"},
    ]
    ids: list[int] = []
    mask: list[int] = []
    for text, sampled in pieces:
        part = encode(world.tokenizer, text)
        ids, mask = ids + part, mask + [sampled] * len(part)
    [verdict] = judged(judge, {"messages": messages, "token_ids": ids, "loss_mask": mask})
    assert verdict.drift == drift
    assert [(note.kind, note.turn) for note in verdict.notes] == notes


SOAK = [pytest.mark.soak, pytest.mark.timeout(1800)]


def sampled_templates(shared: Path, one_in: int, asked: bool = False) -> list[tuple[str, str]]:
    return [
        (name, template)
        for name, template in released(shared)
        if zlib.crc32(name.encode()) % one_in == min(1, one_in - 1) or (asked and name in ASKED)
    ]


@pytest.mark.parametrize("one_in", [5, pytest.param(1, marks=SOAK)])
def test_released_templates_have_no_findings_on_clean_rollouts(shared: Path, one_in: int) -> None:
    kinds = ["several turns", "tools", "typed parts"]
    if one_in == 1:
        kinds = [
            kind
            for kind, row in ODD.items()
            if row.get("messages") and isinstance(row.get("tools"), list | None)
        ]
    templates = sampled_templates(shared, one_in, asked=True)
    assert {name for name, _ in templates} >= set(ASKED)
    alarms: list[Any] = []
    seen = 0
    for name, template in templates:
        world, judge = world_of(template, name)
        rows = []
        for kind in kinds:
            messages, tools = ODD[kind]["messages"], ODD[kind].get("tools")
            rows += [world.sample(messages, tools, share=share) for share in (0, 0.3)]
        for _, messages, tools in conversations_for(name, 2):
            rows.append(world.sample(messages, tools))
        clean = [row for row in rows if row is not None]
        seen += len(clean)
        for row, verdict in zip(clean, judged(judge, *clean), strict=True):
            if isinstance(verdict, RowError):
                if verdict.reason != "template_drops_content":
                    alarms.append((name, verdict.message))
            elif verdict.drift in ("structure", "text"):
                alarms.append((name, row["messages"], verdict.notes))
    assert not alarms, "\n".join(str(alarm) for alarm in alarms[:30])
    assert seen > len(templates)


def prints_contents(world: World, row: Row) -> bool:
    text = world.template.render(row["messages"], row.get("tools"))
    return all(message["content"] in text for message in row["messages"])


@pytest.mark.parametrize(("one_in", "count"), [(18, 2), pytest.param(1, 12, marks=SOAK)])
def test_released_templates_show_every_fault(shared: Path, one_in: int, count: int) -> None:
    missed: list[Any] = []
    tried = 0
    for name, template in sampled_templates(shared, one_in):
        world, judge = world_of(template, name)
        faults = []
        for rng, messages, tools in conversations_for(name, count):
            clean = world.sample(messages, tools)
            if clean is None or not prints_contents(world, clean):
                continue
            for kind, inject in INJECTIONS.items():
                with contextlib.suppress(RowError):
                    if fault := inject(world, copy.deepcopy(clean), rng):
                        faults.append((kind, fault))
        tried += len(faults)
        verdicts = judged(judge, *(fault.row for _, fault in faults))
        for (kind, fault), verdict in zip(faults, verdicts, strict=True):
            drift = None if isinstance(verdict, RowError) else verdict.drift
            unsure = name in ENDED_TWICE and kind in ENDS
            # With other messages, some templates do not print every message, which is an error.
            unsure |= kind in MESSAGES and isinstance(verdict, RowError)
            if drift != fault.drift and not unsure:
                missed.append((name, kind, fault.turn, verdict))
    assert not missed, "\n".join(str(miss) for miss in missed)
    assert tried
