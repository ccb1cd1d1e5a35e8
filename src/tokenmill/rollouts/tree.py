"""Trajectories that share prefixes, cut into rows.

A sampler that branches records the same ids several times: once in every trajectory that runs
through them. `cut_rows` gives rows in which every sampled token is trained exactly once, after
exactly the ids that the sampler saw::

    recorded   p p S S t S S            rows   p p S S t S S
               p p S S t S X S                 p p s s t s X S     s: there, and not trained
               p p S S                         (the beginning of the first: no row)

A trajectory that is the beginning of another gives no row of its own: what it says was sampled is
trained in the other one, where the same ids stand before it. Pure: plain values in, plain values
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenmill.errors import RowError
from tokenmill.rollouts.formats import Recording
from tokenmill.rollouts.trajectory import Bits, Ids, Logprobs, Trajectory


class CutRow(NamedTuple):
    """One row.

    Attributes:
        trajectory: The trajectory whose ids it has, and whose reward counts.
        ids: All ids of it.
        mask: 1 on what this row trains.
        logprobs: Of what it trains, 0 elsewhere; None where none were recorded.
    """

    trajectory: Trajectory
    ids: Ids
    mask: Bits
    logprobs: Logprobs | None


def cut_rows(recording: Recording) -> list[CutRow]:
    """The rows of what one source row recorded, in its order.

    Raises:
        RowError: A trajectory is unsound, or two contradict each other.
    """
    trajectories = recording.trajectories
    for trajectory in trajectories:
        trajectory.require_sound()
    if len(trajectories) == 1:
        return [_whole(trajectories[0])]
    shared = _shared(recording)
    sizes = [len(_ids(trajectory)) for trajectory in trajectories]
    leaves = [
        i
        for i, size in enumerate(sizes)
        if not any(
            shared[i][j] == size and (sizes[j] > size or j < i) for j in range(len(sizes)) if j != i
        )
    ]
    return [
        _row(
            trajectories, leaf, shared[leaf], max((shared[leaf][j] for j in leaves[:n]), default=0)
        )
        for n, leaf in enumerate(leaves)
    ]


def _whole(trajectory: Trajectory) -> CutRow:
    assert trajectory.mask is not None
    return CutRow(trajectory, _ids(trajectory), trajectory.mask, trajectory.logprobs)


def _row(
    trajectories: Sequence[Trajectory], leaf: int, shared: Sequence[int], trained_before: int
) -> CutRow:
    """The row of a leaf: trained is what any trajectory sampled on its way, and no row before."""
    ids = _ids(trajectories[leaf])
    mask = np.zeros(len(ids), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    scored = all(trajectory.given_logprobs is not None for trajectory in trajectories)
    for trajectory, common in zip(trajectories, shared, strict=True):
        assert trajectory.mask is not None
        new = (trajectory.mask[:common] == 1) & (mask[:common] == 0)
        mask[:common][new] = 1
        if scored:
            given = trajectory.logprobs
            assert given is not None
            logprobs[:common][new] = given[:common][new]
    mask[:trained_before] = 0
    logprobs[mask == 0] = 0
    return CutRow(trajectories[leaf], ids, mask, logprobs if scored else None)


def _shared(recording: Recording) -> list[list[int]]:
    """How many ids each two trajectories share, each with itself all of them."""
    ids = [_ids(trajectory) for trajectory in recording.trajectories]
    paths = recording.paths
    if paths is not None:
        return [[_along(a, b) if i != j else len(ids[i]) for j, b in enumerate(paths)]
                for i, a in enumerate(paths)]  # fmt: skip
    return [[common_prefix(a, b) for b in ids] for a in ids]


def _along(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    """How many ids two branches of a tree have before they part."""
    common = 0
    for (node, end), (other, _) in zip(left, right, strict=False):
        if node != other:
            break
        common = end
    return common


def common_prefix(left: Ids, right: Ids) -> int:
    """How many ids two sequences begin with."""
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


def _ids(trajectory: Trajectory) -> Ids:
    if trajectory.ids is None:
        raise RowError("a rollout without token ids")
    return trajectory.ids
