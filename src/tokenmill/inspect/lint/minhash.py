"""Find near-duplicates by MinHash over shingles of tokens, without the system turn.

A *shingle* is `SHINGLE` consecutive tokens, hashed to 64 bits. A *sketch* is `BANDS` × `PER_BAND`
MinHashes, each band condensed to 32 bits. Rows that agree in a band are compared exactly with the
first and the previous row of that bucket, at most `ANCHORS` rows. A pair with Jaccard index j
shares a band with probability 1 - (1 - j^6)^16: 99.2 % at 0.8, 99.999 % at 0.9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

SHINGLE = 5  # tokens: about four words of English, three to five characters of Chinese
THRESHOLD = 0.8  # of the Jaccard index
MIN_SHINGLES = 32  # in shorter rows one word makes the difference
BANDS = 16
PER_BAND = 6
ANCHORS = 4  # earlier rows with which a row is compared exactly
PORTION = 1 << 16  # shingles hashed at once: they stay in the cache
MAX_ROWS = 4_000_000  # sketches held at once: 256 MB; rows beyond are compared for equality only

Hashes = npt.NDArray[np.uint64]
Sketches = npt.NDArray[np.uint32]

_ODD = np.uint64(1)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)  # the two multipliers of the splitmix64 finaliser
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _constants(count: int, seed: int) -> Hashes:
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mixed(steps + np.uint64(seed))


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


_PLACES = _constants(SHINGLE, 1) | _ODD
_MULTIPLY = _constants(BANDS * PER_BAND, 2) | _ODD
_FLIP = _constants(BANDS * PER_BAND, 3)
_WITHIN = _constants(PER_BAND, 4) | _ODD


def shingles(ids: npt.NDArray[np.int32]) -> Hashes:
    """Return the hashes of all shingles of a row, repeated ones included."""
    if len(ids) < SHINGLE:
        return np.zeros(0, np.uint64)
    wide = ids.astype(np.uint64)
    count = len(ids) - SHINGLE + 1
    total = np.zeros(count, np.uint64)
    for place in range(SHINGLE):
        total += wide[place : place + count] * _PLACES[place]
    return _mixed(total)


def sketches(rows: Sequence[Hashes]) -> Sketches:
    """Return `BANDS` numbers per row; every row has at least one shingle."""
    found = np.empty((len(rows), BANDS), np.uint32)
    first = size = 0
    for last, hashes in enumerate(rows, 1):
        size += len(hashes)
        if size >= PORTION or last == len(rows):
            found[first:last] = _sketched(rows[first:last])
            first, size = last, 0
    return found


def _sketched(rows: Sequence[Hashes]) -> Sketches:
    flat = np.concatenate(rows)
    starts = np.concatenate(([0], np.cumsum([len(hashes) for hashes in rows[:-1]], dtype=np.int64)))
    lowest = np.empty((BANDS * PER_BAND, len(rows)), np.uint64)
    for number, (multiply, flip) in enumerate(zip(_MULTIPLY, _FLIP, strict=True)):
        lowest[number] = np.minimum.reduceat(((flat ^ flip) * multiply) >> np.uint64(32), starts)
    bands = lowest.reshape(BANDS, PER_BAND, len(rows)) * _WITHIN[:, None]
    return (_mixed(bands.sum(axis=1, dtype=np.uint64)) >> np.uint64(32)).astype(np.uint32).T


def jaccard(one: Hashes, other: Hashes) -> float:
    shared = len(np.intersect1d(one, other, assume_unique=True))
    whole = len(one) + len(other) - shared
    return shared / whole if whole else 1.0


def candidates(bands: Sketches) -> dict[int, list[int]]:
    """Return by row the earlier rows that may be its near-duplicates, the likeliest first."""
    later: list[npt.NDArray[np.int64]] = []
    earlier: list[npt.NDArray[np.int64]] = []
    for band in range(BANDS if len(bands) > 1 else 0):
        values = bands[:, band]
        order = np.argsort(values, kind="stable")  # within a bucket: in the order of the rows
        ranked = values[order]
        opens = np.concatenate(([True], ranked[1:] != ranked[:-1]))
        first = order[np.maximum.accumulate(np.where(opens, np.arange(len(order)), 0))]
        follows = np.flatnonzero(~opens)
        later += [order[follows], order[follows]]
        earlier += [first[follows], order[follows - 1]]
    if not later:
        return {}
    pairs = np.stack([np.concatenate(later), np.concatenate(earlier)], axis=1)
    unique, counts = np.unique(pairs, axis=0, return_counts=True)
    found: dict[int, list[int]] = {}
    # By row, then by how many bands agree, then the earliest.
    for place in np.lexsort((unique[:, 1], -counts, unique[:, 0])):
        row, other = unique[place].tolist()
        known = found.setdefault(row, [])
        if len(known) < ANCHORS:
            known.append(other)
    return found


def method() -> dict[str, Any]:
    return {
        "shingle_tokens": SHINGLE,
        "threshold": THRESHOLD,
        "bands": BANDS,
        "hashes_per_band": PER_BAND,
        "least_shingles": MIN_SHINGLES,
    }
