"""Print the results of commands, as text or as JSON."""

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
    """Prints what one command has to say."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.known: dict[str, Any] = {}  # printed beside the error if the command fails

    @property
    def progress(self) -> bool | None:
        """The argument of `tokenmill.prepare`: none for a program, else on terminals."""
        return False if self.as_json else None

    @cached_property
    def people(self) -> Console:
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    @cached_property
    def screen(self) -> Console:
        from rich.console import Console

        return Console(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print a line on stderr; control characters in paths and data are made visible."""
        self.people.print(harmless(text), markup=False)

    def show(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print a line of texts on stdout, some with a style of their own; as safe as `say`."""
        from rich.text import Text

        line = Text(style=style)
        for part in parts:
            text, own = (part, None) if isinstance(part, str) else part
            line.append(harmless(text), own)
        self.screen.print(line)

    def result(self, document: dict[str, Any], show: Callable[[], object] | None = None) -> None:
        """Print the document with ``--json``, else call ``show``.

        Without ``show``, the document's ``path`` goes to stdout: the next command takes it.
        """
        if self.as_json:
            print_json(document)
        elif show is None:
            print(document["path"], flush=True)
        else:
            show()

    def failure(self, error: dict[str, Any]) -> None:
        if self.as_json:
            members = ("type", "message", "path", "row", "line", "offset")
            print_json({**self.known, "error": {name: error.get(name) for name in members}})


def one_line(text: str, most: int = 160) -> str:
    """Return the text without line ends, cut to ``most`` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"


def print_json(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
