"""Test the lowest dependency versions of pyproject.toml: `make lowest`.

For each installed Python, create an environment with the lowest versions that pyproject.toml allows
for the core, and run the tests that need no extra. Only direct dependencies are pinned; their own
dependencies and the test tools are the newest.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = PROJECT / "build" / "lowest"  # one per Python
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil")
WITH_EXTRAS = ("conformance", "integrations", "remote",
               "test_documents.py", "test_trainer_pages.py")  # fmt: skip
"""Tests of optional libraries, by their names in ``tests``."""
CORE_ONLY = {"TOKENMILL_TEST_CORE_ONLY": "1"}
"""Makes other tests skip if an optional library is missing."""

_FLOOR = re.compile(r"^(?P<name>[\w.-]+)(?:\[[\w,]+\])?>=(?P<floor>[\w.]+)\s*(?P<marker>;.*)?$")


def floors(requirements: Iterable[str]) -> Iterator[str]:
    """Yield ``name==floor`` with the marker of each requirement, which must have one floor."""
    for requirement in requirements:
        match = _FLOOR.match(requirement)
        if match is None:
            raise SystemExit(f"a requirement needs exactly one lower bound: {requirement}")
        yield f"{match['name']}=={match['floor']}{match['marker'] or ''}"


def tools(extra: Iterable[str]) -> list[str]:
    """Return the requirements of an extra that the core tests need."""
    return [requirement for requirement in extra if re.split(r"[>\[]", requirement)[0] in TOOLS]


def core_tests(packages: Iterable[str]) -> list[str]:
    """Return the paths of the core tests, from the names in ``tests``."""
    return [
        f"tests/{name}"
        for name in sorted(packages)
        if name not in WITH_EXTRAS and (name.startswith("test_") or "." not in name)
    ]


def usable(python: str | Path) -> str | None:
    """Return the version of a Python that is new enough and can create environments."""
    program = (
        "import sys, ensurepip, venv, platform\n"
        "print(platform.python_version())\n"
        "sys.exit(sys.version_info < (3, 10))"
    )
    try:
        done = subprocess.run([python, "-c", program], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def interpreter(python: str) -> tuple[str | Path, str] | None:
    """Return the path and version of a Python by command or path, or None.

    Also looks into the versions of pyenv, whose commands work only for the selected version.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for path in (python, *sorted(pyenv.glob(f"versions/*/bin/{python}"))):
        if version := usable(path):
            return path, version
    return None


def environment(python: str | Path, version: str, project: dict[str, Any]) -> Path:
    """Return the interpreter of an environment with the floors; create it if they changed."""
    directory = ENVIRONMENTS / version
    pins = "\n".join(floors(project["dependencies"])) + "\n"
    complete = directory / "floors.txt"
    own = directory / "bin" / "python"
    if complete.is_file() and complete.read_text(encoding="utf-8") == pins:
        return own
    subprocess.run([python, "-m", "venv", "--clear", directory], check=True)
    constraints = directory / "constraints.txt"
    constraints.write_text(pins, encoding="utf-8")
    pip = [own, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    needed = ["--editable", PROJECT, *tools(project["optional-dependencies"]["test"])]
    subprocess.run([*pip, *needed, "--constraint", constraints], check=True)
    constraints.rename(complete)  # last, so that an interrupted installation is repeated
    return own


def main(arguments: Sequence[str]) -> int:
    """Test each Python, given by command or path; arguments after ``--`` are for pytest."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    pythons, for_pytest = arguments[:end], arguments[end + 1 :]
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = core_tests(path.name for path in (PROJECT / "tests").iterdir() if path.name[0] != "_")
    results: dict[str, str] = {}
    for python in pythons:
        found = interpreter(python)
        if found is None:
            results[python] = "skipped: not installed, or it cannot create environments"
            continue
        own = environment(*found, project)
        # Newer libraries deprecate functions that old versions of others still call.
        options = ["-m", "not slow and not soak and not shared", "-W", "ignore::DeprecationWarning"]
        command = [own, "-m", "pytest", *options, *tests, *for_pytest]
        failed = subprocess.run(command, cwd=PROJECT, env=os.environ | CORE_ONLY).returncode
        results[python] = f"failed ({failed})" if failed else "passed"
    for python, result in results.items():
        print(f"lowest versions on {python}: {result}")
    tested = [result for result in results.values() if not result.startswith("skipped")]
    return 0 if tested and set(tested) == {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
