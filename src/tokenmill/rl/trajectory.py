"""Trajectories: recorded sequences of token ids, and the rows that are cut from them.

A sampler that branches records the same ids several times. `cut_rows` gives rows in which every
sampled token is trained exactly once, after exactly the ids that the sampler saw::

    recorded   p p S S t S S            rows   p p S S t S S
               p p S S t S X S                 p p s s t s X S     s: context, not trained
               p p S S                         (a prefix of the first: no row)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import RowError

Ids = NDArray[np.int32]
Bits = NDArray[np.uint8]
Logprobs = NDArray[np.float32]

TRUNCATED = ("length", "truncated", "aborted", "abort", "max_tokens")  # words of several formats


class Fault(NamedTuple):
    """What is wrong with mask or log-probabilities, whatever the ids say."""

    kind: str
    token: int | None
    expected: str
    found: str


@dataclass
class Trajectory:
    """One recorded rollout; None stands for what was not recorded."""

    format: str
    ids: Ids | None = None  # prompt and everything after it
    mask: Bits | None = None  # 1 on what was sampled: one for each id, if it is sound
    given_logprobs: NDArray[np.float64] | None = None  # one for each id or each sampled id, or NaN
    prompt_length: int | None = None  # in ids
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    prompt: str | None = None
    response: str | None = None
    finish: str | None = None  # why it ended, in the recorder's word
    reward: float | None = None
    advantages: list[float] | float | None = None  # one number, or one for each id
    group: Any = None  # trajectories of one prompt have one group
    step: int | None = None  # of training
    version: Any = None  # of the weights that sampled it
    metadata: dict[str, Any] = field(default_factory=dict)  # whatever else the row has
    among: bool = False  # whether others were recorded with it, which may mask its context

    @property
    def truncated(self) -> bool:
        return self.finish in TRUNCATED

    @property
    def logprobs(self) -> Logprobs | None:
        """One for each id, 0 on what was not sampled; None where none were recorded.

        Only where `faults` finds nothing wrong with them.
        """
        given, mask = self.given_logprobs, self.mask
        if given is None or mask is None:
            return None
        taken = mask.astype(bool)
        spread = np.zeros(len(mask), np.float32)
        spread[taken] = given[taken] if len(given) == len(mask) else given
        return spread

    def faults(self) -> Iterator[Fault]:
        if self.ids is None:
            return
        size = len(self.ids)
        if self.mask is None:
            yield Fault("mask_length", None, f"a mask of {size} tokens", "none")
            return
        if len(self.mask) != size:
            yield Fault("mask_length", None, f"{size} numbers", f"{len(self.mask)} numbers")
            return
        odd = np.flatnonzero(self.mask > 1)
        if len(odd):
            yield Fault("mask_values", int(odd[0]), "0 or 1", "another number")
            return
        given, places = self.given_logprobs, np.flatnonzero(self.mask)
        if given is None:
            return
        if len(given) not in (size, len(places)):
            wanted = f"{size} (one per token) or {len(places)} (one per sampled token)"
            yield Fault("logprobs_length", None, wanted, str(len(given)))
            return
        per_token = len(given) == size
        wrong = np.flatnonzero(~np.isfinite(given[places] if per_token else given))
        if len(wrong):
            token = int(places[wrong[0]])
            value = given[token] if per_token else given[wrong[0]]
            found = "none" if np.isnan(value) else str(value)
            yield Fault("logprobs_nonfinite", token, "a finite number", found)

    def unmasked(self) -> Fault | None:
        """A token that has a log-probability, as only sampled ones have, and is not in the mask.

        A sampler gives a number to what it sampled, and 0 or nothing to the rest. Some recorders
        score the prompt, too, and step by step others write what came before; then this says
        nothing.
        """
        given, mask = self.given_logprobs, self.mask
        if given is None or mask is None or len(given) != len(mask):
            return None
        if not len(mask) or self.among or self.prompt_length is not None:
            return None
        outside = np.isfinite(given) & (given != 0) & (mask == 0)
        first = int(mask.argmax())
        if not outside.any() or (first > 1 and outside[1:first].all()):
            return None
        token = int(outside.argmax())
        found = f"0, and a log-probability of {given[token]:.4g}"
        return Fault("mask_misses_sampled", token, "1", found)

    def require_sound(self) -> None:
        if self.ids is None:
            raise RowError(
                f"a rollout of format {self.format!r} without token ids: what was sampled is never"
                " encoded again"
            )
        for fault in self.faults():
            where = "" if fault.token is None else f" at token {fault.token}"
            raise RowError(f"{fault.kind}{where}: {fault.found} where {fault.expected} belongs")


class Recording(NamedTuple):
    """The trajectories of one source row, at least one."""

    trajectories: list[Trajectory]
    paths: list[list[tuple[int, int]]] | None = None
    """Of a tree, the nodes that each trajectory runs through and how many ids it has after each:
    trajectories share exactly the nodes that both run through. None: they share what their ids have
    in common."""


class CutRow(NamedTuple):
    trajectory: Trajectory  # whose ids and reward it has
    ids: Ids
    mask: Bits  # 1 on what this row trains
    logprobs: Logprobs | None  # of what it trains, 0 elsewhere


def cut_rows(recording: Recording) -> list[CutRow]:
    """The rows of one source row, in its order; unsound trajectories raise `RowError`."""
    trajectories = recording.trajectories
    for trajectory in trajectories:
        trajectory.require_sound()
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


def _row(
    trajectories: Sequence[Trajectory], leaf: int, shared: Sequence[int], trained_before: int
) -> CutRow:
    """The row of a leaf: it trains what any trajectory sampled on its path, and no earlier row."""
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
    ids = [_ids(trajectory) for trajectory in recording.trajectories]
    paths = recording.paths
    if paths is not None:
        return [[_along(a, b) if i != j else len(ids[i]) for j, b in enumerate(paths)]
                for i, a in enumerate(paths)]  # fmt: skip
    return [[_common_prefix(a, b) for b in ids] for a in ids]


def _along(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    shared = (end for (node, end), (other, _) in zip(left, right, strict=False) if node == other)
    return max(shared, default=0)


def _common_prefix(left: Ids, right: Ids) -> int:
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


def _ids(trajectory: Trajectory) -> Ids:
    assert trajectory.ids is not None  # require_sound raises
    return trajectory.ids
