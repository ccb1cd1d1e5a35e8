"""Recorded rollouts: what a sampler saw and wrote, read, cut into rows and judged.

A *trajectory* is one sequence of token ids with the mask of what was sampled, and whatever else was
recorded of it. `read_rollouts` makes trajectories of a row, in whichever of the known formats it
is; `cut_rows` makes rows of trajectories that share prefixes, so that every sampled token is
trained exactly once. `Expected` is what the chat template prints for a trajectory's messages,
and `judge` says how what was recorded differs from it.

Rooms above use it: `build` for stores of rollouts, `report` for the account of a whole dump.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.rollouts.formats import FORMATS, read_rollouts
    from tokenmill.rollouts.trajectory import Trajectory
    from tokenmill.rollouts.tree import cut_rows

__all__ = ["FORMATS", "Trajectory", "cut_rows", "read_rollouts"]

__getattr__ = first_use(
    __name__,
    formats="FORMATS read_rollouts",
    trajectory="Trajectory",
    tree="cut_rows",
)
