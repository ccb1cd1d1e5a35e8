"""Small steps that tests in a browser share: go to a row, read what is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Visit = Callable[..., Any]


def title(page: Any) -> str:
    return str(page.inner_text("#row-title"))


def wait_for_status(page: Any, text: str) -> None:
    page.wait_for_function(
        "text => document.getElementById('status').textContent === text", arg=text
    )


def wait_for_title(page: Any, title: str) -> None:
    """Wait until a row or group is shown, tokens and all."""
    page.wait_for_function(
        """title => document.getElementById('row-title')?.textContent === title
        && document.querySelector('#row-body .tok')""",
        arg=title,
    )


def go_to(page: Any, row: int, title: str = "") -> None:
    """Open a row, or the group that it belongs to, by its number; and wait until it is shown."""
    # The row asked for may be the one that is shown: wait for another body, not for its title.
    page.evaluate("document.getElementById('row-body')?.classList.add('before')")
    page.fill("#jump", str(row))
    page.press("#jump", "Enter")
    page.wait_for_function(
        """text => document.getElementById('row-title')?.textContent === text
        && document.querySelector('#row-body:not(.before) section.turn .tok')""",
        arg=title or f"Row {row}",
    )


def tokens(page: Any, side: str = "#row-body") -> list[list[Any]]:
    """Id, whether shown as trained, and place of every token shown (ids must be switched on)."""
    found: list[list[Any]] = page.evaluate(
        """(side) => {
          const shown = document.querySelector(side);
          if (!shown) throw new Error(`no ${side} in: ${document.body.innerText}`);
          return [...shown.querySelectorAll("section.turn .tok")]
            .map((one) => [Number(one.querySelector("sub").textContent),
                           one.classList.contains("trained"), Number(one.dataset.at)]);
        }""",
        side,
    )
    return found
