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
    from rich.text import Text


class Output:
    """Prints messages on stderr, and the result of a command on stdout."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self.partial: dict[str, Any] = {}  # results so far, printed with the error of a failure

    @property
    def progress(self) -> bool | None:
        """The ``progress`` argument of `tokenmill.prepare`."""
        return False if self.as_json else None

    @cached_property
    def stderr(self) -> Console:
        from rich.console import Console

        return Console(stderr=True, highlight=False, soft_wrap=True)

    @cached_property
    def stdout(self) -> Console:
        from rich.console import Console

        return Console(highlight=False, soft_wrap=True)

    def message(self, *parts: str | tuple[str, str]) -> None:
        """Print texts, or pairs of text and style, as a line on stderr.

        Control characters are made visible.
        """
        self.stderr.print(_line(parts))

    def line(self, *parts: str | tuple[str, str], style: str = "") -> None:
        """Print a line as `message`, but on stdout."""
        self.stdout.print(_line(parts, style))

    def result(self, document: dict[str, Any], show: Callable[[], object] | None = None) -> None:
        """Print the document with ``--json``, else call ``show``.

        Without ``show``, print the document's ``path``, so that the next command can take it.
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
            print_json({**self.partial, "error": {name: error.get(name) for name in members}})


def _line(parts: tuple[str | tuple[str, str], ...], style: str = "") -> Text:
    from rich.text import Text

    line = Text(style=style)
    for part in parts:
        text, own_style = (part, None) if isinstance(part, str) else part
        line.append(harmless(text), own_style)
    return line


def one_line(text: str, max_chars: int = 160) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= max_chars else flat[: max_chars - 1] + "…"


def print_json(document: dict[str, Any]) -> None:
    json.dump(document, sys.stdout, ensure_ascii=False)
    sys.stdout.write("\n")
    sys.stdout.flush()
