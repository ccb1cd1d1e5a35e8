"""Options, declared once: name, type, default, choices and help.

An option is a field of an `Options` struct. Its type says what is allowed: ``Literal`` for a
choice, ``Meta(ge=1)`` for a bound, with ``Meta(title=…)`` for how a message calls it. Its help is
its entry under "Args" of a docstring: `tokenmill.prepare`'s, or the struct's own.
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
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from tokenmill.errors import UsageError

Column = Annotated[str, Meta(min_length=1, title="the name of a column")]
Count = Annotated[int, Meta(ge=1, title="a positive whole number")]
Variables = Annotated[Mapping[str, Any], Meta(title="a mapping of names to values")]

HELP = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)  # under "Args:"
_CALLED = {bool: "true or false", str: "a text", int: "a whole number"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options that belong together; a wrong value is a `UsageError` that says what is allowed."""

    def __post_init__(self) -> None:
        for name, hint in _hints(type(self)).items():
            value, kind = getattr(self, name), _with_paths_as_texts(hint)
            is_path = kind != hint and isinstance(value, os.PathLike)
            try:
                msgspec.convert(os.fspath(value) if is_path else value, kind)
            except (msgspec.ValidationError, UnicodeError) as error:
                raise UsageError((name,), f" is {value!r}; it is {_allowed(hint)}") from error

    def __hash__(self) -> int:
        values = (getattr(self, name) for name in self.__struct_fields__)
        return hash(tuple(frozenset(v) if isinstance(v, dict) else v for v in values))


class Option(NamedTuple):
    name: str
    type: Any  # without None and without constraints; of several kinds, text
    default: Any  # `msgspec.NODEFAULT` where there is none
    choices: tuple[str, ...]  # allowed, or known by name; empty where any value may be
    help: str


@functools.cache
def declared(struct: type[Options], documented: Any = None) -> dict[str, Option]:
    """The options of a struct by name, with their help from its docstring or another object's."""
    bare = get_type_hints(struct)
    told = dict(HELP.findall(inspect.cleandoc((documented or struct).__doc__ or "")))
    found = {}
    for field in msgspec.structs.fields(struct):
        kinds = [part for part in _parts(bare[field.name]) if part is not types.NoneType]
        kind = str if str in kinds else kinds[0]
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        for note in get_args(_hints(struct)[field.name]) if kind is Any else ():
            choices = tuple(note.examples or ()) if isinstance(note, Meta) else choices
        text = " ".join(told.get(field.name, "").split())
        found[field.name] = Option(field.name, kind, field.default, choices, text)
    return found


def refuse_unknown(names: Iterable[str], known: Collection[str], what: str, **place: Any) -> None:
    """Raise a `UsageError` for names that are no options, with the likeliest that was meant.

    ``what`` says how the message calls the names; ``place`` are further arguments of the error.
    """
    said = []
    for name in sorted(set(names) - set(known)):
        meant = difflib.get_close_matches(name, known, 1)
        said.append(f"{name} (did you mean {meant[0]}?)" if meant else name)
    if said:
        raise UsageError(
            f"unknown {what}: {', '.join(said)}; known are {', '.join(sorted(known))}", **place
        )


@functools.cache
def _hints(struct: type[Options]) -> dict[str, Any]:
    return get_type_hints(struct, include_extras=True)


def _parts(hint: Any) -> tuple[Any, ...]:
    """The members of a union; of any other type, itself."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


@functools.cache
def _with_paths_as_texts(hint: Any) -> Any:
    """A type as msgspec can check it: it knows no path objects, so a path is its text."""
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        return Annotated[(_with_paths_as_texts(kind), *notes)]
    kinds = [str if get_origin(part) is os.PathLike else part for part in _parts(hint)]
    return functools.reduce(operator.or_, kinds)


def _allowed(hint: Any) -> str:
    """What may be given, in words."""
    kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    for note in notes:
        if note.title:
            return str(note.title)
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) is os.PathLike:
        return "a path"
    if len(_parts(kind)) == 1:
        return _CALLED.get(kind, str(kind))
    return " or ".join(_allowed(part) for part in _parts(kind) if part is not types.NoneType)
