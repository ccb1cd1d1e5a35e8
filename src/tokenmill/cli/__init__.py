"""The command line: messages on stderr, results or one JSON object on stdout.

Exit codes: 0 done, 1 bad data or cache, 2 wrong arguments. Commands import what they call inside
the function, so that ``--help`` loads neither pyarrow nor a tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    try:
        from tokenmill.cli.app import run

        return run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:  # while modules were imported; `run` reports later ones
        print("interrupted", file=sys.stderr)
        return 130
