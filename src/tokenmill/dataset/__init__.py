"""Rows by integer over stores: slice, filter, select, shuffle, split, map, concatenate, mix.

A `View` has stores and an index, and copies no row. `Mixture` describes sources with weights, which
the loader interleaves. Stores and views have the functions here as methods: see
`tokenmill.store.ViewMethods`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.dataset.choices import (
    filtered,
    rows_holding,
    rows_of_groups,
    select,
    shuffle,
    sliced,
    split,
    split_points,
)
from tokenmill.dataset.mixture import Mixture, mix
from tokenmill.dataset.view import (
    Float32Array,
    View,
    ViewSidecar,
    as_view,
    concat,
    mapped,
    tokens_alone,
    unweighted,
)
from tokenmill.dataset.where import Where
from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.dataset.pictures import StoredPictures, pictures_of

__all__ = [
    "Float32Array",
    "Mixture",
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
    "rows_holding",
    "rows_of_groups",
    "select",
    "shuffle",
    "sliced",
    "split",
    "split_points",
    "tokens_alone",
    "unweighted",
]

__getattr__ = first_use(__name__, pictures="StoredPictures pictures_of")
