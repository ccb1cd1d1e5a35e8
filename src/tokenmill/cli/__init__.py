"""The command line: arguments into specs, one call per command.

Text for people goes to stderr (and tables that were asked for to stdout); with ``--json`` exactly
one JSON object goes to stdout and nothing else. Exit codes: 0 done, 1 the data or the cache is bad,
2 the call is wrong. A command's module is imported when the command runs, so that ``--help``
answers at once and loads neither pyarrow nor a tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the return value is the exit code."""
    from tokenmill.cli.app import run

    return run(list(sys.argv[1:] if arguments is None else arguments))
