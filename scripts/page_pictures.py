"""Draw the pictures of docs/inspect.md: the inspector page of the bundled examples, light and dark.

Prepares the examples with and without earlier turns trained, writes the *page* of the first store,
serves it beside the second, opens both in Debian's chromium and takes *pictures* of the parts that
the documentation speaks of. Needs the extras ``serve`` and ``test``:
`python scripts/page_pictures.py [DIRECTORY]`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tokenmill.api import run_recipe
from tokenmill.report.page import make_page
from tokenmill.report.page.serve import Viewer, serve
from tokenmill.store import Store

PROJECT = Path(__file__).resolve().parent.parent
EXAMPLES = PROJECT / "src" / "tokenmill" / "examples"
IMAGES = PROJECT / "docs" / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip
WIDE = {"width": 1280, "height": 800}
NARROW = {"width": 390, "height": 800}
ROW = 4  # tools, a system prompt and several turns


def prepared(**more: Any) -> Store:
    """A store of the bundled examples."""
    return run_recipe(
        ["conversations.jsonl", "dirty.jsonl"], "tokenizer", cache_dir="cache", carry=("topic",),
        tokenizer_backend="file", executor="inline", progress=False, **more,
    ).store  # fmt: skip


def served(store: Store, other: Store) -> str:
    """Address of a server in a thread of this process."""
    found: list[str] = []
    ready = threading.Event()

    def tell(url: str, _: int) -> None:
        found.append(url)
        ready.set()

    viewer = Viewer(store, other, "cache")
    threading.Thread(target=serve, args=(viewer, 0, tell), daemon=True).start()
    ready.wait(30)
    return found[0]


def row(page: Any) -> None:
    """One row, with a token that tells what it is."""
    page.fill("#jump", str(ROW))
    page.press("#jump", "Enter")
    page.wait_for_function(
        f"() => document.getElementById('row-title').textContent === 'Row {ROW}'"
    )
    page.evaluate("document.querySelector('#view').scrollTop = 330")
    page.wait_for_timeout(200)
    page.hover(".role-assistant .tok.trained >> nth=4")


def tab(name: str) -> Callable[[Any], None]:
    """One part of the page."""
    return lambda page: page.click(f"#tab-{name}")


def rejected(page: Any) -> None:
    """Rejected rows, one opened."""
    page.click("#tab-rejected")
    page.click(".rejected-row summary >> nth=1")
    page.wait_for_selector(".raw")


def compared(page: Any) -> None:
    """A row whose mask changed."""
    page.fill("#jump", "2")
    page.press("#jump", "Enter")
    page.wait_for_function("() => document.getElementById('row-title').textContent === 'Row 2'")
    page.wait_for_selector(".tok.mask-changed")
    page.evaluate("document.querySelector('#view').scrollTop = 130")


def main() -> None:
    """Take all pictures."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else IMAGES).absolute()
    target.mkdir(parents=True, exist_ok=True)
    chromium = shutil.which("chromium") or "/usr/bin/chromium"
    with tempfile.TemporaryDirectory() as room, sync_playwright() as playwright:
        shutil.copytree(EXAMPLES, room, dirs_exist_ok=True)
        os.chdir(room)  # pictures show relative paths, the same wherever they are taken
        store, other = prepared(), prepared(train_on="last_assistant_message")
        make_page(store, Path("page.html"), cache_dir="cache")
        on_disk, by_server = Path("page.html").absolute().as_uri(), served(store, other)
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        pictures: list[tuple[str, str, dict[str, int], Callable[[Any], None]]] = [
            ("row", on_disk, WIDE, row),
            ("overview", on_disk, WIDE, tab("overview")),
            ("rejected", on_disk, WIDE, rejected),
            ("packing", on_disk, WIDE, tab("packing")),
            ("compare", by_server, WIDE, compared),
            ("narrow", on_disk, NARROW, lambda page: page.fill("#search", "tides")),
        ]
        for scheme in ("light", "dark"):
            for name, url, size, prepare in pictures:
                page = browser.new_context(color_scheme=scheme, viewport=size).new_page()
                page.goto(url)
                page.wait_for_selector("body[data-ready=yes]")
                prepare(page)
                page.wait_for_timeout(400)
                page.screenshot(path=target / f"inspect-{name}-{scheme}.png")
                page.context.close()
        browser.close()
        os.chdir(target)


if __name__ == "__main__":
    main()
