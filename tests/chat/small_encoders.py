"""Small encoders, each with a trap of the encoders that models ship. This file imports nothing."""

import json

END = "<|im_end|>"


def plain(messages, tools=None, add_generation_prompt=False, name="assistant", **_):
    """ChatML, with a prompt on request."""
    text = "".join(f"<tool>{json.dumps(tool)}</tool>" for tool in tools or ())
    for message in messages:
        role = name if message["role"] == "assistant" else message["role"]
        text += f"<|im_start|>{role}\n{_body(message)}{END}\n"
    return text + (f"<|im_start|>{name}\n" if add_generation_prompt else "")


def merging(messages, thinking_mode="chat", drop_thinking=True):
    """Changes its input, merges and sorts tool results, drops thinking, prompts by itself."""
    merged, order = [], []
    while messages:
        message = messages.pop(0)
        calls = message.get("tool_calls") or []
        if message["role"] == "tool":
            result = {"id": message.get("tool_call_id"), "text": message["content"]}
            if not (merged and merged[-1]["role"] == "user" and "results" in merged[-1]):
                merged.append({"role": "user", "content": "", "results": []})
            merged[-1]["results"].append(result)
            merged[-1]["results"].sort(
                key=lambda one: order.index(one["id"]) if one["id"] in order else -1
            )
            continue
        if calls:
            order = [call.pop("id") for call in calls]
        merged.append(message)
    last = max((k for k, m in enumerate(merged) if m["role"] == "user"), default=-1)
    if any(message.get("tools") for message in merged):
        drop_thinking = False
    text = "<s>"
    for k, message in enumerate(merged):
        if message["role"] == "system":
            text += message["content"] + "".join(map(json.dumps, message.get("tools", ())))
        elif message["role"] == "user":
            results = "".join(
                f"<result>{one['text']}</result>" for one in message.get("results", ())
            )
            text += f"<|user|>{results}{message['content']}<|assistant|>"
            thinks = thinking_mode == "thinking" and (not drop_thinking or k >= last)
            text += "<think>" if thinks else "</think>"
        else:
            reasoning = message.get("reasoning") or ""
            if thinking_mode == "thinking" and (not drop_thinking or k > last):
                if not (reasoning or message.get("tool_calls")):
                    raise ValueError("no reasoning after the last user message")
                text += f"{reasoning}</think>"
            text += _body(message) + "</s>"
    return text


def leaking(messages, tools=None, add_generation_prompt=False):
    """Prints the question again in the answer, after the prompt."""
    text, asked = "", ""
    for message in messages:
        own = _body(message)
        text += f"<|im_start|>{message['role']}\n"
        text += (f"You asked: {asked}. " if message["role"] == "assistant" else "") + own + END
        asked = own
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def leaking_systems(messages, tools=None, add_generation_prompt=False):
    """Prints a system message again in each answer."""
    extra = messages[0]["content"] if messages[0]["role"] == "system" else ""
    text = ""
    for message in messages:
        own = _body(message) + (extra if message["role"] == "assistant" else "")
        text += f"<|im_start|>{message['role']}\n{own}{END}"
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def dropping(messages, tools=None, add_generation_prompt=False):
    """Does not print calls."""
    text = "".join(f"<|im_start|>{m['role']}\n{m.get('content') or ''}{END}" for m in messages)
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def exclusive(messages, tools=None, add_generation_prompt=False):
    """Refuses calls beside a text that is not empty."""
    if any(message["content"] and message.get("tool_calls") for message in messages):
        raise ValueError("text beside a call")
    return plain(messages, tools, add_generation_prompt)


def segments(messages, tools=None, add_generation_prompt=False):
    """Texts, and whether each may contain control tokens."""
    parts = []
    for message in messages:
        parts += [("<|im_start|>", True), (f"{message['role']}\n", False)]
        parts += [(_body(message), False), (END, True)]
    if add_generation_prompt:
        parts += [("<|im_start|>", True), ("assistant\n", False)]
    return parts


class Segment:
    """A segment as Kimi K3 has it."""

    def __init__(self, text, allow_special):
        self.text, self.allow_special = text, allow_special


def segment_objects(messages, tools=None, *, add_generation_prompt=True):
    return [Segment(*part) for part in segments(messages, tools, add_generation_prompt)]


def numbers(messages, tools=None, add_generation_prompt=False, *, tokenizer):
    """Ids of `segments`, from the library itself."""
    import tokenizers

    encode = tokenizers.Tokenizer.from_file(tokenizer).encode
    parts = segments(messages, tools, add_generation_prompt)
    return [number for text, _ in parts for number in encode(text, add_special_tokens=False).ids]


def counting(messages, tools=None, add_generation_prompt=False):
    return {"neither": "text nor ids"}


def packing(messages, tools=None, add_generation_prompt=False):
    return b"neither text nor ids"


def weighing(messages, tools=None, add_generation_prompt=False):
    return [0.5]


def _body(message):
    calls = [call["function"] for call in message.get("tool_calls") or []]
    text = "".join(f"<call>{call['name']}({call['arguments']})</call>" for call in calls)
    return (message.get("content") or "") + text
