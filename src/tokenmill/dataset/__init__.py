"""Rows by integer over stores: slice, filter, split, concatenate, mix; stateless.

A `View` maps its row numbers to rows of stores without copying any; `filtered` and `split`
publish the numbers of the rows they keep and map them; `Mixture` describes sources with weights,
which the loader serves in an interleave computed from the position.
"""

from __future__ import annotations

from tokenmill.dataset.choices import filtered, split, split_points
from tokenmill.dataset.mixture import Mixture, mix
from tokenmill.dataset.selection import KeptView
from tokenmill.dataset.view import ConcatView, SliceView, StoreView, View, as_view, concat
from tokenmill.dataset.where import Where

__all__ = [
    "ConcatView",
    "KeptView",
    "Mixture",
    "SliceView",
    "StoreView",
    "View",
    "Where",
    "as_view",
    "concat",
    "filtered",
    "mix",
    "split",
    "split_points",
]
