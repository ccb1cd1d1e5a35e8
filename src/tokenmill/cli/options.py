"""Flags that several commands share, declared once.

`RecipeFlags` are the flags that say what is to be made: one field per flag, under the Python name,
with its type, default and help. A command takes them all by one parameter::

    @app.command()
    @takes_recipe
    def why(flags: RecipeFlags, *, as_json: AsJson = False) -> None: ...

`takes_recipe` shows typer the fields in place of the parameter. ``flags.stated`` holds the flags
that stand on the command line: only these override a ``recipe.yaml``, whatever their value.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, get_type_hints

import typer

from tokenmill.errors import UsageError

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
CacheDir = Annotated[
    str | None, typer.Option(help="Where slices and stores live; default: your own cache.")
]
Engine = Annotated[str, typer.Option(help="auto | fastokens | hf; never changes the result")]
RendererName = Annotated[str, typer.Option(help="auto | jinja2; never changes the result")]
PackMethod = Annotated[str, typer.Option(help="best_fit | first_fit | sequential | balanced")]
PackWindow = Annotated[int, typer.Option(help="Rows of the order packed together.")]
PackOversize = Annotated[
    str, typer.Option(help="Rows longer than a pack: error | drop | truncate | split")
]
StorePath = Annotated[
    str, typer.Argument(metavar="STORE", help="What `tokenmill prepare` printed, or an --out DIR.")
]


@dataclass(frozen=True)
class RecipeFlags:
    """What is to be made: the row-shaping arguments of `tokenmill.prepare`, as flags."""

    sources: Annotated[
        list[str] | None, typer.Argument(metavar="SRC", help="Files, directories, globs.")
    ] = None
    tokenizer: Annotated[str | None, typer.Option(help="Directory, tokenizer.json or hub id.")] = (
        None
    )
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="recipe.yaml; other flags override it.")
    ] = None
    tokenizer_backend: Annotated[str, typer.Option(help="auto | transformers | file")] = "auto"
    trust_remote_code: Annotated[bool, typer.Option(help="Let a tokenizer bring its own code.")] = (
        False
    )
    format: Annotated[
        str,
        typer.Option(
            help="auto | messages | sharegpt | alpaca | prompt_completion | text | tokens"
        ),
    ] = "auto"
    messages_key: Annotated[
        str | None, typer.Option(help="Column of the conversation: messages, else conversations.")
    ] = None
    tools_key: Annotated[str, typer.Option(help="Column of the tools.")] = "tools"
    system_key: Annotated[str, typer.Option(help="Column of a system prompt.")] = "system"
    text_key: Annotated[str, typer.Option(help="Column of plain text.")] = "text"
    prompt_key: Annotated[str, typer.Option(help="Column of the prompt.")] = "prompt"
    completion_key: Annotated[str, typer.Option(help="Column of the completion.")] = "completion"
    chat_template: Annotated[str | None, typer.Option(help="File with a Jinja chat template.")] = (
        None
    )
    template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Object of template variables.")
    ] = None
    date: Annotated[
        str | None, typer.Option(help="YYYY-MM-DD, for templates that print the date.")
    ] = None
    train_on: Annotated[
        str | None,
        typer.Option(
            help="all_assistant_messages | last_assistant_message | completion | everything; "
            "default: what suits the rows"
        ),
    ] = None
    turn_end: Annotated[str, typer.Option(help="stop | turn")] = "stop"
    thinking_opener: Annotated[
        str, typer.Option(help="prompt | trained: thinking that the generation prompt opens")
    ] = "prompt"
    expand: Annotated[str, typer.Option(help="none | turns: one row per assistant turn")] = "none"
    trailing: Annotated[
        str, typer.Option(help="reject | trim conversations that end with a user turn")
    ] = "reject"
    append_eos: Annotated[bool, typer.Option(help="For text and string completions.")] = True
    max_length: Annotated[int | None, typer.Option(help="Most tokens of a row.")] = None
    overlong: Annotated[str, typer.Option(help="drop | truncate longer rows")] = "drop"
    carry: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN", help="Column to keep beside the tokens; repeatable."),
    ] = None
    num_workers: Annotated[int | None, typer.Option(help="0 runs inline; default: all cores.")] = (
        None
    )
    cache_dir: CacheDir = None
    executor: Annotated[str, typer.Option(help="local | inline | ray")] = "local"
    stated: frozenset[str] = field(default=frozenset(), metadata={"flag": False})

    def arguments(self) -> dict[str, Any]:
        """What `tokenmill.api.run_recipe` takes, as far as it stands on the command line."""
        apart = ("sources", "config", "tokenizer", "executor", "stated")
        given = {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name in self.stated and item.name not in apart
        }
        if "template_kwargs" in given:
            given["template_kwargs"] = json_object(given["template_kwargs"], "--template-kwargs")
        sources: Any = self.sources or None
        if self.config is None and sources and len(sources) == 1:
            sources = sources[0]  # alone it may be a recipe.yaml, as in Python
        elif self.config is not None:
            if self.sources:
                given["sources"] = tuple(self.sources)
            sources = self.config
        return {
            "sources": sources,
            "tokenizer": self.tokenizer,
            **({"executor": self.executor} if "executor" in self.stated else {}),
            **given,
        }

    def only_stated(self, **values: Any) -> dict[str, Any]:
        """Those of a command's own flags that stand on the command line."""
        return {name: value for name, value in values.items() if name in self.stated}


def takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer the fields of `RecipeFlags` in place of a command's first parameter."""
    hints = get_type_hints(RecipeFlags, include_extras=True)
    flags = [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=item.default,
            annotation=hints[item.name],
        )
        for item in fields(RecipeFlags)
        if item.metadata.get("flag", True)
    ]
    own_hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in list(inspect.signature(command).parameters.items())[1:]
    ]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def called(*, context: typer.Context, **values: Any) -> None:
        stated = frozenset(
            name for name in values if _origin(context, name) not in ("DEFAULT", "DEFAULT_MAP")
        )
        shared = {parameter.name: values.pop(parameter.name) for parameter in flags}
        command(RecipeFlags(**shared, stated=stated), **values)

    parameters = [context, *flags, *own]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    return called


def _origin(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return "DEFAULT" if source is None else source.name


def json_object(text: str, flag: str) -> dict[str, Any]:
    """The object that a flag's text is."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{flag} is {text!r}; it is a JSON object")
    return value
