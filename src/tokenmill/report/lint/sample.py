"""Which rows lint looks at: all of them, or a sample that is the same every time.

In go the numbers of rows per block and how many rows are wanted; out come the rows of each block.
`run_lint` calls it. A *sample* of n rows is spread by the same keyed permutation that orders
training data, seed 0: among all rows where the source has few blocks, else among the rows of
`SAMPLE_BLOCKS` blocks that are themselves chosen so, because a block is read whole. It is a
function of how many rows the blocks have, so it does not change with workers or machines. A
`Choice` names, per block, its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from tokenmill.errors import UsageError
from tokenmill.sampling.permutation import Permutation, derive_key

SAMPLE_BLOCKS = 32  # blocks of about 8 MiB that are read for a sample

_ROWS, _BLOCKS = 1, 2  # streams of the seed: rows within, and blocks

Choice = dict[int, list[int] | None]
"""Number of the block → numbers of its rows, None for all of them."""


def choose(rows: Sequence[int], wanted: int | None) -> Choice:
    """The rows to look at.

    Args:
        rows: How many rows each block has.
        wanted: Size of the sample; None: everything.
    """
    if wanted is not None and (isinstance(wanted, bool) or wanted < 1):
        raise UsageError(f"sample is {wanted!r}; it is a positive number of rows")
    filled = [number for number, count in enumerate(rows) if count]
    if wanted is None or wanted >= sum(rows):
        return dict.fromkeys(filled)
    if len(filled) > SAMPLE_BLOCKS:
        order = Permutation(len(filled), derive_key(0, _BLOCKS)).indices(np.arange(SAMPLE_BLOCKS))
        filled = sorted(filled[place] for place in order.tolist())
    starts = np.concatenate(([0], np.cumsum([rows[number] for number in filled], dtype=np.int64)))
    total = int(starts[-1])
    if wanted >= total:
        return dict.fromkeys(filled)
    places = np.sort(Permutation(total, derive_key(0, _ROWS)).indices(np.arange(wanted)))
    owners = np.searchsorted(starts, places, side="right") - 1
    return {
        filled[owner]: (places[owners == owner] - starts[owner]).tolist()
        for owner in np.unique(owners).tolist()
    }


def ranks_of(choice: Choice, rows: Sequence[int]) -> list[int]:
    """Per block, how many rows before it are looked at; one more than blocks, the last is all."""
    looked = [0] * len(rows)
    for number, some in choice.items():
        looked[number] = rows[number] if some is None else len(some)
    return [0, *accumulate(looked)]


def described(choice: Choice, rows: Sequence[int]) -> dict[str, Any] | None:
    """What the report says of a sample; None where everything is looked at."""
    looked = ranks_of(choice, rows)[-1]
    if looked == sum(rows):
        return None
    return {"rows": looked, "blocks": len(choice), "of_blocks": len(rows), "seed": 0}
