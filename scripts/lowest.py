"""The lowest versions that pyproject.toml allows, as constraints for pip.

``make lowest`` installs the core with exactly these and runs its tests: a floor that is stated is a
floor that works. Only the core's own dependencies are pinned; test tools come as they are.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
_FLOOR = re.compile(r"^(?P<name>[\w.-]+)(?:\[[\w,]+\])?>=(?P<floor>[\w.]+)\s*(?:;.*)?$")


def floors(requirements: Iterable[str]) -> Iterator[str]:
    """``name==floor`` for each requirement; one without a floor is an error."""
    for requirement in requirements:
        found = _FLOOR.match(requirement)
        if found is None:
            raise SystemExit(f"pyproject.toml states no floor, or more than one: {requirement}")
        yield f"{found['name']}=={found['floor']}"


if __name__ == "__main__":
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.stdout.writelines(f"{line}\n" for line in floors(project["dependencies"]))
