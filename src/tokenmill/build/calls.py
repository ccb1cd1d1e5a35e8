"""The functions that run a recipe: `prepare`, `prepare_part`, and those that commands call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET as _UNSET

from tokenmill._core.options import refuse_unknown
from tokenmill.build.recipe import NO_SOURCES, Recipe, RunOptions, is_recipe_file, load_recipe_file
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from tokenmill.build.outcome import Prepared, Unfinished
    from tokenmill.build.tasks import Executor
    from tokenmill.store import Store

Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

UNSET: Any = _UNSET  # default of an argument, so that a recipe's value is kept


def prepare(
    sources: Sources | Recipe,
    tokenizer: Any = UNSET,
    *,
    tokenizer_backend: Literal["auto", "transformers", "file"] = UNSET,
    processor: Any = UNSET,
    trust_remote_code: bool = UNSET,
    format: Literal[  # noqa: A002 - a name of the contract
        "auto",
        "messages",
        "sharegpt",
        "alpaca",
        "prompt_completion",
        "preference",
        "kto",
        "ranked",
        "text",
        "tokens",
        "rollouts",
    ] = UNSET,
    messages_key: str | None = UNSET,
    tools_key: str = UNSET,
    system_key: str = UNSET,
    text_key: str = UNSET,
    prompt_key: str = UNSET,
    completion_key: str = UNSET,
    chat_template: Any = UNSET,
    template_kwargs: Mapping[str, Any] | None = UNSET,
    date: str | None = UNSET,
    train_on: Literal[
        "all_assistant_messages", "last_assistant_message", "completion", "everything"
    ]
    | None = UNSET,
    turn_end: Literal["stop", "turn"] = UNSET,
    thinking_opener: Literal["prompt", "trained"] = UNSET,
    expand: Literal["none", "turns", "append"] = UNSET,
    trailing: Literal["reject", "trim"] = UNSET,
    append_eos: bool = UNSET,
    max_length: int | None = UNSET,
    overlong: Literal["drop", "truncate"] = UNSET,
    carry: Sequence[str] = UNSET,
    on_bad_row: Literal["reject", "raise"] = UNSET,
    max_rejected: float | int | str | None = UNSET,
    num_workers: int | None = UNSET,
    cache_dir: str | os.PathLike[str] | None = UNSET,
    force_recache: bool = UNSET,
    disable_cache: bool = UNSET,
    executor: str | Executor = UNSET,
    engine: Literal["auto", "fastokens", "hf"] = UNSET,
    renderer: Literal["auto", "jinja2"] = UNSET,
    rehash: bool = UNSET,
    media_root: str | os.PathLike[str] | None = UNSET,
    media_urls: bool = UNSET,
    progress: Any = None,
) -> Store:
    """Make a store of tokens and loss masks from raw rows, or find the one that is there.

    An argument that is not given has the value of the recipe, or the default of `Recipe` and
    `RunOptions`. Objects are taken too: a `Recipe` as sources, a ``tokenizers.Tokenizer`` or a
    transformers tokenizer, a transformers processor, an executor.

    Args:
        sources: Files, directories, globs, each with an optional ``@[a:b]``. Or one
            ``recipe.yaml``: other arguments override it.
        tokenizer: Directory, ``tokenizer.json`` or hub id; when not given, the processor's.
        tokenizer_backend: Who reads the tokenizer; ``auto`` refuses where AutoTokenizer and
            ``tokenizer.json`` would encode differently, or where that cannot be found out.
        processor: For rows with pictures: directory or hub id of the model's processor.
        trust_remote_code: Allow a tokenizer or processor to bring code of its own.
        format: Format of the rows; ``auto`` looks at each row's columns. ``tokens``, for rows
            that are tokenized already, and ``rollouts``, for recorded ones, must be asked for.
            ``preference``, ``kto`` and ``ranked`` rows hold answers that belong together: each
            becomes a group of rows.
        messages_key: Column of the conversation; when not given, ``messages``, else
            ``conversations``.
        tools_key: Column of the tools.
        system_key: Column of a system prompt, for conversations that have no system turn.
        text_key: Column of plain text.
        prompt_key: Column of the prompt.
        completion_key: Column of the completion.
        chat_template: Jinja source, or a file that holds it; when not given, the tokenizer's own.
        template_kwargs: Further variables for the chat template.
        date: ``YYYY-MM-DD`` for templates that print the date; such a template is refused without
            it.
        train_on: What is trained; when not given, all assistant messages of a conversation, the
            completion of a prompt, everything of a text.
        turn_end: Train up to and including the end-of-turn token (``stop``), or up to where the
            next turn starts (``turn``).
        thinking_opener: Whether a thinking opener that is already in the generation prompt belongs
            to the ``prompt`` or is ``trained``.
        expand: ``turns`` makes one row of every assistant turn, with the turns before it;
            ``append`` joins those of which one goes on where another ends, as a rollout does.
        trailing: Reject a conversation that ends with a user turn, or trim it to its last
            assistant turn.
        append_eos: End text and string completions with the end-of-sequence token.
        max_length: Most tokens of a row.
        overlong: What happens to longer rows.
        carry: Columns of the row to keep beside the tokens.
        on_bad_row: Count a bad row as rejected, or make the first one an error.
        max_rejected: Most rows that may be rejected, as a count or a share like ``1%``; more is an
            error.
        num_workers: Worker processes; 0 runs inline. When not given, one for each core, or none
            where only a few MB are to be made.
        cache_dir: Directory of the cache; when not given, ``$TOKENMILL_CACHE_DIR``, else
            ``$XDG_CACHE_HOME/tokenmill``, else ``~/.cache/tokenmill``.
        force_recache: Build again and compare with what is there.
        disable_cache: Build into a private directory that lives as long as the returned store.
        executor: Where the work runs: ``local``, ``inline`` or ``ray``.
        engine: Which library encodes; never changes the result.
        renderer: What renders chat templates; ``jinja2`` is the reference. Never changes the
            result.
        rehash: Read source files and pictures again even where they seem unchanged.
        media_root: Directory that the rows' paths of pictures start from and may not leave; when
            not given, that of each source file.
        media_urls: Fetch pictures whose rows give an address.
        progress: True, False, or a callable; None shows progress on a terminal.
    """
    given = {name: value for name, value in locals().items() if value is not UNSET}
    return run_recipe(**given).store


def run_recipe(
    sources: Any,
    tokenizer: Any = None,
    *,
    progress: Any = None,
    judge: bool = True,
    **given: Any,
) -> Prepared:
    """`prepare`, with a summary of the run; without ``judge`` the caller calls `Prepared.judge`."""
    from tokenmill.build.run import run

    recipe, options = resolve_call(sources, tokenizer, given)
    prepared = run(recipe, options, progress=progress)
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
    progress: Any = None,
    judge: bool = True,
    **given: Any,
) -> Prepared | Unfinished:
    from tokenmill.build.outcome import Prepared
    from tokenmill.build.plan import Share
    from tokenmill.build.run import run_share

    share = Share.of(part)
    recipe, options = resolve_call(sources, tokenizer, given)
    outcome = run_share(recipe, options, share, progress=progress)
    if judge and isinstance(outcome, Prepared):
        outcome.judge()
    return outcome


def explain_recipe(sources: Any, tokenizer: Any = None, **given: Any) -> dict[str, Any]:
    """Return whether `run_recipe` would be a hit, and what differs from the nearest store."""
    from tokenmill.build.blocks import cache_of
    from tokenmill.build.executors import executor_for
    from tokenmill.build.plan import explain
    from tokenmill.build.run import plan

    recipe, options = resolve_call(sources, tokenizer, given)
    cache = cache_of(options.cache_dir)
    with executor_for(options.executor, options.num_workers) as workers:
        planned = plan(recipe, options, workers, cache)
    return explain(planned, cache)


def resolve_call(
    sources: Any, tokenizer: Any, given: Mapping[str, Any]
) -> tuple[Recipe, RunOptions]:
    """Return recipe and options from arguments, which override a `Recipe` or ``recipe.yaml``."""
    recipe_names, run_names = Recipe.__struct_fields__, RunOptions.__struct_fields__
    refuse_unknown(given, (*recipe_names, *run_names), "arguments")
    stated: dict[str, Any] = {}
    if isinstance(sources, Recipe):
        stated = {name: getattr(sources, name) for name in recipe_names}
    elif is_recipe_file(sources):
        stated = load_recipe_file(sources)
    elif sources is not None:
        stated = {"sources": sources}
    stated.update(given)
    if tokenizer is not None:
        stated["tokenizer"] = tokenizer
    if stated.get("tokenizer") is None and stated.get("processor") is None:
        raise UsageError("no tokenizer: name a directory, a tokenizer.json or a hub id")
    if not stated.get("sources"):
        raise UsageError(NO_SOURCES)
    recipe = Recipe(**{n: v for n, v in stated.items() if n in recipe_names})
    options = RunOptions(**{n: v for n, v in stated.items() if n in run_names})
    return recipe, options
