"""Run the tests of a change: `make quick`.

`plan` maps the files that differ from `main`, committed or not, to tests by name: the tests of a
package are in the directory of the same name. If a change touches no package, the fast tests are
run. Tests marked ``slow`` or ``soak`` are not. Arguments are passed to pytest.
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
    """Return the tests for changed files, sorted, none inside another.

    Args:
        changed: Files that were edited, added, or deleted, relative to the project.
        present: Existing files and directories of tests, relative to the project.
    """
    tests = [_tests_of(PurePosixPath(path), present) for path in changed] or [None]
    selected = {ALWAYS, *(path for path in tests if path)}
    if None in tests:
        selected.update(FAST)
    return sorted(
        path
        for path in selected & set(present)
        if not any(str(parent) in selected for parent in PurePosixPath(path).parents)
    )


def _tests_of(path: PurePosixPath, present: Collection[str]) -> str | None:
    """Return the tests of one file; None if it is in no package."""
    if path.parts[0] == "docs" or path.suffix == ".md":
        return "tests/test_documents.py"
    if path.parts[0] == "tests":
        if path.name.startswith("test_") and str(path) in present:
            return str(path)
        package = str(path.parent)
        return package if package != "tests" and package in present else None
    if path.parts[0] == "conformance":
        return "tests/conformance"
    if path.parts[:2] == ("src", "tokenmill"):
        folder = PurePosixPath("tests", *(part.lstrip("_") for part in path.parts[2:-1]))
        for tests in (folder, *folder.parents, PurePosixPath(f"tests/test_{path.stem}.py")):
            if str(tests) in present:
                return str(tests)
    return None


def changed_paths() -> list[str]:
    """Return the files that differ from the merge base with main, including untracked ones."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(
            ["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=False
        )
        return done.stdout.splitlines() if done.returncode == 0 else []

    start = git("merge-base", "HEAD", "main") or ["HEAD"]
    return [
        *git("diff", "--name-only", "--no-renames", start[0]),
        *git("ls-files", "--others", "--exclude-standard"),
    ]


def main(arguments: list[str]) -> int:
    present = {str(path.relative_to(PROJECT)) for path in (PROJECT / "tests").rglob("*")}
    tests = plan(changed_paths(), present)
    print("quick:", *tests, flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "not soak and not slow", *tests, *arguments]
    return subprocess.run(command, cwd=PROJECT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
