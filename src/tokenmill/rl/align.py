"""Find the differences between two texts that should be equal.

If the ends of a difference are ambiguous (a turn is missing, and the next begins with the same
text), the difference is moved to begin at one of the given starts of turns and sampled parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import AnyStr

WINDOW = 24  # bytes that must agree for two texts to be in sync again
REACH = 4096  # bytes after a difference that are searched for a match
MAX_OVERRUN = 256  # bytes that may agree by chance before a difference is noticed
MAX_MATCHES = 8  # matches after a difference that are compared
MAX_DIVERGENCES = 16  # per trajectory


@dataclass(frozen=True, slots=True)
class Divergence:
    """``expected[start:end]`` was expected, and ``found[found_start:found_end]`` was found."""

    start: int
    end: int
    found_start: int
    found_end: int


def same_until(left: AnyStr, at: int, right: AnyStr, by: int) -> int:
    """Return how many bytes two texts share from two positions on."""
    size = min(len(left) - at, len(right) - by)
    done, step = 0, 64
    while done < size:
        step = min(step * 2, size - done)
        if left[at + done : at + done + step] != right[by + done : by + done + step]:
            break
        done += step
    else:
        return size
    low, high = done, done + step
    while low < high:  # the first difference is in here
        middle = (low + high) // 2
        if left[at + low : at + middle + 1] == right[by + low : by + middle + 1]:
            low = middle + 1
        else:
            high = middle
    return low


def divergences(expected: bytes, found: bytes, starts: Sequence[int]) -> list[Divergence]:
    """Return where two texts differ, in order; the last one may reach to both ends."""
    result: list[Divergence] = []
    e = r = sync = 0
    while True:
        same = same_until(expected, e, found, r)
        e, r = e + same, r + same
        if e == len(expected) and r == len(found):
            return result
        meeting = (
            None if len(result) >= MAX_DIVERGENCES else _resync(expected, e, found, r, starts, sync)
        )
        if meeting is None:
            result.append(Divergence(e, len(expected), r, len(found)))
            return result
        divergence = _trim_and_move(expected, found, meeting, starts, sync)
        result.append(divergence)
        e, r = divergence.end, divergence.found_end
        sync = r


def _resync(
    expected: bytes, e: int, found: bytes, r: int, starts: Sequence[int], sync: int
) -> Divergence | None:
    """Choose the match with the most equal bytes after it and the fewest skipped before it."""
    best: tuple[int, Divergence] | None = None

    def offer(start: int, end: int, found_start: int, found_end: int) -> None:
        nonlocal best
        skipped = end - start + found_end - found_start
        if skipped <= 0:
            return
        cost = skipped - min(same_until(expected, end, found, found_end), REACH)
        if best is None or cost < best[0]:
            best = cost, Divergence(start, end, found_start, found_end)

    ends = same_until(expected[e:][::-1], 0, found[r:][::-1], 0)  # shared at the end of both
    if ends >= WINDOW or (ends and len(expected) - e - ends < WINDOW):
        offer(e, len(expected) - ends, r, len(found) - ends)
    windows: dict[bytes, int] = {}
    for index in range(e, min(e + REACH, len(expected) - WINDOW + 1)):
        windows.setdefault(expected[index : index + WINDOW], index)
    index, stop, matches = r, min(r + REACH, len(found) - WINDOW + 1), 0
    while index < stop and matches < MAX_MATCHES:
        match = windows.get(found[index : index + WINDOW])
        if match is None:
            index += 1
        else:
            offer(e, match, r, index)
            index += max(1, same_until(expected, match, found, index))
            matches += 1
    for index in starts[bisect_left(starts, e) :]:
        probe = expected[index : index + 2 * WINDOW]
        if len(probe) < WINDOW // 2:
            continue
        at = found.find(probe, max(sync, r - MAX_OVERRUN))
        if at < 0:
            continue
        back = max(0, r - at)
        if back <= e:
            offer(e - back, index, r - back, at)
    return None if best is None else best[1]


def _trim_and_move(
    expected: bytes, found: bytes, one: Divergence, starts: Sequence[int], sync: int
) -> Divergence:
    """Trim the common end, then move the start to one of the given starts."""
    start, end, found_start, found_end = one.start, one.end, one.found_start, one.found_end
    while end > start and found_end > found_start and expected[end - 1] == found[found_end - 1]:
        end, found_end = end - 1, found_end - 1
    allowed = set(starts)
    if start in allowed or (end > start and found_end > found_start):
        return Divergence(start, end, found_start, found_end)
    for back in range(1, MAX_OVERRUN):
        if start - back < 0 or found_start - back < sync:
            break
        if expected[end - back] != found[found_end - back]:
            break
        if start - back in allowed:
            return Divergence(start - back, end - back, found_start - back, found_end - back)
    return Divergence(start, end, found_start, found_end)
