"""Rows by integer over stores: slice, filter, select, shuffle, split, map, concatenate, mix.

A `View` maps its row numbers to rows of stores without copying any and keeps no state. `filtered`,
`select` and `split` publish the numbers of the rows they keep and map them; `Mixture` describes
sources with weights, which the loader serves in an interleave computed from the position. Stores
and views have the same as methods: see `tokenmill.store.ViewMethods`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.dataset.choices import (
    filtered,
    rows_of_groups,
    select,
    shuffle,
    split,
    split_points,
)
from tokenmill.dataset.mapped import MappedView, mapped
from tokenmill.dataset.mixture import Mixture, mix
from tokenmill.dataset.selection import KeptView
from tokenmill.dataset.sidecars import Float32Array, ViewSidecar
from tokenmill.dataset.view import (
    ConcatView,
    PartView,
    ShuffledView,
    SliceView,
    StoreView,
    View,
    as_view,
    concat,
    tokens_alone,
    unweighted,
)
from tokenmill.dataset.where import Where
from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.dataset.pictures import StoredPictures, pictures_of

__all__ = [
    "ConcatView",
    "Float32Array",
    "KeptView",
    "MappedView",
    "Mixture",
    "PartView",
    "ShuffledView",
    "SliceView",
    "StoreView",
    "StoredPictures",
    "View",
    "ViewSidecar",
    "Where",
    "as_view",
    "concat",
    "filtered",
    "mapped",
    "mix",
    "pictures_of",
    "rows_of_groups",
    "select",
    "shuffle",
    "split",
    "split_points",
    "tokens_alone",
    "unweighted",
]

__getattr__ = first_use(__name__, pictures="StoredPictures pictures_of")
