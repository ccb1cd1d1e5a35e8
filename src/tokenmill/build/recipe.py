"""The options of a build: a `Recipe`, whose document is in every key, and `RunOptions`.

They declare the arguments of `tokenmill.prepare`, where their help is, the flags of
``tokenmill prepare`` and the names in a ``recipe.yaml``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import asdict, force_setattr

from tokenmill._core import fingerprint
from tokenmill._core.options import Count, Options, declared, refuse_unknown
from tokenmill.chat import ChatSpec
from tokenmill.errors import SourceMissing, UsageError

RECIPE_VERSION = 1  # part of every key; raised when the same fields give other rows
RECIPE_ENDINGS = (".yaml", ".yml")

_IN_HUB = re.compile(r"^[^/\s]+/[^/:\s]+:")  # owner/name:split


class _ByName(ChatSpec, frozen=True, kw_only=True):
    tokenizer_backend: Literal["auto", "transformers", "file"] = "auto"
    processor: Any = None
    trust_remote_code: bool = False
    chat_template: Any = None
    max_length: Count | None = None
    overlong: Literal["drop", "truncate"] = "drop"
    carry: tuple[str, ...] = ()


class Recipe(_ByName, frozen=True):
    """What is to be made: everything that can change a row's tokens or mask.

    Takes the arguments of `tokenmill.prepare` from ``sources`` to ``carry``; all but ``sources``
    and ``tokenizer`` by name.
    """

    sources: tuple[str, ...]
    tokenizer: Any = None

    def __post_init__(self) -> None:
        force_setattr(self, "sources", _texts("sources", self.sources, "a path", "paths"))
        force_setattr(self, "carry", _texts("carry", self.carry, "a column", "columns"))
        if not self.sources:
            raise UsageError(NO_SOURCES)
        super().__post_init__()
        if len(set(self.carry)) != len(self.carry):
            raise UsageError(("carry",), f" names a column twice: {', '.join(self.carry)}")
        for name in (*ChatSpec.__struct_fields__, "carry"):
            value = fingerprint.plain(getattr(self, name), name)
            force_setattr(self, name, tuple(value) if name == "carry" else value)

    def chat_spec(self) -> ChatSpec:
        return ChatSpec(**{name: getattr(self, name) for name in ChatSpec.__struct_fields__})

    def document(self) -> dict[str, Any]:
        """Return the fields for a key, without tokenizer, template and processor.

        Those are in the key by content, not by name.
        """
        spec = super().document()
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


class RunOptions(Options, frozen=True, kw_only=True):
    """How it is to be made; part of no key."""

    on_bad_row: Literal["reject", "raise"] = "reject"
    max_rejected: Annotated[
        float | int | str | None, Meta(title="a count of rows or a share like 1%")
    ] = None
    num_workers: Annotated[int, Meta(ge=0, title="0 (inline) or a count")] | None = None
    cache_dir: str | os.PathLike[str] | None = None
    force_recache: bool = False
    disable_cache: bool = False
    executor: Annotated[Any, Meta(examples=["local", "inline", "ray"])] = "local"
    engine: Literal["auto", "fastokens", "hf"] = "auto"
    renderer: Literal["auto", "jinja2"] = "auto"
    rehash: bool = False
    media_root: str | os.PathLike[str] | None = None
    media_urls: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "max_rejected", _count_or_share(self.max_rejected))
        if self.disable_cache and self.force_recache:
            raise UsageError(("disable_cache",), " and ", ("force_recache",), " exclude each other")


NO_SOURCES = "no sources: name at least one file, directory or glob"


def to_travel(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe for a worker, without what it does not need or what has no encoding."""
    return {
        **asdict(recipe),
        "sources": ["-"],
        "tokenizer": None,
        "processor": None,
        "chat_template": None,  # it is in the tokenizer's copy
        "carry": list(recipe.carry),
    }


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
        raise UsageError(
            ("max_rejected",), f" is {value!r}; it is a count of rows or a share like 1%"
        )
    if isinstance(share, float) and share > 1:
        raise UsageError(("max_rejected",), f" is {value!r}; a share is at most 100%")
    return share


def _texts(name: str, value: Any, one: str, many: str) -> tuple[str, ...]:
    if isinstance(value, str | os.PathLike):
        value = (value,)
    try:
        return tuple(os.fspath(item) for item in value)
    except TypeError as error:
        raise UsageError((name,), f" is {value!r}; it is {one} or a list of {many}") from error


def is_recipe_file(sources: Any) -> bool:
    return isinstance(sources, str | os.PathLike) and os.fspath(sources).endswith(RECIPE_ENDINGS)


def load_recipe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a ``recipe.yaml``; relative paths in it are relative to the file."""
    path = Path(path)
    document = read_yaml(path)
    refuse_unknown(document, [*declared(Recipe), *declared(RunOptions)], "names", path=path)
    for name in ("sources", "tokenizer", "processor", "chat_template", "cache_dir", "media_root"):
        if name in document:
            document[name] = _relative_to(path.parent, document[name])
    if not isinstance(document.get("executor", ""), str):
        raise UsageError(f"executor is {document['executor']!r}; it is a name", path=path)
    if not isinstance(document.get("date"), str | None):
        document["date"] = str(document["date"])  # YAML reads an unquoted date as one
    return document


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceMissing("no such recipe", path=path) from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"cannot be read as YAML: {error}", path=path) from error
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise UsageError("a recipe is a mapping of names to values", path=path)
    return document


def _relative_to(directory: Path, value: Any) -> Any:
    """Return paths as seen from the recipe; what is not there (hub ids, URLs) is unchanged."""
    if isinstance(value, list):
        return [_relative_to(directory, item) for item in value]
    if not isinstance(value, str) or "\n" in value or "://" in value or os.path.isabs(value):
        return value
    if _IN_HUB.match(value):
        return value
    bare = value.partition("@")[0]
    if (directory / bare).exists() or any(mark in bare for mark in "*?["):
        return str(directory / value)
    return value
