"""The page itself: one HTML file with its style, its program and its data inside.

The *client* is a handful of small files beside this module (`page.html`, `page.css`, `*.js`), put
together when a page is written or served. Nothing is fetched from elsewhere, and a content security
policy in the page allows exactly this style and this program, by their hashes: text out of
somebody's data cannot become code even where an escape were forgotten. The *data* is compressed
(`compressed`) and stands as base64 in a script element that no browser runs: none of its characters
can end the element. The program inflates it and puts text on the page as text only.

`make_page` writes a page to disk with `write_page`, `serve` hands one out; both make it by `page`.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from tokenmill.errors import UsageError
from tokenmill.files import Staging, replace_file, writing_errors

SCRIPTS = ("text.js", "data.js", "pictures.js", "rows.js", "list.js", "charts.js", "rollouts.js",
           "panels.js", "compare.js", "groups.js", "main.js")  # fmt: skip
GENERATOR = b'<meta name="generator" content="tokenmill inspect">'
HEAD_BYTES = 2048  # of an existing file, to see whether it is a page of ours
LEVEL = 6  # of deflate: 9 gains one percent for three times the time


@cache
def client() -> tuple[str, str, str]:
    """Frame, style and program of the page."""
    folder = resources.files("tokenmill.report.page") / "client"

    def read(name: str) -> str:
        return (folder / name).read_text(encoding="utf-8")

    program = "\n".join(read(name) for name in SCRIPTS)
    return read("page.html"), read("page.css"), f'"use strict";\n(() => {{\n{program}\n}})();'


def security_policy(*, served: bool) -> str:
    """What the page may do: its own style and program, and where served ask its own server."""
    _, style, program = client()
    connect = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src '{_hash(program)}'; style-src '{_hash(style)}'; "
        f"connect-src {connect}; img-src data:; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"sha256-{digest}"


def page(about: dict[str, Any], *, rows: dict[str, Any] | None = None) -> bytes:
    """The whole page as bytes.

    Args:
        about: ``overview``, ``selection`` (the sentence) and, where there is one, ``compare``.
        rows: What `EmbeddedRows.document` says of the rows that come along; None where the page
            asks a server for them.
    """
    frame, style, program = client()
    parts = {
        "TITLE": html.escape(f"{about['overview']['name']} · tokenmill inspect"),
        "POLICY": html.escape(security_policy(served=rows is None)),
        "STYLE": style,
        "DATA": json.dumps({"about": compressed(about), "rows": rows}, separators=(",", ":")),
        "PROGRAM": program,
    }
    pieces = []
    for number, piece in enumerate(frame.split("%%")):
        # Placeholders stand at odd places; replacing one after the other could replace in data.
        pieces.append(parts[piece] if number % 2 else piece)
    return "".join(pieces).encode("utf-8", "replace")


def compressed(data: Any) -> str:
    """Bytes, or a value as JSON: deflated, as base64, which may stand anywhere in a page."""
    if not isinstance(data, bytes):
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        data = text.encode("utf-8", "replace")
    return base64.b64encode(zlib.compress(data, LEVEL)).decode("ascii")


def write_page(target: Path, content: bytes) -> None:
    """Publish a page; it replaces a page of ours and nothing else.

    Raises:
        UsageError: Something else stands there.
        CacheError: The disk does not take it.
    """
    if target.is_dir():
        raise UsageError("--html names a file, this is a directory", path=target)
    with writing_errors(target):
        if target.exists():
            with open(target, "rb") as file:
                ours = GENERATOR in file.read(HEAD_BYTES)
            if not ours:
                raise UsageError(
                    "this file is not a page of ours and is left alone; name another", path=target
                )
        with Staging(target.parent, beside=target) as staging:
            staged = staging.write(target.name, content)
            replace_file(staged, target)
