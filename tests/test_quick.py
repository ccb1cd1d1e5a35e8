"""`make quick` runs the tests of what changed, and `make test` every test there is."""

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
        (["tests/chat/judge.py"], ["tests/chat"]),
        (["tests/data/test_that_was_deleted.py"], ["tests/data"]),
        (["conformance/hosts/verl.py"], ["tests/conformance"]),
        (["docs/index.md", "README.md"], ["tests/test_documents.py"]),
        (["tests/test_architecture.py"], []),
    ],
)
def test_change_asks_for_the_tests_of_its_room(changed: list[str], tests: list[str]) -> None:
    assert plan(changed, TESTS) == sorted([ALWAYS, *tests])


@pytest.mark.parametrize(
    "changed", [[], ["Makefile"], ["tests/conftest.py"], ["src/tokenmill/__init__.py"]]
)
def test_change_of_no_room_asks_for_the_fast_tests(changed: list[str]) -> None:
    assert plan(changed, TESTS) == sorted([ALWAYS, *FAST])


def test_change_of_a_room_and_of_none_asks_for_both() -> None:
    found = plan(["Makefile", "src/tokenmill/inspect/page/serve.py"], TESTS)
    assert found == sorted([ALWAYS, *FAST, "tests/inspect/page"])


def test_fast_rooms_are_there() -> None:
    assert {ALWAYS, *FAST} <= TESTS


def test_every_directory_of_tests_is_looked_into(pytestconfig: pytest.Config) -> None:
    """Pytest's own list of directories to pass by has `build` on it, which is a room of ours."""
    rooms = {Path(path).parent.name for path in TESTS if Path(path).name.startswith("test_")}
    assert "chat" in rooms
    passed_by = pytestconfig.getini("norecursedirs")
    assert not [room for room in rooms for pattern in passed_by if fnmatch(room, pattern)]
