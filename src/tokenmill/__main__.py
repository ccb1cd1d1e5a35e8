"""``python -m tokenmill``: the command, also where scripts are not on the path."""

from __future__ import annotations

import sys

from tokenmill.cli import main

sys.exit(main())
