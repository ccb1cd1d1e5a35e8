"""Progress: the arithmetic without a clock, the reporters without a build."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversations, prepare, write_rows
from tests.data.making import open_prompts
from tokenmill.build.progress import (
    MAX_SAMPLES,
    Progress,
    Snapshot,
    describe,
    duration,
    open_progress,
)
from tokenmill.errors import UsageError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


Step = tuple[float, int, int, bool]  # seconds since the last one, rows, bytes, found
SPEEDS: dict[str, tuple[dict[str, int], list[Step], float, tuple[Any, Any, Any]]] = {
    # Totals, steps, seconds after the last one; then rows/s, bytes/s and seconds left.
    "nothing yet": ({"total_size": 100}, [], 1, (None, None, None)),
    "steady": ({"total_rows": 1000, "total_size": 100_000}, [(1, 20, 2_000, False)] * 10, 0,
               (20, 2_000, 40)),
    "slow start": ({"total_size": 5_000}, [(1000, 1, 1, False), *[(1, 1, 50, False)] * 99], 0,
                   (1, 50, 0.98)),
    "found only": ({"total_size": 1_000}, [(0.1, 9, 900, True)], 0.1, (None, None, None)),
    "found first": ({"total_size": 1_000}, [(0, 9, 900, True), *[(10, 1, 25, False)] * 3], 0,
                    (0.1, 2.5, 10)),
    "bytes unknown": ({"total_rows": 200}, [(10, 50, 123, False)] * 3, 0, (5, 12.3, 10)),
    "stalled": ({"total_size": 400}, [(10, 10, 100, False)] * 3, 20, (0.5, 5, 20)),
    "one result": ({"total_size": 400}, [(60, 10, 100, False)], 1, (None, None, None)),
    "first results of four workers": ({"total_size": 800}, [(60, 10, 100, False),
                                      *[(0.01, 10, 100, False)] * 3], 1, (None, None, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", SPEEDS)
def test_speed_and_time_left_are_those_of_the_last_half_minute(name: str) -> None:
    totals, steps, after, expected = SPEEDS[name]
    clock = Clock()
    progress = Progress(clock=clock)
    progress.phase("", **totals)
    for pause, rows, size, found in steps:
        clock.now += pause
        progress.add(rows=rows, size=size, is_hit=found)
    clock.now += after
    shot = progress.snapshot()
    assert (shot.rows_per_s, shot.bytes_per_s, shot.left_s) == tuple(
        None if value is None else pytest.approx(value, rel=0.05) for value in expected
    )


STEP = st.tuples(st.floats(0, 100), st.integers(0, 10**6), st.integers(0, 10**9), st.booleans())


@given(st.lists(STEP, max_size=150))
def test_everything_is_counted_in_bounded_memory(steps: list[Step]) -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    progress.phase("", total_size=sum(size for _, _, size, _ in steps))
    for pause, rows, size, found in steps:
        clock.now += pause
        progress.add(rows=rows, size=size, is_hit=found)
        shot = progress.snapshot()
        assert shot.bytes_per_s is None or shot.bytes_per_s >= 0
        assert shot.left_s is None or shot.left_s >= 0
        assert len(progress._samples) <= MAX_SAMPLES + 3
    shot = progress.snapshot()
    assert shot.rows == sum(rows for _, rows, _, _ in steps)
    assert shot.size == sum(size for _, _, size, _ in steps)
    assert shot.slices == len(steps)
    assert shot.fraction in (None, 1.0)


def test_description_says_what_is_known_and_rounds_before_it_splits() -> None:
    seconds = (0, 59.4, 59.6, 187, 3599.9, 7380)
    assert [*map(duration, seconds)] == ["0s", "59s", "1m00s", "3m07s", "1h00m", "2h03m"]
    full = Snapshot(1234, 5, 1, 5000, 10, 1.0, 1000.4, 2.5e6, 65.0)
    assert describe(full) == " 50%, 1,234 of 5,000 rows, 1,000 rows/s, 2.5 MB/s, 1m05s left"
    by_rows = Snapshot(70, 0, 1, 2000, None, 1.0, 9.3, 0.0, None)
    assert describe(by_rows) == "  4%, 70 of 2,000 rows, 9 rows/s"
    unknown = Snapshot(0, 0, 0, None, None, 1.0, None, None, None)
    assert describe(unknown) == "0 rows"


@pytest.mark.parametrize(("seconds", "lines"), [(0.12, 3), (0.01, 0)], ids=["12 s", "1 s"])
def test_lines_come_every_few_seconds_and_at_the_end(seconds: float, lines: int) -> None:
    stream, clock = io.StringIO(), Clock()
    with open_progress(True, stream=stream, clock=clock) as shown:
        shown.phase("", total_size=100)
        for _ in range(100):
            clock.now += seconds
            shown.add(rows=1, size=1)
    found = stream.getvalue().splitlines()
    assert len(found) == lines  # of twelve seconds: at 5, at 10, at the end
    assert not found or found[-1].startswith("tokenmill: 100%, 100 rows, 8 rows/s")


def test_function_is_called_with_the_final_numbers_even_after_an_error() -> None:
    seen: list[Snapshot] = []

    def work() -> None:
        with open_progress(seen.append) as shown:
            shown.phase("", total_size=10, total_rows=7)
            shown.add(rows=3, size=5)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert (seen[-1].rows, seen[-1].total_rows, seen[-1].fraction) == (3, 7, 0.5)


@pytest.mark.parametrize(
    ("progress", "stream", "shown"),
    [
        (None, io.StringIO(), False),
        (True, io.StringIO(), True),
        (False, TerminalStream(), False),
        (None, TerminalStream(), True),
        (True, TerminalStream(), True),
    ],
)
def test_reporter_is_chosen_by_wish_and_terminal(
    monkeypatch: pytest.MonkeyPatch, progress: bool | None, stream: io.StringIO, shown: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    clock = Clock()
    with open_progress(progress, stream=stream, clock=clock) as counted:
        counted.phase("", total_size=100)
        clock.now += 10
        counted.add(rows=5, size=50)
    assert ("50%, 5 rows" in stream.getvalue()) is shown
    assert bool(stream.getvalue()) is shown


def test_wrong_progress_is_refused() -> None:
    with pytest.raises(UsageError, match="progress"), open_progress("yes"):  # type: ignore[arg-type]
        pass


def test_phases_are_named_at_once_and_speed_excludes_the_start() -> None:
    clock, seen = Clock(), list[Snapshot]()
    with open_progress(seen.append, clock=clock) as shown:
        shown.phase("loading the tokenizer")
        assert describe(seen[-1]) == "loading the tokenizer …"
        clock.now += 20
        shown.phase("building", total_rows=1000)
        clock.now += 100  # workers start
        for _ in range(5):
            shown.add(rows=100, size=1000)
            clock.now += 1
        shown.add(rows=100, size=1000)
    assert [shot.phase for shot in seen[:2]] == ["loading the tokenizer", "building"]
    assert seen[-1].rows_per_s == pytest.approx(100)
    assert seen[-1].left_s == pytest.approx(4)
    assert seen[-1].elapsed_s == 105
    assert describe(seen[-1]).startswith("building:  60%, 600 of 1,000 rows, 100 rows/s")


def test_build_shows_its_phases_in_order(tmp_path: Path) -> None:
    seen: list[Snapshot] = []
    given = {"cache_dir": tmp_path / "cache", "progress": seen.append}
    source = write_rows(tmp_path / "a.jsonl", conversations(3))
    prepare(source, **given)
    phases = ["loading the tokenizer", "indexing the files", "checking the cache"]
    assert list(dict.fromkeys(shot.phase for shot in seen)) == [*phases, "building"]
    assert (seen[-1].rows, seen[-1].total_rows) == (3, 3)
    seen.clear()
    prepare(source, **given)
    assert list(dict.fromkeys(shot.phase for shot in seen)) == phases


def test_lint_and_prompts_show_their_phases_in_order(tmp_path: Path) -> None:
    seen: list[Snapshot] = []
    given = {"cache_dir": tmp_path / "cache", "tokenizer": TOKENIZER, "progress": seen.append}
    source = write_rows(tmp_path / "a.jsonl", conversations(3))
    tm.lint(source, **(INLINE | given))
    start = ["loading the tokenizer", "indexing the files"]
    assert list(dict.fromkeys(shot.phase for shot in seen)) == [
        *start, "checking", "finding duplicates",
    ]  # fmt: skip
    assert (3, 3) in {(shot.rows, shot.total_rows) for shot in seen if shot.phase == "checking"}
    seen.clear()
    open_prompts(source, prompt_key="messages", **given)
    assert list(dict.fromkeys(shot.phase for shot in seen)) == [*reversed(start), "measuring"]
    assert (seen[-1].rows, seen[-1].total_rows) == (3, 3)
