"""Progress of a build: a bar on a terminal, lines, or snapshots for a function of the caller."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

from tokenmill.errors import UsageError

WINDOW_S = 30.0  # seconds over which speed is measured
LINE_EVERY_S = 5.0  # seconds between lines where there is no terminal
SHOW_EVERY_S = 0.1  # seconds between two snapshots for a terminal or a function
MAX_SAMPLES = 64  # of the window; closer ones are merged, so that memory stays bounded


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Progress of a build at one moment, cache hits included."""

    rows: int
    size: int  # bytes of source
    slices: int
    total_rows: int | None
    total_size: int | None
    elapsed_s: float
    rows_per_s: float | None  # recent speed; None before the third result
    bytes_per_s: float | None
    left_s: float | None
    phase: str = ""  # what is being done, like "building"

    @property
    def fraction(self) -> float | None:
        """Return the fraction that is done, by bytes or else rows."""
        if self.total_size:
            return min(1.0, self.size / self.total_size)
        if self.total_rows:
            return min(1.0, self.rows / self.total_rows)
        return None


def duration(seconds: float) -> str:
    """Format seconds: ``7s``, ``3m07s``, ``2h03m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def describe(snapshot: Snapshot) -> str:
    parts = []
    if snapshot.phase and not (snapshot.total_rows or snapshot.total_size):
        return f"{snapshot.phase} …"
    if snapshot.fraction is not None:
        parts.append(f"{snapshot.fraction:4.0%}")
    rows = f"{snapshot.rows:,}"
    if snapshot.total_rows is not None:
        rows += f" of {snapshot.total_rows:,}"
    parts.append(f"{rows} rows")
    if snapshot.rows_per_s is not None:
        parts.append(f"{snapshot.rows_per_s:,.0f} rows/s")
    if snapshot.bytes_per_s:
        parts.append(f"{snapshot.bytes_per_s / 1e6:.1f} MB/s")
    if snapshot.left_s is not None:
        parts.append(f"{duration(snapshot.left_s)} left")
    phase = f"{snapshot.phase}: " if snapshot.phase else ""
    return phase + ", ".join(parts)


Show = Callable[[Snapshot], object]


class Progress:
    """Counts finished work and shows it at most every `every_s` seconds and at the end."""

    def __init__(
        self,
        show: Show | None = None,
        every_s: float = SHOW_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show = show
        self._every_s = every_s
        self._total_rows: int | None = None
        self._total_size: int | None = None
        self._clock = clock
        self._phase = ""
        self._shown = clock()
        self._reset()

    def phase(
        self, name: str, *, total_rows: int | None = None, total_size: int | None = None
    ) -> None:
        """Begin another phase, and show its name at once where there is no line per snapshot."""
        if self._slices:
            self._show_end()
        self._phase, self._total_rows, self._total_size = name, total_rows, total_size
        self._reset()
        if self._show is not None and self._every_s < LINE_EVERY_S:
            self._show(self.snapshot())

    def _reset(self) -> None:
        self._started = self._clock()
        self._rows = self._size = self._slices = 0
        self._built_rows = self._built_size = 0
        # (time, rows built, bytes built), the oldest one at or before the window's start. It begins
        # with the first result: the time before contains the start of the workers.
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, *, rows: int = 0, size: int = 0, is_hit: bool = False) -> None:
        """Count a slice; cache hits do not count for the speed."""
        now = self._clock()
        self._rows += rows
        self._size += size
        self._slices += 1
        if not is_hit:
            self._built_rows += rows
            self._built_size += size
            self._sample((now, self._built_rows, self._built_size))
        if self._show is not None and now - self._shown >= self._every_s:
            self._shown = now
            self._show(self.snapshot())

    def _sample(self, sample: tuple[float, int, int]) -> None:
        now, samples = sample[0], self._samples
        if len(samples) > 1 and now - samples[-2][0] < WINDOW_S / MAX_SAMPLES:
            samples[-1] = sample
        else:
            samples.append(sample)
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_S:
            samples.popleft()

    def snapshot(self) -> Snapshot:
        now = self._clock()
        rows_per_s = bytes_per_s = left_s = None
        if len(self._samples) > 2:  # workers often finish their first blocks at the same time
            then, rows, size = self._samples[0]
            seconds = max(now - then, 1e-9)
            rows_per_s = (self._built_rows - rows) / seconds
            bytes_per_s = (self._built_size - size) / seconds
        if self._total_size is not None and bytes_per_s:
            left_s = max(0, self._total_size - self._size) / bytes_per_s
        elif self._total_rows is not None and rows_per_s:
            left_s = max(0, self._total_rows - self._rows) / rows_per_s
        return Snapshot(
            rows=self._rows,
            size=self._size,
            slices=self._slices,
            total_rows=self._total_rows,
            total_size=self._total_size,
            elapsed_s=now - self._started,
            rows_per_s=rows_per_s,
            bytes_per_s=bytes_per_s,
            left_s=left_s,
            phase=self._phase,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._show_end()

    def _show_end(self) -> None:
        # Where lines are printed, a short job prints none.
        if self._show is not None and (self._every_s < LINE_EVERY_S or self._shown > self._started):
            self._show(self.snapshot())


@contextlib.contextmanager
def _terminal_bar(stream: TextIO) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        BarColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(file=stream),
        transient=True,
        auto_refresh=False,  # no thread in a process that may be forked
    )
    task = bar.add_task("", total=None)

    def show(snapshot: Snapshot) -> None:
        share = snapshot.fraction
        bar.update(
            task,
            description=describe(snapshot),
            completed=share or 0.0,
            total=None if share is None else 1.0,
            refresh=True,
        )

    with bar:
        yield show


@contextlib.contextmanager
def open_progress(
    progress: bool | Show | None = None,
    *,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """Open the progress that a caller chose.

    None: a bar if standard error is a terminal, else nothing. True: a bar there, else a line every
    few seconds. False: nothing. A function: called with each `Snapshot`, a few times a second and
    at the end.
    """
    stream = sys.stderr if stream is None else stream
    show: Show | None = None
    every_s = SHOW_EVERY_S
    with contextlib.ExitStack() as opened:
        if callable(progress):
            show = progress
        elif progress not in (None, True, False):
            raise UsageError(
                ("progress",), f" must be None, a bool or a function, got {progress!r}"
            )
        # The stream may be missing (pythonw) or closed.
        elif progress is not False and stream is not None and not stream.closed:
            if stream.isatty():
                show = opened.enter_context(_terminal_bar(stream))
            elif progress:
                show, every_s = functools.partial(_print_line, stream), LINE_EVERY_S
        yield opened.enter_context(Progress(show, every_s, clock))


def _print_line(stream: TextIO, snapshot: Snapshot) -> None:
    print(f"tokenmill: {describe(snapshot)}", file=stream, flush=True)
