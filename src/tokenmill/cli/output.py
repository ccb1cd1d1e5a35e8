"""What a command says, and to whom.

An `Output` knows whether the caller wants JSON. ``say`` speaks to people on stderr; ``result`` ends
a command: with ``--json`` it prints the one object, else it calls the given function to show it;
``failure`` ends one that failed. A command finds its own by `Output.current`.
Colours are used on terminals only (and never where ``NO_COLOR`` is set: rich sees to it).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenmill.report.terminal_text import harmless

if TYPE_CHECKING:
    from rich.console import Console


class Output:
    """One command's voice.

    Args:
        as_json: Whether stdout is for a program.

    Attributes:
        known: What a failure can still tell a program; a command adds to it as it learns.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.known: dict[str, Any] = {}

    @classmethod
    def current(cls) -> Output:
        """The output of the command that is running."""
        return _current.get()

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Let a command find this output as `current`."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    @cached_property
    def people(self) -> Console:
        """Console on stderr."""
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    @cached_property
    def screen(self) -> Console:
        """Console on stdout, for what was asked for."""
        from rich.console import Console

        return Console(highlight=False, soft_wrap=True)

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Keep stdout for the result: what libraries print meanwhile (Ray does) goes to stderr."""
        with redirect_stdout(sys.stderr):
            yield

    def say(self, text: str) -> None:
        """Tell people something; paths and words of the data cannot speak to the terminal."""
        self.people.print(harmless(text), markup=False)

    def result(self, document: dict[str, Any], show: Callable[[], None]) -> None:
        """End a command."""
        if self.as_json:
            print_json(document)
        else:
            show()

    def failure(self, error: dict[str, Any]) -> None:
        """End a command that failed: with ``--json`` the one object, else nothing yet."""
        if self.as_json:
            members = ("type", "message", "path", "row", "line", "offset")
            print_json({**self.known, "error": {name: error.get(name) for name in members}})


_current: ContextVar[Output] = ContextVar("output")


def one_line(text: str, most: int = 160) -> str:
    """Text that fits a line of a summary: no line ends, not longer than ``most``."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def print_json(document: dict[str, Any]) -> None:
    """The one object on stdout."""
    json.dump(document, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
