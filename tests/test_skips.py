"""The line about skipped tests at the end of `make test`."""

from __future__ import annotations

from tests.programs import PROJECT, python
from tests.skips import skip_line


def test_skips_are_counted_by_reason() -> None:
    reasons = [
        "Skipped: needs ../shared/data, which is not beside this checkout",
        "Skipped: could not import 'polars': No module named 'polars'",
        "Skipped: needs ../shared/data, which is not beside this checkout",
    ]
    expected = "skipped 3 tests: 2 needs ../shared/data; 1 needs polars"
    assert skip_line(reasons) == expected
    assert skip_line([]) == ""


def test_run_ends_with_one_line_about_skips() -> None:
    name = "test_rows_in_memory_give_the_store_of_their_file[polars]"
    test = f"tests/build/test_in_memory.py::{name}"
    program = (
        "import pytest, sys\n"
        "sys.modules['polars'] = None\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', sys.argv[1]]))\n"
    )
    done = python(program, test, cwd=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("needs polars") == 1
    assert "skipped 1 tests: 1 needs polars" in done.stdout.splitlines()
