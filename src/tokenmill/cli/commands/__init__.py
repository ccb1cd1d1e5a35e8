"""One module per command; importing this package declares them all.

A module here holds a command's signature and the words it says; the work is done by one call into
`tokenmill.api` or a room, imported inside the function so that ``--help`` stays quick.
"""

from __future__ import annotations

from tokenmill.cli.commands import (
    cache,
    demo,
    doctor,
    export,
    inspect,
    lint,
    pack,
    prepare,
    prompts,
    pull,
    push,
    rows,
    stats,
    verify,
    why,
)

__all__ = [
    "cache",
    "demo",
    "doctor",
    "export",
    "inspect",
    "lint",
    "pack",
    "prepare",
    "prompts",
    "pull",
    "push",
    "rows",
    "stats",
    "verify",
    "why",
]
