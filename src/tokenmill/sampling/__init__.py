"""Which index stands at position p of epoch e: pure integer functions.

`Permutation` is the keyed bijection, an `Order` maps (epoch, position) to an index with it,
`Schedule` and `MixedOrder` do the same for several sources with weights. Nothing here keeps a
position, reads a file or touches a random generator of anybody else: a cursor is the caller's, and
saving and loading one is therefore all there is to resuming.
"""

from __future__ import annotations

from tokenmill.sampling.interleave import Interleave, as_fraction
from tokenmill.sampling.mixture import EXHAUSTED, MixedOrder, Schedule
from tokenmill.sampling.order import (
    ORDERS,
    PURPOSE_MISMATCH,
    PURPOSE_PACKS,
    PURPOSE_VIEW,
    FeistelOrder,
    GroupedOrder,
    MilesOrder,
    Order,
    Recent,
    SequentialOrder,
    check_seed,
    make_order,
    unroll,
)
from tokenmill.sampling.permutation import (
    LARGEST,
    ORDER_VERSION,
    Int64Array,
    Permutation,
    derive_key,
)
from tokenmill.sampling.states import admit_state
from tokenmill.sampling.varying import VaryingInterleave

__all__ = [
    "EXHAUSTED",
    "LARGEST",
    "ORDERS",
    "ORDER_VERSION",
    "PURPOSE_MISMATCH",
    "PURPOSE_PACKS",
    "PURPOSE_VIEW",
    "FeistelOrder",
    "GroupedOrder",
    "Int64Array",
    "Interleave",
    "MilesOrder",
    "MixedOrder",
    "Order",
    "Permutation",
    "Recent",
    "Schedule",
    "SequentialOrder",
    "VaryingInterleave",
    "admit_state",
    "as_fraction",
    "check_seed",
    "derive_key",
    "make_order",
    "unroll",
]
