"""Recorded rollouts: read, cut into rows and compared with what the template prints.

A *trajectory* is one sequence of token ids with the mask of what was sampled, and whatever else was
recorded of it. `read_rollouts` reads trajectories from a row, `cut_rows` makes rows of those that
share prefixes, and `verdict.Judge` says how a recording differs from what is `expected`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.rollouts.formats import FORMATS, read_rollouts
    from tokenmill.rollouts.trajectory import Trajectory, cut_rows

__all__ = ["FORMATS", "Trajectory", "cut_rows", "read_rollouts"]

__getattr__ = first_use(__name__, formats="FORMATS read_rollouts", trajectory="Trajectory cut_rows")
