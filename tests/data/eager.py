"""The eager datasets of miles and slime, written from their documentation: all rows in memory.

A row at which the frameworks would stop is in ``refused``, by its line number.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLACEHOLDERS = {"image": "<image>", "video": "<video>", "audio": "<audio>"}


@dataclass
class Eager:
    """Kept samples in file order, and lengths by line."""

    kept: list[int] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    lengths: dict[int, int] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)

    def limited(self, max_length: int | None) -> Eager:
        if max_length is None:
            return self
        short = [n for n in self.kept if self.lengths.get(n, 0) <= max_length]
        by_number = dict(zip(self.kept, self.samples, strict=True))
        return Eager(short, [by_number[n] for n in short], self.lengths, self.refused)


def with_parts(messages: list[dict[str, Any]], row: dict[str, Any], keys: dict[str, str]) -> Any:
    """Placeholders walked over one character at a time: slow, and plainly right."""
    waiting = {kind: list(row.get(column) or []) for kind, column in keys.items()}
    result = []
    for message in messages:
        text = message["content"]
        parts: list[dict[str, Any]] = []
        plain = ""
        while text:
            kind = next((k for k in keys if text.startswith(PLACEHOLDERS[k])), None)
            if kind is None:
                plain, text = plain + text[0], text[1:]
                continue
            if plain:
                parts.append({"type": "text", "text": plain})
            plain, text = "", text[len(PLACEHOLDERS[kind]) :]
            parts.append({"type": kind, kind: waiting[kind].pop(0)})
        if plain:
            parts.append({"type": "text", "text": plain})
        result.append({**message, "content": parts})
    assert not any(waiting.values())
    return result


def normalised(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments decoded, null contents empty, as newer miles does before it renders."""
    messages = copy.deepcopy(messages)
    for message in messages:
        if message.get("content") is None:
            message["content"] = ""
        for call in message.get("tool_calls") or []:
            if isinstance(call["function"].get("arguments"), str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


def eager(
    path: Path,
    tokenizer: Any,
    *,
    prompt_key: str,
    label_key: str | None = None,
    tool_key: str | None = None,
    multimodal_keys: dict[str, str] | None = None,
    apply_chat_template: bool = False,
    kwargs: dict[str, Any] | None = None,
    rows: int | None = None,
) -> Eager:
    made = Eager()
    everything = []
    lines = path.read_text(encoding="utf-8").split("\n")[:rows]
    for number, line in enumerate(line for line in lines if line.strip()):
        try:
            row = json.loads(line)
            prompt = row[prompt_key]
            if isinstance(prompt, str) and (apply_chat_template or multimodal_keys is not None):
                prompt = [{"role": "user", "content": prompt}]
            if multimodal_keys:
                prompt = with_parts(prompt, row, multimodal_keys)
            metadata = row.get("metadata") or {}
            tools = None
            if tool_key is not None and row.get(tool_key) is not None:
                tools = row[tool_key]
                tools = json.loads(tools) if isinstance(tools, str) else tools
                metadata["tools"] = tools
            text = prompt
            if apply_chat_template:
                text = tokenizer.apply_chat_template(
                    normalised(prompt),
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=True,
                    **(kwargs or {}),
                )
            label = row[label_key] if label_key is not None else None
        except Exception:
            made.refused.append(number)
            continue
        sample = {"prompt": text, "label": label, "metadata": metadata, "tools": tools}
        everything.append((number, sample))
    texts = [sample["prompt"] for _, sample in everything]
    if texts and all(isinstance(text, str) for text in texts):
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        made.lengths = {n: len(i) for (n, _), i in zip(everything, ids, strict=True)}
    made.kept = [number for number, _ in everything]
    made.samples = [sample for _, sample in everything]
    return made
