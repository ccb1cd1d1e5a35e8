"""What a command says, and to whom.

An `Output` knows whether the caller wants JSON. ``say`` speaks to people on stderr; ``result`` ends
a command: with ``--json`` it prints the one object, else it calls the given function to show it.
Colours are used on terminals only (and never where ``NO_COLOR`` is set: rich sees to it).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


class Output:
    """One command's voice.

    Args:
        as_json: Whether stdout is for a program.
    """

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

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
        """Tell people something."""
        self.people.print(text, markup=False)

    def result(self, document: dict[str, Any], show: Callable[[], None]) -> None:
        """End a command."""
        if self.as_json:
            print_json(document)
        else:
            show()


def print_json(document: dict[str, Any]) -> None:
    """The one object on stdout."""
    json.dump(document, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
