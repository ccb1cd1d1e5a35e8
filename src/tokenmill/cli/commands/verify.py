"""``tokenmill verify``: checks every checksum of a store.

Exit 0 means that each byte that could be served is the byte that was written. The first error of
each slice is told with file, offset, expected and actual; the rest of the store is still checked.
"""

from __future__ import annotations

import typer

from tokenmill.cli.app import app
from tokenmill.cli.options import StorePath, command
from tokenmill.cli.output import Output


@command(app)
def verify(output: Output, store: StorePath) -> None:
    """Check every checksum of a store."""
    from tokenmill.store import open_store

    checked, errors = open_store(store).check_everything()
    document = {
        "ok": not errors,
        "checked_bytes": checked,
        "errors": [error.as_dict() for error in errors],
    }

    def show() -> None:
        for error in errors:
            output.say(str(error))
        output.say(f"{'intact' if not errors else 'CORRUPT'}: {checked:,} bytes checked")

    output.result(document, show)
    if errors:
        raise typer.Exit(1)
