"""Programs in a fresh interpreter; where it need not be fresh, the `zygote` fixture is cheaper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tokenmill

PACKAGES = Path(tokenmill.__file__).resolve().parent.parent
PROJECT = Path(__file__).resolve().parent.parent


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGES), str(PROJECT)]), **more}


def python(
    program: str, *arguments: object, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=environment(**variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
    )
