"""Which index is at position p of epoch e: pure integer functions without state.

`Permutation` is the keyed bijection, an `Order` maps (epoch, position) to an index with it,
`Schedule` and `MixedOrder` do the same for several sources with weights.
"""

from __future__ import annotations

from tokenmill.sampling.interleave import (
    EXHAUSTED,
    Interleave,
    MixedOrder,
    Schedule,
    as_fraction,
)
from tokenmill.sampling.order import (
    LARGEST,
    ORDER_VERSION,
    ORDERS,
    PURPOSE_MISMATCH,
    PURPOSE_PACKS,
    PURPOSE_VIEW,
    FeistelOrder,
    GroupedOrder,
    Int64Array,
    Order,
    Permutation,
    Recent,
    SequentialOrder,
    check_seed,
    derive_key,
    make_order,
    unroll,
)
from tokenmill.sampling.states import admit_state

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
    "MixedOrder",
    "Order",
    "Permutation",
    "Recent",
    "Schedule",
    "SequentialOrder",
    "admit_state",
    "as_fraction",
    "check_seed",
    "derive_key",
    "make_order",
    "unroll",
]
