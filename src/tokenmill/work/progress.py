"""Progress of a build: how far, how fast, how long yet.

A `Meter` adds up what was done. A `Reporter` shows its snapshots: a bar on a terminal (rich, on
standard error), a line every few seconds elsewhere, a function of the caller, or nothing. Speed is
that of the last half minute; what was found in the cache counts as done, but not as speed.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from tokenmill.errors import UsageError

WINDOW_S = 30.0  # seconds over which speed is measured
LINE_EVERY_S = 5.0  # seconds between lines where there is no terminal
SHOW_EVERY_S = 0.1  # seconds between two snapshots for a terminal or a function
MAX_SAMPLES = 64  # of the window; closer ones are merged, so that memory stays bounded


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a build is at one moment; what was found in the cache is included."""

    rows: int
    size: int  # bytes of source
    slices: int
    total_rows: int | None
    total_size: int | None
    elapsed_s: float
    rows_per_s: float | None  # recent speed; None before the first result
    bytes_per_s: float | None
    left_s: float | None

    @property
    def fraction(self) -> float | None:
        """Return the share of the work that is done, 0 to 1, by bytes or else rows."""
        if self.total_size:
            return min(1.0, self.size / self.total_size)
        if self.total_rows:
            return min(1.0, self.rows / self.total_rows)
        return None


class Meter:
    """Adds up work and computes the speed, from times in seconds that it is given."""

    def __init__(
        self, now: float, *, total_rows: int | None = None, total_size: int | None = None
    ) -> None:
        self.total_rows = total_rows
        self.total_size = total_size
        self._rows = self._size = self._slices = 0
        self._built_rows = self._built_size = 0
        self._started = now
        # (time, rows built, bytes built), the oldest one at or before the window's start.
        self._samples: deque[tuple[float, int, int]] = deque([(now, 0, 0)])

    def add(self, now: float, *, rows: int = 0, size: int = 0, found: bool = False) -> None:
        """Count a slice; one that was `found` in the cache says nothing about speed."""
        self._rows += rows
        self._size += size
        self._slices += 1
        if found:
            return
        self._built_rows += rows
        self._built_size += size
        sample = (now, self._built_rows, self._built_size)
        if len(self._samples) > 1 and now - self._samples[-2][0] < WINDOW_S / MAX_SAMPLES:
            self._samples[-1] = sample
        else:
            self._samples.append(sample)
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()

    def snapshot(self, now: float) -> Snapshot:
        then, rows, size = self._samples[0]
        rows_per_s = bytes_per_s = None
        if self._built_rows or self._built_size:
            seconds = max(now - then, 1e-9)
            rows_per_s = (self._built_rows - rows) / seconds
            bytes_per_s = (self._built_size - size) / seconds
        return Snapshot(
            rows=self._rows,
            size=self._size,
            slices=self._slices,
            total_rows=self.total_rows,
            total_size=self.total_size,
            elapsed_s=now - self._started,
            rows_per_s=rows_per_s,
            bytes_per_s=bytes_per_s,
            left_s=self._left(rows_per_s, bytes_per_s),
        )

    def _left(self, rows_per_s: float | None, bytes_per_s: float | None) -> float | None:
        if self.total_size is not None and bytes_per_s:
            return max(0, self.total_size - self._size) / bytes_per_s
        if self.total_rows is not None and rows_per_s:
            return max(0, self.total_rows - self._rows) / rows_per_s
        return None


def duration(seconds: float) -> str:
    """Seconds as a person reads them: ``7s``, ``3m07s``, ``2h03m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def describe(snapshot: Snapshot) -> str:
    """One line: share, rows, speed, time left, as far as each is known."""
    parts = []
    if snapshot.fraction is not None:
        parts.append(f"{snapshot.fraction:4.0%}")
    rows = f"{snapshot.rows:,}"
    if snapshot.total_rows is not None:
        rows += f" of {snapshot.total_rows:,}"
    parts.append(f"{rows} rows")
    if snapshot.rows_per_s is not None and snapshot.bytes_per_s is not None:
        parts.append(f"{snapshot.rows_per_s:,.0f} rows/s")
        parts.append(f"{snapshot.bytes_per_s / 1e6:.1f} MB/s")
    if snapshot.left_s is not None:
        parts.append(f"{duration(snapshot.left_s)} left")
    return ", ".join(parts)


class Reporter(Protocol):
    """Shows snapshots, at most one every `every_s` seconds, and the last one when it closes."""

    every_s: float

    def show(self, snapshot: Snapshot) -> None: ...
    def close(self, snapshot: Snapshot) -> None: ...


class Lines:
    """A line every few seconds, for logs; nothing at all for work that is over before."""

    every_s = LINE_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = False

    def show(self, snapshot: Snapshot) -> None:
        self._shown = True
        print(f"tokenmill: {describe(snapshot)}", file=self._stream, flush=True)

    def close(self, snapshot: Snapshot) -> None:
        if self._shown:
            self.show(snapshot)


class Called:
    """Calls a function with each snapshot and the last one."""

    def __init__(
        self, function: Callable[[Snapshot], object], every_s: float = SHOW_EVERY_S
    ) -> None:
        self._function = function
        self.every_s = every_s

    def show(self, snapshot: Snapshot) -> None:
        self._function(snapshot)

    close = show


class Silent:
    """Shows nothing."""

    every_s = float("inf")

    def show(self, snapshot: Snapshot) -> None:
        pass

    close = show


class Terminal:
    """A bar that is redrawn in place, by rich."""

    every_s = SHOW_EVERY_S

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._bar = Progress(
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(file=stream),
            transient=True,
            auto_refresh=False,  # no thread in a process that may be forked
        )
        self._task: Any = self._bar.add_task("", total=None)
        self._bar.start()

    def show(self, snapshot: Snapshot) -> None:
        share = snapshot.fraction
        self._bar.update(
            self._task,
            description=describe(snapshot),
            completed=share or 0.0,
            total=None if share is None else 1.0,
            refresh=True,
        )

    def close(self, snapshot: Snapshot) -> None:
        self.show(snapshot)
        self._bar.stop()


class Progress:
    """Counts what is done and shows it through a reporter."""

    def __init__(
        self,
        reporter: Reporter,
        *,
        total_rows: int | None = None,
        total_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reporter = reporter
        self._clock = clock
        self._shown = clock()
        self._meter = Meter(self._shown, total_rows=total_rows, total_size=total_size)

    def add(self, *, rows: int = 0, size: int = 0, found: bool = False) -> None:
        """Count a slice that was built, or found in the cache."""
        now = self._clock()
        self._meter.add(now, rows=rows, size=size, found=found)
        if now - self._shown >= self._reporter.every_s:
            self._shown = now
            self._reporter.show(self._meter.snapshot(now))

    def snapshot(self) -> Snapshot:
        return self._meter.snapshot(self._clock())

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._reporter.close(self.snapshot())


def open_progress(
    progress: bool | Callable[[Snapshot], object] | Reporter | None = None,
    *,
    total_rows: int | None = None,
    total_size: int | None = None,
    stream: TextIO | None = None,
) -> Progress:
    """Open the progress that a caller chose.

    Args:
        progress: None: a bar if standard error is a terminal, else nothing. True: a bar there, else
            a line every few seconds. False: nothing. A function: called with each `Snapshot`, a few
            times a second and at the end. Or a `Reporter`.
        total_rows: Rows in all, if known.
        total_size: Bytes in all, if known.
        stream: Instead of standard error.
    """
    return Progress(
        _choose(progress, sys.stderr if stream is None else stream),
        total_rows=total_rows,
        total_size=total_size,
    )


def _choose(progress: object, stream: TextIO) -> Reporter:
    if progress is False:
        return Silent()
    if progress is None or progress is True:
        # A stream may be missing (pythonw) or closed; then there is nobody to show anything to.
        if stream is None or stream.closed:
            return Silent()
        if stream.isatty():
            return Terminal(stream)
        return Lines(stream) if progress else Silent()
    if hasattr(progress, "show") and hasattr(progress, "close"):
        reporter: Reporter = progress  # type: ignore[assignment]
        return reporter
    if callable(progress):
        return Called(progress)
    raise UsageError(f"progress must be None, a bool or a function, not {progress!r}")
