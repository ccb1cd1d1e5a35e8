"""Find the differences between two texts that should be equal.

Where the ends of a difference are ambiguous (a turn is missing, and the next begins alike), it is
moved to begin at one of the given places: the beginnings of turns and sampled parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import AnyStr

WINDOW = 24  # bytes that must agree for two texts to be in sync again
REACH = 4096  # bytes after a difference in which they may be in sync at any place
OVERRUN = 256  # bytes in which two texts may agree by chance before a difference is seen
MEETINGS = 8  # matches after a difference that are compared before one is chosen
MOST = 16  # divergences of one trajectory


@dataclass(frozen=True, slots=True)
class Divergence:
    """Expected were ``expected[start:end]``; found were ``found[found_start:found_end]``."""

    start: int
    end: int
    found_start: int
    found_end: int


def same_until(left: AnyStr, at: int, right: AnyStr, by: int) -> int:
    """Return how many bytes two texts share from two places on."""
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


def divergences(expected: bytes, found: bytes, places: Sequence[int]) -> list[Divergence]:
    """Return where two texts differ, in order; the last one may reach to both ends."""
    told: list[Divergence] = []
    e = r = synced = 0
    while True:
        same = same_until(expected, e, found, r)
        e, r = e + same, r + same
        if e == len(expected) and r == len(found):
            return told
        meeting = None if len(told) >= MOST else _meet(expected, e, found, r, places, synced)
        if meeting is None:
            told.append(Divergence(e, len(expected), r, len(found)))
            return told
        divergence = _settle(expected, found, meeting, places, synced)
        told.append(divergence)
        e, r = divergence.end, divergence.found_end
        synced = r


def _meet(
    expected: bytes, e: int, found: bytes, r: int, places: Sequence[int], synced: int
) -> Divergence | None:
    """Choose the place with the most equal bytes after it and the fewest different before it."""
    best: tuple[int, Divergence] | None = None

    def offer(start: int, end: int, found_start: int, found_end: int) -> None:
        nonlocal best
        passed = end - start + found_end - found_start
        if passed <= 0:
            return
        cost = passed - min(same_until(expected, end, found, found_end), REACH)
        if best is None or cost < best[0]:
            best = cost, Divergence(start, end, found_start, found_end)

    ends = same_until(expected[e:][::-1], 0, found[r:][::-1], 0)  # shared at the end of both
    if ends >= WINDOW or (ends and len(expected) - e - ends < WINDOW):
        offer(e, len(expected) - ends, r, len(found) - ends)
    windows: dict[bytes, int] = {}
    for place in range(e, min(e + REACH, len(expected) - WINDOW + 1)):
        windows.setdefault(expected[place : place + WINDOW], place)
    place, stop, met = r, min(r + REACH, len(found) - WINDOW + 1), 0
    while place < stop and met < MEETINGS:
        known = windows.get(found[place : place + WINDOW])
        if known is None:
            place += 1
        else:
            offer(e, known, r, place)
            place += max(1, same_until(expected, known, found, place))
            met += 1
    for place in places[bisect_left(places, e) :]:
        probe = expected[place : place + 2 * WINDOW]
        if len(probe) < WINDOW // 2:
            continue
        at = found.find(probe, max(synced, r - OVERRUN))
        if at < 0:
            continue
        back = max(0, r - at)
        if back <= e:
            offer(e - back, place, r - back, at)
    return None if best is None else best[1]


def _settle(
    expected: bytes, found: bytes, one: Divergence, places: Sequence[int], synced: int
) -> Divergence:
    """Trim what both share at the end, then move the start to one of the places."""
    start, end, found_start, found_end = one.start, one.end, one.found_start, one.found_end
    while end > start and found_end > found_start and expected[end - 1] == found[found_end - 1]:
        end, found_end = end - 1, found_end - 1
    known = set(places)
    if start in known or (end > start and found_end > found_start):
        return Divergence(start, end, found_start, found_end)
    for back in range(1, OVERRUN):
        if start - back < 0 or found_start - back < synced:
            break
        if expected[end - back] != found[found_end - back]:
            break
        if start - back in known:
            return Divergence(start - back, end - back, found_start - back, found_end - back)
    return Divergence(start, end, found_start, found_end)
