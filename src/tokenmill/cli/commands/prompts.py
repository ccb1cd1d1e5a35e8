"""``tokenmill prompts``: builds the length index of RL prompts, or finds it.

The flags are the Python names of `tokenmill.PromptDataset` with dashes. Afterwards a trainer that
opens the same prompts starts at once, under this limit or another. Rows that are no prompts, and
those over ``--max-length``, are counted by reason with an example each.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tokenmill.cli.app import app
from tokenmill.cli.options import (
    RECIPE_OPTIONS,
    RUN_OPTIONS,
    TOKENIZER,
    WHERE,
    Given,
    Sources,
    command,
)
from tokenmill.cli.output import Output, one_line
from tokenmill.options import declared
from tokenmill.origin import nothing_left
from tokenmill.prompts import PromptSpec

if TYPE_CHECKING:
    from tokenmill.prompts import PromptDataset

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
    from tokenmill.api import PromptDataset

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
    report(output, found, document)
    if not len(found):
        raise nothing_left("prompt", found.rejected, found.rejected_rows(), sources[0])
    output.result(document)


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
