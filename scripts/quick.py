"""Run the tests that a change asks for: `make quick`, the loop between two edits.

In come the paths that differ from where the branch left `main`, committed or not. `plan` turns them
into directories and files of tests, by names alone: a room's tests bear its name. Where a change
touches no room, the fast ones are run. Tests marked ``slow`` or ``soak`` are left to `make test`
and `make soak`. Arguments are handed on to pytest.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

PROJECT = Path(__file__).resolve().parent.parent
ALWAYS = "tests/test_architecture.py"
FAST = (
    "tests/chat", "tests/core", "tests/data", "tests/examples", "tests/sources", "tests/store",
    "tests/test_errors.py",
)  # fmt: skip
"""Packages whose tests start few processes and load no trainer and no real tokenizer."""


def plan(changed: Iterable[str], present: Collection[str]) -> list[str]:
    """Paths of tests for paths that changed, both relative to the project.

    Args:
        changed: Files that were edited, added, or deleted.
        present: Files and directories of tests that there are.

    Returns:
        What to hand to pytest, sorted, none inside another.
    """
    asked = [_asked_for(PurePosixPath(path), present) for path in changed] or [None]
    wanted = {ALWAYS, *(path for path in asked if path)}
    if None in asked:
        wanted.update(FAST)
    return sorted(
        path
        for path in wanted & set(present)
        if not any(str(parent) in wanted for parent in PurePosixPath(path).parents)
    )


def _asked_for(path: PurePosixPath, present: Collection[str]) -> str | None:
    """The tests of one file; None where no room is its own."""
    if path.parts[0] == "docs" or path.suffix == ".md":
        return "tests/test_documents.py"
    if path.parts[0] == "tests":
        if path.name.startswith("test_") and str(path) in present:
            return str(path)
        room = str(path.parent)
        return room if room != "tests" and room in present else None
    if path.parts[0] == "conformance":
        return "tests/conformance"
    if path.parts[:2] == ("src", "tokenmill"):
        folder = PurePosixPath("tests", *(part.lstrip("_") for part in path.parts[2:-1]))
        for tests in (folder, *folder.parents, PurePosixPath(f"tests/test_{path.stem}.py")):
            if str(tests) in present:
                return str(tests)
    return None


def changed_paths() -> list[str]:
    """What differs from where this branch left main, with files that git does not know yet."""

    def git(*arguments: str) -> list[str]:
        answer = subprocess.run(
            ["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False
        )
        return answer.stdout.splitlines() if answer.returncode == 0 else []

    start = git("merge-base", "HEAD", "main") or ["HEAD"]
    return [
        *git("diff", "--name-only", "--no-renames", start[0]),
        *git("ls-files", "--others", "--exclude-standard"),
    ]


def main(arguments: list[str]) -> int:
    """Plan, say what is run, run it."""
    present = {str(path.relative_to(PROJECT)) for path in (PROJECT / "tests").rglob("*")}
    tests = plan(changed_paths(), present)
    print("quick:", *tests, flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "not soak and not slow", *tests, *arguments]
    return subprocess.run(command, cwd=PROJECT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
