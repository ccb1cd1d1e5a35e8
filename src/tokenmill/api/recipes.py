"""The public verbs.

Each verb resolves names to objects (``executor="ray"``, a path to ``recipe.yaml``) and calls one
room; nothing is decided here. `prepare` makes or finds a store and returns it; `run_recipe` is the
same with the account of what happened, for the command line.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import signature
from typing import TYPE_CHECKING, Any

from tokenmill.errors import UsageError
from tokenmill.store import Store

if TYPE_CHECKING:
    from tokenmill.build.outcome import Prepared, Unfinished
    from tokenmill.build.recipe import Recipe, RunOptions
    from tokenmill.report.lint import LintReport
    from tokenmill.source import Rows
    from tokenmill.work import Executor

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
    thinking_opener: str = "prompt",
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
    renderer: str = "auto",
    progress: Any = None,
) -> Store:
    """Make a store of tokens and loss masks from raw rows, or find the one that is there.

    Args:
        sources: Files, directories, globs; or a `Recipe`; or a path to ``recipe.yaml``. The
            other arguments, where they are not left at their defaults, override a recipe's.
        tokenizer: Directory, ``tokenizer.json``, hub id, ``tokenizers.Tokenizer`` or a
            transformers tokenizer.
        tokenizer_backend: ``auto`` refuses where AutoTokenizer and tokenizer.json would encode
            differently, or where it cannot be asked; ``transformers`` or ``file`` chooses.
        trust_remote_code: Allow a tokenizer to bring code of its own.
        format: ``auto``, ``messages``, ``sharegpt``, ``alpaca``, ``prompt_completion``, ``text``;
            ``tokens`` for rows that are tokenized already (``auto`` never takes a row for that).
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
        thinking_opener: ``prompt``: thinking that the generation prompt already opens is given to
            the model and not trained; ``trained``: it is.
        expand: ``turns``: one row per assistant turn.
        trailing: ``reject`` or ``trim`` a conversation that ends with a user turn.
        append_eos: Append the end-of-sequence token to text and string completions.
        max_length: Most tokens of a row.
        overlong: ``drop`` or ``truncate`` longer rows.
        carry: Columns of the row to keep beside the tokens.
        on_bad_row: ``reject`` counts a bad row, ``raise`` makes the first one an error.
        num_workers: Worker processes; 0 runs inline, None takes the machine's cores, or runs
            inline where only a few MB are to be made.
        cache_dir: Where slices and stores live; None: ``$TOKENMILL_CACHE_DIR``, else
            ``$XDG_CACHE_HOME/tokenmill``, else ``~/.cache/tokenmill``.
        force_recache: Build again and compare with what is there.
        disable_cache: Build into a private directory that lives as long as the returned store.
        executor: ``local``, ``inline``, ``ray`` or an executor object.
        engine: ``auto``, ``fastokens`` or ``hf``; never changes the result.
        renderer: ``auto`` or ``jinja2``, the reference; never changes the result.
        progress: True, False, or a callable; None shows progress on a terminal.
    """
    given = dict(locals())
    sources, tokenizer = given.pop("sources"), given.pop("tokenizer")
    return run_recipe(sources, tokenizer, **_changed_from_defaults(given)).store


def run_recipe(
    sources: Any,
    tokenizer: Any = None,
    *,
    executor: str | Executor | None = None,
    progress: Any = None,
    judge: bool = True,
    **given: Any,
) -> Prepared:
    """`prepare`, returning the store together with the account of what was done.

    Whatever is given counts, default or not: it overrides what a recipe says. Without ``judge``
    the caller looks at the account first and calls `Prepared.judge` itself.
    """
    from tokenmill.build.run import run

    recipe, options, where = resolve_call(sources, tokenizer, executor, given)
    prepared = run(recipe, options, where, progress=progress)
    if judge:
        prepared.judge()
    return prepared


def prepare_part(
    sources: Any, tokenizer: Any = None, *, part: str | tuple[int, int], **given: Any
) -> Store | None:
    """Build a share of what `prepare` would build; the store, once no share is missing.

    For many machines without a scheduler of ours (Slurm arrays, ssh): each runs this with another
    part, on a cache directory that they share. Any number of parts, in any order and any overlap,
    may die and be run again; whoever finds that nothing is missing commits the store.

    Args:
        sources: As for `prepare`.
        tokenizer: As for `prepare`.
        part: ``"3/8"`` or ``(3, 8)``: the third of eight shares.
        given: Other arguments of `prepare`.

    Returns:
        The store, or None while slices of other parts are missing.
    """
    outcome = run_part(sources, tokenizer, part=part, **given)
    store: Store | None = getattr(outcome, "store", None)
    return store


def run_part(
    sources: Any,
    tokenizer: Any = None,
    *,
    part: str | tuple[int, int],
    executor: str | Executor | None = None,
    progress: Any = None,
    judge: bool = True,
    **given: Any,
) -> Prepared | Unfinished:
    """`prepare_part`, returning what was done; rejected rows are judged when the store is there."""
    from tokenmill.build.outcome import Prepared
    from tokenmill.build.plan import Share
    from tokenmill.build.run import run_share

    share = Share.of(part)
    recipe, options, where = resolve_call(sources, tokenizer, executor, given)
    outcome = run_share(recipe, options, where, share, progress=progress)
    if judge and isinstance(outcome, Prepared):
        outcome.judge()
    return outcome


def explain_recipe(
    sources: Any,
    tokenizer: Any = None,
    *,
    executor: str | Executor | None = None,
    **given: Any,
) -> dict[str, Any]:
    """Whether such a `run_recipe` would be a hit, and what differs from the nearest store."""
    from tokenmill.build.run import plan
    from tokenmill.build.why import explain
    from tokenmill.work import executor_for
    from tokenmill.work.inputs import cache_of

    recipe, options, where = resolve_call(sources, tokenizer, executor, given)
    cache = cache_of(options.cache_dir)
    with executor_for(where, options.num_workers) as workers:
        planned, comparison = plan(recipe, options, workers, cache)
        if comparison is not None:
            comparison.agree(planned.card, cache.root)
    return explain(planned, cache)


def lint(
    sources: Any,
    tokenizer: Any = None,
    *,
    sample: int | None = 2000,
    only: Sequence[str] = (),
    ignore: Sequence[str] = (),
    executor: str | Executor | None = None,
    progress: Any = None,
    **given: Any,
) -> LintReport:
    """Look for what is wrong with raw rows, before anything is made of them.

    Args:
        sources: As for `prepare`.
        tokenizer: As for `prepare`.
        sample: Look at this many rows, the same every time; None: all of them.
        only: Names of the rules that run; empty: all (`tokenmill.report.lint.RULES`).
        ignore: Names of rules that do not run.
        executor: ``local``, ``inline``, ``ray`` or an executor object.
        progress: As for `prepare`.
        given: Any other argument of `prepare` that shapes rows, ``num_workers``, ``cache_dir``,
            ``engine``, ``renderer``.
    """
    from tokenmill.report.lint import run_lint
    from tokenmill.work import executor_for

    recipe, options, where = resolve_call(sources, tokenizer, executor, given)
    with executor_for(where, options.num_workers) as workers:
        return run_lint(
            recipe, options, workers, sample=sample, only=only, ignore=ignore, progress=progress
        )


def resolve_call(
    sources: Any, tokenizer: Any, executor: str | Executor | None, given: Mapping[str, Any]
) -> tuple[Recipe, RunOptions, str | Executor]:
    """What is to be made, how and where, from arguments, a `Recipe` or ``recipe.yaml``."""
    from tokenmill.build.recipe import Recipe, RunOptions, load_recipe_file

    recipe_names = {field.name for field in fields(Recipe)}
    run_names = {field.name for field in fields(RunOptions)}
    unknown = sorted(set(given) - recipe_names - run_names)
    if unknown:
        raise UsageError(f"unknown arguments: {', '.join(unknown)}")
    stated: dict[str, Any] = {}
    if isinstance(sources, Recipe):
        stated = {name: getattr(sources, name) for name in recipe_names}
    elif _is_recipe_file(sources):
        stated = load_recipe_file(sources)
    elif sources is not None:
        stated = {"sources": sources}
    stated.update(given)
    if tokenizer is not None:
        stated["tokenizer"] = tokenizer
    executor = executor or stated.pop("executor", "local")
    if stated.get("tokenizer") is None:
        raise UsageError("no tokenizer: name a directory, a tokenizer.json or a hub id")
    if not stated.get("sources"):
        raise UsageError("no sources: name at least one file, directory or glob")
    recipe = Recipe(**{n: v for n, v in stated.items() if n in recipe_names})
    options = RunOptions(**{n: v for n, v in stated.items() if n in run_names})
    return recipe, options, executor


def _is_recipe_file(sources: Any) -> bool:
    return isinstance(sources, str | os.PathLike) and os.fspath(sources).endswith(RECIPE_ENDINGS)


def _changed_from_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Python cannot tell an argument left out from its default, so a default says nothing."""
    defaults = {name: item.default for name, item in signature(prepare).parameters.items()}
    return {
        name: value
        for name, value in given.items()
        if not (value is defaults[name] or value == defaults[name])
    }
