"""Trained tokens of any piece of a row, counted without its tokens.

A mask is a few *runs*: it begins untrained and changes at some tokens, first into a trained run,
then out of it, and so on. Those places are all of it, a few numbers per turn. A slice holds them in
its meta file (``mask_runs``); a store holds those of all rows (``mask_runs.bin``, with
``mask_run_ends.bin`` to find a row's), and whether each row's first token is trained
(``first_trained.bin``: one byte per row, which is all that whole rows need).

So a rank that must know how many tokens the whole global batch trains opens no row of another rank.

*Weights* run likewise: where a trained token counts other than 1 in the loss, slices and stores
also hold the tokens at which the weight changes and what it is from there on (`WeightRuns`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.store import layout as names

if TYPE_CHECKING:
    from tokenmill.store.store import Store

Int64 = NDArray[np.int64]


def runs_of(mask: NDArray[Any], starts: NDArray[Any]) -> tuple[NDArray[np.int32], Int64]:
    """The places within each row at which its mask changes, and where each row's begin.

    Args:
        mask: Masks of all rows, one after another.
        starts: Where each row starts in them; one more entry than rows.

    Returns:
        The places of all rows, one after another; and one more start than rows.
    """
    starts = np.asarray(starts, np.int64)
    changes = np.empty(len(mask), bool)
    np.not_equal(mask[1:], mask[:-1], out=changes[1:])
    firsts = starts[:-1][starts[:-1] < len(mask)]
    changes[firsts] = mask[firsts] != 0  # every row begins untrained
    places = np.flatnonzero(changes)
    bounds = np.searchsorted(places, starts)
    within = places - np.repeat(starts[:-1], np.diff(bounds))
    return within.astype(np.int32), bounds.astype(np.int64)


def firsts_of(runs: NDArray[np.int32], bounds: Int64) -> NDArray[np.uint8]:
    """Whether each row's first token is trained: then its mask changes there."""
    firsts = np.zeros(len(bounds) - 1, np.uint8)
    some = np.flatnonzero(bounds[:-1] < bounds[1:])
    firsts[some] = runs[bounds[some]] == 0
    return firsts


def count_within(
    runs: NDArray[np.int32], first: Int64, last: Int64, starts: Int64, stops: Int64
) -> Int64:
    """Trained tokens among tokens ``start`` to ``stop`` of some rows.

    Args:
        runs: Places at which masks change.
        first: Where those of each row begin in ``runs``.
        last: One past its last.
        starts: First token of each piece, within its row.
        stops: One past its last.
    """
    sizes = last - first
    ends = np.cumsum(sizes)
    number = np.arange(int(ends[-1]) if ends.size else 0, dtype=np.int64)
    number -= np.repeat(ends - sizes, sizes)  # of a change among those of its row
    change = runs[np.repeat(first, sizes) + number].astype(np.int64)
    # Behind a change every token counts, until the next change takes its share off again.
    covered = np.maximum(np.repeat(stops, sizes) - change, 0)
    covered -= np.maximum(np.repeat(starts, sizes) - change, 0)
    covered[number % 2 == 1] *= -1
    total = np.concatenate(([0], np.cumsum(covered)))
    return np.asarray(total[ends] - total[ends - sizes], np.int64)


class WeightRuns(NamedTuple):
    """How the weights of rows run along their tokens.

    Attributes:
        places: The tokens at which each row's weight changes, all rows one after another.
        weights: What it is from each of them on; before the first it is 0.
        bounds: Where each row's begin; one more entry than rows. A row in which every trained token
            weighs 1 has none: there the mask says it all.
    """

    places: NDArray[np.int32]
    weights: NDArray[np.float32]
    bounds: Int64


def weight_runs_of(weights: NDArray[np.float32], starts: NDArray[Any]) -> WeightRuns:
    """The runs of weights per token, 0 where untrained.

    Args:
        weights: Of all rows, one after another.
        starts: Where each row starts in them; one more entry than rows.
    """
    starts = np.asarray(starts, np.int64)
    changes = np.empty(len(weights), bool)
    np.not_equal(weights[1:], weights[:-1], out=changes[1:])
    firsts = starts[:-1][starts[:-1] < len(weights)]
    changes[firsts] = weights[firsts] != 0
    said = np.concatenate(([0], np.cumsum((weights != 0) & (weights != 1))))
    changes &= np.repeat(said[starts[1:]] > said[starts[:-1]], np.diff(starts))
    places = np.flatnonzero(changes)
    bounds = np.searchsorted(places, starts).astype(np.int64)
    within = places - np.repeat(starts[:-1], np.diff(bounds))
    return WeightRuns(within.astype(np.int32), weights[places], bounds)


def weights_along(
    places: NDArray[np.int32], weights: NDArray[np.float32], mask: NDArray[np.uint8]
) -> NDArray[np.float32]:
    """The weight of every token of one row, from its runs and its mask as it is served.

    A token that is trained though it was stored as untrained weighs 1: nobody said otherwise.
    """
    if not len(places):
        return mask.astype(np.float32)
    stored = np.repeat(
        np.concatenate((np.zeros(1, np.float32), weights)),
        np.diff(np.concatenate(([0], places, [len(mask)]))),
    )
    return np.where(mask > 0, np.where(stored > 0, stored, np.float32(1)), np.float32(0))


def trained_within(store: Store, rows: Int64, starts: Int64, stops: Int64) -> Int64:
    """Trained tokens of pieces of a store's rows; see `Store.trained_within`."""
    lengths = store.lengths[rows].astype(np.int64)
    found = store.trained[rows].astype(np.int64)
    partly = (found > 0) & (found < lengths)
    found = np.where(partly, 0, np.where(found > 0, np.maximum(stops - starts, 0), 0))
    if not partly.any():
        return found
    tail = partly & (starts == 1) & (stops == lengths)
    found[tail] = store.trained[rows[tail]] - store.own_array(names.FIRST_TRAINED)[rows[tail]]
    cut = np.flatnonzero(partly & ~tail)
    if cut.size:
        ends = store.own_array(names.MASK_RUN_ENDS)
        before = np.where(rows[cut] > 0, ends[np.maximum(rows[cut] - 1, 0)], 0)
        runs = store.own_array(names.MASK_RUNS)
        found[cut] = count_within(runs, before, ends[rows[cut]], starts[cut], stops[cut])
    return found


def weighed_within(store: Store, rows: Int64, starts: Int64, stops: Int64) -> NDArray[np.float64]:
    """Sums of the weights of pieces of a store's rows; see `Store.weighed_within`."""
    found = trained_within(store, rows, starts, stops).astype(np.float64)
    if not store.has_weights:
        return found
    ends = store.own_array(names.WEIGHT_RUN_ENDS)
    places, weights = store.own_array(names.WEIGHT_RUNS), store.own_array(names.RUN_WEIGHTS)
    first = np.where(rows > 0, ends[np.maximum(rows - 1, 0)], 0)
    last = ends[rows]
    for number in np.flatnonzero(first < last).tolist():
        own = slice(int(first[number]), int(last[number]))
        bounds = np.append(places[own], store.lengths[rows[number]]).astype(np.int64)
        inside = np.diff(np.clip(bounds, starts[number], max(starts[number], stops[number])))
        found[number] = float(inside @ weights[own].astype(np.float64))
    return found
