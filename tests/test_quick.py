"""Tests of the selection of tests by `make quick`."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import pytest
from scripts.quick import ALWAYS, FAST, PROJECT, plan

TESTS = {str(path.relative_to(PROJECT)) for path in (PROJECT / "tests").rglob("*")}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        (["src/tokenmill/data/fill.py"], ["tests/data"]),
        (["src/tokenmill/inspect/lint/near.py"], ["tests/inspect"]),
        (["src/tokenmill/inspect/page/serve.py"], ["tests/inspect/page"]),
        (["src/tokenmill/errors.py"], ["tests/test_errors.py"]),
        (["tests/data/test_fill.py"], ["tests/data/test_fill.py"]),
        (["tests/data/test_fill.py", "src/tokenmill/data/fill.py"], ["tests/data"]),
        (["tests/chat/scoring.py"], ["tests/chat"]),
        (["tests/data/test_that_was_deleted.py"], ["tests/data"]),
        (["conformance/trainers/verl.py"], ["tests/conformance"]),
        (["docs/index.md", "README.md"], ["tests/test_documents.py"]),
        (["tests/test_architecture.py"], []),
    ],
)
def test_change_selects_the_tests_of_its_package(changed: list[str], tests: list[str]) -> None:
    assert plan(changed, TESTS) == sorted([ALWAYS, *tests])


@pytest.mark.parametrize(
    "changed", [[], ["Makefile"], ["tests/conftest.py"], ["src/tokenmill/__init__.py"]]
)
def test_change_outside_of_packages_selects_the_fast_tests(changed: list[str]) -> None:
    assert plan(changed, TESTS) == sorted([ALWAYS, *FAST])


def test_changes_inside_and_outside_of_packages_select_both() -> None:
    tests = plan(["Makefile", "src/tokenmill/inspect/page/serve.py"], TESTS)
    assert tests == sorted([ALWAYS, *FAST, "tests/inspect/page"])


def test_fast_tests_exist() -> None:
    assert {ALWAYS, *FAST} <= TESTS


def test_pytest_collects_every_directory_of_tests(pytestconfig: pytest.Config) -> None:
    """The default of pytest's `norecursedirs` contains `build`, which is one of our packages."""
    packages = {Path(path).parent.name for path in TESTS if Path(path).name.startswith("test_")}
    assert "chat" in packages
    skipped = pytestconfig.getini("norecursedirs")
    assert not [package for package in packages for pattern in skipped if fnmatch(package, pattern)]
