"""`prepare`, and the functions that commands call to run a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, cast, overload

from msgspec import UNSET as _UNSET

from tokenmill._core.options import check_names
from tokenmill.build.recipe import NO_SOURCES, Recipe, RunOptions, is_recipe_file, load_recipe_file
from tokenmill.chat.spec import RowFormat
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from tokenmill.build.tasks import Executor
    from tokenmill.store import Store
    from tokenmill.store.by_source import SourceRows

Sources = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Iterable[Mapping[str, Any]]

UNSET: Any = _UNSET  # default of an argument, so that a recipe's value is kept

P = ParamSpec("P")


class _Prepare(Protocol[P]):
    """The type of `prepare`: its own signature, with another result for ``lazy=True``."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self,
        sources: Sources | Recipe | Any = None,
        tokenizer: Any = UNSET,
        *,
        lazy: Literal[True],
        **options: Any,
    ) -> SourceRows: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Store: ...
    def __hash__(self) -> int: ...  # `declared` caches by function


def _typed(function: Callable[P, Any]) -> _Prepare[P]:
    return cast("_Prepare[P]", function)


@_typed
def prepare(
    sources: Sources | Recipe | Any = None,
    tokenizer: Any = UNSET,
    *,
    format: RowFormat = UNSET,  # noqa: A002 - a name of the contract
    columns: Mapping[str, str | None] | None = UNSET,
    keep_columns: Sequence[str] = UNSET,
    chat_template: Any = UNSET,
    chat_template_kwargs: Mapping[str, Any] | None = UNSET,
    date: str | None = UNSET,
    encoder: Any = UNSET,
    encoder_kwargs: Mapping[str, Any] | None = UNSET,
    as_chat: bool = UNSET,
    processor: Any = UNSET,
    media_root: str | os.PathLike[str] | None = UNSET,
    media_urls: bool = UNSET,
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
    max_rejected: float | int | str | None = UNSET,
    num_workers: int | None = UNSET,
    executor: str | Executor = UNSET,
    cache_dir: str | os.PathLike[str] | None = UNSET,
    force_recache: bool = UNSET,
    disable_cache: bool = UNSET,
    tokenizer_backend: Literal["auto", "transformers", "file"] = UNSET,
    trust_remote_code: bool = UNSET,
    reference: bool = UNSET,
    name: str | None = UNSET,
    lazy: bool = False,
    progress: Any = None,
) -> Any:
    """Tokenize rows, compute loss masks and return the store; open it if it exists already.

    An argument that is not given has the value of the recipe, or the default of `Recipe` and
    `RunOptions`.

    Args:
        sources: Files, directories, globs, URLs or hub ids, each with an optional ``@[a:b]``. Or
            in-memory rows: a `datasets.Dataset`, a list or iterator of dicts, a pandas or polars
            frame. Or a `Recipe` or the path of a ``recipe.yaml``; other arguments override it.
        tokenizer: Directory, ``tokenizer.json``, hub id, or a tokenizer object of tokenizers or
            transformers. Default: the tokenizer of the processor.
        format: Format of the rows; ``auto`` looks at each row's columns. ``tokens`` (rows that are
            tokenized already) and ``rollouts`` (recorded rollouts, of one format with
            ``rollouts-miles``) are never detected. Each row of ``preference``, ``kto`` and
            ``ranked`` becomes a group of rows.
        columns: Names of the columns by role, like ``{"messages": "chat"}``; None ignores a
            column. Roles: messages, tools, system, text, prompt, completion, chosen, rejected,
            label, images, weight.
        keep_columns: Columns to keep with the tokens, as ``row.extra``.
        chat_template: Jinja source, or a file with it. Default: the tokenizer's own.
        chat_template_kwargs: Additional variables for the chat template.
        date: ``YYYY-MM-DD`` for templates that print the date, which require it.
        encoder: Python function of the model that encodes conversations, in place of a template:
            ``path/to/file.py:callable``, ``module:callable``, a callable, ``mistral-common``,
            ``harmony`` or ``transformers``. Code of a checkpoint needs ``trust_remote_code``.
        encoder_kwargs: Additional arguments of the encoder.
        as_chat: Make prompts and answers that are plain strings user and assistant messages, so
            that the chat template is applied.
        processor: Directory or hub id of the model's processor, or the object; for rows with
            images.
        media_root: Directory of image paths in rows; images outside of it are rejected. Default:
            the directory of each source file.
        media_urls: Download images that rows give as URLs.
        train_on: What to train. Default: all assistant messages of a conversation, the completion
            of a prompt, everything of a text.
        turn_end: Train up to and including the end-of-turn token (``stop``), or up to the start
            of the next turn (``turn``).
        thinking_opener: Whether a thinking tag that the generation prompt already contains is part
            of the ``prompt`` or ``trained``.
        expand: ``turns`` makes one row of every assistant turn, with the turns before it;
            ``append`` merges rows that continue each other, as in a rollout.
        trailing: Reject a conversation that ends with a user turn, or trim it after its last
            assistant turn.
        append_eos: End texts and string completions with the end-of-sequence token.
        max_length: Maximum number of tokens of a row.
        overlong: Drop longer rows, or truncate them.
        max_rejected: Maximum number of rejected rows, or a share like ``1%``; more raise an error.
            0 raises on the first rejected row.
        num_workers: Number of worker processes; 0 works in this process. Default: one per core,
            or none for a few MB of rows.
        executor: Where workers run: ``local``, ``inline``, ``ray``, or an executor object.
        cache_dir: Cache directory. Default: ``$TOKENMILL_CACHE_DIR``, else
            ``$XDG_CACHE_HOME/tokenmill``, else ``~/.cache/tokenmill``.
        force_recache: Read the files again, build again, and compare with the cache.
        disable_cache: Build in a temporary directory that is deleted with the store object.
        tokenizer_backend: Library that loads the tokenizer. ``auto`` raises an error if
            AutoTokenizer and ``tokenizer.json`` encode differently, or if that is unknown.
        trust_remote_code: Allow a tokenizer or processor to run its own code.
        reference: Use jinja2 and the reference tokenizer for every row. Slower; the result is the
            same.
        name: Name for the store, which `open_store` and commands accept. A name that is in use
            moves to this store.
        lazy: Only index the files now, and tokenize rows when they are requested. Returns source
            rows by number instead of a store: see docs/guides/train-at-once.md.
        progress: True, False, or a callable. Default: show progress on a terminal.
    """
    given = {name: value for name, value in locals().items() if value is not UNSET}
    if given.pop("lazy"):
        from tokenmill.build.lazy import open_lazily

        del given["progress"]
        recipe, options = resolve_call(given.pop("sources"), given.pop("tokenizer", None), given)
        return open_lazily(recipe, options)
    return run_recipe(**given).store


def run_recipe(
    sources: Any,
    tokenizer: Any = None,
    *,
    part: str | tuple[int, int] | None = None,
    progress: Any = None,
    raise_for_rejections: bool = True,
    **given: Any,
) -> Any:
    """Run `prepare`; return a `Prepared`, the store with a summary of the run.

    Machines that share a cache directory build one ``part`` of the slices each, like ``"3/8"``
    (Slurm arrays, ssh). The last one commits the store, the others return `Unfinished`. Parts may
    overlap, run in any order, fail and run again.
    """
    from tokenmill.build.outcome import Prepared
    from tokenmill.build.plan import ALL, Partition
    from tokenmill.build.run import run

    partition = ALL if part is None else Partition.of(part)
    recipe, options = resolve_call(sources, tokenizer, given)
    outcome = run(recipe, options, partition, progress=progress)
    if raise_for_rejections and isinstance(outcome, Prepared):
        outcome.raise_for_rejections()
    return outcome


def explain_recipe(sources: Any, tokenizer: Any = None, **given: Any) -> dict[str, Any]:
    """Return whether the store exists, and the differences from the nearest store."""
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
    """Merge arguments with a `Recipe` or ``recipe.yaml``; the arguments take precedence."""
    recipe_names, run_names = Recipe.__struct_fields__, RunOptions.__struct_fields__
    check_names(given, (*recipe_names, *run_names), "arguments")
    merged: dict[str, Any] = {}
    if isinstance(sources, Recipe):
        merged = {name: getattr(sources, name) for name in recipe_names}
    elif is_recipe_file(sources):
        merged = load_recipe_file(sources)
    elif sources is not None:
        merged = {"sources": sources}
    merged.update(given)
    if tokenizer is not None:
        merged["tokenizer"] = tokenizer
    if merged.get("sources") is None:
        raise UsageError(NO_SOURCES)
    if merged.get("tokenizer") is None and merged.get("processor") is None:
        raise UsageError(("tokenizer",), " is missing: pass a directory, tokenizer.json or hub id")
    _write_in_memory_rows(merged)
    if not merged.get("sources"):
        raise UsageError(NO_SOURCES)
    recipe = Recipe(**{n: v for n, v in merged.items() if n in recipe_names})
    options = RunOptions(**{n: v for n, v in merged.items() if n in run_names})
    return recipe, options


def _write_in_memory_rows(merged: dict[str, Any]) -> None:
    """Replace in-memory rows by files in the cache, or in a directory of this process."""
    from tokenmill._core.process import process_directory
    from tokenmill.build.blocks import cache_of
    from tokenmill.chat.spec import IMAGE_COLUMNS
    from tokenmill.sources.memory import as_addresses

    given = merged.get("sources")
    if isinstance(given, str | os.PathLike):
        return
    is_private = merged.get("disable_cache")
    root = process_directory() if is_private else cache_of(merged.get("cache_dir")).root
    columns = merged.get("columns")
    images = columns.get("images") if isinstance(columns, Mapping) else None
    addresses = as_addresses(given, root, nullable=(*IMAGE_COLUMNS, str(images)))
    merged["sources"] = addresses
    if addresses is not given and merged.get("processor") is not None:
        merged.setdefault("media_root", os.getcwd())  # these rows have no directory
