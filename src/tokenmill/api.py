"""The public verbs.

Each verb resolves names to objects (``executor="ray"``, a path to ``recipe.yaml``) and calls one
room; nothing is decided here. `prepare` makes or finds a store and returns it; `run_recipe` is the
same with the account of what happened, for the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import UsageError
from tokenmill.store import Store

if TYPE_CHECKING:
    from tokenmill.build.executors import Executor
    from tokenmill.build.outcome import Prepared
    from tokenmill.build.recipe import Recipe
    from tokenmill.source import Rows

Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

RECIPE_ENDINGS = (".yaml", ".yml")


def open_rows(
    source: Sources, *, cache_dir: str | os.PathLike[str] | None = None, rehash: bool = False
) -> Rows:
    """Open rows lazily: indexed once, read one by one.

    Args:
        source: File, directory, glob or a list of these, each with an optional ``@[a:b]``.
        cache_dir: Where the index is kept.
        rehash: Read the files again even where they seem unchanged.
    """
    from tokenmill.source import open_rows as open_source

    return open_source(source, cache_dir=cache_dir, rehash=rehash)


def prepare(
    sources: Sources | Recipe,
    tokenizer: Any = None,
    *,
    tokenizer_backend: str = "auto",
    trust_remote_code: bool = False,
    format: str = "auto",  # noqa: A002 - a name of the contract
    messages_key: str | None = None,
    tools_key: str = "tools",
    system_key: str = "system",
    text_key: str = "text",
    prompt_key: str = "prompt",
    completion_key: str = "completion",
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    date: str | None = None,
    train_on: str | None = None,
    turn_end: str = "stop",
    expand: str = "none",
    trailing: str = "reject",
    append_eos: bool = True,
    max_length: int | None = None,
    overlong: str = "drop",
    carry: Sequence[str] = (),
    on_bad_row: str = "reject",
    num_workers: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    force_recache: bool = False,
    disable_cache: bool = False,
    executor: str | Executor = "local",
    engine: str = "auto",
    progress: Any = None,
) -> Store:
    """Make a store of tokens and loss masks from raw rows, or find the one that is there.

    Args:
        sources: Files, directories, globs; or a `Recipe`; or a path to ``recipe.yaml``. The
            other arguments, where they are not left at their defaults, override a recipe's.
        tokenizer: Directory, ``tokenizer.json``, hub id, ``tokenizers.Tokenizer`` or a
            transformers tokenizer.
        tokenizer_backend: ``auto`` refuses where AutoTokenizer and tokenizer.json would encode
            differently; ``transformers`` or ``file`` chooses.
        trust_remote_code: Allow a tokenizer to bring code of its own.
        format: ``auto``, ``messages``, ``sharegpt``, ``alpaca``, ``prompt_completion``, ``text``.
        messages_key: Column of the conversation; None: ``messages``, else ``conversations``.
        tools_key: Column of the tools.
        system_key: Column of a system prompt.
        text_key: Column of plain text.
        prompt_key: Column of the prompt.
        completion_key: Column of the completion.
        chat_template: Jinja source, or a file that holds it; None: the tokenizer's own.
        template_kwargs: Variables for the template.
        date: ``YYYY-MM-DD`` for templates that print the date; such a template is refused without.
        train_on: ``all_assistant_messages``, ``last_assistant_message``, ``completion``,
            ``everything``; None: what suits the row's format.
        turn_end: ``stop``: train up to and including the end-of-turn token; ``turn``: to where
            the next turn starts.
        expand: ``turns``: one row per assistant turn.
        trailing: ``reject`` or ``trim`` a conversation that ends with a user turn.
        append_eos: Append the end-of-sequence token to text and string completions.
        max_length: Most tokens of a row.
        overlong: ``drop`` or ``truncate`` longer rows.
        carry: Columns of the row to keep beside the tokens.
        on_bad_row: ``reject`` counts a bad row, ``raise`` stops at the first.
        num_workers: Worker processes; 0 runs inline, None takes the machine's cores.
        cache_dir: Where slices and stores live; None: ``$TOKENMILL_CACHE_DIR``, else
            ``$XDG_CACHE_HOME/tokenmill``, else ``~/.cache/tokenmill``.
        force_recache: Build again and compare with what is there.
        disable_cache: Build into a private directory that lives as long as the returned store.
        executor: ``local``, ``inline``, ``ray`` or an executor object.
        engine: ``auto``, ``fastokens`` or ``hf``; never changes the result.
        progress: True, False, or a callable; None shows progress on a terminal.
    """
    given = dict(locals())
    sources, tokenizer = given.pop("sources"), given.pop("tokenizer")
    executor, progress = given.pop("executor"), given.pop("progress")
    return run_recipe(sources, tokenizer, executor=executor, progress=progress, **given).store


def run_recipe(
    sources: Any,
    tokenizer: Any = None,
    *,
    executor: str | Executor = "local",
    progress: Any = None,
    out: str | os.PathLike[str] | None = None,
    **given: Any,
) -> Prepared:
    """`prepare`, returning the store together with the account of what was done.

    ``out`` also makes a self-contained copy there; it is then the store that is returned.
    """
    from tokenmill.build.recipe import Recipe, RunOptions, load_recipe_file
    from tokenmill.build.run import run

    recipe_names = {field.name for field in fields(Recipe)}
    run_names = {field.name for field in fields(RunOptions)}
    unknown = sorted(set(given) - recipe_names - run_names)
    if unknown:
        raise UsageError(f"unknown arguments: {', '.join(unknown)}")
    changed = _changed_from_defaults(given, Recipe, RunOptions)
    if isinstance(sources, Recipe):
        stated: dict[str, Any] = {}
        recipe = sources
        if tokenizer is not None:
            changed["tokenizer"] = tokenizer
        recipe = replace(recipe, **{n: v for n, v in changed.items() if n in recipe_names})
    else:
        stated = load_recipe_file(sources) if _is_recipe_file(sources) else {"sources": sources}
        if tokenizer is not None:
            stated["tokenizer"] = tokenizer
        stated.update(changed)
        executor = stated.pop("executor", executor) if executor == "local" else executor
        if stated.get("tokenizer") is None:
            raise UsageError("no tokenizer: name a directory, a tokenizer.json or a hub id")
        if not stated.get("sources"):
            raise UsageError("no sources: name at least one file, directory or glob")
        recipe = Recipe(**{n: v for n, v in stated.items() if n in recipe_names})
    stated.update(changed)
    options = RunOptions(**{n: v for n, v in stated.items() if n in run_names})
    workers = resolve_executor(executor, options.num_workers)
    prepared = run(recipe, options, workers, progress=progress)
    return prepared if out is None else prepared.copied_to(Path(out))


def _is_recipe_file(sources: Any) -> bool:
    return isinstance(sources, str | os.PathLike) and os.fspath(sources).endswith(RECIPE_ENDINGS)


def _changed_from_defaults(given: dict[str, Any], *classes: Any) -> dict[str, Any]:
    defaults = {field.name: field.default for cls in classes for field in fields(cls)}
    return {
        name: value
        for name, value in given.items()
        if not (value == defaults[name] or (value is None and defaults[name] is None))
    }


def resolve_executor(executor: str | Executor, num_workers: int | None) -> Executor:
    """An executor by name, or the object that was given."""
    if not isinstance(executor, str):
        return executor
    from tokenmill.build.executors import InlineExecutor, LocalExecutor

    if executor == "inline" or (executor == "local" and num_workers == 0):
        return InlineExecutor()
    if executor == "local":
        return LocalExecutor(num_workers)
    raise UsageError(f"executor is {executor!r}; it is one of local, inline")
