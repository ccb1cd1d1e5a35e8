"""What a command says, and to whom.

An `Output` knows whether the caller wants JSON. ``say`` speaks to people on stderr; ``result`` ends
a command: with ``--json`` it prints the one object on stdout, else it shows the result to people;
``failure`` ends one that failed. `tokenmill.cli.options.command` hands every command its own.
Colours are used on terminals only (and never where ``NO_COLOR`` is set: rich sees to it).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tokenmill.inspect.terminal_text import harmless

if TYPE_CHECKING:
    from rich.console import Console


class Output:
    """Where one command's words go.

    Args:
        as_json: Whether stdout is for a program.

    Attributes:
        known: What a failure can still tell a program; a command adds to it as it learns.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.known: dict[str, Any] = {}

    @property
    def progress(self) -> bool | None:
        """What `tokenmill.prepare` calls so: none for a program, else on terminals."""
        return False if self.as_json else None

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

    def say(self, text: str) -> None:
        """Tell people something; control characters in paths and data are made visible."""
        self.people.print(harmless(text), markup=False)

    def result(self, document: dict[str, Any], show: Callable[[], object] | None = None) -> None:
        """End a command.

        Args:
            document: For a program.
            show: Shows it to people. Without, the document's ``path`` alone goes to stdout: it is
                what the next command takes.
        """
        if self.as_json:
            print_json(document)
        elif show is None:
            print(document["path"], flush=True)
        else:
            show()

    def failure(self, error: dict[str, Any]) -> None:
        """End a command that failed: with ``--json`` the one object, else nothing yet."""
        if self.as_json:
            members = ("type", "message", "path", "row", "line", "offset")
            print_json({**self.known, "error": {name: error.get(name) for name in members}})


def one_line(text: str, most: int = 160) -> str:
    """Text that fits a line of a summary: no line ends, not longer than ``most``."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def print_json(document: dict[str, Any]) -> None:
    """The one object on stdout."""
    json.dump(document, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
