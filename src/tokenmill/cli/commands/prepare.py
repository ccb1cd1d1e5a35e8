"""``tokenmill prepare``: builds or finds a store.

The flags are the Python names with dashes. The summary on stderr groups rejected rows by reason
with an example and a hint; ``--max-rejected`` turns a surprise into exit code 1.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

from tokenmill.cli.app import app
from tokenmill.cli.output import Output
from tokenmill.errors import UsageError

if TYPE_CHECKING:
    from tokenmill.build.outcome import Prepared

HINTS = {
    "bad_json": "the line is not one JSON object",
    "bad_shape": "name the columns (--messages-key, --format …) or mend the row",
    "template_error": "the chat template itself refuses this conversation",
    "template_drops_content": "the template prints this content nowhere; use one that does",
    "mask_unproven": "no method could show what is the assistant's; see docs/masks.md",
    "trailing_user": "--trailing trim keeps such rows without their last turn",
    "no_trained_tokens": "nothing in the row would be trained",
    "overlong": "--overlong truncate keeps the first --max-length tokens",
    "limit": "a bound on line length, nesting or a template's work was reached",
}
EXAMPLES = 1  # rejected rows shown per reason; all of them are in the store


@app.command()
def prepare(
    sources: list[str] = typer.Argument(None, metavar="SRC…", help="Files, directories, globs."),
    tokenizer: str | None = typer.Option(None, help="Directory, tokenizer.json or hub id."),
    config: str | None = typer.Option(None, help="recipe.yaml; other flags override it."),
    tokenizer_backend: str = typer.Option("auto", help="auto | transformers | file"),
    trust_remote_code: bool = typer.Option(False, help="Let a tokenizer bring its own code."),
    format: str = typer.Option(  # noqa: A002
        "auto", help="auto | messages | sharegpt | alpaca | prompt_completion | text"
    ),
    messages_key: str | None = typer.Option(None, help="Column of the conversation."),
    tools_key: str = typer.Option("tools"),
    system_key: str = typer.Option("system"),
    text_key: str = typer.Option("text"),
    prompt_key: str = typer.Option("prompt"),
    completion_key: str = typer.Option("completion"),
    chat_template: str | None = typer.Option(None, help="File with a Jinja chat template."),
    template_kwargs: str | None = typer.Option(None, help="JSON object of template variables."),
    date: str | None = typer.Option(None, help="YYYY-MM-DD, for templates that print the date."),
    train_on: str | None = typer.Option(
        None, help="all_assistant_messages | last_assistant_message | completion | everything"
    ),
    turn_end: str = typer.Option("stop", help="stop | turn"),
    expand: str = typer.Option("none", help="none | turns"),
    trailing: str = typer.Option("reject", help="reject | trim"),
    append_eos: bool = typer.Option(True),
    max_length: int | None = typer.Option(None, help="Most tokens of a row."),
    overlong: str = typer.Option("drop", help="drop | truncate"),
    carry: list[str] = typer.Option([], help="Column to keep beside the tokens; repeatable."),
    on_bad_row: str = typer.Option("reject", help="reject | raise"),
    max_rejected: str | None = typer.Option(None, help="10 or 1%: more is exit code 1."),
    num_workers: int | None = typer.Option(None, help="0 runs inline; default: all cores."),
    cache_dir: str | None = typer.Option(None),
    force_recache: bool = typer.Option(False, help="Build again and compare."),
    disable_cache: bool = typer.Option(False, help="Leave nothing in the cache; needs --out."),
    executor: str = typer.Option("local", help="local | inline"),
    engine: str = typer.Option("auto", help="auto | fastokens | hf; never changes the result"),
    out: str | None = typer.Option(None, help="Also make a self-contained copy here."),
    as_json: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> None:
    """Turn rows into tokens and loss masks, or find the store that is there."""
    from tokenmill.api import run_recipe

    given = dict(locals())
    for name in ("sources", "tokenizer", "config", "out", "as_json", "executor", "run_recipe"):
        given.pop(name, None)
    given["template_kwargs"] = _json_object(template_kwargs)
    given["max_rejected"] = _share(max_rejected)
    given["carry"] = tuple(carry)
    if disable_cache and out is None:
        raise UsageError("--disable-cache needs --out: the store would be gone at once")
    if config is not None and sources:
        given["sources"] = tuple(sources)
    output = Output(as_json=as_json)
    prepared = run_recipe(
        config if config is not None else sources or None,
        tokenizer,
        executor=executor,
        progress=False if as_json else None,
        out=out,
        **given,
    )
    # First what can still fail: it reads rows, and stdout must hold one object in any case.
    report_rejected(output, prepared)
    output.result(prepared.summary(), lambda: print_path(prepared))


def print_path(prepared: Prepared) -> None:
    """The store's path on stdout: what the next command takes."""
    typer.echo(str(prepared.path))


def report_rejected(output: Output, prepared: Prepared) -> None:
    """Say what was made and which rows are missing from it, and why."""
    summary = prepared.summary()
    found = "found" if summary["hit"] else f"built in {summary['seconds']:.1f} s"
    output.say(
        f"{found}: {summary['rows_out']:,} rows, {summary['tokens']:,} tokens, "
        f"{summary['trained_tokens']:,} trained; {sum(summary['rejected'].values()):,} rejected"
    )
    for reason, count in sorted(summary["rejected"].items(), key=lambda item: -item[1]):
        output.say(f"  {count:,} {reason}: {HINTS.get(reason, '')}")
        for origin, detail in prepared.examples(reason, EXAMPLES):
            output.say(f"      {origin}: {detail}")
    for note in prepared.remarks():
        output.say(f"  {note}")


def _json_object(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--template-kwargs is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"--template-kwargs is {text!r}; it is a JSON object")
    return value


def _share(text: str | None) -> float | int | None:
    """``10`` is a count, ``1%`` a share of the rows."""
    if text is None:
        return None
    try:
        if text.endswith("%"):
            return float(text[:-1]) / 100
        return int(text)
    except ValueError as error:
        raise UsageError(f"--max-rejected is {text!r}; it is a count or a percentage") from error
