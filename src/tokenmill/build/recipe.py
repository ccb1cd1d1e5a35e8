"""The recipe: the frozen description of a preparation.

A `Recipe` says what is to be made: which sources, which tokenizer, how rows are read, rendered,
trained and cut. Every field that can change the output is in its *document*, and so in every key;
nothing else is. `RunOptions` say how it is to be made (workers, cache, engines, what to do about
rejected rows): they are part of no key and never change a byte.

Both are checked where they are made, with the offending value in the message. ``recipe.yaml`` holds
the same names; unknown ones are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tokenmill import fingerprint
from tokenmill.chat import ChatSpec
from tokenmill.errors import SourceMissing, UsageError

RECIPE_VERSION = 1
"""Raised when rows would come out differently for the same fields: part of every key."""

OVERLONG = ("drop", "truncate")
ON_BAD_ROW = ("reject", "raise")
ENGINES = ("auto", "fastokens", "hf")
RENDERERS = ("auto", "jinja2")
BACKENDS = ("auto", "transformers", "file")

_IN_HUB = re.compile(r"^[^/\s]+/[^/:\s]+:")  # owner/name:split

_CHAT_FIELDS = tuple(field.name for field in fields(ChatSpec))


@dataclass(frozen=True)
class Recipe:
    """What is to be made. The names are those of `tokenmill.prepare`, which describes them."""

    sources: tuple[str, ...]
    tokenizer: Any
    tokenizer_backend: str = "auto"
    trust_remote_code: bool = False
    format: str = "auto"
    messages_key: str | None = None
    tools_key: str = "tools"
    system_key: str = "system"
    text_key: str = "text"
    prompt_key: str = "prompt"
    completion_key: str = "completion"
    chat_template: str | None = None
    template_kwargs: Mapping[str, Any] | None = None
    date: str | None = None
    train_on: str | None = None
    turn_end: str = "stop"
    thinking_opener: str = "prompt"
    expand: str = "none"
    trailing: str = "reject"
    append_eos: bool = True
    max_length: int | None = None
    overlong: str = "drop"
    carry: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", _names(self.sources, "sources"))
        object.__setattr__(self, "carry", _names(self.carry, "carry"))
        if not self.sources:
            raise UsageError("no sources: name at least one file, directory or glob")
        _one_of("tokenizer_backend", self.tokenizer_backend, BACKENDS)
        _one_of("overlong", self.overlong, OVERLONG)
        # "no" in a recipe is a text, and a text is true: never for a question like these.
        _yes_or_no("trust_remote_code", self.trust_remote_code)
        _yes_or_no("append_eos", self.append_eos)
        if self.max_length is not None and (
            isinstance(self.max_length, bool)
            or not isinstance(self.max_length, int)
            or self.max_length < 1
        ):
            raise UsageError(f"max_length is {self.max_length!r}; it is a positive integer or None")
        if len(set(self.carry)) != len(self.carry):
            raise UsageError(f"carry names a column twice: {', '.join(self.carry)}")
        self.chat_spec()  # refuses what the chat room cannot do
        for name in (*_CHAT_FIELDS, "carry"):
            value = fingerprint.plain(getattr(self, name), name)
            object.__setattr__(self, name, tuple(value) if name == "carry" else value)

    def chat_spec(self) -> ChatSpec:
        """The fields that shape a row, for the chat room."""
        return ChatSpec(**{name: getattr(self, name) for name in _CHAT_FIELDS})

    def document(self) -> dict[str, Any]:
        """Every field that can change a row's tokens or mask, apart from tokenizer and template.

        Those two are in the tokenizer's identity, by content instead of by name.
        """
        spec = self.chat_spec().document()
        order = fingerprint.own_order(spec["template_kwargs"])
        return {
            "version": RECIPE_VERSION,
            **spec,
            **({} if order is None else {"template_kwargs_order": order}),
            "max_length": self.max_length,
            # Without a limit the policy decides nothing, so it must not make another key.
            "overlong": self.overlong if self.max_length is not None else None,
            "carry": list(self.carry),
        }


@dataclass(frozen=True)
class RunOptions:
    """How it is to be made; part of no key."""

    on_bad_row: str = "reject"
    max_rejected: float | int | str | None = None
    num_workers: int | None = None
    cache_dir: str | os.PathLike[str] | None = None
    force_recache: bool = False
    disable_cache: bool = False
    engine: str = "auto"
    renderer: str = "auto"
    rehash: bool = False

    def __post_init__(self) -> None:
        _one_of("on_bad_row", self.on_bad_row, ON_BAD_ROW)
        _one_of("engine", self.engine, ENGINES)
        _one_of("renderer", self.renderer, RENDERERS)
        object.__setattr__(self, "max_rejected", _count_or_share(self.max_rejected))
        workers = self.num_workers
        if workers is not None and (
            isinstance(workers, bool) or not isinstance(workers, int) or workers < 0
        ):
            raise UsageError(f"num_workers is {workers!r}; it is 0 (inline), a count, or None")
        if not isinstance(self.cache_dir, str | os.PathLike | None):
            raise UsageError(f"cache_dir is {self.cache_dir!r}; it is a path or None")
        for name in ("force_recache", "disable_cache", "rehash"):
            _yes_or_no(name, getattr(self, name))
        if self.disable_cache and self.force_recache:
            raise UsageError("disable_cache and force_recache exclude each other")


def to_travel(recipe: Recipe) -> dict[str, Any]:
    """The recipe without what a worker does not need or what cannot travel."""
    document = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    kwargs = recipe.template_kwargs
    return {
        **document,
        "sources": ["-"],
        "tokenizer": None,
        "chat_template": None,  # it is in the tokenizer's copy
        "template_kwargs": None if kwargs is None else dict(kwargs),
        "carry": list(recipe.carry),
    }


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} is {value!r}; it is one of {', '.join(allowed)}")


def _yes_or_no(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}; it is true or false")


def _count_or_share(value: Any) -> int | float | None:
    """``10`` is a count of rows, ``1%`` (or 0.01) a share of them."""
    share: Any = value
    if isinstance(value, str):
        try:
            share = float(value[:-1]) / 100 if value.endswith("%") else int(value)
        except ValueError:
            share = -1
    if share is None:
        return None
    if isinstance(share, bool) or not isinstance(share, int | float) or not share >= 0:
        raise UsageError(f"max_rejected is {value!r}; it is a count of rows or a share like 1%")
    if isinstance(share, float) and share > 1:
        raise UsageError(f"max_rejected is {value!r}; a share is at most 100%")
    return share


def _names(value: Any, name: str) -> tuple[str, ...]:
    if isinstance(value, str | os.PathLike):
        value = (value,)
    try:
        return tuple(os.fspath(item) for item in value)
    except TypeError as error:
        raise UsageError(f"{name} is {value!r}; it is a path or a list of paths") from error


def load_recipe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read ``recipe.yaml``: a mapping of the names of `Recipe` and `RunOptions`.

    Relative paths in it are relative to the file, so a recipe can travel with its data.
    """
    import yaml

    path = Path(path)
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceMissing("no such recipe", path=path) from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"cannot be read as YAML: {error}", path=path) from error
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise UsageError("a recipe is a mapping of names to values", path=path)
    known = {field.name for field in (*fields(Recipe), *fields(RunOptions))} | {"executor"}
    unknown = sorted(set(document) - known)
    if unknown:
        raise UsageError(
            f"unknown names: {', '.join(unknown)}; known are {', '.join(sorted(known))}", path=path
        )
    for name in ("sources", "tokenizer", "chat_template", "cache_dir"):
        if name in document:
            document[name] = _relative_to(path.parent, document[name])
    if not isinstance(document.get("executor", ""), str):
        raise UsageError(f"executor is {document['executor']!r}; it is a name", path=path)
    if not isinstance(document.get("date"), str | None):
        document["date"] = str(document["date"])  # YAML reads an unquoted date as one
    return document


def _relative_to(directory: Path, value: Any) -> Any:
    """Paths as seen from the recipe; what does not exist there (hub ids, URLs) stays as it is."""
    if isinstance(value, list):
        return [_relative_to(directory, item) for item in value]
    if not isinstance(value, str) or "\n" in value or "://" in value or os.path.isabs(value):
        return value
    if _IN_HUB.match(value):
        return value
    bare = value.partition("@")[0]
    candidate = directory / bare
    if candidate.exists() or any(mark in bare for mark in "*?["):
        return str(directory / value)
    return value
