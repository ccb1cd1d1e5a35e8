"""``tokenmill verify``: check every checksum of a store."""

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
