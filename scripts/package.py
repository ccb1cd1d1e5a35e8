"""The wheel and the source distribution, built and tried as a stranger would: `make package`.

The source distribution is built from the checkout and the wheel from the source distribution, so
that what is missing in the first is missing in both. Each is then installed into an environment
that holds nothing else, and `tokenmill demo` is run there, away from the checkout, with a cache of
its own. Both lie in ``dist`` afterwards.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
DIST = PROJECT / "dist"
PLACE = PROJECT / "build" / "package"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


def fresh(name: str) -> Path:
    """The interpreter of an environment that holds nothing."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", PLACE / name], check=True)
    return PLACE / name / "bin" / "python"


def build() -> list[Path]:
    """Both distributions."""
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
    away = PLACE / name / "away"
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
    found = subprocess.run(where, cwd=away, env=environment, capture_output=True, text=True)
    if str(PLACE / name) not in found.stdout:
        raise SystemExit(f"{distribution.name}: tokenmill comes from {found.stdout.strip()}")
    print(f"{distribution.name}: installed alone, and the demo ran", flush=True)


if __name__ == "__main__":
    for made in build():
        try_out(made)
