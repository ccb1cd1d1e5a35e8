"""The options of a build: a `Recipe`, which is part of every key, and `RunOptions`.

They declare the arguments of `tokenmill.prepare` (whose docstring has the help), the flags of
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
from tokenmill._core.options import Count, Options, Variables, check_names, declared
from tokenmill.chat import ChatSpec
from tokenmill.errors import SourceMissing, UsageError

RECIPE_VERSION = 1  # part of every key; incremented when the same fields give other rows
RECIPE_ENDINGS = (".yaml", ".yml")

_IN_HUB = re.compile(r"^[^/\s]+/[^/:\s]+:")  # owner/name:split


class _ByName(ChatSpec, frozen=True, kw_only=True):
    tokenizer_backend: Literal["auto", "transformers", "file"] = "auto"
    processor: Any = None
    trust_remote_code: bool = False
    chat_template: Any = None
    encoder: Any = None
    encoder_kwargs: Variables | None = None
    max_length: Count | None = None
    overlong: Literal["drop", "truncate"] = "drop"
    keep_columns: tuple[str, ...] = ()


class Recipe(_ByName, frozen=True):
    """All options that can change the tokens or mask of a row.

    Takes these arguments of `tokenmill.prepare`; all but ``sources`` and ``tokenizer`` by name.
    """

    sources: tuple[str, ...]
    tokenizer: Any = None

    def __post_init__(self) -> None:
        force_setattr(self, "sources", _texts("sources", self.sources, "a path", "paths"))
        force_setattr(
            self, "keep_columns", _texts("keep_columns", self.keep_columns, "a column", "columns")
        )
        if not self.sources:
            raise UsageError(NO_SOURCES)
        super().__post_init__()
        if len(set(self.keep_columns)) != len(self.keep_columns):
            raise UsageError(
                ("keep_columns",), f" contains a column twice: {', '.join(self.keep_columns)}"
            )
        for name in (*ChatSpec.__struct_fields__, "keep_columns"):
            value = fingerprint.plain(getattr(self, name), name)
            force_setattr(self, name, tuple(value) if name == "keep_columns" else value)

    def chat_spec(self) -> ChatSpec:
        return ChatSpec(**{name: getattr(self, name) for name in ChatSpec.__struct_fields__})

    def document(self) -> dict[str, Any]:
        """Return the fields for a key, without tokenizer, template, encoder and processor.

        Their content is in the key instead.
        """
        spec = super().document()
        order = fingerprint.own_order(spec["chat_template_kwargs"])
        return {
            "version": RECIPE_VERSION,
            **spec,
            **({} if order is None else {"chat_template_kwargs_order": order}),
            "max_length": self.max_length,
            # Without a limit, the policy must not change the key.
            "overlong": self.overlong if self.max_length is not None else None,
            "keep_columns": list(self.keep_columns),
        }


class RunOptions(Options, frozen=True, kw_only=True):
    """Options that do not change the rows; part of no key."""

    media_root: str | os.PathLike[str] | None = None
    media_urls: bool = False
    max_rejected: Annotated[
        float | int | str | None, Meta(title="a number of rows or a share like 1%")
    ] = None
    num_workers: Annotated[int, Meta(ge=0, title="0 (inline) or a count")] | None = None
    executor: Annotated[Any, Meta(examples=["local", "inline", "ray"])] = "local"
    cache_dir: str | os.PathLike[str] | None = None
    force_recache: bool = False
    disable_cache: bool = False
    reference: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        force_setattr(self, "max_rejected", _count_or_share(self.max_rejected))
        if self.disable_cache and self.force_recache:
            raise UsageError(("disable_cache",), " and ", ("force_recache",), " cannot be combined")
        if self.name is not None:
            from tokenmill.store.named import check_name  # imports numpy

            check_name(self.name)
            if self.disable_cache:
                raise UsageError(
                    ("name",), " names a store of the cache; remove ", ("disable_cache",)
                )


NO_SOURCES = "no sources: pass at least one file, directory or glob, and a tokenizer"


def serialize(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe for a worker, without fields that it does not need."""
    return {
        **asdict(recipe),
        "sources": ["-"],
        "tokenizer": None,
        "processor": None,
        "chat_template": None,  # part of the tokenizer's copy
        "encoder": None,  # part of the tokenizer's fingerprint
        "encoder_kwargs": None,
        "keep_columns": list(recipe.keep_columns),
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
            ("max_rejected",), f" must be a number of rows or a share like 1%, got {value!r}"
        )
    if isinstance(share, float) and share > 1:
        raise UsageError(("max_rejected",), f" must be at most 100%, got {value!r}")
    return share


def _texts(name: str, value: Any, one: str, many: str) -> tuple[str, ...]:
    if isinstance(value, str | os.PathLike):
        value = (value,)
    try:
        return tuple(os.fspath(item) for item in value)
    except TypeError as error:
        raise UsageError((name,), f" must be {one} or a list of {many}, got {value!r}") from error


def is_recipe_file(sources: Any) -> bool:
    return isinstance(sources, str | os.PathLike) and os.fspath(sources).endswith(RECIPE_ENDINGS)


def load_recipe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a ``recipe.yaml``; relative paths in it are relative to the file."""
    path = Path(path)
    document = read_yaml(path)
    check_names(document, [*declared(Recipe), *declared(RunOptions)], "names", path=path)
    for name in ("sources", "tokenizer", "processor", "chat_template", "cache_dir", "media_root"):
        if name in document:
            document[name] = _relative_to(path.parent, document[name])
    encoder = document.get("encoder")
    if isinstance(encoder, str) and ":" in encoder:
        file, _, name = encoder.rpartition(":")
        document["encoder"] = f"{_relative_to(path.parent, file)}:{name}"
    if not isinstance(document.get("executor", ""), str):
        raise UsageError(f"executor must be a name, got {document['executor']!r}", path=path)
    if not isinstance(document.get("date"), str | None):
        document["date"] = str(document["date"])  # YAML parses an unquoted date
    return document


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SourceMissing("this recipe does not exist", path=path) from error
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UsageError(f"this recipe is not valid YAML: {error}", path=path) from error
    if not isinstance(document, dict) or not all(isinstance(name, str) for name in document):
        raise UsageError("a recipe must be a mapping of names to values", path=path)
    return document


def _relative_to(directory: Path, value: Any) -> Any:
    """Resolve paths relative to the recipe; hub ids, URLs and missing paths stay unchanged."""
    if isinstance(value, list):
        return [_relative_to(directory, item) for item in value]
    if not isinstance(value, str) or "\n" in value or "://" in value or os.path.isabs(value):
        return value
    if _IN_HUB.match(value):
        return value
    location = value.partition("@")[0]
    if (directory / location).exists() or any(mark in location for mark in "*?["):
        return str(directory / value)
    return value
