"""The recipe: the frozen description of a preparation.

A `Recipe` says what is to be made: which sources, which tokenizer, how rows are read, rendered,
trained and cut. Every field that can change the output is in its *document*, and so in every key;
nothing else is. `RunOptions` say how it is to be made (workers, cache, engines, what to do about
rejected rows): they are part of no key and never change a byte.

Together they declare the arguments of `tokenmill.prepare` and the flags of ``tokenmill prepare``
(see `tokenmill._core.options`). ``recipe.yaml`` holds the same names; unknown ones are refused.
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

RECIPE_VERSION = 1
"""Raised when rows would come out differently for the same fields: part of every key."""

RECIPE_ENDINGS = (".yaml", ".yml")

_IN_HUB = re.compile(r"^[^/\s]+/[^/:\s]+:")  # owner/name:split


class _ByName(ChatSpec, frozen=True, kw_only=True):
    """The options of a recipe that are given by name.

    Args:
        tokenizer_backend: Who reads the tokenizer; ``auto`` refuses where AutoTokenizer and
            ``tokenizer.json`` would encode differently, or where that cannot be found out.
        processor: For rows with pictures: directory or hub id of the model's processor.
        trust_remote_code: Allow a tokenizer or processor to bring code of its own.
        chat_template: Jinja source, or a file that holds it; when not given, the tokenizer's own.
        max_length: Most tokens of a row.
        overlong: What happens to longer rows.
        carry: Columns of the row to keep beside the tokens.
    """

    tokenizer_backend: Literal["auto", "transformers", "file"] = "auto"
    processor: Any = None
    trust_remote_code: bool = False
    chat_template: Any = None
    max_length: Count | None = None
    overlong: Literal["drop", "truncate"] = "drop"
    carry: tuple[str, ...] = ()


class Recipe(_ByName, frozen=True):
    """What is to be made; the arguments of `ChatSpec` belong to it.

    Args:
        sources: Files, directories, globs, each with an optional ``@[a:b]``.
        tokenizer: Directory, ``tokenizer.json`` or hub id; when not given, the processor's.
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
        """The fields that shape a row, alone."""
        return ChatSpec(**{name: getattr(self, name) for name in ChatSpec.__struct_fields__})

    def document(self) -> dict[str, Any]:
        """Every field that can change a row's tokens or mask, apart from tokenizer and template.

        Those two are in the tokenizer's identity, by content instead of by name, and the processor
        is in a document of its own.
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
    """How it is to be made; part of no key.

    Args:
        on_bad_row: Count a bad row as rejected, or make the first one an error.
        max_rejected: Most rows that may be rejected, as a count or a share like ``1%``; more is an
            error.
        num_workers: Worker processes; 0 runs inline. When not given, one for each core, or none
            where only a few MB are to be made.
        cache_dir: Directory of the cache; when not given, ``$TOKENMILL_CACHE_DIR``, else
            ``$XDG_CACHE_HOME/tokenmill``, else ``~/.cache/tokenmill``.
        force_recache: Build again and compare with what is there.
        disable_cache: Build into a private directory that lives as long as the returned store.
        executor: Where the work runs.
        engine: Which library encodes; never changes the result.
        renderer: What renders chat templates; ``jinja2`` is the reference. Never changes the
            result.
        rehash: Read source files and pictures again even where they seem unchanged.
        media_root: Directory that the rows' paths of pictures start from and may not leave; when
            not given, that of each source file.
        media_urls: Fetch pictures whose rows give an address.
    """

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
    """The recipe without what a worker does not need or what cannot travel."""
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
    """Return whether sources are the path of a ``recipe.yaml``."""
    return isinstance(sources, str | os.PathLike) and os.fspath(sources).endswith(RECIPE_ENDINGS)


def load_recipe_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read ``recipe.yaml``: a mapping of the names of `Recipe` and `RunOptions`.

    Relative paths in it are relative to the file, so a recipe can travel with its data.
    """
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
    """A mapping of names to values that stands in a file."""
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
