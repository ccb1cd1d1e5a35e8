"""Read agent traces (docs/guides/traces.md) as messages; reject what messages cannot express."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.chat.calls import TEXT_PARTS, call_list, is_media, tool_list
from tokenmill.errors import RowError

Row = dict[str, Any]

NOTES = {
    "no_system_prompt": "agent traces have no system prompt; a column system can add it",
    "no_tool_definitions": "agent traces call undefined tools; a column tools can define them",
    "truncated_traces": "agent traces end in a turn that was cut off; it is not trained",
    "subagents_left_out": "agent traces contain traces of subagents, which are not trained",
}
"""What readers of traces report: counter → its meaning."""

REASONING, TEXT, CALL = range(3)  # parts of an assistant message, in the order of templates

# Type of a block or item → method of `Trace`, and the keys of its arguments.
_BLOCKS = {
    "thinking": ("think", "thinking"),
    "redacted_thinking": ("refuse_encrypted", "data"),
    "tool_use": ("call", "id", "name", "input"),
    "tool_result": ("answer", "tool_use_id", "content", "is_error"),
}
_ITEMS = {
    "reasoning": ("think_parts", "content", "summary", "encrypted_content"),
    "function_call": ("call", "call_id", "name", "arguments"),
    "function_call_output": ("answer", "call_id", "output"),
}


class Trace:
    """The messages of a trace; grows while it is read."""

    def __init__(self) -> None:
        self.messages: list[Row] = []
        self.tools: Any = None
        self.completion = 0  # index of the first message after the prompt, if it is known
        self.generations: list[tuple[list[Row], Row]] = []  # messages and tokens of model calls
        self.notes: set[str] = set()
        self.functions: dict[Any, Any] = {}  # names by id of the call
        self._part: int | None = None  # last part of an unfinished assistant message

    def say(self, role: Any, content: Any, **fields: Any) -> None:
        self.end_turn()
        self.messages.append({"role": _text(role, "role"), "content": content, **fields})

    def end_turn(self) -> None:
        self._part = None

    def _turn(self, part: int) -> Row:
        if self._part is None:
            self.say("assistant", "")
        elif part < self._part:
            raise RowError("a message has reasoning, text, calls, but a turn has another order")
        self._part = part
        return self.messages[-1]

    def think(self, text: Any) -> None:
        if text:
            turn = self._turn(REASONING)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _text(text, "reasoning")

    def think_parts(self, content: Any, summary: Any, encrypted: Any) -> None:
        self.refuse_encrypted(encrypted)
        for part in _objects(content or summary, "reasoning"):
            self.think(part.get("text"))

    def refuse_encrypted(self, data: Any) -> None:
        if data:
            raise RowError("reasoning is encrypted; remove it to train the turn without it")

    def write(self, content: Any) -> None:
        self._turn(TEXT)["content"] += _content(content)

    def call(self, identity: Any, name: Any, arguments: Any) -> None:
        self.functions[_text(identity, "id of a call")] = _text(name, "name of a call")
        calls = self._turn(CALL).setdefault("tool_calls", [])
        calls.append(_in_function({"id": identity, "name": name, "arguments": arguments}))

    def answer(self, identity: Any, content: Any, is_error: Any = None) -> None:
        if _text(identity, "id of a call") not in self.functions:
            raise RowError(f"a result belongs to call {identity!r:.40}, which is not in the trace")
        fields = {"tool_call_id": identity, "name": self.functions[identity]}
        self.say("tool", _content(content), **fields, **({"is_error": True} if is_error else {}))

    def read(self, item: Row) -> None:
        """Add a message of Anthropic, or an item of OpenAI's Responses."""
        kind, role, content = item.get("type") or "message", item.get("role"), item.get("content")
        if kind != "message":
            self._apply(_ITEMS, item)
            return
        if role == "assistant" and self._part == TEXT:
            self.end_turn()  # two messages with text are two turns
        if item.get("tool_calls"):
            raise RowError("a message of Anthropic has no 'tool_calls'")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        others: list[Row] = []
        for block in _objects(blocks, "content"):
            if block.get("type") in _BLOCKS:
                self._apply(_BLOCKS, block)
            elif role == "assistant":
                self.write([block])
            else:
                others.append(block)
                continue
            if others:
                raise RowError("tool results must come before other content")
        if others:
            self.say(role, _content(others))

    def _apply(self, table: dict[str, tuple[str, ...]], item: Row) -> None:
        if item.get("type") not in table:
            raise RowError(f"a message cannot express an item of type {item.get('type')!r:.60}")
        method, *keys = table[item["type"]]
        getattr(self, method)(*map(item.get, keys))

    def say_pair(self, row: Row) -> None:
        """Add ``prompt`` and ``completion``, OpenAI messages whose calls may be flat."""
        for name, role in (("prompt", "user"), ("completion", "assistant")):
            self.completion = len(self.messages)
            for message in _messages(row, name, role):
                self.say(message.get("role"), message.get("content"))
                calls = [_in_function(call) for call in call_list(message.get("tool_calls"))]
                self.functions.update((call.get("id"), None) for call in calls)
                self.messages[-1] = {**message, "tool_calls": calls} if calls else message

    def cut_off(self) -> None:
        """Exclude the last turn from training, since the model did not end it."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages[-1] = {**self.messages[-1], "train": False}
            self.notes.add("truncated_traces")


def _atif(row: Row, trace: Trace) -> None:
    trace.tools = _object(row, "agent").get("tool_definitions")
    steps = _objects(row.get("steps"), "steps")
    last = max((n for n, step in enumerate(steps) if step.get("source") == "agent"), default=-1)
    for number, step in enumerate(steps):
        source, calls = step.get("source"), step.get("llm_call_count")
        results = _objects(_object(step, "observation").get("results"), "results")
        if source in ("system", "user"):
            if results and number < last:
                raise RowError(f"steps[{number}]: after it, the context of the agent is unknown")
            if not results:
                trace.say(source, _content(step.get("message")))
            continue
        if source != "agent":
            raise RowError(f"steps[{number}]: the source is {source!r:.40}")
        trace.think(step.get("reasoning_content"))
        trace.write(step.get("message"))
        for call in _objects(step.get("tool_calls"), "tool_calls"):
            trace.call(*map(call.get, ("tool_call_id", "function_name", "arguments")))
        if step.get("is_copied_context") or calls == 0:  # trained elsewhere, or not sampled
            trace.messages[-1]["train"] = False
        else:  # the ids of several calls cannot be separated
            tokens = _object(step, "metrics") if calls in (None, 1) else {}
            trace.generations.append((trace.messages[:], tokens))
        for result in results:
            if result.get("content") is None:
                raise RowError(f"steps[{number}]: a result has no content")
            if result.get("source_call_id") is not None:
                trace.answer(result["source_call_id"], result["content"])
            else:  # the last one was never read by the agent, like the results of tools
                trace.say("user" if number < last else "tool", _content(result["content"]))
        trace.end_turn()
    if row.get("subagent_trajectories"):
        trace.notes.add("subagents_left_out")


def _verifiers(row: Row, trace: Trace) -> None:
    trace.tools = row.get("tool_defs")
    trace.say_pair(row)
    for step in _objects(row.get("trajectory"), "trajectory"):
        own = Trace()
        own.say_pair(step)
        trace.generations.append((own.messages, _object(step, "tokens")))
    if row.get("is_truncated"):
        trace.cut_off()


def _responses(row: Row, trace: Trace) -> None:
    request, response = _object(row, "responses_create_params", "request"), _object(row, "response")
    if request.get("previous_response_id") or request.get("conversation"):
        raise RowError("the row continues a conversation that it does not contain")
    if instructions := request.get("instructions") or response.get("instructions"):
        trace.say("system", _content(instructions))
    for item in _messages(request, "input", "user"):
        trace.read(item)
    trace.completion = len(trace.messages)
    trace.end_turn()
    for item in _objects(response.get("output"), "output"):
        trace.read(item)
        if item.get("generation_token_ids"):  # in the last item of each model call
            trace.generations.append((trace.messages[:], item))
            trace.end_turn()
    trace.tools = request.get("tools") or response.get("tools")
    if response.get("status") == "incomplete":
        trace.cut_off()


def _anthropic(row: Row, trace: Trace) -> None:
    if row.get("system"):
        trace.say("system", _content(row["system"]))
    for message in _objects(row.get("messages"), "messages"):
        trace.read({**message, "type": "message"})
    if isinstance(row.get("response"), dict):
        trace.completion = len(trace.messages)
        trace.end_turn()
        trace.read(row["response"])
        if row["response"].get("stop_reason") == "max_tokens":
            trace.cut_off()


def is_anthropic(row: Row) -> bool:
    """Whether messages contain blocks of calls or results; other blocks are also OpenAI's."""
    for message in row.get("messages") or ():
        content = message.get("content") if isinstance(message, dict) else None
        if type(content) is list:
            kinds = [part.get("type") for part in content if isinstance(part, dict)]
            if "tool_use" in kinds or "tool_result" in kinds:
                return True
    return False


TRACES: dict[str, tuple[Callable[[Row], bool], Callable[[Row, Trace], None]]] = {
    "atif": (lambda row: "steps" in row and isinstance(row.get("agent"), dict), _atif),
    "nemo_gym": (lambda row: isinstance(row.get("responses_create_params"), dict), _responses),
    "responses": (lambda row: isinstance(_object(row, "response").get("output"), list), _responses),
    "verifiers": (lambda row: {"example_id", "completion", "metrics"} <= row.keys(), _verifiers),
    "anthropic": (is_anthropic, _anthropic),
}
"""Format → whether a row has it, and its reader; tried in this order."""


def read_trace(row: Row, name: str) -> Trace:
    """Read a trace of one of `TRACES`; its columns ``system`` and ``tools`` add what it lacks.

    Raises:
        RowError: The row is not such a trace, or messages cannot express it.
    """
    trace = Trace()
    TRACES[name][1](row, trace)
    if not any(message.get("role") in ("system", "developer") for message in trace.messages):
        if row.get("system"):
            first = {"role": "system", "content": _text(row["system"], "system prompt")}
            for messages in (trace.messages, *(one for one, _ in trace.generations)):
                messages.insert(0, first)
            trace.completion += 1
        else:
            trace.notes.add("no_system_prompt")
    trace.tools = [_tool(tool) for tool in tool_list(trace.tools or row.get("tools")) or ()] or None
    if trace.functions and trace.tools is None:
        trace.notes.add("no_tool_definitions")
    return trace


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"the {what} must be text, not {type(value).__name__}")
    return value


def _object(row: Row, *names: str) -> Row:
    return next((row[name] for name in names if isinstance(row.get(name), dict)), row)


def _objects(value: Any, what: str) -> list[Row]:
    if not isinstance(value, list | None) or not all(isinstance(one, dict) for one in value or ()):
        raise RowError(f"{what!r} must be a list of objects")
    return value or []


def _messages(row: Row, name: str, role: str) -> list[Row]:
    value = row.get(name)
    return _objects([{"role": role, "content": value}] if isinstance(value, str) else value, name)


def _content(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    for part in _objects(value, "content"):
        if part.get("type") not in TEXT_PARTS:
            reason = "bad_media" if is_media(part) else "bad_shape"
            message = f"a message of a trace cannot express a part of type {part.get('type')!r:.60}"
            raise RowError(message, reason=reason)
    return "".join(_text(part.get("text"), "text of a part") for part in value)


def _in_function(call: Row) -> Row:
    if "function" in call:
        return call
    function = {name: call.get(name) for name in ("name", "arguments")}
    return {"id": call.get("id"), "type": "function", "function": function}


def _tool(tool: Row) -> Row:
    """Return a tool in OpenAI's form."""
    if "function" in tool:
        return tool
    if {"parameters", "input_schema"}.isdisjoint(tool):
        raise RowError(f"a tool of type {tool.get('type')!r:.60} has no parameters")
    names = {"input_schema": "parameters"}
    kept = {names.get(k, k): v for k, v in tool.items() if k != "type" and v is not None}
    return {"type": "function", "function": kept}
