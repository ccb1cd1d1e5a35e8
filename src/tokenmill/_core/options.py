"""Options, declared once: name, type, default, choices and help.

An option is a field of an `Options` struct. Its type restricts the values: ``Literal`` lists
choices, ``Meta(ge=1)`` sets a bound, and ``Meta(title=…)`` describes them in error messages. Its
help is its entry under "Args" in the docstring of `tokenmill.prepare` or of the struct.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import os
import re
import types
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tokenmill.errors import UsageError

Column = Annotated[str, Meta(min_length=1, title="the name of a column")]
Count = Annotated[int, Meta(ge=1, title="a positive integer")]
Variables = Annotated[Mapping[str, Any], Meta(title="a mapping of names to values")]

MIN_WEIGHT, MAX_WEIGHT = 2.0**-100, 2.0**100  # must neither underflow nor overflow in float32

HELP = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)  # under "Args:"
_TYPE_NAMES = {bool: "true or false", str: "a string", int: "an integer"}


class Options(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A group of options. A wrong value raises `UsageError` with the allowed values."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            value = getattr(self, name)
            if isinstance(value, Integral) and not isinstance(value, int):  # a numpy integer
                msgspec.structs.force_setattr(self, name, int(value))
            value, kind = getattr(self, name), _with_paths_as_texts(hint)
            is_path = kind != hint and isinstance(value, os.PathLike)
            try:
                msgspec.convert(os.fspath(value) if is_path else value, kind)
            except (msgspec.ValidationError, UnicodeError, TypeError, AttributeError) as error:
                raise UsageError((name,), f" must be {_allowed(hint)}, got {value!r}") from error

    def __hash__(self) -> int:
        values = (getattr(self, name) for name in self.__struct_fields__)
        return hash(tuple(frozenset(v) if isinstance(v, dict) else v for v in values))


class Option(NamedTuple):
    name: str
    type: Any  # without None and without constraints; of several kinds, text
    default: Any  # `msgspec.NODEFAULT` where there is none
    choices: tuple[str, ...]  # allowed values, or examples; empty if there are none
    help: str


@functools.cache
def declared(struct: type[Options], documented: Any = None) -> dict[str, Option]:
    """Return the options of a struct by name, with the help of its or another docstring."""
    hints = get_type_hints(struct)
    help_texts = dict(HELP.findall(inspect.cleandoc((documented or struct).__doc__ or "")))
    options = {}
    for field in msgspec.structs.fields(struct):
        kinds = [part for part in _parts(hints[field.name]) if part is not types.NoneType]
        kind = str if str in kinds else kinds[0]
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        for meta in get_args(_hints(struct)[field.name]) if kind is Any else ():
            choices = tuple(meta.examples or ()) if isinstance(meta, Meta) else choices
        text = " ".join(help_texts.get(field.name, "").split())
        options[field.name] = Option(field.name, kind, field.default, choices, text)
    return options


def check_names(
    names: Iterable[str], known: Collection[str], *what: str | tuple[str], **location: Any
) -> None:
    """Raise `UsageError` for names that are not in ``known``, with suggestions.

    ``what`` are parts of the message; ``location`` are further arguments of the error.
    """
    unknown = []
    for name in sorted(set(names) - set(known)):
        similar = difflib.get_close_matches(name, known, 1)
        unknown.append(f"{name} (did you mean {similar[0]}?)" if similar else name)
    if unknown:
        raise UsageError(
            "unknown ",
            *what,
            f": {', '.join(unknown)}; known are {', '.join(sorted(known))}",
            **location,
        )


@functools.cache
def _hints(struct: type[Options]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _parts(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union; for any other type, the type alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


@functools.cache
def _with_paths_as_texts(hint: Any) -> Any:
    """Replace path objects by strings, because msgspec cannot check path objects."""
    if get_origin(hint) is Annotated:
        kind, *metas = get_args(hint)
        return Annotated[(_with_paths_as_texts(kind), *metas)]
    kinds = [str if get_origin(part) is os.PathLike else part for part in _parts(hint)]
    return functools.reduce(operator.or_, kinds)


def _allowed(hint: Any) -> str:
    """Describe the allowed values in words."""
    kind, *metas = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    for meta in metas:
        if meta.title:
            return str(meta.title)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is os.PathLike:
        return "a path"
    if len(_parts(kind)) == 1:
        return _TYPE_NAMES.get(kind, str(kind))
    return " or ".join(_allowed(part) for part in _parts(kind) if part is not types.NoneType)
