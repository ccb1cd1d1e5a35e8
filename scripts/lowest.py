"""The floors of pyproject.toml, tried: `make lowest`.

For each Python that is asked for and there, an environment of its own gets the core with exactly
the lowest versions that pyproject.toml allows it, and the *core tests* are run in it: those of the
rooms that need none of the extras. A floor that is stated is a floor that works. Only the core's
own dependencies are pinned; what they need, and the tools of the tests, come as they are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
PLACE = PROJECT / "build" / "lowest"  # one environment per Python
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "psutil")
WITH_EXTRAS = ("conformance", "integrations", "remote",
               "test_documents.py", "test_host_pages.py")  # fmt: skip
"""Tests about libraries that are no part of the core, by their names in ``tests``."""
CORE_ONLY = {"TOKENMILL_TEST_CORE_ONLY": "1"}
"""Other tests that miss such a library are skipped by its name."""

_FLOOR = re.compile(r"^(?P<name>[\w.-]+)(?:\[[\w,]+\])?>=(?P<floor>[\w.]+)\s*(?P<marker>;.*)?$")


def floors(requirements: Iterable[str]) -> Iterator[str]:
    """``name==floor`` for each requirement, for the machines that it is for.

    One without a floor is an error.
    """
    for requirement in requirements:
        found = _FLOOR.match(requirement)
        if found is None:
            raise SystemExit(f"pyproject.toml states no floor, or more than one: {requirement}")
        yield f"{found['name']}=={found['floor']}{found['marker'] or ''}"


def tools(extra: Iterable[str]) -> list[str]:
    """What of an extra the core tests need."""
    return [requirement for requirement in extra if re.split(r"[>\[]", requirement)[0] in TOOLS]


def core_tests(rooms: Iterable[str]) -> list[str]:
    """The tests to run, of the names in ``tests``."""
    return [
        f"tests/{name}"
        for name in sorted(rooms)
        if name not in WITH_EXTRAS and (name.startswith("test_") or "." not in name)
    ]


def usable(python: str | Path) -> str | None:
    """The version of a Python that is there, new enough and able to make environments."""
    question = (
        "import sys, ensurepip, venv, platform\n"
        "print(platform.python_version())\n"
        "sys.exit(sys.version_info < (3, 11))"
    )
    try:
        asked = subprocess.run([python, "-c", question], capture_output=True, text=True)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def interpreter(python: str) -> tuple[str | Path, str] | None:
    """The Python that a command or path means, and its version; None where there is none.

    pyenv's own commands refuse every version but the one it is set to, so what it has installed is
    looked for as well.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for found in (python, *sorted(pyenv.glob(f"versions/*/bin/{python}"))):
        if version := usable(found):
            return found, version
    return None


def environment(python: str | Path, version: str, project: dict[str, Any]) -> Path:
    """The interpreter of an environment with the floors, made anew where they changed."""
    place = PLACE / version
    wanted = "\n".join(floors(project["dependencies"])) + "\n"
    made = place / "floors.txt"
    own = place / "bin" / "python"
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return own
    subprocess.run([python, "-m", "venv", "--clear", place], check=True)
    constraints = place / "constraints.txt"
    constraints.write_text(wanted, encoding="utf-8")
    pip = [own, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    needed = ["--editable", PROJECT, *tools(project["optional-dependencies"]["test"])]
    subprocess.run([*pip, *needed, "--constraint", constraints], check=True)
    constraints.rename(made)  # last: what was broken off is made again
    return own


def main(arguments: Sequence[str]) -> int:
    """Try each Python, named by its command or path; what follows ``--`` is for pytest."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    pythons, for_pytest = arguments[:end], arguments[end + 1 :]
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tests = core_tests(path.name for path in (PROJECT / "tests").iterdir() if path.name[0] != "_")
    ended: dict[str, str] = {}
    for python in pythons:
        found = interpreter(python)
        if found is None:
            ended[python] = "skipped: not on this machine, or it makes no environments"
            continue
        own = environment(*found, project)
        # Old versions are told by newer ones what will go one day: that is no failure of a floor.
        options = ["-m", "not slow and not soak and not shared", "-W", "ignore::DeprecationWarning"]
        command = [own, "-m", "pytest", *options, *tests, *for_pytest]
        failed = subprocess.run(command, cwd=PROJECT, env=os.environ | CORE_ONLY).returncode
        ended[python] = f"failed ({failed})" if failed else "passed"
    for python, how in ended.items():
        print(f"lowest versions on {python}: {how}")
    tried = [how for how in ended.values() if not how.startswith("skipped")]
    return 0 if tried and set(tried) == {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
