"""``tokenmill prepare``: builds or finds a store.

The flags are the Python names with dashes. The summary on stderr groups rejected rows by reason
with an example and a hint; ``--max-rejected`` turns a surprise into exit code 1, after the summary.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import (
    RECIPE,
    RUN_OPTIONS,
    EmbedMedia,
    Given,
    OutDirectory,
    command,
    recipe_arguments,
)
from tokenmill.cli.output import Output, one_line
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from tokenmill.build.outcome import Prepared, Unfinished

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
    out: OutDirectory = None,
    embed_media: EmbedMedia = False,
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Build only this share of the slices, on many machines."),
    ] = None,
) -> None:
    """Turn rows into tokens and loss masks, or find the store that was made before."""
    from tokenmill.api import run_part, run_recipe
    from tokenmill.build.outcome import Unfinished

    arguments = recipe_arguments(given)
    if out is None and is_private(arguments):
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
        report_unfinished(output, outcome)
        output.result(outcome.summary() | also, lambda: None)
        return
    output.known.update(outcome.summary() | also)
    report(output, outcome)
    outcome.judge()
    if out is not None:
        outcome = outcome.copied_to(Path(out), embed_media=embed_media)
    output.result(outcome.summary() | also)


def report_unfinished(output: Output, outcome: Unfinished) -> None:
    """Say what this part did and what the store still waits for."""
    summary = outcome.summary()
    output.say(
        f"part {outcome.share}: {_how_built(summary)} in {summary['seconds']:.1f} s; "
        f"{outcome.missing:,} slices of other parts are missing; "
        "the last part to finish makes the store"
    )


def report(output: Output, prepared: Prepared) -> None:
    """Say what was made and which rows are missing from it, and why."""
    summary = prepared.summary()
    tokens, trained = summary["tokens"], summary["trained_tokens"]
    how = "found" if summary["hit"] else _how_built(summary)
    output.say(
        f"{summary['rows_out']:,} rows, {tokens:,} tokens, {trained:,} trained "
        f"({trained / max(tokens, 1):.1%}); {how} in {summary['seconds']:.1f} s"
    )
    report_rejected(output, prepared)
    for note in prepared.remarks():
        output.say(f"note: {note}")


def _how_built(summary: dict[str, Any]) -> str:
    slices, built, derived = (
        summary[name] for name in ("slices", "slices_built", "slices_derived")
    )
    parts = [f"{built:,} of {slices:,} slices built"]
    if derived:
        parts.append(f"{derived:,} derived")
    return ", ".join(parts)


def report_rejected(output: Output, prepared: Prepared) -> None:
    """Rejected rows by reason, the commonest first, each with an example and a hint."""
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


def is_private(arguments: Given) -> bool:
    """Whether the store will be gone with the command, by a flag or by the recipe named."""
    from tokenmill.api.recipes import is_recipe_file
    from tokenmill.build.recipe import load_recipe_file

    sources = arguments["sources"]
    stated = load_recipe_file(sources) if is_recipe_file(sources) else {}
    return bool({**stated, **arguments}.get("disable_cache"))
