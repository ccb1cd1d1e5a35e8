"""Faults, injected into clean rollouts, with the class, kind and turn that a check must find.

What the sampler saw is changed by sampling another conversation and recording the first one's
messages, as a broken agent loop does.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.rl.simulated import Row, World, encode, pieces_of

WHERE = {"where": {"type": "string", "description": "Where."}}
PARAMETERS = {"type": "object", "properties": WHERE, "required": ["where"]}
LOOK = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": LOOK}]
WORDS = ("amber", "birch", "cedar", "delta", "ember", "flint", "grove", "heron", "inlet", "jetty")


def words(rng: random.Random, count: int = 6) -> str:
    return " ".join(f"{rng.choice(WORDS)}{rng.randrange(1000)}" for _ in range(count))


def conversation(rng: random.Random, *, tools: bool, thoughts: bool) -> list[dict[str, Any]]:
    """A user's questions with answers, calls and results in between; every text is unique."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": words(rng)})
    for _ in range(rng.randrange(1, 4)):
        messages.append({"role": "user", "content": words(rng)})
        for _ in range(rng.randrange(0, 3) if tools else 0):
            number = f"call{len(messages):05d}"
            call = {"name": "look", "arguments": {"where": words(rng, 2)}}
            messages += [
                {"role": "assistant", "content": words(rng),
                 "tool_calls": [{"id": number, "type": "function", "function": call}]},
                {"role": "tool", "name": "look", "tool_call_id": number,
                 "content": words(rng, 12)},
            ]  # fmt: skip
        messages.append({"role": "assistant", "content": words(rng)})
    if thoughts:
        for message in messages:
            if message["role"] == "assistant":
                message["reasoning_content"] = words(rng, 8)
    return messages


@dataclass(frozen=True)
class Injected:
    """A broken rollout and its fault; kind `ANY` if several kinds are right, turn None if none."""

    row: Row
    drift: str
    kind: str | None
    turn: int | None = None


ANY = "any"
Injection = Callable[[World, Row, random.Random], Injected | None]
INJECTIONS: dict[str, Injection] = {}


def fault(function: Injection) -> Injection:
    INJECTIONS[function.__name__] = function
    return function


def _spans(row: Row) -> list[tuple[int, int, int]]:
    """Return (turn, start, end) of sampled tokens; spans are never adjacent."""
    edges = np.flatnonzero(np.diff([0, *row["loss_mask"], 0])).tolist()
    turns = [k for k, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    return list(zip(turns, edges[::2], edges[1::2], strict=False))


def _seen(world: World, row: Row, messages: list[Row]) -> Row | None:
    """Return the recording of a sampler that saw other messages than recorded."""
    other = world.sample(messages, row.get("tools"))
    if other is None or other["token_ids"] == row["token_ids"]:
        return None  # the template does not append here, or prints nothing of it
    return {**other, "messages": row["messages"]}


@fault
def turn_missing(world: World, row: Row, rng: random.Random) -> Injected | None:
    users = [k for k, m in enumerate(row["messages"]) if m["role"] == "user"][1:]
    if not users:
        return None
    turn = rng.choice(users)
    other = _seen(world, row, [m for k, m in enumerate(row["messages"]) if k != turn])
    return other and Injected(other, "structure", "turn_missing", turn)


@fault
def last_turn_missing(world: World, row: Row, rng: random.Random) -> Injected | None:
    turn = _spans(row)[-1][0]
    if turn < 2 or row["messages"][turn - 1]["role"] != "user":
        return None
    other = _seen(world, row, row["messages"][: turn - 1])
    return other and Injected(other, "structure", "turn_missing", turn - 1)


@fault
def observation_lost(world: World, row: Row, rng: random.Random) -> Injected | None:
    results = [k for k, m in enumerate(row["messages"]) if m["role"] == "tool"]
    if not results:
        return None
    turn = rng.choice(results)
    messages = copy.deepcopy(row["messages"])
    if rng.random() < 0.5:
        messages[turn]["content"] = ""
    else:
        del messages[turn]
    other = _seen(world, row, messages)
    if other is None or len(other["token_ids"]) >= len(row["token_ids"]):
        return None
    return Injected(other, "structure", "observation_lost", turn)


def _spliced(row: Row, at: int, ids: list[int], bit: int) -> Row:
    other = copy.deepcopy(row)
    for name, values in (("token_ids", ids), ("loss_mask", [bit] * len(ids)),
                         ("logprobs", [-0.5 * bit] * len(ids))):  # fmt: skip
        other[name][at:at] = values
    return other


def _misrecorded(world: World, row: Row, other: Row) -> Injected | None:
    """Messages or tools that are not those of the ids, if the template prints them otherwise."""
    printed = world.template.render(other["messages"], other.get("tools"))
    if printed == world.template.render(row["messages"], row.get("tools")):
        return None
    return Injected(other, "structure", ANY)


@fault
def message_unrecorded(world: World, row: Row, rng: random.Random) -> Injected | None:
    places = [k for k, m in enumerate(row["messages"]) if m["role"] != "assistant"]
    place = rng.choice(places)
    messages = [m for k, m in enumerate(row["messages"]) if k != place]
    return _misrecorded(world, row, {**row, "messages": messages})


@fault
def assistant_doubled(world: World, row: Row, rng: random.Random) -> Injected | None:
    turn = rng.choice(_spans(row))[0]
    messages = [*row["messages"][: turn + 1], *row["messages"][turn:]]
    return _misrecorded(world, row, {**row, "messages": messages})


@fault
def tool_recorded_as_user(world: World, row: Row, rng: random.Random) -> Injected | None:
    results = [k for k, m in enumerate(row["messages"]) if m["role"] == "tool"]
    if not results:
        return None
    messages = copy.deepcopy(row["messages"])
    place = rng.choice(results)
    messages[place] = {"role": "user", "content": messages[place]["content"]}
    return _misrecorded(world, row, {**row, "messages": messages})


@fault
def tools_unrecorded(world: World, row: Row, rng: random.Random) -> Injected | None:
    return _misrecorded(world, row, {k: v for k, v in row.items() if k != "tools"})


@fault
def turn_injected(world: World, row: Row, rng: random.Random) -> Injected | None:
    place = rng.choice(_spans(row))[0]
    added = {"role": "user", "content": words(rng)}
    messages = [*row["messages"][:place], added, *row["messages"][place:]]
    other = _seen(world, row, messages)
    return other and Injected(other, "structure", ANY)


@fault
def observations_swapped(world: World, row: Row, rng: random.Random) -> Injected | None:
    results = [k for k, m in enumerate(row["messages"]) if m["role"] == "tool"]
    if len(results) < 2:
        return None
    one, two = rng.sample(results, 2)
    messages = copy.deepcopy(row["messages"])
    messages[one]["content"], messages[two]["content"] = (
        messages[two]["content"], messages[one]["content"]
    )  # fmt: skip
    other = _seen(world, row, messages)
    return other and Injected(other, "structure", ANY)


@fault
def sampled_twice(world: World, row: Row, rng: random.Random) -> Injected | None:
    _, start, end = rng.choice(_spans(row))
    return Injected(_spliced(row, end, row["token_ids"][start:end], 1), "structure", ANY)


def _turn_end(world: World, row: Row, rng: random.Random) -> tuple[int, list[int]] | None:
    """Where a turn ends, and the ids of its end-of-turn token."""
    turn, start, end = rng.choice(_spans(row))
    message = row["messages"][turn]
    sampled = world.tokenizer.decode(row["token_ids"][start:end], skip_special_tokens=False)
    ids = encode(world.tokenizer, sampled.rpartition(message["content"])[2].strip())
    if message.get("tool_calls") or not ids or row["token_ids"][end - len(ids) : end] != ids:
        return None
    return end, ids


@fault
def turn_end_doubled(world: World, row: Row, rng: random.Random) -> Injected | None:
    found = _turn_end(world, row, rng)
    return found and Injected(_spliced(row, *found, 1), "structure", ANY)


@fault
def turn_end_missing(world: World, row: Row, rng: random.Random) -> Injected | None:
    found = _turn_end(world, row, rng)
    if found is None:
        return None
    end, ids = found
    other = copy.deepcopy(row)
    for name in ("token_ids", "loss_mask", "logprobs"):
        del other[name][end - len(ids) : end]
    if end == len(row["token_ids"]):  # without the reason, it was truncated
        other["finish_reason"] = "stop"
    return Injected(other, "structure", ANY)


@fault
def newline_added(world: World, row: Row, rng: random.Random) -> Injected | None:
    """Two newlines more than the template prints after the end-of-turn token."""
    found = _turn_end(world, row, rng)
    printed = world.template.render(row["messages"], row.get("tools"))
    if found is None or printed.endswith("\n\n"):
        return None
    size = len(row["token_ids"])
    added = encode(world.tokenizer, "\n\n" if found[0] == size else "\n")
    return Injected(_spliced(row, found[0], added, 0), "text", ANY)


@fault
def logprobs_positive(world: World, row: Row, rng: random.Random) -> Injected | None:
    place = rng.choice([n for n, bit in enumerate(row["loss_mask"]) if bit])
    values = [-v if rng.random() < 0.5 or n == place else v for n, v in enumerate(row["logprobs"])]
    return Injected({**row, "logprobs": values}, "structure", "logprobs_positive")


@fault
def logprobs_zero(world: World, row: Row, rng: random.Random) -> Injected | None:
    if sum(row["loss_mask"]) < 4:
        return None
    size = rng.choice([len(row["loss_mask"]), sum(row["loss_mask"])])
    return Injected({**row, "logprobs": [0.0] * size}, "structure", "logprobs_zero")


@fault
def prompt_length(world: World, row: Row, rng: random.Random) -> Injected | None:
    size, first = len(row["token_ids"]), row["loss_mask"].index(1)
    value = rng.choice([-1, 0, first + 1, size, size + 1, 10**9])
    return Injected({**row, "prompt_length": value}, "structure", "prompt_length")


@fault
def stopped_inside_a_turn(world: World, row: Row, rng: random.Random) -> Injected | None:
    cut = truncated(world, row, rng)
    stopped = {"finish_reason": rng.choice(["stop", "tool_calls", "completed"])}
    return cut and Injected({**cut.row, **stopped}, "structure", "turn_cut")


@fault
def thought_dropped(world: World, row: Row, rng: random.Random) -> Injected | None:
    thinking = [k for k, m in enumerate(row["messages"]) if m.get("reasoning_content")]
    if not thinking:
        return None
    turn = rng.choice(thinking)
    messages = copy.deepcopy(row["messages"])
    thought = messages[turn].pop("reasoning_content")
    printed = "".join(t for t, _ in pieces_of(world.template, row["messages"], row.get("tools")))
    other = _seen(world, row, messages)
    if other is None or thought not in printed:
        return None
    return Injected(other, "structure", "thought_dropped", turn)


@fault
def generation_prompt_doubled(world: World, row: Row, rng: random.Random) -> Injected | None:
    turn, start, _ = rng.choice(_spans(row))
    messages = row["messages"][:turn]
    asked = world.template.render(messages, row.get("tools"), add_generation_prompt=True)
    unasked = world.template.render(messages, row.get("tools"))
    if not asked.startswith(unasked) or not asked[len(unasked) :].strip():
        return None
    more = encode(world.tokenizer, asked[len(unasked) :])
    other = copy.deepcopy(row)
    for name, values in (("token_ids", more), ("loss_mask", [0] * len(more)),
                         ("logprobs", [0.0] * len(more))):  # fmt: skip
        other[name][start:start] = values
    return Injected(other, "structure", "generation_prompt_doubled", turn)


@fault
def mask_covers_unsampled(world: World, row: Row, rng: random.Random) -> Injected | None:
    other = copy.deepcopy(row)
    places = [n for n, bit in enumerate(row["loss_mask"]) if not bit]
    start = rng.choice(places)
    size = rng.randrange(1, 5)
    for place in range(start, min(start + size, len(row["loss_mask"]))):
        other["loss_mask"][place] = 1
    del other["logprobs"]
    return Injected(other, "structure", "mask_covers_unsampled")


@fault
def mask_misses_sampled(world: World, row: Row, rng: random.Random) -> Injected | None:
    other = copy.deepcopy(row)
    turn, start, end = rng.choice(_spans(row))
    if end - start < 3:
        return None
    size = rng.randrange(1, end - start - 1)
    first = rng.choice([start, end - size, rng.randrange(start, end - size + 1)])
    other["loss_mask"][first : first + size] = [0] * size
    del other["logprobs"]
    return Injected(other, "structure", "mask_misses_sampled", turn)


@fault
def mask_shifted(world: World, row: Row, rng: random.Random) -> Injected | None:
    other = copy.deepcopy(row)
    mask = other["loss_mask"]
    early = rng.random() < 0.5
    other["loss_mask"] = [*mask[1:], 0] if early else [0, *mask[:-1]]
    del other["logprobs"]
    # Of a single turn at the very end, a mask that comes too late only misses a token.
    alone = not early and len(_spans(row)) == 1
    kind = "mask_misses_sampled" if alone else "mask_shifted"
    return Injected(other, "structure", kind)


@fault
def turn_unmasked(world: World, row: Row, rng: random.Random) -> Injected | None:
    """A later turn without any mask, or an earlier one that log-probabilities give away."""
    other = copy.deepcopy(row)
    _, start, end = rng.choice(_spans(row))
    other["loss_mask"][start:end] = [0] * (end - start)
    return Injected(other, "structure", "mask_misses_sampled")


@fault
def logprobs_length(world: World, row: Row, rng: random.Random) -> Injected | None:
    other = copy.deepcopy(row)
    if rng.random() < 0.5:
        other["logprobs"] = [v for v, bit in zip(row["logprobs"], row["loss_mask"], strict=True)
                             if bit]  # fmt: skip
    other["logprobs"] = other["logprobs"][:-1] if rng.random() < 0.5 else [*other["logprobs"], -1.0]
    return Injected(other, "structure", "logprobs_length")


@fault
def logprobs_nonfinite(world: World, row: Row, rng: random.Random) -> Injected | None:
    other = copy.deepcopy(row)
    place = rng.choice([n for n, bit in enumerate(row["loss_mask"]) if bit])
    other["logprobs"][place] = rng.choice([math.nan, math.inf, -math.inf, None])
    return Injected(other, "structure", "logprobs_nonfinite")


@fault
def mask_length(world: World, row: Row, rng: random.Random) -> Injected | None:
    other = copy.deepcopy(row)
    other["loss_mask"].pop()
    return Injected(other, "structure", "mask_length")


def _reworded(
    world: World, row: Row, rng: random.Random, kind: str, *roles: str
) -> Injected | None:
    turn = rng.choice([k for k, m in enumerate(row["messages"]) if m["role"] in roles])
    messages = copy.deepcopy(row["messages"])
    said = messages[turn]["content"].split()
    said[rng.randrange(len(said))] = "quartz"
    messages[turn]["content"] = " ".join(said)
    other = _seen(world, row, messages)
    return other and Injected(other, "text", kind, turn)


@fault
def context_text(world: World, row: Row, rng: random.Random) -> Injected | None:
    return _reworded(world, row, rng, "context_text", "user", "tool")


@fault
def sampled_text(world: World, row: Row, rng: random.Random) -> Injected | None:
    return _reworded(world, row, rng, "sampled_text", "assistant")


@fault
def retokenized(world: World, row: Row, rng: random.Random) -> Injected | None:
    other = world.sample(row["messages"], row.get("tools"), share=0.5)
    if other is None or other["token_ids"] == row["token_ids"]:
        return None
    return Injected(other, "retokenized", "retokenized")


@fault
def truncated(world: World, row: Row, rng: random.Random) -> Injected | None:
    """Truncate inside a sampled turn, which is not a fault."""
    _, start, end = _spans(row)[-1]
    if end - start < 3:
        return None
    size = rng.randrange(start + 1, end)
    other = {**row, **{name: row[name][:size] for name in ("token_ids", "loss_mask", "logprobs")}}
    return Injected(other, "equal", None)
