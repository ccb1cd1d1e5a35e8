"""Progress: the arithmetic without a clock, the reporters without a build."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import UsageError
from tokenmill.work.progress import (
    MAX_SAMPLES,
    WINDOW_S,
    Lines,
    Meter,
    Progress,
    Silent,
    Snapshot,
    Terminal,
    describe,
    duration,
    open_progress,
)


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_meter_before_the_first_result_knows_no_speed() -> None:
    shot = Meter(5.0, total_size=100).snapshot(6.0)
    assert (shot.rows_per_s, shot.bytes_per_s, shot.left_s) == (None, None, None)
    assert shot.fraction == 0.0
    assert shot.elapsed_s == 1.0


def test_meter_at_a_steady_pace_tells_speed_and_time_left() -> None:
    meter = Meter(0.0, total_rows=1000, total_size=100_000)
    for second in range(1, 11):
        meter.add(float(second), rows=20, size=2_000)
    shot = meter.snapshot(10.0)
    assert shot.rows_per_s == pytest.approx(20)
    assert shot.bytes_per_s == pytest.approx(2_000)
    assert shot.left_s == pytest.approx(40)
    assert shot.fraction == pytest.approx(0.2)
    assert (shot.rows, shot.size, shot.slices) == (200, 20_000, 10)


def test_meter_forgets_a_slow_start() -> None:
    meter = Meter(0.0, total_size=10_000)
    meter.add(1000.0, size=1)
    for second in range(1, 100):
        meter.add(1000.0 + second, size=50)
    assert meter.snapshot(1099.0).bytes_per_s == pytest.approx(50, rel=0.05)


def test_found_work_is_done_but_is_no_speed() -> None:
    meter = Meter(0.0, total_size=1_000)
    meter.add(0.1, size=900, rows=9, found=True)
    assert meter.snapshot(0.2).bytes_per_s is None
    meter.add(10.0, size=50, rows=1)
    shot = meter.snapshot(10.0)
    assert shot.bytes_per_s == pytest.approx(5)
    assert shot.left_s == pytest.approx(10)
    assert (shot.rows, shot.size) == (10, 950)


def test_time_left_by_rows_where_bytes_are_unknown() -> None:
    meter = Meter(0.0, total_rows=100)
    meter.add(10.0, rows=50, size=123)
    assert meter.snapshot(10.0).left_s == pytest.approx(10)
    assert meter.snapshot(10.0).fraction == pytest.approx(0.5)


def test_stalled_work_gets_slower_while_nothing_comes() -> None:
    meter = Meter(0.0, total_size=200)
    meter.add(10.0, size=100)
    assert meter.snapshot(40.0).left_s == pytest.approx(40)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.integers(0, 10**6), st.integers(0, 10**9), st.booleans()),
        max_size=150,
    )
)
def test_meter_counts_everything_in_bounded_memory(
    steps: list[tuple[float, int, int, bool]],
) -> None:
    meter = Meter(0.0, total_size=sum(size for _, _, size, _ in steps))
    now = 0.0
    for pause, rows, size, found in steps:
        now += pause
        meter.add(now, rows=rows, size=size, found=found)
        shot = meter.snapshot(now)
        assert shot.bytes_per_s is None or shot.bytes_per_s >= 0
        assert shot.left_s is None or shot.left_s >= 0
        assert len(meter._samples) <= MAX_SAMPLES + 3
        assert found or len(meter._samples) <= 2 or meter._samples[1][0] > now - WINDOW_S
    shot = meter.snapshot(now)
    assert shot.rows == sum(rows for _, rows, _, _ in steps)
    assert shot.size == sum(size for _, _, size, _ in steps)
    assert shot.fraction in (None, 1.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (187, "3m07s"), (3599.9, "1h00m"), (7380, "2h03m")],
)
def test_duration_is_rounded_before_it_is_split(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_description_says_what_is_known() -> None:
    full = Snapshot(1234, 5, 1, 5000, 10, 1.0, 1000.4, 2.5e6, 65.0)
    assert describe(full) == " 50%, 1,234 of 5,000 rows, 1,000 rows/s, 2.5 MB/s, 1m05s left"
    unknown = Snapshot(0, 0, 0, None, None, 1.0, None, None, None)
    assert describe(unknown) == "0 rows"


def test_lines_come_every_few_seconds_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(Lines(stream), total_size=100, clock=clock) as shown:
        for _ in range(100):
            clock.now += 0.12
            shown.add(rows=1, size=1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3  # twelve seconds: at 5, at 10, at the end
    assert lines[-1].startswith("tokenmill: 100%, 100 rows, 8 rows/s")


def test_lines_of_short_work_say_nothing() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(Lines(stream), clock=clock) as shown:
        clock.now += 1
        shown.add(rows=1)
    assert stream.getvalue() == ""


def test_function_is_called_with_the_final_numbers_even_after_an_error() -> None:
    seen: list[Snapshot] = []

    def work() -> None:
        with open_progress(seen.append, total_size=10, total_rows=7) as shown:
            shown.add(rows=3, size=5)
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert (seen[-1].rows, seen[-1].total_rows, seen[-1].fraction) == (3, 7, 0.5)


def test_terminal_draws_and_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream, clock = TerminalStream(), Clock()
    with Progress(Terminal(stream), total_size=100, clock=clock) as shown:
        clock.now += 1
        shown.add(rows=5, size=50)
    assert "50%, 5 rows" in stream.getvalue()


@pytest.mark.parametrize(
    ("progress", "stream", "kind"),
    [
        (None, io.StringIO(), Silent),
        (True, io.StringIO(), Lines),
        (False, TerminalStream(), Silent),
        (None, TerminalStream(), Terminal),
        (True, TerminalStream(), Terminal),
    ],
)
def test_reporter_is_chosen_by_wish_and_terminal(
    progress: bool | None, stream: io.StringIO, kind: type
) -> None:
    with open_progress(progress, stream=stream) as shown:
        assert type(shown._reporter) is kind


def test_own_reporter_is_used_and_nonsense_is_refused() -> None:
    reporter = Silent()
    with open_progress(reporter) as shown:
        assert shown._reporter is reporter
    with pytest.raises(UsageError, match="progress"):
        open_progress("yes")  # type: ignore[arg-type]
