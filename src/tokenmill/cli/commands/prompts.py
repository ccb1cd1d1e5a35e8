"""``tokenmill prompts``: builds the length index of RL prompts, or finds it.

The flags are the Python names of `tokenmill.PromptDataset` with dashes. Afterwards a trainer that
opens the same prompts starts at once, under this limit or another. Rows that are no prompts, and
those over ``--max-length``, are counted by reason with an example each.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import AsJson, CacheDir, json_object
from tokenmill.cli.output import Output, one_line
from tokenmill.origin import nothing_left

if TYPE_CHECKING:
    from tokenmill.prompts import PromptDataset


@app.command()
def prompts(
    sources: Annotated[
        list[str], typer.Argument(metavar="SRC", help="Files, directories, globs; path@[a:b].")
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory, tokenizer.json or hub id.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Most tokens of a prompt.")] = None,
    prompt_key: Annotated[str, typer.Option(help="Column of the prompt.")] = "text",
    label_key: Annotated[str | None, typer.Option(help="Column of the label.")] = None,
    tool_key: Annotated[str | None, typer.Option(help="Column of the tools.")] = None,
    metadata_key: Annotated[str, typer.Option(help="Column of the metadata.")] = "metadata",
    multimodal_keys: Annotated[
        str | None, typer.Option(metavar="JSON", help='Media columns: {"image": "images"}.')
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option(help="Render with the generation prompt.")
    ] = False,
    apply_chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Object of template variables.")
    ] = None,
    template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="The same, under its other name.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="File with a Jinja chat template.")
    ] = None,
    date: Annotated[
        str | None, typer.Option(help="YYYY-MM-DD, for templates that print the date.")
    ] = None,
    tokenizer_backend: Annotated[str, typer.Option(help="auto | transformers | file")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option(help="Let a tokenizer bring its own code.")
    ] = False,
    convention: Annotated[Any, typer.Option(help="default | miles | slime")] = "default",
    on_bad_row: Annotated[str, typer.Option(help="reject | raise")] = "reject",
    num_workers: Annotated[int | None, typer.Option(help="0 runs inline; default: all cores.")] = (
        None
    ),
    executor: Annotated[str, typer.Option(help="local | inline | ray")] = "local",
    cache_dir: CacheDir = None,
    as_json: AsJson = False,
) -> None:
    """Measure RL prompts once, so that opening them costs nothing."""
    from tokenmill.prompts import PromptDataset

    output = Output.current()
    start = time.perf_counter()
    found = PromptDataset(
        list(sources),
        tokenizer,
        max_length=max_length,
        prompt_key=prompt_key,
        label_key=label_key,
        tool_key=tool_key,
        metadata_key=metadata_key,
        multimodal_keys=_object(multimodal_keys, "--multimodal-keys"),
        apply_chat_template=apply_chat_template,
        apply_chat_template_kwargs=_object(
            apply_chat_template_kwargs, "--apply-chat-template-kwargs"
        ),
        template_kwargs=_object(template_kwargs, "--template-kwargs"),
        chat_template=chat_template,
        date=date,
        tokenizer_backend=tokenizer_backend,
        trust_remote_code=trust_remote_code,
        convention=convention,
        on_bad_row=on_bad_row,
        num_workers=num_workers,
        executor=executor,
        cache_dir=cache_dir,
    )
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
    report(output, found, document)
    if not len(found):
        raise nothing_left("prompt", found.rejected, found.rejected_rows(), sources[0])
    # The path of the index is what other programs may want, so it alone goes to stdout.
    output.result(document, lambda: typer.echo(document["path"]))


def _object(text: str | None, flag: str) -> dict[str, Any] | None:
    return None if text is None else json_object(text, flag)


def report(output: Output, found: PromptDataset, document: dict[str, Any]) -> None:
    """Say what is kept, and which rows are not and why."""
    how = "found" if document["hit"] else f"{found.measured:,} rows measured"
    output.say(
        f"{document['kept']:,} of {document['rows']:,} prompts; {how} in "
        f"{document['seconds']:.1f} s"
    )
    if output.as_json or not document["rejected"]:
        return
    shown: set[str] = set()
    for origin, reason, detail in found.rejected_rows():
        if reason not in shown:
            shown.add(reason)
            output.say(f"  {document['rejected'][reason]:,} {reason}: {origin}: {one_line(detail)}")
        if len(shown) == len(document["rejected"]):
            return
