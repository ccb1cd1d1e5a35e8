"""``tokenmill demo``: all the steps on bundled rows, without network.

Five steps that a user would do: prepare, prepare again (a hit), count, look at a row, and train for
a while, stop in the middle of an epoch and resume to exactly the same batches. Each step prints the
command or the line of Python that does it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.cli.app import app
from tokenmill.cli.options import CACHE, Given, command
from tokenmill.cli.output import Output
from tokenmill.errors import StateError

if TYPE_CHECKING:
    from tokenmill.store import Store

BATCHES = 12  # how far the demo "trains"; it stops and resumes half way
SHOWN_TOKENS = 220  # a row that fits a screen


@command(app, *CACHE)
def demo(output: Output, given: Given) -> None:
    """Prepare, inspect and train on a few rows that come with tokenmill."""
    from tokenmill.api import run_recipe
    from tokenmill.cli.commands.inspect import show_row
    from tokenmill.cli.commands.prepare import report
    from tokenmill.cli.commands.stats import show_stats
    from tokenmill.report.row import store_tokenizer, view_row
    from tokenmill.report.stats import store_stats

    examples = Path(str(resources.files("tokenmill") / "examples"))
    sources = [str(examples / "conversations.jsonl"), str(examples / "dirty.jsonl")]
    tokenizer = str(examples / "tokenizer")

    def step(number: int, command: str) -> None:
        output.people.rule(f"[bold]{number}. {command}", align="left")

    step(1, "tokenmill prepare conversations.jsonl dirty.jsonl --tokenizer tokenizer/")
    first = run_recipe(sources, tokenizer, **given, progress=False)
    report(output, first)
    step(2, "the same again: the store is found, nothing is built")
    second = run_recipe(sources, tokenizer, **given, progress=False)
    output.say(f"hit: {second.hit}, {second.seconds * 1000:.0f} ms, {second.path}")
    if not output.as_json:
        step(3, "tokenmill stats STORE")
        show_stats(output.screen, store_stats(second.store))
        number = _row_to_show(second.store)
        step(4, f"tokenmill inspect STORE --row {number}   (green is trained)")
        show_row(output.screen, view_row(second.store, number, store_tokenizer(second.store)))
    step(5, "stop after half of the batches, resume from a state of a few integers")
    state = resumes_exactly(second.store)
    output.say(f"state: {state}")
    output.say(f"batches {BATCHES // 2 + 1} to {BATCHES} after resuming: identical")
    output.result(second.summary(), lambda: None)


def _row_to_show(store: Store) -> int:
    """The row with the most turns among those that fit a screen."""
    fits = [n for n, length in enumerate(store.lengths) if length <= SHOWN_TOKENS]
    return max(fits or [0], key=lambda n: len(store[n].turns))


def resumes_exactly(store: Store) -> dict[str, Any]:
    """Take some batches, stop, resume in a new loader, and compare; returns the state."""
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
