"""Helpers of browser tests: go to a row, read the shown tokens."""

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
    """Wait until a row or group and its tokens are shown."""
    page.wait_for_function(
        """title => document.getElementById('row-title')?.textContent === title
        && document.querySelector('#row-body .tok')""",
        arg=title,
    )


def go_to(page: Any, row: int, title: str = "") -> None:
    """Open a row, or its group, by number, and wait until it is shown."""
    # The row may be shown already, so wait for a new body and not only for the title.
    page.evaluate("document.getElementById('row-body')?.classList.add('before')")
    page.fill("#jump", str(row))
    page.press("#jump", "Enter")
    page.wait_for_function(
        """text => document.getElementById('row-title')?.textContent === text
        && document.querySelector('#row-body:not(.before) section.turn .tok')""",
        arg=title or f"Row {row}",
    )


def tokens(page: Any, side: str = "#row-body") -> list[list[Any]]:
    """Return id, trained or not, and position of every shown token (ids must be switched on)."""
    result: list[list[Any]] = page.evaluate(
        """(side) => {
          const shown = document.querySelector(side);
          if (!shown) throw new Error(`no ${side} in: ${document.body.innerText}`);
          return [...shown.querySelectorAll("section.turn .tok")]
            .map((one) => [Number(one.querySelector("sub").textContent),
                           one.classList.contains("trained"), Number(one.dataset.at)]);
        }""",
        side,
    )
    return result
