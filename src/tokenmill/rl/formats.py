"""Read trajectories from rows of several trainers and servers (docs/guides/rollouts.md).

Unknown columns become metadata.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenmill.chat.agent_traces import AGENT_TRACES, NOTES, read_agent_trace
from tokenmill.errors import RowError, check_one_of
from tokenmill.rl.trajectory import Bits, Ids, Recording, Trajectory

Row = dict[str, Any]

_REWARD_ENDINGS = ("_reward", "_reward_func")
_TOTAL = re.compile(r"(?:^|[_/])(?:total|sum|overall)(?:_|$)")  # in the name of a reward column


def read_rollouts(row: Any, format: str = "auto") -> Recording:  # noqa: A002 - public name
    """Read one row in one of `FORMATS`; ``auto`` detects the format from its columns."""
    if isinstance(row, RowError):
        raise row
    check_one_of("format", format, ("auto", *FORMATS))
    if not isinstance(row, dict):
        raise RowError(f"a rollout must be an object, not {type(row).__name__}")
    for name, (matches, read) in FORMATS.items():
        if format == name or (format == "auto" and matches(row)):
            return read(row)
    known = ", ".join(sorted(map(str, row))[:8]) or "none"
    raise RowError(f"the row is not a rollout of a known format; its columns are {known}")


def reread(value: Any, raw: bytes) -> Any:
    """Parse a row with NaN or infinities again, so that a check can name the token."""
    if not isinstance(value, RowError) or value.reason != "bad_json":
        return value
    if b"NaN" not in raw and b"Infinity" not in raw:
        return value
    try:
        value_again = json.loads(raw)
    except (ValueError, RecursionError):
        return value
    return value_again if isinstance(value_again, dict) else value


# The rollout format

_ROLLOUT_COLUMNS = (
    "messages", "tools", "token_ids", "loss_mask", "logprobs", "prompt_length", "prompt",
    "response", "finish_reason", "reward", "advantage", "advantages", "group", "step", "version",
    "trajectories", "tree",
)  # fmt: skip


def _rollout(row: Row) -> Recording:
    if row.get("tree") is not None:
        return _tree(row)
    if row.get("trajectories") is not None:
        members = _objects(row, "trajectories")
        shared = _others(row, ("trajectories",))
        trajectories = [_trajectory({**shared, **member}) for member in members]
        for trajectory in trajectories:
            trajectory.has_siblings = len(trajectories) > 1
        return Recording(trajectories)
    return Recording([_trajectory(row)])


def _trajectory(row: Row) -> Trajectory:
    return Trajectory(
        "rollout",
        ids=_ids(row, "token_ids"),
        mask=_mask(row, "loss_mask"),
        recorded_logprobs=_numbers(row, "logprobs"),
        prompt_length=_integer(row, "prompt_length"),
        messages=_messages(row.get("messages")),
        tools=_tools(row),
        prompt=_text(row, "prompt"),
        response=_text(row, "response"),
        finish=_text(row, "finish_reason"),
        reward=_number(row.get("reward"), "reward"),
        advantages=_advantages(_first_of(row, "advantages", "advantage")),
        group=row.get("group"),
        step=_integer(row, "step"),
        version=row.get("version"),
        metadata=_others(row, _ROLLOUT_COLUMNS),
    )


def _tree(row: Row) -> Recording:
    """Return one trajectory for every leaf of a tree.

    Siblings are different samples even if their ids are equal, so the nodes determine what two
    trajectories share.
    """
    nodes = _objects(row, "tree")
    outer = _others(row, ("tree",))
    parents: list[int | None] = []
    for number, node in enumerate(nodes):
        parent = node.get("parent")
        if parent is not None and (type(parent) is not int or not 0 <= parent < number):
            raise RowError(f"tree[{number}]: 'parent' must be the number of an earlier node")
        parents.append(parent)
    inner = {parent for parent in parents if parent is not None}
    trajectories, paths = [], []
    for leaf in range(len(nodes)):
        if leaf in inner:
            continue
        branch: list[int] = []
        step: int | None = leaf
        while step is not None:
            branch.append(step)
            step = parents[step]
        branch.reverse()
        joined, path = _join(nodes, branch)
        trajectory = _trajectory({**outer, **joined})
        trajectory.has_siblings = True
        trajectories.append(trajectory)
        paths.append(path)
    return Recording(trajectories, paths)


def _join(nodes: list[Row], branch: list[int]) -> tuple[Row, list[tuple[int, int]]]:
    """Return the nodes of a branch as one row, and the number of ids after each node."""
    joined: Row = {"messages": [], "token_ids": [], "loss_mask": [], "logprobs": []}
    path, has_logprobs, has_messages = [], False, True
    for number in branch:
        node = nodes[number]
        ids = _ids(node, "token_ids")
        if ids is None:
            raise RowError(f"tree[{number}] has no 'token_ids'")
        mask = node.get("loss_mask")
        if mask in (0, 1):  # also False and True; for all tokens
            mask = [int(mask)] * len(ids)
        if not isinstance(mask, list) or len(mask) != len(ids):
            raise RowError(f"tree[{number}]: 'loss_mask' must be 0, 1, or one of them per token")
        logprobs = node.get("logprobs")
        has_logprobs |= logprobs is not None
        spread: list[Any] = [None] * len(ids)
        if logprobs is not None:
            if not isinstance(logprobs, list):
                raise RowError(f"tree[{number}]: 'logprobs' must be a list of numbers")
            if len(logprobs) == len(ids):
                spread = logprobs
            elif len(logprobs) == sum(map(bool, mask)):
                values = iter(logprobs)
                spread = [next(values) if bit else None for bit in mask]
            else:
                raise RowError(f"tree[{number}]: {len(logprobs)} logprobs for {len(ids)} tokens")
        joined["token_ids"] += ids.tolist()
        joined["loss_mask"] += mask
        joined["logprobs"] += spread
        messages = node.get("messages") or ([node["message"]] if node.get("message") else None)
        if messages is not None and not isinstance(messages, list):
            raise RowError(f"tree[{number}]: 'messages' must be a list of messages")
        has_messages &= messages is not None
        joined["messages"] += messages or []
        structure = ("parent", "message", "messages", "token_ids", "loss_mask", "logprobs")
        joined.update({name: node[name] for name in node if name not in structure})
        path.append((number, len(joined["token_ids"])))
    if not has_logprobs:
        joined["logprobs"] = None
    if not has_messages:
        joined["messages"] = None
    return joined, path


# Formats of trainers and servers


def _miles(row: Row) -> Recording:
    """A sample of miles or slime, as `dump_details` and `save_debug_rollout_data` write it."""
    names = (
        "tokens", "response_length", "loss_mask", "rollout_log_probs", "reward", "group_index",
        "weight_versions", "prompt", "response", "status", "rollout_id", "tools", "metadata",
    )  # fmt: skip
    ids = _ids(row, "tokens")
    size = _integer(row, "response_length")
    if ids is None or size is None or not 0 <= size <= len(ids):
        raise RowError(f"'response_length' is {size}, of {0 if ids is None else len(ids)} tokens")
    metadata = _object(row, "metadata", {})
    versions = row.get("weight_versions") or [None]
    mask = _mask(row, "loss_mask")
    trajectory = _prompt_and_response(
        "miles", ids[: len(ids) - size], ids[len(ids) - size :], mask,
        _numbers(row, "rollout_log_probs"),
    )  # fmt: skip
    trajectory.response = _text(row, "response")
    trajectory.finish = _text(row, "status")
    reward = row.get("reward")
    trajectory.group = row.get("group_index")
    trajectory.step = _integer(row, "rollout_id")
    trajectory.version = versions[-1] if isinstance(versions, list) else versions
    trajectory.metadata = {**metadata, **_others(row, names)}
    if isinstance(reward, dict):
        trajectory.metadata["reward"] = reward
        numbers = [reward.get(name) for name in ("score", "reward")]
        reward = next((value for value in numbers if isinstance(value, int | float)), None)
    trajectory.reward = _number(reward, "reward")
    trajectory.tools = metadata.get("tools") or _tools(row)
    _set_messages(trajectory, row.get("prompt"), metadata.get("messages"))
    return Recording([trajectory])


def _skyrl(row: Row) -> Recording:
    """A row of SkyRL's generator output, or of its evaluation dumps, which are decoded."""
    names = (
        "prompt_token_ids", "response_ids", "loss_mask", "loss_masks", "rollout_logprobs", "score",
        "reward", "rewards", "trajectory_id", "trajectory_ids", "stop_reason", "stop_reasons",
        "input_prompt", "output_response", "step", "global_step",
    )  # fmt: skip
    mask = _mask(row, "loss_mask" if row.get("loss_mask") is not None else "loss_masks")
    trajectory = _prompt_and_response(
        "skyrl", _ids(row, "prompt_token_ids"), _ids(row, "response_ids"), mask,
        _numbers(row, "rollout_logprobs"),
    )  # fmt: skip
    trajectory.prompt = _text(row, "input_prompt")
    trajectory.response = _text(row, "output_response")
    trajectory.finish = _text(row, "stop_reason") or _text(row, "stop_reasons")
    reward = _first_of(row, "score", "reward", "rewards")
    if isinstance(reward, list):  # one per token
        trajectory.metadata["token_rewards"] = reward
        reward = sum(_number(value, "rewards") or 0.0 for value in reward)
    trajectory.reward = _number(reward, "reward")
    identity = _first_of(row, "trajectory_id", "trajectory_ids")
    trajectory.group = identity.get("instance_id") if isinstance(identity, dict) else identity
    trajectory.step = (
        _integer(row, "global_step") if "global_step" in row else _integer(row, "step")
    )
    trajectory.metadata |= _others(row, names)
    return Recording([trajectory])


def _is_verl(row: Row) -> bool:
    return isinstance(row.get("input"), str) and isinstance(row.get("output"), str)


def _verl(row: Row) -> Recording:
    """A row of verl's ``trainer.rollout_data_dir``: texts, decoded without special tokens."""
    trajectory = Trajectory(
        "verl",
        prompt=_text(row, "input"),
        response=_text(row, "output"),
        reward=_number(row.get("score"), "score"),
        step=_integer(row, "step"),
        group=_first_of(row, "uid", "request_id"),
        metadata=_others(row, ("input", "output", "score", "step", "uid")),
    )
    return Recording([trajectory])


def _trl(row: Row) -> Recording:
    """A row of TRL's logged completions; reward columns have the names of their functions."""
    names = ("prompt", "completion", "step", "advantage", "prompt_ids", "completion_ids",
             "completion_mask", "logprobs", "sampling_per_token_logps", "reward")  # fmt: skip
    if row.get("prompt") is None or row.get("completion") is None:
        raise RowError("a row of TRL's completions has 'prompt' and 'completion'")
    logprobs = "sampling_per_token_logps" if row.get("logprobs") is None else "logprobs"
    trajectory = _prompt_and_response(
        "trl", _ids(row, "prompt_ids"), _ids(row, "completion_ids"), _mask(row, "completion_mask"),
        _numbers(row, logprobs),
    )  # fmt: skip
    completion = row["completion"]
    if isinstance(completion, str):
        trajectory.response = completion
    if isinstance(row["prompt"], list) and isinstance(completion, list):
        _set_messages(trajectory, row["prompt"], [*row["prompt"], *completion])
    else:
        _set_messages(trajectory, row["prompt"], None)
    trajectory.reward, trajectory.warning = _trl_reward(row, names)
    trajectory.advantages = _number(row.get("advantage"), "advantage")
    trajectory.step = _integer(row, "step")
    trajectory.metadata = _others(row, names)
    return Recording([trajectory])


def _trl_reward(row: Row, known: tuple[str, ...]) -> tuple[float | None, str]:
    """Return ``reward``, else a total or the sum of the reward columns, and a warning if unsure.

    TRL logs NaN if a function gives no reward for a row.
    """
    if row.get("reward") is not None:
        return _number(row["reward"], "reward"), ""
    columns = {n: v for n, v in _others(row, known).items() if v is not None and v == v}
    named = [n for n in columns if n.startswith("rewards/") or n.endswith(_REWARD_ENDINGS)]
    numbers = {name: _number(columns[name], name) or 0.0 for name in named}
    totals = [name for name in named if _TOTAL.search(name)]
    if len(totals) == 1 and len(named) > 1:
        return numbers[totals[0]], (
            f"{totals[0]} is used as the reward, because it may be the sum of the other reward"
            " columns; add the reward as reward"
        )
    reward = _number(sum(numbers.values()), "reward") if named else None
    # TRL logs rewards as floats; next to them, an integer is something else.
    others = [
        name
        for name, value in columns.items()
        if name not in named
        and (isinstance(value, float if named else int | float) or name.startswith("reward"))
    ]
    if not others:
        return reward, ""
    what = "part of the reward may be missing" if named else "the reward is unknown"
    return reward, (
        f"{what}: {', '.join(sorted(others))} may be rewards; name such columns *_reward or"
        " rewards/*, or add their sum as reward"
    )


def _is_openai(row: Row) -> bool:
    return isinstance(_object(row, "response", row).get("choices"), list)


def _openai(row: Row) -> Recording:
    """A chat completion: alone, beside its messages, or as ``{"request": …, "response": …}``."""
    request, response = _object(row, "request", row), _object(row, "response", row)
    choices = _objects(response, "choices")
    request_messages = _messages(request.get("messages"))
    names = ("request", "response", "choices", "messages", "tools", "prompt_token_ids")
    trajectories = []
    for choice in choices:
        prompt = _ids(response, "prompt_token_ids")
        if prompt is None:
            prompt = _ids(choice, "prompt_token_ids")
        ids, logprobs = _ids_and_logprobs(choice)
        trajectory = _prompt_and_response("openai", prompt, ids, None, logprobs)
        message = choice.get("message")
        if isinstance(message, dict):
            # Servers write every field, with null for missing values.
            message = {key: value for key, value in message.items() if value not in (None, [])}
            trajectory.response = _text(message, "content")
            if request_messages is not None:
                trajectory.messages = [
                    *request_messages,
                    {"role": "assistant", "content": "", **message},
                ]
        trajectory.tools = _tools(request)
        trajectory.finish = _text(choice, "finish_reason")
        rewarded = row if choice.get("reward") is None else choice
        trajectory.reward = _number(rewarded.get("reward"), "reward")
        trajectory.group = response.get("id") if row.get("group") is None else row["group"]
        trajectory.step, trajectory.version = _integer(row, "step"), row.get("version")
        trajectory.metadata = _others(row, names)
        trajectories.append(trajectory)
    return Recording(trajectories, [[(number, 0)] for number in range(len(trajectories))])


def _ids_and_logprobs(choice: Row) -> tuple[Ids | None, NDArray[np.float64] | None]:
    details = choice.get("logprobs")
    content = details.get("content") if isinstance(details, dict) else None
    logprobs, ids = None, _ids(choice, "token_ids")
    if isinstance(content, list) and all(isinstance(token, dict) for token in content):
        logprobs = _numbers({"logprobs": [token.get("logprob") for token in content]}, "logprobs")
        tokens = [str(token.get("token", "")) for token in content]
        if ids is None and tokens and all(token.startswith("token_id:") for token in tokens):
            numbers = [token.removeprefix("token_id:") for token in tokens]
            if not all(number.isdecimal() for number in numbers):
                raise RowError("a token of 'logprobs' starts with token_id: but has no number")
            ids = _ids({"token_ids": list(map(int, numbers))}, "token_ids")
    return ids, logprobs


def _prompt_and_response(
    name: str,
    prompt: Ids | None,
    response: Ids | None,
    mask: Bits | None,
    logprobs: NDArray[np.float64] | None,
) -> Trajectory:
    """Return a trajectory with the mask and logprobs of its response; it may lack ids."""
    if prompt is None or response is None:
        return Trajectory(name)
    if mask is None:
        mask = np.ones(len(response), np.uint8)
    if logprobs is not None and len(logprobs) == len(response):
        logprobs = np.concatenate([np.zeros(len(prompt)), logprobs])
    if len(mask) == len(response):  # else `Trajectory.faults` reports it
        mask = np.concatenate([np.zeros(len(prompt), np.uint8), mask])
    return Trajectory(
        name,
        ids=np.concatenate([prompt, response]),
        mask=mask,
        recorded_logprobs=logprobs,
        prompt_length=len(prompt) or None,  # some recorders put all ids into the response
    )


def _set_messages(trajectory: Trajectory, prompt: Any, messages: Any) -> None:
    """Set the prompt as text, or the messages if all are known."""
    if isinstance(prompt, str):
        trajectory.prompt = prompt
    if isinstance(messages, list) and messages:
        trajectory.messages = _messages(messages)
    elif isinstance(prompt, list) and trajectory.response is not None:
        mask = trajectory.mask
        is_one_answer = mask is None or (
            trajectory.prompt_length is not None and bool(mask[trajectory.prompt_length :].all())
        )
        if is_one_answer:  # otherwise messages of the environment are missing
            answer = {"role": "assistant", "content": trajectory.response}
            trajectory.messages = _messages([*prompt, answer])


# Trace format → columns of a model call: prompt, sampled ids, their mask and log-probabilities.
_TOKENS = {
    "atif": ("prompt_token_ids", "completion_token_ids", "", "logprobs"),
    "nemo_gym": ("prompt_token_ids", "generation_token_ids", "", "generation_log_probs"),
    "verifiers": ("prompt_ids", "completion_ids", "completion_mask", "completion_logprobs"),
}
_TRACE_COLUMNS = (*_ROLLOUT_COLUMNS, "steps", "responses_create_params", "completion", "trajectory")


def _trace(name: str) -> Callable[[Row], Recording]:
    """Return a reader of traces, in which every model call is a trajectory."""
    prompt, sampled, mask, logprobs = _TOKENS[name]

    def read(row: Row) -> Recording:
        trace = read_agent_trace(row, name)
        recorded = [(own, tokens) for own, tokens in trace.generations if tokens.get(sampled)]
        turns = sum(m.get("role") == "assistant" for m in trace.messages[trace.completion :])
        calls = max(len(trace.generations), 0 if name == "atif" else turns)
        if recorded and len(recorded) < calls:
            raise RowError(f"{len(recorded)} of {calls} model calls have token ids")
        trajectories = []
        for messages, tokens in recorded or [(trace.messages, {})]:
            trajectory = _prompt_and_response(
                name, _ids(tokens, prompt), _ids(tokens, sampled), _mask(tokens, mask),
                _numbers(tokens, logprobs),
            )  # fmt: skip
            trajectory.messages, trajectory.tools = _messages(messages), trace.tools
            trajectory.finish = "length" if tokens.get("is_truncated") else None
            trajectory.reward = _number(row.get("reward"), "reward")
            trajectory.group = _first_of(row, "group", "example_id", "_ng_task_index")
            trajectory.step, trajectory.version = _integer(row, "step"), row.get("version")
            trajectory.metadata = _others(row, _TRACE_COLUMNS)
            trajectory.warning = "; ".join(NOTES[note] for note in sorted(trace.notes))
            trajectories.append(trajectory)
        return Recording(trajectories)

    return read


def _has(*alternatives: str) -> Callable[[Row], bool]:
    sets = [names.split() for names in alternatives]
    return lambda row: any(all(row.get(name) is not None for name in names) for names in sets)


FORMATS: dict[str, tuple[Callable[[Row], bool], Callable[[Row], Recording]]] = {
    "openai": (_is_openai, _openai),
    **{name: (AGENT_TRACES[name][0], _trace(name)) for name in _TOKENS},
    "rollout": (_has("token_ids", "trajectories", "tree"), _rollout),
    "miles": (_has("tokens response_length"), _miles),
    "skyrl": (_has("prompt_token_ids response_ids", "input_prompt output_response"), _skyrl),
    "verl": (_is_verl, _verl),
    "trl": (_has("prompt completion"), _trl),
    "slime": (_has(), _miles),  # only by name: detected as miles
}
"""Format → whether a row has it, and its reader; tried in this order."""


# Columns


def _ids(row: Row, name: str) -> Ids | None:
    values = row.get(name)
    if values is None:
        return None
    try:
        ids = np.array(values)
    except (ValueError, OverflowError) as error:
        raise RowError(f"{name!r} must be a list of token ids") from error
    if ids.ndim == 1 and not ids.size:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RowError(f"{name!r} must be a list of token ids")
    if int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max:
        raise RowError(f"{name!r} contains a number that is not a token id")
    return ids.astype(np.int32)


def _mask(row: Row, name: str) -> Bits | None:
    """Return a mask; numbers other than 0 and 1 become 2, and `Trajectory.faults` reports them."""
    mask = _numbers(row, name, "0 and 1")
    if mask is None:
        return None
    return np.where((mask == 0) | (mask == 1), mask, 2).astype(np.uint8)


def _numbers(row: Row, name: str, kind: str = "numbers") -> NDArray[np.float64] | None:
    values = row.get(name)
    if values is None:
        return None
    try:
        numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError, OverflowError) as error:
        raise RowError(f"{name!r} must be a list of {kind}") from error
    if numbers.ndim != 1:
        raise RowError(f"{name!r} must be a list of {kind}")
    return numbers


def _messages(values: Any) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    messages = values if isinstance(values, list) else []
    roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
    if not roles or not all(isinstance(role, str) for role in roles):
        raise RowError("'messages' must be a list of messages with roles")
    return messages


def _tools(row: Row) -> list[Any] | None:
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise RowError(f"'tools' must be a list, not {type(tools).__name__}")
    return tools or None


def _objects(row: Row, name: str) -> list[Row]:
    values = row.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(v, dict) for v in values):
        raise RowError(f"{name!r} must be a non-empty list of objects")
    return values


def _object(row: Row, name: str, otherwise: Row) -> Row:
    value = row.get(name)
    return value if isinstance(value, dict) else otherwise


def _text(row: Row, name: str) -> str | None:
    value = row.get(name)
    return value if isinstance(value, str) else None


def _integer(row: Row, name: str) -> int | None:
    value = row.get(name)
    if value is None:
        return None
    is_integer = value.is_integer() if isinstance(value, float) else type(value) is int
    if not is_integer:
        raise RowError(f"{name!r} must be an integer, not {value!r:.40}")
    if not -(1 << 63) <= value < 1 << 63:
        raise RowError(f"{name!r} must fit into 64 bits, got {value!r:.40}")
    return int(value)


def _number(value: Any, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"{name!r} must be a number, not {value!r:.40}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RowError(f"{name!r} must be finite, not {value!r:.40}")
    return number


def _advantages(value: Any) -> list[float] | float | None:
    if isinstance(value, list):
        return [_number(one, "advantages") or 0.0 for one in value]
    return _number(value, "advantage")


def _first_of(row: Row, *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _others(row: Row, names: tuple[str, ...]) -> Row:
    return {name: value for name, value in row.items() if name not in names}
