"""Commands that build: `prepare`, `why` (what `prepare` would do), `prompts` and `demo`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import redirect_stdout
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill._core.options import declared
from tokenmill._core.origin import nothing_left
from tokenmill.cli.app import app
from tokenmill.cli.options import (
    CACHE,
    MEDIA,
    RECIPE,
    RECIPE_OPTIONS,
    RUN_OPTIONS,
    TOKENIZER,
    WHERE,
    EmbedMedia,
    Given,
    OutDirectory,
    Sources,
    command,
    recipe_arguments,
)
from tokenmill.cli.output import Output, one_line
from tokenmill.data.prompt_rows import PromptSpec
from tokenmill.errors import StateError, UsageError

if TYPE_CHECKING:
    from tokenmill.build.outcome import Prepared, Unfinished
    from tokenmill.data.prompts import PromptDataset
    from tokenmill.store import Store

HINTS = {
    "bad_json": "one line is one JSON object, in UTF-8",
    "bad_shape": "name the columns (--format, --messages-key …) or fix the row",
    "bad_media": "look at the picture, --media-root and --media-urls; pictures need --processor",
    "media_mismatch": "a row has as many pictures as <image> or image parts without a picture",
    "bad_group": "answers to compare have text and differ; labels are true or false",
    "template_error": "the chat template itself refuses this conversation",
    "template_drops_content": "the template prints this content nowhere; use one that does",
    "mask_unproven": "no method could show which text is the assistant's; see docs/masks.md",
    "trailing_user": "--trailing trim keeps such rows without their last turn",
    "no_trained_tokens": "look at --train-on, and at weights in the messages",
    "overlong": "--overlong truncate keeps the first --max-length tokens",
    "limit": "the row is larger, nested deeper or costlier to render than the limits allow",
}
EXAMPLES = 1  # rejected rows shown per reason; all of them are in the store
PRIVATE = RUN_OPTIONS["disable_cache"]._replace(help="Leave nothing in the cache; needs --out.")


@command(app, *RECIPE, *(RUN_OPTIONS | {"disable_cache": PRIVATE}).values())
def prepare(
    output: Output,
    given: Given,
    *,
    out: OutDirectory = None,
    embed_media: EmbedMedia = False,
    part: str | None = None,
) -> None:
    """Turn rows into tokens and loss masks, or find the store that was made before.

    Args:
        part: Build only this share of the slices, on many machines.
    """
    from tokenmill.build.calls import run_part, run_recipe
    from tokenmill.build.outcome import Unfinished

    arguments = recipe_arguments(given)
    if out is None and _is_private(arguments):
        raise UsageError(
            "--disable-cache needs --out: the private store is removed when the command ends"
        )
    arguments |= {"progress": output.progress, "judge": False}
    also: dict[str, Any] = {}
    with redirect_stdout(sys.stderr):  # stdout is for the result, and Ray prints
        outcome = run_recipe(**arguments) if part is None else run_part(**arguments, part=part)
    if part is not None:
        missing = getattr(outcome, "missing", 0)
        also = {"part": part, "complete": not missing, "slices_missing": missing}
    if isinstance(outcome, Unfinished):
        _report_unfinished(output, outcome)
        output.result(outcome.summary() | also, lambda: None)
        return
    output.known.update(outcome.summary() | also)
    _report(output, outcome)
    outcome.judge()
    if out is not None:
        outcome = outcome.copied_to(Path(out), embed_media=embed_media)
    output.result(outcome.summary() | also)


def _report_unfinished(output: Output, outcome: Unfinished) -> None:
    summary = outcome.summary()
    output.say(
        f"part {outcome.share}: {_how_built(summary)} in {summary['seconds']:.1f} s; "
        f"{outcome.missing:,} slices of other parts are missing; "
        "the last part to finish makes the store"
    )


def _report(output: Output, prepared: Prepared) -> None:
    summary = prepared.summary()
    tokens, trained = summary["tokens"], summary["trained_tokens"]
    how = "found" if summary["hit"] else _how_built(summary)
    output.say(
        f"{summary['rows_out']:,} rows, {tokens:,} tokens, {trained:,} trained "
        f"({trained / max(tokens, 1):.1%}); {how} in {summary['seconds']:.1f} s"
    )
    _report_rejected(output, prepared)
    for note in prepared.remarks():
        output.say(f"note: {note}")


def _how_built(summary: dict[str, Any]) -> str:
    derived = summary["slices_derived"]
    built = f"{summary['slices_built']:,} of {summary['slices']:,} slices built"
    return f"{built}, {derived:,} derived" if derived else built


def _report_rejected(output: Output, prepared: Prepared) -> None:
    summary = prepared.summary()
    rejected, rows_in = summary["rejected"], summary["rows_in"]
    count = sum(rejected.values())
    if not count:
        return
    output.say(f"{count:,} of {rows_in:,} rows rejected ({count / rows_in:.1%}):")
    examples = prepared.examples(EXAMPLES)
    number = max(len(f"{n:,}") for n in rejected.values())
    name = max(len(reason) for reason in rejected)
    for reason, n in sorted(rejected.items(), key=lambda item: (-item[1], item[0])):
        output.say(f"  {n:>{number},}  {reason:<{name}}  {HINTS.get(reason, '')}")
        for origin, detail in examples.get(reason, ()):
            output.say(f"  {'':{number}}  {'':{name}}  {origin}: {one_line(detail)}")


def _is_private(arguments: Given) -> bool:
    """Return whether a flag or the recipe disables the cache, so that the store is removed."""
    from tokenmill.build.recipe import is_recipe_file, load_recipe_file

    sources = arguments["sources"]
    stated = load_recipe_file(sources) if is_recipe_file(sources) else {}
    return bool({**stated, **arguments}.get("disable_cache"))


SHOWN_CHARS = 60  # of a value; the whole one is in --json


@command(app, *RECIPE, *WHERE, *MEDIA)
def why(output: Output, given: Given) -> None:
    """Say whether `prepare` would find its store, and if not, why."""
    from tokenmill.build.calls import explain_recipe

    found = explain_recipe(**recipe_arguments(given))
    output.result(found, lambda: _show_why(output, found))


def _show_why(output: Output, found: dict[str, Any]) -> None:
    there, slices = found["slices_there"], found["slices"]
    if found["hit"]:
        output.say(f"hit: {found['nearest_path']}")
        return
    cached = f"{there:,} of {slices:,} slices are in the cache"
    output.say(f"miss: {cached}, but no store {found['key'][:12]}")
    if found["nearest"] is None:
        output.say("the cache holds no store to compare with")
        return
    differs = found["differs"]
    output.say(f"nearest: {found['nearest_path']}")
    width = max(len(difference["field"]) for difference in differs)
    for difference in differs:
        ours, theirs = _short(difference["ours"]), _short(difference["theirs"])
        output.say(f"  {difference['field']:<{width}}  {ours}, in the nearest {theirs}")


def _short(value: Any) -> str:
    return one_line(json.dumps(value, ensure_ascii=False), SHOWN_CHARS)


_SPEC = {name: option for name, option in declared(PromptSpec).items() if name != "tool_form"}
OPTIONS = (
    RECIPE_OPTIONS["max_length"]._replace(help="Most tokens of a prompt."),
    *_SPEC.values(),
    _SPEC["template_kwargs"]._replace(
        name="apply_chat_template_kwargs", help="The same as --template-kwargs."
    ),
    RECIPE_OPTIONS["chat_template"],
    *TOKENIZER,
    *WHERE,
    RUN_OPTIONS["on_bad_row"],
)


@command(app, *OPTIONS)
def prompts(output: Output, given: Given, sources: Sources) -> None:
    """Measure the lengths of RL prompts once, so that opening them is quick."""
    from tokenmill.data.prompts import PromptDataset

    start = time.perf_counter()
    found = PromptDataset(sources, **given)
    document: dict[str, Any] = {
        "rows": found.source_rows,
        "kept": len(found),
        "rejected": found.rejected,
        "seconds": round(time.perf_counter() - start, 3),
        "hit": found.hit,
        "path": str(found.path),
        "key": found.key,
    }
    output.known.update(document)
    _report_prompts(output, found, document)
    if not len(found):
        raise nothing_left("prompt", found.rejected, found.rejected_rows(), sources[0])
    output.result(document)


def _report_prompts(output: Output, found: PromptDataset, document: dict[str, Any]) -> None:
    how = "found" if document["hit"] else f"{found.measured:,} rows measured"
    kept = f"{document['kept']:,} of {document['rows']:,} prompts"
    output.say(f"{kept}; {how} in {document['seconds']:.1f} s")
    if output.as_json or not document["rejected"]:
        return
    shown: set[str] = set()
    for origin, reason, detail in found.rejected_rows():
        if reason not in shown:
            shown.add(reason)
            output.say(f"  {document['rejected'][reason]:,} {reason}: {origin}: {one_line(detail)}")
        if len(shown) == len(document["rejected"]):
            return


BATCHES = 12  # how far the demo "trains"; it stops and resumes half way
SHOWN_TOKENS = 220  # a row that fits a screen


@command(app, *CACHE)
def demo(output: Output, given: Given) -> None:
    """Prepare, inspect and train on a few rows that come with tokenmill."""
    from tokenmill.build.calls import run_recipe
    from tokenmill.cli.commands.inspect import show_row
    from tokenmill.cli.commands.stats import show_stats
    from tokenmill.inspect.row import store_tokenizer, view_row
    from tokenmill.inspect.stats import store_stats

    examples = Path(str(resources.files("tokenmill") / "examples"))
    sources = [str(examples / "conversations.jsonl"), str(examples / "dirty.jsonl")]
    tokenizer = str(examples / "tokenizer")

    def step(number: int, command: str) -> None:
        output.people.rule(f"[bold]{number}. {command}", align="left")

    step(1, "tokenmill prepare conversations.jsonl dirty.jsonl --tokenizer tokenizer/")
    first = run_recipe(sources, tokenizer, **given, progress=False)
    _report(output, first)
    step(2, "the same again: the store is found, nothing is built")
    second = run_recipe(sources, tokenizer, **given, progress=False)
    output.say(f"hit: {second.hit}, {second.seconds * 1000:.0f} ms, {second.path}")
    if not output.as_json:
        step(3, "tokenmill stats STORE")
        show_stats(output.screen, store_stats(second.store))
        number = _row_to_show(second.store)
        step(4, f"tokenmill inspect STORE --row {number}   (green is trained)")
        show_row(output, view_row(second.store, number, store_tokenizer(second.store)))
    step(5, "stop after half of the batches, resume from a state of a few integers")
    state = _resumes_exactly(second.store)
    output.say(f"state: {state}")
    output.say(f"batches {BATCHES // 2 + 1} to {BATCHES} after resuming: identical")
    output.result(second.summary(), lambda: None)


def _row_to_show(store: Store) -> int:
    """Return the row with the most turns among those that fit a screen."""
    fits = [n for n, length in enumerate(store.lengths) if length <= SHOWN_TOKENS]
    return max(fits or [0], key=lambda n: len(store[n].turns))


def _resumes_exactly(store: Store) -> dict[str, Any]:
    """Compare batches after a resume with uninterrupted ones; return the state."""
    import numpy as np

    from tokenmill import Loader

    straight = Loader(store, batch_size=4, seed=42).repeat()
    expected = [next(straight) for _ in range(BATCHES)]
    stopped = Loader(store, batch_size=4, seed=42)
    batches = stopped.repeat()
    for _ in range(BATCHES // 2):
        next(batches)
    state = stopped.state_dict()
    resumed = Loader(store, batch_size=4, seed=42)
    resumed.load_state_dict(state)
    for wanted, batch in zip(expected[BATCHES // 2 :], resumed.repeat(), strict=False):
        if not all(np.array_equal(wanted[name], batch[name]) for name in wanted):
            raise StateError("a resumed batch differs from the uninterrupted one")
    return dict(state)
