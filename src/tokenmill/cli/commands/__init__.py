"""One module per subject; importing this package declares all commands.

A module here holds a command's signature and the words it says; the work is done by one call into
`tokenmill.api` or a room, imported inside the function so that ``--help`` stays quick.
"""

from tokenmill.cli.commands import (  # noqa: F401
    attach,
    cache,
    demo,
    doctor,
    export,
    inspect,
    lint,
    prepare,
    prompts,
    rows,
    stats,
    trace,
    transfer,
    verify,
    why,
)
