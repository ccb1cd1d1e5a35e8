"""``python -m tokenmill`` is the command ``tokenmill``.

For machines where the environment's scripts are not on the path. Nothing is decided here: the
arguments go to `tokenmill.cli.main`, and its return value is the exit code.
"""

from __future__ import annotations

import sys

from tokenmill.cli import main

sys.exit(main())
