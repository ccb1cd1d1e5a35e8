"""Commands and their flags.

The parameters of a command's function are its arguments, the keyword-only ones its flags; help
stands under "Args" of the docstring. ``output: Output`` gets the command's words; ``given`` the
declared options (`tokenmill._core.options`) that are on the command line: others keep their
defaults, or what a ``recipe.yaml`` says. A ``Literal`` is a choice, for help and completion.
"""

from __future__ import annotations

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
from tokenmill.chat import ChatSpec
from tokenmill.errors import UsageError

Given = dict[str, Any]

RECIPE_OPTIONS, RUN_OPTIONS = declared(Recipe, prepare), declared(RunOptions, prepare)

# Declared options that several commands take together.
TOKENIZER = tuple(
    RECIPE_OPTIONS[name] for name in ("tokenizer", "tokenizer_backend", "trust_remote_code")
)
RECIPE = tuple(
    {
        "sources": RECIPE_OPTIONS["sources"],
        "config": Option("config", str, None, (), "A recipe.yaml; other flags override it."),
        **{option.name: option for option in TOKENIZER},
        **declared(ChatSpec),
        **RECIPE_OPTIONS,
    }.values()
)
CACHE = (RUN_OPTIONS["cache_dir"],)
WHERE = (RUN_OPTIONS["num_workers"], RUN_OPTIONS["executor"], *CACHE)
MEDIA = (RUN_OPTIONS["media_root"], RUN_OPTIONS["media_urls"])
ENGINES = (RUN_OPTIONS["engine"], RUN_OPTIONS["renderer"])

METAVARS = {
    "also": "COLUMN", "cache_dir": "DIR", "carry": "COLUMN", "compare": "OTHER", "config": "FILE",
    "html": "FILE", "ignore": "RULE", "mix": "RECIPE", "only": "RULE", "origin": "FILE:LINE",
    "out": "PATH", "pack": "LENGTH", "part": "I/N", "sources": "SRC", "split": "NAME=SHARE",
    "store": "KEY", "values": "NAME",
}  # fmt: skip

Sources = Annotated[
    list[str], typer.Argument(metavar="SRC", help="Files, directories, globs; path@[a:b].")
]
StorePath = Annotated[
    str, typer.Argument(metavar="STORE", help="What `tokenmill prepare` printed, or an --out DIR.")
]
OutDirectory = Annotated[
    str | None, typer.Option(metavar="DIR", help="Also make a self-contained copy here.")
]
EmbedMedia = Annotated[
    bool,
    typer.Option("--embed-media", help="Bring the pictures of rows along in the copy, each once."),
]
PackMethod = Annotated[
    Literal["best_fit", "first_fit", "sequential", "balanced"],
    typer.Option(help="How rows are chosen for a pack."),
]
PackWindow = Annotated[int, typer.Option(help="Rows of the order packed together.")]
PackOversize = Annotated[
    Literal["error", "drop", "truncate", "split"],
    typer.Option(help="What happens to rows longer than a pack."),
]


def command(
    group: typer.Typer, *options: Option, name: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare a command of a group; the function gets ``options`` as ``given``."""

    def declare(function: Callable[..., None]) -> Callable[..., None]:
        about = inspect.cleandoc(function.__doc__ or "")
        hints, told = get_type_hints(function, include_extras=True), dict(HELP.findall(about))
        own = [
            _parameter(
                one.name,
                _for_typer(_with_help(one, hints[one.name], told.get(one.name, "")), one.name),
                one.default,
            )
            for one in inspect.signature(function).parameters.values()
            if one.name not in ("output", "given")
        ]
        as_json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
        parameters = [
            _parameter("context", typer.Context),
            *map(_flag, options),
            *own,
            _parameter("as_json", as_json, False),
        ]

        def called(*, context: typer.Context, as_json: bool, **values: Any) -> None:
            values = {
                name: value.value if isinstance(value, enum.Enum) else value
                for name, value in values.items()
            }
            given = {}
            for option in options:
                value = values.pop(option.name)
                # No flag can say None; older versions of click say of an argument that is left out
                # that it stands there.
                if value is not None and _stands(context, option.name):
                    given[option.name] = _parsed(option, value)
            function(context.obj, **({"given": given} if options else {}), **values)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        called.__name__, called.__doc__ = function.__name__, about.partition("\n\n")[0]
        group.command(name)(called)
        return function

    return declare


def recipe_arguments(given: Given) -> Given:
    """Return the arguments of `tokenmill.build.calls.run_recipe` from the options `RECIPE`."""
    from tokenmill.build.recipe import load_recipe_file

    arguments = {"sources": None, **given}
    config = arguments.pop("config", None)
    if config is not None:
        return arguments | load_recipe_file(config) | {n: given[n] for n in given if n != "config"}
    if len(given.get("sources", ())) == 1:
        arguments["sources"] = given["sources"][0]  # alone it may be a recipe.yaml, as in Python
    return arguments


def _parameter(
    name: str, annotation: Any, default: Any = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _with_help(parameter: inspect.Parameter, hint: Any, told: str) -> Any:
    if get_origin(hint) is Annotated:
        return hint
    told, name = " ".join(told.split()), parameter.name
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
        return Annotated[hint, typer.Option(help=told, metavar=METAVARS.get(name))]
    return Annotated[hint, typer.Argument(help=told, metavar=METAVARS.get(name, name.upper()))]


def _flag(option: Option) -> inspect.Parameter:
    told = option.help.replace("``", "")
    default = None if option.default in (msgspec.NODEFAULT, ()) else option.default
    kind = Literal[option.choices] if option.choices else option.type
    metavar = METAVARS.get(option.name)
    if get_origin(kind) is tuple:
        kind = list[str]
    elif get_origin(kind) is Mapping:
        kind, metavar = str, "JSON"
    elif kind is Any:
        kind = str
    shown: Any = typer.Option(help=told, metavar=metavar)
    if option.name == "sources":
        shown = typer.Argument(help=told, metavar=metavar)
    elif option.name == "carry":
        shown = typer.Option(help=f"{told} Repeatable.", metavar=metavar)
    kind = _for_typer(kind if default is not None else kind | None, option.name)
    return _parameter(option.name, Annotated[kind, shown], default)


def _for_typer(hint: Any, name: str) -> Any:
    """Return the type that old versions of typer take, too: enumerations for literals, Optional."""
    if get_origin(hint) is Literal:
        return enum.Enum(name, {choice: choice for choice in get_args(hint)})
    if get_origin(hint) is Annotated:
        kind, *notes = get_args(hint)
        return Annotated[(_for_typer(kind, name), *notes)]
    if type(None) in get_args(hint):
        [kind] = (part for part in get_args(hint) if part is not type(None))
        return Optional[_for_typer(kind, name)]  # noqa: UP045 - not the same at run time
    return hint


def _stands(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def _parsed(option: Option, value: Any) -> Any:
    if get_origin(option.type) is not Mapping:
        return value
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise UsageError((option.name,), f" is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UsageError((option.name,), f" is {value!r}; it is a JSON object")
    return parsed
