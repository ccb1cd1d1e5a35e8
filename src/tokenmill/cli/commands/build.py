"""The commands `prepare`, `why`, `prompts` and `demo`."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from contextlib import redirect_stdout, suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill._core.options import declared
from tokenmill._core.origin import nothing_left
from tokenmill.cli.app import app
from tokenmill.cli.help import RecipeCommand
from tokenmill.cli.options import (
    CACHE,
    MEDIA,
    RECIPE,
    RECIPE_OPTIONS,
    RUN_OPTIONS,
    TOKENIZER,
    WHERE,
    EmbedMedia,
    Flags,
    OutDirectory,
    Sources,
    command,
    recipe_arguments,
)
from tokenmill.cli.output import Output, one_line
from tokenmill.data.prompt_rows import PromptSpec
from tokenmill.errors import CacheError, StateError, UsageError

if TYPE_CHECKING:
    from tokenmill.build.outcome import Prepared
    from tokenmill.data.prompts import PromptDataset
    from tokenmill.store import Store

MAX_FILES = 3  # with rejected rows shown per reason; all rows are in the store


@command(app, *RECIPE, *RUN_OPTIONS.values(), cls=RecipeCommand)
def prepare(
    output: Output,
    flags: Flags,
    *,
    out: OutDirectory = None,
    embed_media: EmbedMedia = False,
    part: str | None = None,
    rejected: str | None = None,
) -> None:
    """Turn rows into tokens and loss masks, cached as a store.

    The path of the store is printed on stdout. Flags without a value have a --no- form.

    Examples:
      tokenmill prepare chat.jsonl --tokenizer Qwen/Qwen3-0.6B
      tokenmill prepare data/*.parquet --tokenizer ./model --column messages=chat
      tokenmill prepare recipe.yaml --max-length 8192 --out ./store

    Args:
        part: Build only this part of the slices; for builds on many machines.
        rejected: Write the rejected rows here, as JSONL with reason, place and turn.
    """
    from tokenmill.build.calls import run_recipe
    from tokenmill.build.outcome import Unfinished

    arguments = recipe_arguments(flags)
    if out is None and _is_cache_disabled(arguments):
        raise UsageError(
            ("disable_cache",), " removes the store when the command ends. Add --out DIR to keep it"
        )
    if rejected is not None and not os.access(Path(rejected).absolute().parent, os.W_OK):
        raise UsageError(("rejected",), " must be in a directory that can be written")
    if out is not None:
        from tokenmill.build.calls import explain_recipe
        from tokenmill.store.transfer import check_target

        check_target(Path(out), lambda: str(explain_recipe(**arguments)["key"]))
    arguments |= {"progress": output.progress, "raise_for_rejections": False}
    part_summary: dict[str, Any] = {}
    with redirect_stdout(sys.stderr):  # Ray prints on stdout, which is for the result.
        outcome = run_recipe(**arguments, part=part)
    if part is not None:
        missing = getattr(outcome, "missing", 0)
        part_summary = {"part": part, "complete": not missing, "slices_missing": missing}
    if isinstance(outcome, Unfinished):
        summary = outcome.summary()
        output.message(
            f"part {outcome.partition}: {_slice_counts(summary)} in {summary['seconds']:.1f} s; "
            f"{outcome.missing:,} slices of other parts are missing; "
            "the last part to finish writes the store"
        )
        output.result(summary | part_summary, lambda: None)
        return
    output.partial.update(outcome.summary() | part_summary)
    _report(output, outcome)
    if rejected is not None:
        from tokenmill.inspect.rejected import write_rejected

        count = write_rejected(outcome.store, Path(rejected), arguments.get("cache_dir"))
        output.message(f"{count:,} rejected rows written to {rejected}")
    outcome.raise_for_rejections()
    if out is not None:
        outcome = outcome.copied_to(Path(out), embed_media=embed_media)
    _remember(outcome)
    _report_next(output, outcome, has_rejected_file=rejected is not None)
    output.result(outcome.summary() | part_summary)


def _report(output: Output, prepared: Prepared) -> None:
    summary = prepared.summary()
    tokens, trained = summary["tokens"], summary["trained_tokens"]
    how = "cache hit" if summary["hit"] else _slice_counts(summary)
    output.message(
        (f"{summary['rows_out']:,} rows", "bold green"),
        f", {tokens:,} tokens, {trained:,} trained ({trained / max(tokens, 1):.1%}); "
        f"{how} in {summary['seconds']:.1f} s",
    )
    _report_rejected(output, prepared)
    for remark in prepared.remarks():
        output.message(("note: ", "bold"), remark)


def _slice_counts(summary: dict[str, Any]) -> str:
    derived = summary["slices_derived"]
    built = f"{summary['slices_built']:,} of {summary['slices']:,} slices built"
    return f"{built}, {derived:,} derived" if derived else built


def _report_rejected(output: Output, prepared: Prepared) -> None:
    from tokenmill.inspect.lint.rules import RULES
    from tokenmill.inspect.rejected import rejected_by_file

    summary = prepared.summary()
    rejected, rows_in = summary["rejected"], summary["rows_in"]
    count = sum(rejected.values())
    if not count:
        return
    share = f" of {rows_in:,} rows rejected ({count / rows_in:.1%}):"
    output.message((f"{count:,}{share}", "bold yellow"))
    count_width = max(len(f"{n:,}") for n in rejected.values())
    name_width = max(len(reason) for reason in rejected)
    indent = f"{'':{count_width + name_width + 6}}"
    for reason, files in rejected_by_file(prepared.store).items():
        head = f"  {rejected[reason]:>{count_width},}  {reason:<{name_width}}  "
        output.message((head, "yellow"), RULES[reason].hint)
        for file in files[:MAX_FILES]:
            output.message(f"{indent}{file.path}: {file.count:,} of {file.source_rows:,} rejected")
            output.message((f"{indent}{file.first}: {one_line(file.detail)}", "dim"))
        if len(files) > MAX_FILES:
            output.message(f"{indent}and rows of {len(files) - MAX_FILES:,} other files")


def _remember(prepared: Prepared) -> None:
    """Make ``@last`` the name of the store, unless the cache cannot be written."""
    from tokenmill.store.named import LAST, write_name

    root = prepared.store.cache_root
    if root is not None and prepared.store.private_directory is None:
        with suppress(CacheError):
            write_name(root, LAST, prepared.store.key)


def _report_next(output: Output, prepared: Prepared, *, has_rejected_file: bool) -> None:
    """Say which commands to run next."""
    store = shlex.quote(prepared.options.name or str(prepared.path))
    output.message(("next: ", "bold"), (f"tokenmill inspect {store}", "cyan"))
    if prepared.summary()["rejected"] and not has_rejected_file:
        output.message("      add ", ("--rejected FILE", "cyan"), " to write all rejected rows")


def _is_cache_disabled(arguments: dict[str, Any]) -> bool:
    from tokenmill.build.recipe import is_recipe_file, load_recipe_file

    sources = arguments["sources"]
    recipe = load_recipe_file(sources) if is_recipe_file(sources) else {}
    return bool({**recipe, **arguments}.get("disable_cache"))


MAX_VALUE_CHARS = 60  # --json prints whole values


@command(app, *RECIPE, *WHERE, *MEDIA, cls=RecipeCommand)
def why(output: Output, flags: Flags) -> None:
    """Explain whether `prepare` would reuse a store."""
    from tokenmill.build.calls import explain_recipe

    document = explain_recipe(**recipe_arguments(flags))
    output.result(document, lambda: _show_why(output, document))


def _show_why(output: Output, document: dict[str, Any]) -> None:
    cached, slices = document["slices_there"], document["slices"]
    if document["hit"]:
        output.message(f"hit: {document['nearest_path']}")
        return
    key = document["key"][:12]
    output.message(f"miss: store {key} is not cached; {cached:,} of {slices:,} slices are")
    if document["nearest"] is None:
        output.message("the cache has no store to compare with")
        return
    differs = document["differs"]
    output.message(f"nearest: {document['nearest_path']}")
    width = max(len(difference["field"]) for difference in differs)
    for difference in differs:
        requested, nearest = _short(difference["ours"]), _short(difference["theirs"])
        output.message(f"  {difference['field']:<{width}}  {requested}; nearest: {nearest}")


def _short(value: Any) -> str:
    return one_line(json.dumps(value, ensure_ascii=False), MAX_VALUE_CHARS)


OPTIONS = (
    TOKENIZER[0],
    RECIPE_OPTIONS["max_length"]._replace(help="Drop prompts with more tokens."),
    *(
        option
        for name, option in declared(PromptSpec).items()
        if name not in ("convention", "tool_form")
    ),
    RECIPE_OPTIONS["chat_template"],
    RECIPE_OPTIONS["encoder"],
    RECIPE_OPTIONS["encoder_kwargs"],
    *TOKENIZER[1:],
    *WHERE,
)


@command(app, *OPTIONS)
def prompts(output: Output, flags: Flags, sources: Sources) -> None:
    """Measure and cache the token lengths of RL prompts."""
    from tokenmill.data.prompts import PromptSettings, open_prompts

    start = time.perf_counter()
    executor = flags.pop("executor", "local")
    settings = PromptSettings(executor=executor, progress=output.progress)
    dataset = open_prompts(settings, sources, **flags)
    document: dict[str, Any] = {
        "rows": dataset.source_rows,
        "kept": len(dataset),
        "rejected": dataset.rejected,
        "seconds": round(time.perf_counter() - start, 3),
        "hit": dataset.hit,
        "path": str(dataset.path),
        "key": dataset.key,
    }
    output.partial.update(document)
    _report_prompts(output, dataset, document)
    if not len(dataset):
        raise nothing_left("prompt", dataset.rejected, dataset.rejected_rows(), sources[0])
    output.result(document)


def _report_prompts(output: Output, dataset: PromptDataset, document: dict[str, Any]) -> None:
    how = "cache hit" if document["hit"] else f"{dataset.measured:,} rows measured"
    kept = f"{document['kept']:,} of {document['rows']:,} prompts"
    output.message(f"{kept}; {how} in {document['seconds']:.1f} s")
    if output.as_json or not document["rejected"]:
        return
    shown: set[str] = set()
    for origin, reason, detail in dataset.rejected_rows():
        if reason not in shown:
            shown.add(reason)
            output.message(
                f"  {document['rejected'][reason]:,} {reason}: {origin}: {one_line(detail)}"
            )
        if len(shown) == len(document["rejected"]):
            return


BATCHES = 12  # batches of the demo, which stops and resumes half way
MAX_SHOWN_TOKENS = 220  # so that a row fits a screen


@command(app, *CACHE)
def demo(output: Output, flags: Flags, *, files: str | None = None) -> None:
    """Prepare, inspect and batch bundled example rows.

    Args:
        files: Only write the example rows and tokenizer to this new directory.
    """
    from tokenmill.build.calls import run_recipe
    from tokenmill.cli.commands.inspect import show_row
    from tokenmill.cli.commands.stats import show_stats
    from tokenmill.inspect.row import view_row
    from tokenmill.inspect.stats import store_stats

    examples = Path(str(resources.files("tokenmill") / "examples"))
    if files is not None:
        if Path(files).exists():
            raise UsageError(("files",), f" must be a new directory, but {files} exists.")
        shutil.copytree(examples, files)
        Path(files, "conversations.jsonl").rename(Path(files, "chat.jsonl"))
        output.result({"path": files}, lambda: output.stdout.print(f"Wrote {files}"))
        return
    sources = [str(examples / "conversations.jsonl"), str(examples / "dirty.jsonl")]
    tokenizer = str(examples / "tokenizer")

    def step(number: int, command: str) -> None:
        output.stderr.rule(f"[bold]{number}. {command}", align="left")

    step(1, "tokenmill prepare conversations.jsonl dirty.jsonl --tokenizer tokenizer/")
    first = run_recipe(sources, tokenizer, **flags, progress=False)
    _report(output, first)
    step(2, "the same command again: the store is in the cache")
    second = run_recipe(sources, tokenizer, **flags, progress=False)
    output.message(f"hit: {second.hit}, {second.seconds * 1000:.0f} ms, {second.path}")
    if not output.as_json:
        step(3, "tokenmill stats STORE")
        show_stats(output.stdout, store_stats(second.store))
        number = _row_to_show(second.store)
        step(4, f"tokenmill inspect STORE --row {number}   (green is trained)")
        show_row(output, view_row(second.store, number))
    step(5, "stop half way through the batches, then resume from the saved state")
    state = _check_resume(second.store)
    output.message(f"state: {state}")
    output.message(f"batches {BATCHES // 2 + 1} to {BATCHES} after resuming: identical")
    _report_what_next(output)
    output.result(second.summary(), lambda: None)


def _report_what_next(output: Output) -> None:
    program = sys.argv[0] if shutil.which("tokenmill") is None else "tokenmill"
    output.stderr.rule("[bold]next: your own rows and model", align="left")
    for arguments, purpose in {
        "prepare FILE.jsonl --tokenizer MODEL --name first": "a directory or hub id as MODEL",
        "inspect first --html page.html": "then open page.html in a browser",
        "stats first --pack 8192": "lengths, roles, sources, and packs",
        "demo --files sample": "write the rows of this demo to a directory",
    }.items():
        output.message((f"{program} {arguments}", "cyan"), f"   # {purpose}")


def _row_to_show(store: Store) -> int:
    """Return the row with the most turns among those that fit a screen."""
    fits = [n for n, length in enumerate(store.lengths) if length <= MAX_SHOWN_TOKENS]
    return max(fits or [0], key=lambda n: len(store[n].turns))


def _check_resume(store: Store) -> dict[str, Any]:
    """Compare batches after a resume with uninterrupted ones; return the state."""
    import numpy as np

    from tokenmill import Loader

    uninterrupted = Loader(store, batch_size=4, seed=42).repeat()
    expected = [next(uninterrupted) for _ in range(BATCHES)]
    stopped = Loader(store, batch_size=4, seed=42)
    batches = stopped.repeat()
    for _ in range(BATCHES // 2):
        next(batches)
    state = stopped.state_dict()
    resumed = Loader(store, batch_size=4, seed=42)
    resumed.load_state_dict(state)
    for reference, batch in zip(expected[BATCHES // 2 :], resumed.repeat(), strict=False):
        if not all(np.array_equal(reference[name], batch[name]) for name in reference):
            raise StateError("A batch after the resume differs from the uninterrupted run.")
    return dict(state)
