"""Build and test the wheel and the source distribution: `make package`.

The wheel is built from the source distribution, so that a missing file is missing in both. Each is
installed into an empty environment, and `tokenmill demo` is run outside of the checkout. Both are
written to ``dist``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
DIST = PROJECT / "dist"
BUILD = PROJECT / "build" / "package"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def fresh(name: str) -> Path:
    """Create an empty environment and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", BUILD / name], check=True)
    return BUILD / name / "bin" / "python"


def build() -> list[Path]:
    shutil.rmtree(DIST, ignore_errors=True)
    builder = fresh("builder")
    subprocess.run([builder, *PIP, "install", "hatchling>=1.18"], check=True)
    make = [builder, "-m", "hatchling", "build", "--target", "sdist", "--directory", DIST]
    subprocess.run(make, cwd=PROJECT, check=True)
    [source] = DIST.glob("*.tar.gz")
    subprocess.run([builder, *PIP, "wheel", "--no-deps", "--wheel-dir", DIST, source], check=True)
    [wheel] = DIST.glob("*.whl")
    return [wheel, source]


def try_out(distribution: Path) -> None:
    """Install a distribution alone and run the demo with it."""
    name = "wheel" if distribution.suffix == ".whl" else "sdist"
    python = fresh(name)
    subprocess.run([python, *PIP, "install", distribution], check=True)
    away = BUILD / name / "away"
    away.mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "TOKENMILL"))
    }
    environment["TOKENMILL_CACHE_DIR"] = str(away / "cache")
    demo = [python.with_name("tokenmill"), "demo"]
    subprocess.run(demo, cwd=away, env=environment, check=True)
    where = [python, "-c", "import tokenmill; print(tokenmill.__file__)"]
    done = subprocess.run(where, cwd=away, env=environment, capture_output=True, text=True)
    if str(BUILD / name) not in done.stdout:
        raise SystemExit(f"{distribution.name}: tokenmill is imported from {done.stdout.strip()}")
    print(f"{distribution.name}: installed, and the demo passed", flush=True)


if __name__ == "__main__":
    for distribution in build():
        try_out(distribution)
