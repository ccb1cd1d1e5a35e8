"""Declare commands and their flags.

The parameters of a command's function become arguments, the keyword-only ones flags. Their help is
under "Args" of the docstring. The parameter ``flags`` gets the declared options
(`tokenmill._core.options`) that are on the command line, so that a ``recipe.yaml`` gives the rest.
"""

from __future__ import annotations

import copy
import enum
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Optional, get_args, get_origin, get_type_hints

import msgspec
import typer

from tokenmill._core.options import HELP, Option, declared
from tokenmill.build.calls import prepare
from tokenmill.build.recipe import Recipe, RunOptions
from tokenmill.chat.spec import ROLES
from tokenmill.cli.help import Command
from tokenmill.errors import UsageError

Flags = dict[str, Any]

# Help that differs from the docstring of `prepare`, which describes Python objects and values.
HELP_OF_FLAGS = {
    "sources": "Files, directories, globs, URLs or hub ids, each with an optional @[a:b]. "
    "Or one recipe.yaml; flags override it.",
    "tokenizer": "Directory, tokenizer.json or hub id. Default: the tokenizer of --processor.",
    "format": "Format of the rows. auto detects all but tokens and rollouts.",
    "columns": f"Column of a role: {', '.join(ROLES)}. ROLE= ignores a column. Repeatable.",
    "keep_columns": "Column to keep with the tokens. Repeatable.",
    "processor": "Directory or hub id of the model's processor, for rows with images.",
    "max_rejected": "Fail if more rows are rejected: a number, or a share like 1%. "
    "0 fails on the first rejected row.",
    "disable_cache": "Leave nothing in the cache; needs --out.",
    "executor": "Where workers run.",
}
RECIPE_OPTIONS, RUN_OPTIONS = (
    {
        name: option._replace(help=HELP_OF_FLAGS.get(name, option.help))
        for name, option in declared(struct, prepare).items()
    }
    for struct in (Recipe, RunOptions)
)

# Options that several commands share.
TOKENIZER = (
    RECIPE_OPTIONS["tokenizer"]._replace(help="Directory, tokenizer.json or hub id."),
    RECIPE_OPTIONS["tokenizer_backend"],
    RECIPE_OPTIONS["trust_remote_code"],
)
RECIPE = (
    *RECIPE_OPTIONS.values(),
    Option("config", str, None, (), "A recipe.yaml; other flags override it."),
)
CACHE = (RUN_OPTIONS["cache_dir"],)
WHERE = (RUN_OPTIONS["num_workers"], RUN_OPTIONS["executor"], *CACHE)
MEDIA = (RUN_OPTIONS["media_root"], RUN_OPTIONS["media_urls"])
REFERENCE = (RUN_OPTIONS["reference"],)

METAVARS = {
    "also": "COLUMN", "cache_dir": "DIR", "chat_template": "FILE", "columns": "ROLE=COLUMN",
    "compare": "STORE", "config": "FILE", "date": "DATE", "encoder": "FILE:NAME", "files": "DIR",
    "html": "FILE", "name": "NAME",
    "ignore": "RULE", "keep_columns": "COLUMN", "length": "TOKENS", "max_length": "TOKENS",
    "max_rejected": "N|SHARE", "media_root": "DIR", "mix": "RECIPE", "only": "RULE",
    "origin": "FILE:LINE", "out": "PATH", "pack": "LENGTH", "part": "I/N", "processor": "MODEL",
    "producer": "TEXT", "rejected": "FILE", "sources": "SRC", "split": "NAME=SHARE", "store": "KEY",
    "tokenizer": "MODEL", "values": "NAME",
}  # fmt: skip
MAX_METAVAR = 14  # characters of choices beside a flag; more of them go into the help

Sources = Annotated[
    list[str], typer.Argument(metavar="SRC", help="Files, directories, globs; path@[a:b].")
]
StorePath = Annotated[
    str, typer.Argument(metavar="STORE", help="Path, name or key of a store, or @last.")
]
OutDirectory = Annotated[
    str | None, typer.Option(metavar="DIR", help="Also write a self-contained copy here.")
]
EmbedMedia = Annotated[
    bool,
    typer.Option("--embed-media", help="Include the images of rows in the copy."),
]
PackMethod = Annotated[
    Literal["best_fit", "first_fit", "sequential", "balanced"],
    typer.Option(help="How rows are assigned to packs."),
]
PackWindow = Annotated[int, typer.Option(help="Number of rows packed at a time.")]
PackOversize = Annotated[
    Literal["error", "drop", "truncate", "split"],
    typer.Option(help="What to do with rows longer than a pack."),
]


def command(
    group: typer.Typer, *options: Option, name: str | None = None, cls: type[Command] = Command
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command of a group; the function gets ``options`` as the argument ``flags``."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        about = inspect.cleandoc(function.__doc__ or "")
        hints = {
            name: _without_optional(hint)
            for name, hint in get_type_hints(function, include_extras=True).items()
        }
        help_of = dict(HELP.findall(about))
        own = [
            _parameter(
                one.name,
                _for_typer(_with_help(one, hints[one.name], help_of.get(one.name, "")), one.name),
                one.default,
            )
            for one in inspect.signature(function).parameters.values()
            if one.name not in ("output", "flags")
        ]
        as_json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
        parameters = [
            _parameter("context", typer.Context),
            *own,
            *map(_flag, options),
            _parameter("as_json", as_json, False),
        ]

        def run(*, context: typer.Context, as_json: bool, **values: Any) -> None:
            values = {
                name: value.value if isinstance(value, enum.Enum) else value
                for name, value in values.items()
            }
            flags = {}
            for option in options:
                value = values.pop(option.name)
                # Old versions of click report an argument that is left out as given, with None.
                if value is not None and _is_on_command_line(context, option.name):
                    flags[option.name] = _parse(option, value)
            function(context.obj, **({"flags": flags} if options else {}), **values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__name__, run.__doc__ = function.__name__, about.partition("\n\nArgs:")[0]
        group.command(name, cls=cls)(run)
        return function

    return declare


def _without_optional(hint: Any) -> Any:
    """Undo what Python 3.10 does to the hint of a parameter with the default None."""
    return next((part for part in get_args(hint) if get_origin(part) is Annotated), hint)


def recipe_arguments(flags: Flags) -> dict[str, Any]:
    """Return the arguments of `tokenmill.build.calls.run_recipe` for flags of `RECIPE`."""
    from tokenmill.build.recipe import load_recipe_file

    arguments = {"sources": None, **flags}
    config = arguments.pop("config", None)
    if config is not None:
        return arguments | load_recipe_file(config) | {n: flags[n] for n in flags if n != "config"}
    if len(flags.get("sources", ())) == 1:
        arguments["sources"] = flags["sources"][0]  # a single source may be a recipe.yaml
    return arguments


def _parameter(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _with_help(parameter: inspect.Parameter, hint: Any, text: str) -> Any:
    is_flag = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    info: Any = typer.Option() if is_flag else typer.Argument()
    if get_origin(hint) is Annotated:
        hint, shared = get_args(hint)
        info, text = copy.copy(shared), shared.help
    info.help, metavar = _help_and_metavar(parameter.name, text, hint)
    info.metavar = info.metavar or metavar or (None if is_flag else parameter.name.upper())
    return Annotated[hint, info]


def _flag(option: Option) -> inspect.Parameter:
    default = None if option.default in (msgspec.NODEFAULT, ()) else option.default
    kind = Literal[option.choices] if option.choices else option.type
    text, metavar = _help_and_metavar(option.name, option.help, kind)
    if get_origin(kind) is tuple or option.name == "columns":
        kind = list[str]
    elif get_origin(kind) is Mapping:
        kind, metavar = str, "JSON"
    elif kind is Any:
        kind = str
    declaration = typer.Argument if option.name == "sources" else typer.Option
    kind = _for_typer(kind if default is not None else kind | None, option.name)
    names = ("--column",) if option.name == "columns" else ()
    described = declaration(*names, help=text, metavar=metavar)
    return _parameter(option.name, Annotated[kind, described], default)


def _help_and_metavar(name: str, text: str, hint: Any) -> tuple[str, str | None]:
    # Rich reads square brackets as markup.
    text = " ".join(text.split()).replace("``", "").replace("[", r"\[")
    choices = _choices(hint)
    if len("|".join(choices)) > MAX_METAVAR:
        return f"{text} One of {', '.join(choices)}.", "NAME"
    return text, METAVARS.get(name, "N" if int in (hint, *get_args(hint)) else None)


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the choices of a ``Literal`` or of an optional one."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    return next((found for part in get_args(hint) if (found := _choices(part))), ())


def _for_typer(hint: Any, name: str) -> Any:
    """Return a type that old versions of typer accept: enumerations and ``Optional``."""
    if get_origin(hint) is Literal:
        return enum.Enum(name, {choice: choice for choice in get_args(hint)})
    if get_origin(hint) is Annotated:
        kind, *metadata = get_args(hint)
        return Annotated[(_for_typer(kind, name), *metadata)]
    if type(None) in get_args(hint):
        [kind] = (part for part in get_args(hint) if part is not type(None))
        return Optional[_for_typer(kind, name)]  # noqa: UP045 - not the same at run time
    return hint


def _is_on_command_line(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _parse_columns(values: list[str]) -> dict[str, str | None]:
    columns: dict[str, str | None] = {}
    for value in values:
        role, equals, column = value.partition("=")
        if not equals or role in columns:
            raise UsageError(
                ("columns",), f" must be ROLE=COLUMN, each role once, got {', '.join(values)}"
            )
        columns[role] = column or None
    return columns


def _parse(option: Option, value: Any) -> Any:
    if get_origin(option.type) is not Mapping:
        return value
    if option.name == "columns":
        return _parse_columns(value)
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise UsageError((option.name,), f" must be valid JSON, got {value!r}: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError((option.name,), f" must be a JSON object, got {value!r}")
    return parsed
