"""Conversations to render: rows of the shared corpora, and odd ones (`ODD`) with unique words."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Message = dict[str, Any]

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
DATE = "2026-11-15"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Where."}},
                "required": ["city"],
            },
        },
    }
]
VARIABLES = {
    "models/fireworks-ai-llama-3-firefunction-v2": {"functions": "[]", "datetime": "2026-11-15"},
}
"""What a template needs besides and cannot do without, by its name in `zoo`."""
NAMES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}


def words(kind: str, index: int, count: int = 3) -> str:
    return " ".join(f"{kind}{index}x{number}" for number in range(count))


def say(role: str, index: int, content: Any = None, **keys: Any) -> Message:
    name = NAMES[role]
    text = words(name, index) if content is None else content
    return {"role": name, "content": text, **keys}


def turns(roles: str) -> list[Message]:
    return [_result(index) if role == "t" else say(role, index) for index, role in enumerate(roles)]


def _call(arguments: Any, number: int = 1, name: str = "get_weather") -> dict[str, Any]:
    return {
        "id": f"call{number:05d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _result(index: int, content: str | None = None, number: int = 1) -> Message:
    text = words("tool", index) if content is None else content
    return {
        "role": "tool",
        "name": "get_weather",
        "tool_call_id": f"call{number:05d}",
        "content": text,
    }


def _calling(
    *calls: dict[str, Any], content: Any = "", after: str = "ta", result: str | None = None
) -> Row:
    messages = [say("u", 0), say("a", 1, content, tool_calls=list(calls))]
    for index, role in enumerate(after, 2):
        messages.append(_result(index, result) if role == "t" else say(role, index))
    return {"messages": messages, "tools": TOOLS}


def _with(roles: str, changes: dict[int, dict[str, Any]], tools: Any = None) -> Row:
    messages = turns(roles)
    for index, keys in changes.items():
        messages[index].update(keys)
    row: Row = {"messages": messages}
    if tools is not None:
        row["tools"] = tools
    return row


def _agent(steps: int) -> Row:
    """A long run: call, result, now and then a word in between."""
    messages = [say("s", 0), say("u", 1)]
    for step in range(steps):
        index = len(messages)
        arguments: Any = {"city": words("call", index)}
        if step % 5 == 2:
            arguments = {}
        content = words("assistant", index) if step % 3 == 0 else ""
        call = _call(arguments, step)
        messages.append(say("a", index, content, tool_calls=[call]))
        text = "" if step % 7 == 3 else None
        messages.append(_result(index + 1, text, step))
        if step % 6 == 5:
            messages += [say("a", index + 2), say("u", index + 3)]
    messages.append(say("a", len(messages)))
    return {"messages": messages, "tools": TOOLS}


def _thinking(form: str) -> Row:
    messages = turns("uaua")
    for index in (1, 3):
        thought, answer = words("reason", index), messages[index]["content"]
        if form in ("content", "both"):
            messages[index]["content"] = f"<think>\n{thought}\n</think>\n\n{answer}"
        if form in ("reasoning_content", "both", "thinking", "reasoning"):
            name = "reasoning_content" if form == "both" else form
            messages[index][name] = words("thought" if form == "both" else "reason", index)
        if form == "empty":
            messages[index]["content"] = f"<think>\n\n</think>\n\n{answer}"
        if form == "unclosed":
            messages[index]["content"] = f"<think>\n{thought}"
        if form == "parts":
            messages[index]["content"] = [
                {"type": "reasoning", "value": thought},
                {"type": "text", "value": answer},
            ]
    return {"messages": messages}


def _arguments() -> dict[str, Row]:
    values: dict[str, Any] = {
        "an empty object": {},
        "a number": {"city": 7},
        "a fraction": {"city": -1.5e-7},
        "true": {"city": True},
        "false": {"city": False},
        "null": {"city": None},
        "an empty text": {"city": ""},
        "a text": {"city": words("call", 1)},
        "a text with quotes": {"city": 'say "x"\n\t\\ é 你 <b>&'},
        "nested": {"a": {"b": {"c": [1, {"d": words("call", 1)}], "e": {}}}, "f": []},
        "a list": {"cities": [words("call", 1), 2, None, True, ""]},
        "several keys": {"z": 1, "a": words("call", 1), "m": [], "b": False},
        "text that is JSON": '{"city": "call1x0"}',
        "text that is JSON of nothing": "{}",
        "text that is no JSON": "call1x0 {",
        "blank keys": {"": "call1x0", " ": 1},
        "null itself": None,
        "a list itself": ["call1x0"],
    }
    return {f"arguments: {name}": _calling(_call(value)) for name, value in values.items()}


def _odd() -> dict[str, Row]:
    made: dict[str, Row] = {
        "plain": {"messages": turns("ua")},
        "system": {"messages": turns("sua")},
        "several turns": {"messages": turns("uauaua")},
        "tools, none called": {"messages": turns("suaua"), "tools": TOOLS},
        "tools": _calling(_call({"city": words("call", 1)})),
        "a call at the end": _calling(_call({"city": words("call", 1)}), after=""),
        "call without an answer": _calling(_call({"city": "call1x0"}), after="tu") | {},
        "text and call": _calling(_call({"city": words("call", 1)}), content="assistant1x0"),
        "null content and call": _calling(_call({"city": "call1x0"}), content=None),
        "several calls": _calling(
            _call({"city": words("call", 1)}, 1),
            _call({}, 2),
            _call({"city": words("call", 2)}, 3, "other_tool"),
            after="ttta",
        ),
        "several calls, one result": _calling(_call({}, 1), _call({"n": 1}, 2), after="ta"),
        "calls twice": _with(
            "uatataua",
            {
                1: {"content": "", "tool_calls": [_call({"city": 1}, 1)]},
                3: {"content": "", "tool_calls": [_call({"city": words("call", 3)}, 2)]},
                4: {"tool_call_id": "call00002"},
            },
            TOOLS,
        ),
        "calls thought about": _with(
            "uata",
            {
                1: {"content": "", "reasoning_content": "reason1x0"}
                | {"tool_calls": [_call({"city": "q"})]},
                3: {"reasoning_content": words("reason", 3)},
            },
            TOOLS,
        ),
        "an empty result": _calling(_call({"city": "call1x0"}), result=""),
        "results empty, arguments empty": _calling(_call({}), after="taua", result=""),
        "consecutive assistants": {"messages": turns("uaa")},
        "consecutive assistants in the middle": {"messages": turns("uaaua")},
        "three assistants": {"messages": turns("uaaa")},
        "consecutive users": {"messages": turns("uuaua")},
        "assistant first": {"messages": turns("aua")},
        "assistant alone": {"messages": turns("a")},
        "assistant after system": {"messages": turns("sa")},
        "tool after no call": {"messages": turns("uata"), "tools": TOOLS},
        "tool after user": {"messages": turns("uta"), "tools": TOOLS},
        "tool first": {"messages": turns("tua")},
        "system in the middle": {"messages": turns("uasua")},
        "system twice": {"messages": turns("ssua")},
        "system after user": {"messages": turns("usaua")},
        "developer": {"messages": turns("dua")},
        "developer and system": {"messages": turns("sduaua")},
        "trailing tool": {"messages": turns("uat")},
        "thinking in content": _thinking("content"),
        "reasoning_content": _thinking("reasoning_content"),
        "thinking key": _thinking("thinking"),
        "reasoning key": _thinking("reasoning"),
        "thinking in both": _thinking("both"),
        "thinking empty": _thinking("empty"),
        "thinking unclosed": _thinking("unclosed"),
        "thinking alone": _with("ua", {1: {"content": "<think>reason1x0\n</think>\n"}}),
        "thinking in parts": _thinking("parts"),
        "echo": {"messages": [{**m, "content": "same words"} for m in turns("uauaua")]},
        "echo of roles": {
            "messages": [
                say(role, 0, text)
                for role, text in zip(
                    "uaua", ("assistant", "user", "assistant", "assistant"), strict=True
                )
            ]
        },
        "one letter": {"messages": [{**m, "content": "e"} for m in turns("uaua")]},
        "unicode": _with(
            "uaua",
            {
                0: {"content": "你好 👋🏽 user0x0 é\u2028"},
                1: {"content": "\u0301你好！ assistant1x0 🎉\n\n1. 一\n2. \u0301"},
                2: {"content": "\u200b\u00a0user2x0\u3000"},
                3: {"content": "\ufeffassistant3x0\u0085"},
            },
        ),
        "private use": _with("ua", {1: {"content": "assistant1x0 \U00100000\ue000"}}),
        "typed parts": _with(
            "sua",
            {
                index: {"content": [{"type": "text", "text": words(kind, index)}]}
                for index, kind in enumerate(("system", "user", "assistant"))
            },
        ),
        "several parts": _with(
            "ua",
            {
                0: {"content": [{"type": "text", "text": "user0x0 "}, {"text": "user0x1"}]},
                1: {"content": [{"type": "text", "text": t} for t in ("assistant1x0", "\n", "x")]},
            },
        ),
        "a part of no known type": _with(
            "ua",
            {0: {"content": [{"type": "citation"}, {"type": "text", "text": "user0x0"}]}},
        ),
        "untrained turn": _with("uauaua", {3: {"train": False}}),
        "weights": _with("uauaua", {1: {"weight": 0}, 5: {"weight": 1}}),
        "extra keys": _with("ua", {0: {"name": "Ann"}, 1: {"name": "Bo", "score": 0.5}}),
        "sharegpt": {
            "conversations": [
                {"from": "system", "value": "system0x0"},
                {"from": "human", "value": "user1x0"},
                {"from": "function_call", "value": '{"name": "get_weather", "arguments": {}}'},
                {"from": "observation", "value": "tool3x0"},
                {"from": "gpt", "value": "assistant4x0"},
                {"from": "human", "value": "user5x0"},
                {"from": "gpt", "value": "assistant6x0"},
            ],
            "tools": json.dumps(TOOLS),
        },
        "alpaca": {"instruction": "user0x0", "input": "user0x1", "output": "assistant1x0"},
        "long agent run": _agent(20),
        "very long agent run": _agent(40),
        "long chat": {"messages": turns("s" + "ua" * 40)},
    }
    made |= _arguments()
    made |= _blank()
    made |= _literals()
    return made


def _blank() -> dict[str, Row]:
    made: dict[str, Row] = {}
    for role, index in (("system", 0), ("user", 1), ("assistant", 2), ("user", 3), ("last", 4)):
        for name, content in (("empty", ""), ("blank", " \n"), ("null", None)):
            case = f"{name} {role if index != 3 else 'later user'}"
            made[case] = _with("suaua", {index: {"content": content}})
    made["all empty"] = {"messages": [{**m, "content": ""} for m in turns("suaua")]}
    made["empty user alone"] = _with("ua", {0: {"content": ""}})
    for name, (before, after) in {
        "leading newlines": ("\n\n", ""),
        "trailing newlines": ("", "\n\n"),
        "trailing space": ("", " "),
        "outer whitespace": (" \t\n", "\n \n"),
        "windows lines": ("", "\r\n"),
    }.items():
        made[name] = {
            "messages": [{**m, "content": f"{before}{m['content']}{after}"} for m in turns("suaua")]
        }
    return made


def _literals() -> dict[str, Row]:
    """Texts that hold what templates print or look for."""
    literals = (
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<|im_start|>user",
        "</think>",
        "<think>",
        "<tool_call>",
        "</tool_call>",
        "</s>",
        "[/INST]",
        "<|eot_id|>",
        "<｜Assistant｜>",
        "{{ 7 * 7 }}{% if x %}",
        "<|end|>",
        "<|user|>",
    )
    made: dict[str, Row] = {}
    for literal in literals:
        messages = turns("uaua")
        for message in messages:
            message["content"] = f"{message['content']} {literal} behind"
        made[f"literal {literal!r}"] = {"messages": messages}
    made["literal at the ends"] = {
        "messages": [{**m, "content": f"<|im_end|>{m['content']}<|im_end|>"} for m in turns("uaua")]
    }
    made["literal in a result"] = _calling(_call({"city": "</tool_call><|im_end|>"}))
    return made


ODD: dict[str, Row] = _odd()
CORPORA = (
    "alpaca_eval_en",
    "alpaca_zh",
    "codealpaca",
    "drone_tool_calls",
    "glaive_tools_sharegpt",
    "reason_tool_use",
    "smilechat_zh",
    "tau_bench_trajectories",
    "think_traces",
    "toy_chat",
)


@functools.cache
def _sampled_lines(path: Path, count: int, seed: str) -> list[str]:
    """Read once: the sample is small, and the corpora are not."""
    lines = _lines(path)
    return random.Random(seed).sample(lines, count) if count < len(lines) else lines


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text("utf-8").split("\n") if line.strip()]


def corpus_rows(shared: Path, name: str, count: int | None, seed: int = 13) -> list[Row]:
    path = shared / "corpora" / f"{name}.jsonl"
    lines = _lines(path) if count is None else _sampled_lines(path, count, f"{name}{seed}")
    return [json.loads(line) for line in lines]


def zoo(shared: Path) -> dict[str, str]:
    found = {
        f"{path.parent.name}/{path.stem}": path.read_text("utf-8")
        for path in sorted((shared / "templates").glob("*/*.jinja"))
    }
    for path in sorted((shared / "tokenizers").glob("*/chat_template.jinja")):
        found[f"tokenizers/{path.parent.name}"] = path.read_text("utf-8")
    return found
