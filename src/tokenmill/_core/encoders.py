"""`EncoderSource`: a Python function that encodes conversations, in place of a chat template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from tokenmill._core import fingerprint

MAX_CACHED_CHARS = 1 << 20

objects: dict[str, Callable[..., Any]] = {}  # by digest: encoders that exist in this process only


class EncoderSource(msgspec.Struct, frozen=True):
    """An encoder that is not loaded, in a form that can be sent to workers."""

    name: str  # "module:callable", or the name of an adapter
    kwargs: dict[str, Any] = {}
    files: dict[str, str] = {}  # Python sources by module name; the first has the callable
    digest: str = ""  # of code and data that `files` does not have
    path: str = ""  # where the adapter reads its data; part of no key
    is_object: bool = False  # exists only in this process

    @property
    def key(self) -> str:
        sources = {name: fingerprint.key(text) for name, text in self.files.items()}
        order = fingerprint.own_order({"kwargs": self.kwargs})
        document = {"name": self.name, "files": sources, "digest": self.digest}
        return fingerprint.key({**document, "kwargs": self.kwargs, "order": order})

    def dump(self) -> dict[str, Any]:
        return {"encoder": msgspec.to_builtins(self)}

    @staticmethod
    def load(template: Any) -> Any:
        """Return the source of a `dump`, and any other template as it is."""
        if isinstance(template, dict) and isinstance(template.get("encoder"), dict):
            return msgspec.convert(template["encoder"], EncoderSource)
        return template


def arguments_of(encoder: str) -> tuple[Any, ...]:
    """Return the arguments that select an encoder of a directory, for a message."""
    selected = ("encoder", encoder)
    if encoder in ("mistral-common", "harmony"):  # which run no code of the checkpoint
        return (selected,)
    return selected, " and ", ("trust_remote_code",)


def cached_ids(encode: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Cache the ids of the last `MAX_CACHED_CHARS`: the prompts of a row repeat its texts."""
    known: dict[Any, list[int]] = {}
    chars = 0

    def cached(text: str, *given: Any, **named: Any) -> list[int]:
        nonlocal chars
        key = text, given, tuple(named.items())
        if key not in known:
            chars += len(text)
            if chars > MAX_CACHED_CHARS:
                known.clear()
                chars = len(text)
            known[key] = encode(text, *given, **named)
        return [*known[key]]

    return cached
