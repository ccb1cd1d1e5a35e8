"""Read agent traces (docs/guides/traces.md) as messages; reject what messages cannot express."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.chat.calls import TEXT_PARTS, call_list, is_media, tool_list
from tokenmill.errors import RowError

Row = dict[str, Any]

NOTES = {  # by counter of the render stage
    "no_system_prompt": "agent traces have no system prompt; a column system can add it",
    "no_tool_definitions": "agent traces call undefined tools; a column tools can define them",
    "truncated_traces": "agent traces end in a turn that was cut off; it is not trained",
    "subagents_left_out": "agent traces contain traces of subagents, which are not trained",
}

# Type of a block of Anthropic or an item of Responses → method of `AgentTrace`, and its arguments.
_PARTS = {
    "thinking": ("add_reasoning", "thinking"),
    "redacted_thinking": ("add_reasoning", "thinking", "data"),
    "tool_use": ("add_call", "id", "name", "input"),
    "tool_result": ("add_result", "tool_use_id", "content", "is_error"),
    "reasoning": ("add_reasoning", "content", "encrypted_content", "summary"),
    "function_call": ("add_call", "call_id", "name", "arguments"),
    "function_call_output": ("add_result", "call_id", "output"),
}


class AgentTrace:
    """The messages of a trace, while it is read."""

    def __init__(self) -> None:
        self.messages: list[Row] = []
        self.tools: Any = None
        self.is_cut = False  # whether the model did not end the last turn
        self.completion = 0  # index of the first message after the prompt, if it is known
        self.generations: list[tuple[list[Row], Row]] = []  # messages and tokens of model calls
        self.notes: set[str] = set()
        self.in_turn = False  # whether the last message is an assistant's and can continue
        self._functions: dict[str, str] = {}  # names by id of the call

    def add_message(self, role: Any, content: Any, **fields: Any) -> None:
        self.in_turn = False
        self.messages.append({"role": _text(role, "role"), "content": content, **fields})

    def _turn(self, *later: str) -> Row:
        """Return the assistant's message, in which templates print ``later`` fields afterwards."""
        if not self.in_turn:
            self.add_message("assistant", "")
        if any(map(self.messages[-1].get, later)):
            raise RowError("a turn has another order than reasoning, text, calls")
        self.in_turn = True
        return self.messages[-1]

    def add_reasoning(self, text: Any, encrypted: Any = None, summary: Any = None) -> None:
        if encrypted:
            raise RowError("reasoning is encrypted; remove it to train the turn without it")
        found = text or summary
        for part in [{"text": found}] if isinstance(found, str) else _objects(found, "reasoning"):
            turn = self._turn("content", "tool_calls")
            thoughts = turn.get("reasoning_content", "") + _text(part.get("text"), "reasoning")
            turn["reasoning_content"] = thoughts

    def add_text(self, content: Any) -> None:
        self._turn("tool_calls")["content"] += _content(content)

    def add_call(self, identity: Any, name: Any, arguments: Any) -> None:
        self._functions[_text(identity, "id of a call")] = _text(name, "name of a call")
        calls = self._turn().setdefault("tool_calls", [])
        if any(call["id"] == identity for call in calls):
            raise RowError(f"two calls of a turn have the id {identity!r:.40}")
        calls.append(_in_function({"id": identity, "name": name, "arguments": arguments}))

    def add_result(self, identity: Any, content: Any, is_error: Any = None) -> None:
        if _text(identity, "id of a call") not in self._functions:
            raise RowError(f"a result belongs to call {identity!r:.40}, which is not in the trace")
        fields: Row = {"tool_call_id": identity, "name": self._functions[identity]}
        if is_error:
            fields["is_error"] = True
        self.add_message("tool", _content(content), **fields)

    def read(self, item: Row) -> None:
        """Add a message or block of Anthropic, or an item of OpenAI's Responses."""
        kind, role = str(item.get("type") or "message"), item.get("role")
        if kind in _PARTS:
            method, *keys = _PARTS[kind]
            getattr(self, method)(*map(item.get, keys))
            return
        if kind != "message" or item.get("tool_calls"):
            raise RowError(f"a message cannot express an item of type {kind!r:.60}")
        is_assistant, continues, content = role == "assistant", False, item.get("content") or ""
        if is_assistant and self.in_turn and not self.messages[-1].get("tool_calls"):
            self.in_turn = not self.messages[-1]["content"]  # two texts are two turns
        text = [{"type": "text", "text": content}]
        for block in text if isinstance(content, str) else _objects(content, "content"):
            part = _PARTS.get(str(block.get("type")))
            if part and is_assistant == (part[0] == "add_result"):
                raise RowError(f"a message of role {role!r:.40} has a part {block['type']!r}")
            if part:
                self.read(block)
            elif is_assistant:
                self.add_text([block])
            elif continues:
                self.messages[-1]["content"] += _content([block])
            else:
                self.add_message(role, _content([block]))
            continues = not part

    def add_pair(self, row: Row) -> None:
        """Add ``prompt`` and ``completion``, OpenAI messages whose calls may be flat."""
        for name, role in (("prompt", "user"), ("completion", "assistant")):
            self.completion = len(self.messages)
            for message in _messages(row.get(name), name, role):
                calls = list(map(_in_function, call_list(message.get("tool_calls"))))
                self.add_message(message.get("role"), message.get("content"))
                self.messages[-1] = {**message, "tool_calls": calls} if calls else message


def _atif(row: Row, trace: AgentTrace) -> None:
    trace.tools = _object(row, "agent").get("tool_definitions")
    steps = _objects(row.get("steps"), "steps")
    last = max((n for n, step in enumerate(steps) if step.get("source") == "agent"), default=-1)
    for number, step in enumerate(steps):
        source, calls = step.get("source"), step.get("llm_call_count")
        results = _objects(_object(step, "observation").get("results"), "results")
        if source in ("system", "user"):
            if (results or step.get("tool_calls")) and number < last:
                raise RowError(f"steps[{number}]: after it, the context of the agent is unknown")
            if not results:
                trace.add_message(source, _content(step.get("message")))
            continue
        if source != "agent":
            raise RowError(f"steps[{number}]: the source is {source!r:.40}")
        trace.add_reasoning(step.get("reasoning_content"))
        trace.add_text(step.get("message"))
        for call in _objects(step.get("tool_calls"), "tool_calls"):
            trace.add_call(*map(call.get, ("tool_call_id", "function_name", "arguments")))
        if step.get("is_copied_context") or calls == 0:  # not sampled for this trace
            trace.messages[-1]["train"] = False
        else:  # the ids of several calls cannot be separated
            tokens = _object(step, "metrics") if calls in (None, 1) else {}
            trace.generations.append((trace.messages[:], tokens))
        for result in results:
            if result.get("content") is None:
                raise RowError(f"steps[{number}]: a result has no content")
            if result.get("source_call_id") is not None:
                trace.add_result(result["source_call_id"], result["content"])
            else:  # the last one was never read by the agent, like the results of tools
                trace.add_message("user" if number < last else "tool", _content(result["content"]))
        trace.in_turn = False
    if row.get("subagent_trajectories"):
        trace.notes.add("subagents_left_out")


def _verifiers(row: Row, trace: AgentTrace) -> None:
    trace.tools = row.get("tool_defs")
    trace.add_pair(row)
    for step in _objects(row.get("trajectory"), "trajectory"):
        own = AgentTrace()
        own.add_pair(step)
        trace.generations.append((own.messages, _object(step, "tokens")))
    trace.is_cut = bool(row.get("is_truncated"))


def _responses(row: Row, trace: AgentTrace) -> None:
    request, response = _object(row, "responses_create_params", "request"), _object(row, "response")
    if request.get("previous_response_id") or request.get("conversation"):
        raise RowError("the row continues a conversation that it does not contain")
    if instructions := request.get("instructions") or response.get("instructions"):
        trace.add_message("system", _content(instructions))
    for item in _messages(request.get("input"), "input", "user"):
        trace.read(item)
    trace.completion, trace.in_turn = len(trace.messages), False
    for item in _objects(response.get("output"), "output"):
        trace.read(item)
        if item.get("generation_token_ids"):  # in the last item of each model call
            trace.generations.append((trace.messages[:], item))
            trace.in_turn = False
    trace.tools = request.get("tools") or response.get("tools")
    trace.is_cut = response.get("status") == "incomplete"


def _anthropic(row: Row, trace: AgentTrace) -> None:
    if row.get("system"):
        trace.add_message("system", _content(row["system"]))
    for message in _objects(row.get("messages"), "messages"):
        trace.read({**message, "type": "message"})
    if isinstance(row.get("response"), dict):
        trace.completion, trace.in_turn = len(trace.messages), False
        trace.read(row["response"])
        trace.is_cut = row["response"].get("stop_reason") == "max_tokens"


def _has_output(row: Row) -> bool:
    response = row.get("response") or row
    return isinstance(response, dict) and isinstance(response.get("output"), list)


def has_blocks(messages: Any) -> bool:
    """Whether messages contain calls or results as blocks; other blocks are also OpenAI's."""
    messages = messages if isinstance(messages, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(p, dict) and p.get("type") in ("tool_use", "tool_result") for p in parts)


# Format → whether a row has it, and its reader; tried in this order.
AGENT_TRACES: dict[str, tuple[Callable[[Row], bool], Callable[[Row, AgentTrace], None]]] = {
    "atif": (lambda row: "steps" in row and isinstance(row.get("agent"), dict), _atif),
    "nemo_gym": (lambda row: isinstance(row.get("responses_create_params"), dict), _responses),
    "responses": (_has_output, _responses),
    "verifiers": (lambda row: {"example_id", "completion", "metrics"} <= row.keys(), _verifiers),
    "anthropic": (lambda row: has_blocks(row.get("messages")), _anthropic),
}


def read_agent_trace(row: Row, name: str) -> AgentTrace:
    """Read a trace of one of `AGENT_TRACES`; a column ``tools`` adds tools that it lacks."""
    trace = AgentTrace()
    AGENT_TRACES[name][1](row, trace)
    if trace.is_cut and trace.messages and trace.messages[-1].get("role") == "assistant":
        trace.messages[-1] = {**trace.messages[-1], "train": False}
        trace.notes.add("truncated_traces")
    if not any(message.get("role") in ("system", "developer") for message in trace.messages):
        trace.notes.add("no_system_prompt")
    trace.tools = [_tool(tool) for tool in tool_list(trace.tools or row.get("tools")) or ()] or None
    if trace.tools is None and any(message.get("tool_calls") for message in trace.messages):
        trace.notes.add("no_tool_definitions")
    return trace


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"the {what} must be text, not {type(value).__name__}")
    return value


def _object(row: Row, *names: str) -> Row:
    value = next((row[name] for name in names if row.get(name) is not None), row)
    if not isinstance(value, dict):
        raise RowError(f"{' or '.join(names)} must be an object, not {type(value).__name__}")
    return value


def _objects(value: Any, what: str) -> list[Row]:
    if not isinstance(value, list | None) or not all(isinstance(one, dict) for one in value or ()):
        raise RowError(f"{what!r} must be a list of objects")
    return value or []


def _messages(value: Any, what: str, role: str) -> list[Row]:
    return _objects([{"role": role, "content": value}] if isinstance(value, str) else value, what)


def _content(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    for part in _objects(value, "content"):
        if part.get("type") not in TEXT_PARTS:
            message = f"a message of a trace cannot express a part of type {part.get('type')!r:.60}"
            raise RowError(message, reason="bad_media" if is_media(part) else "bad_shape")
    return "".join(_text(part.get("text"), "text of a part") for part in value)


def _in_function(call: Row) -> Row:
    function = {name: call.get(name) for name in ("name", "arguments")}
    wrapped = {"id": call.get("id"), "type": "function", "function": function}
    return call if "function" in call else wrapped


def _tool(tool: Row) -> Row:
    if "function" in tool:
        return tool
    if {"parameters", "input_schema"}.isdisjoint(tool):
        raise RowError(f"a tool of type {tool.get('type')!r:.60} has no parameters")
    names = {"input_schema": "parameters"}
    kept = {names.get(k, k): v for k, v in tool.items() if k != "type" and v is not None}
    return {"type": "function", "function": kept}
