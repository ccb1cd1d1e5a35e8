"""Run programs in a new interpreter. The `zygote` fixture is faster if it need not be new."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import tokenmill

PACKAGES = Path(tokenmill.__file__).resolve().parent.parent
PROJECT = Path(__file__).resolve().parent.parent


def environment(**variables: str) -> dict[str, str]:
    path = os.pathsep.join([str(PACKAGES), str(PROJECT)])
    return {**os.environ, "PYTHONPATH": path, **variables}


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
