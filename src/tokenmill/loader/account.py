"""The account: what every source has given up to a cursor, from the cursor alone.

Because the stream is a function of the position, so is the account: nothing is counted while
serving, nothing is saved, and a resume cannot lose it. Up to the last boundary of a window the rows
of each source are a prefix of its own order, known in closed form; the rows of a window that was
begun (packs, or rows grouped by length) are looked up. Tokens of whole passes are stored totals;
those of the pass under way are added up from stored lengths, a stretch at a time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tokenmill.dataset import Mixture
from tokenmill.loader.cursor import Cursor
from tokenmill.loader.samples import PackSamples, Samples
from tokenmill.loader.units import Units
from tokenmill.sampling import GroupedOrder, Int64Array, MixedOrder, Order

_CHUNK = 1 << 18  # rows whose lengths are added up at a time

Account = dict[str, dict[str, int]]


def served(
    cursor: Cursor, order: Order, samples: Samples, units: Units, mixture: Mixture | None
) -> Account:
    """Rows (or groups), whole passes, tokens and trained tokens of every source behind a cursor."""
    begun: list[Int64Array] = []  # rows handed out of windows that are not finished
    position = cursor.position
    if isinstance(samples, PackSamples):
        position = min(cursor.window * samples.window, order.rows)
        inside = cursor.position - cursor.packs_before
        if inside:
            packs = samples.packed(cursor.epoch, cursor.window)
            stop = int(packs.bounds[inside])
            # A row that was split counts with its first piece.
            begun.append(packs.rows[:stop][packs.starts[:stop] == 0])
    if isinstance(order, GroupedOrder):
        start = position // order.window * order.window
        begun.append(order.indices(cursor.epoch, np.arange(start, position, dtype=np.int64)))
        position, order = start, order.base
    extra = np.concatenate(begun) if begun else np.zeros(0, dtype=np.int64)

    if mixture is None or not isinstance(order, MixedOrder):
        before = cursor.epoch * order.rows + position
        return {"data": _source(before, order, units, extra)}
    account: Account = {}
    counts = order.schedule.served(cursor.epoch, position)
    begin = 0
    for number, (name, part) in enumerate(zip(mixture.names, mixture.views, strict=True)):
        here = replace(units, view=part)
        own = extra[(extra >= begin) & (extra < begin + here.count)] - begin
        account[name] = _source(counts[number], order.orders[number], here, own)
        begin += here.count
    return account


def _source(before: int, order: Order, units: Units, extra: Int64Array) -> dict[str, int]:
    view = units.view
    passes, rest = divmod(before, order.rows)
    tokens = trained = 0
    if passes:
        tokens, trained = passes * view.total("lengths"), passes * view.total("trained")
    for first in range(0, rest, _CHUNK):
        positions = np.arange(first, min(first + _CHUNK, rest), dtype=np.int64)
        rows = order.indices(passes, positions)
        tokens += int(units.tokens_at(rows).sum())
        trained += int(units.trained_at(rows).sum())
    tokens += int(units.tokens_at(extra).sum())
    trained += int(units.trained_at(extra).sum())
    rows_served = before + extra.size
    return {
        "rows": rows_served,
        "passes": rows_served // order.rows,
        "tokens": tokens,
        "trained_tokens": trained,
    }
