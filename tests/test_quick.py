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
        (["src/tokenmill/packing/fill.py"], ["tests/packing"]),
        (["src/tokenmill/report/lint/near.py"], ["tests/report"]),
        (["src/tokenmill/report/page/serve.py"], ["tests/page"]),
        (["src/tokenmill/errors.py"], ["tests/test_errors.py"]),
        (["tests/packing/test_fill.py"], ["tests/packing/test_fill.py"]),
        (["tests/packing/test_fill.py", "src/tokenmill/packing/fill.py"], ["tests/packing"]),
        (["tests/chat/judge.py"], ["tests/chat"]),
        (["tests/packing/test_that_was_deleted.py"], ["tests/packing"]),
        (["conformance/hosts/verl.py"], ["tests/conformance"]),
        (["docs/index.md", "README.md"], ["tests/test_documents.py"]),
        (["tests/test_house.py"], []),
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
    found = plan(["Makefile", "src/tokenmill/report/page/serve.py"], TESTS)
    assert found == sorted([ALWAYS, *FAST, "tests/page"])


def test_fast_rooms_are_there() -> None:
    assert {ALWAYS, *FAST} <= TESTS


def test_every_directory_of_tests_is_looked_into(pytestconfig: pytest.Config) -> None:
    """Pytest's own list of directories to pass by has `build` on it, which is a room of ours."""
    rooms = {Path(path).parent.name for path in TESTS if Path(path).name.startswith("test_")}
    assert "chat" in rooms
    passed_by = pytestconfig.getini("norecursedirs")
    assert not [room for room in rooms for pattern in passed_by if fnmatch(room, pattern)]
