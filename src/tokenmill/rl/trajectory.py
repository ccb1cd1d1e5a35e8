"""Trajectories: recorded sequences of token ids, and the rows that are cut from them.

A sampler that branches records the same ids several times. `cut_rows` returns rows in which every
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

MAX_LOGPROB = 1e-3  # rounding gives numbers just above 0
MIN_ZEROS = 4  # so many log-probabilities of 0 are not a confident model
STOPPED = ("stop", "tool_calls", "completed", "complete", "eos")
TRUNCATED = ("length", "truncated", "aborted", "abort", "max_tokens")  # names in several formats


class Fault(NamedTuple):
    """An error in the mask or the log-probabilities, independent of the ids."""

    kind: str
    token: int | None
    expected: str
    found: str


@dataclass
class Trajectory:
    """One recorded rollout; None for values that were not recorded."""

    format: str
    ids: Ids | None = None  # prompt and everything after it
    mask: Bits | None = None  # 1 for sampled ids; one per id, if correct
    recorded_logprobs: NDArray[np.float64] | None = None  # one per id or per sampled id, or NaN
    prompt_length: int | None = None  # in ids
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    prompt: str | None = None
    response: str | None = None
    finish: str | None = None  # why it ended, as recorded
    reward: float | None = None
    advantages: list[float] | float | None = None  # one number, or one for each id
    group: Any = None  # the same for trajectories of one prompt
    step: int | None = None  # of training
    version: Any = None  # of the weights that sampled it
    metadata: dict[str, Any] = field(default_factory=dict)  # other columns of the row
    warning: str = ""  # about values that could not be read
    has_siblings: bool = False  # whether the row has other trajectories, which may mask its context

    @property
    def truncated(self) -> bool:
        return self.finish in TRUNCATED

    @property
    def stopped(self) -> bool:
        return self.finish in STOPPED

    @property
    def logprobs(self) -> Logprobs | None:
        """One per id, 0 for ids that were not sampled; None if none were recorded.

        Valid only if `faults` finds none.
        """
        recorded, mask = self.recorded_logprobs, self.mask
        if recorded is None or mask is None:
            return None
        sampled = mask.astype(bool)
        result = np.zeros(len(mask), np.float32)
        result[sampled] = recorded[sampled] if len(recorded) == len(mask) else recorded
        return result

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
        invalid = np.flatnonzero(self.mask > 1)
        if len(invalid):
            yield Fault("mask_values", int(invalid[0]), "0 or 1", "another number")
            return
        recorded, sampled = self.recorded_logprobs, np.flatnonzero(self.mask)
        if recorded is None:
            return
        if len(recorded) not in (size, len(sampled)):
            expected = f"{size} (one per token) or {len(sampled)} (one per sampled token)"
            yield Fault("logprobs_length", None, expected, str(len(recorded)))
            return
        per_token = len(recorded) == size
        wrong = np.flatnonzero(~np.isfinite(recorded[sampled] if per_token else recorded))
        if len(wrong):
            token = int(sampled[wrong[0]])
            value = recorded[token] if per_token else recorded[wrong[0]]
            found = "none" if np.isnan(value) else str(value)
            yield Fault("logprobs_nonfinite", token, "a finite number", found)

    def doubts(self) -> Iterator[Fault]:
        """Yield values that no sampler records, though rows can be made of them."""
        if self.ids is None or self.mask is None:
            return
        sampled, size = np.flatnonzero(self.mask), self.prompt_length
        last = int(sampled[0]) if len(sampled) else len(self.ids)
        first = min(last, 1)  # 0 if the first token is sampled
        if size is not None and not first <= size <= last:
            expected = f"from {first} to {last}, the first sampled token"
            yield Fault("prompt_length", last, expected, str(size))
        logprobs = self.logprobs
        if logprobs is not None and len(sampled):
            values = logprobs[sampled]
            if values.max() > MAX_LOGPROB:
                token = int(sampled[values.argmax()])
                yield Fault("logprobs_positive", token, "at most 0", f"{values.max():.4g}")
            elif len(values) >= MIN_ZEROS and not values.any():
                found = f"0 for all {len(values)} sampled tokens"
                yield Fault("logprobs_zero", int(sampled[0]), "numbers below 0", found)
        if (unmasked := self.unmasked()) is not None:
            yield unmasked

    def unmasked(self) -> Fault | None:
        """Return the first token with a log-probability that is not in the mask.

        A sampler scores the tokens that it sampled, and gives 0 or nothing to the rest. Some
        recorders also score the prompt or earlier steps; then the result is None.
        """
        recorded, mask = self.recorded_logprobs, self.mask
        if recorded is None or mask is None or len(recorded) != len(mask):
            return None
        if not len(mask) or self.has_siblings or self.prompt_length is not None:
            return None
        outside = np.isfinite(recorded) & (recorded != 0) & (mask == 0)
        first = int(mask.argmax())
        if not outside.any() or (first > 1 and outside[1:first].all()):
            return None
        token = int(outside.argmax())
        found = f"0, and a log-probability of {recorded[token]:.4g}"
        return Fault("mask_misses_sampled", token, "1", found)

    def require_sound(self) -> None:
        if self.ids is None:
            raise RowError(
                f"a rollout of format {self.format!r} has no token ids; sampled text is never"
                " encoded again"
            )
        for fault in self.faults():
            where = "" if fault.token is None else f" at token {fault.token}"
            raise RowError(f"{fault.kind}{where}: expected {fault.expected}, got {fault.found}")


class Recording(NamedTuple):
    """The trajectories of one source row, at least one."""

    trajectories: list[Trajectory]
    paths: list[list[tuple[int, int]]] | None = None
    """The tree nodes of each trajectory, with its number of ids after each. Trajectories share
    exactly their common nodes. None: they share the common prefix of their ids."""


class CutRow(NamedTuple):
    trajectory: Trajectory  # the source of its ids and reward
    ids: Ids
    mask: Bits  # 1 for the tokens that this row trains
    logprobs: Logprobs | None  # of those tokens, else 0


def cut_rows(recording: Recording) -> list[CutRow]:
    """Return the rows of one source row, in order; trajectories with faults raise `RowError`."""
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
    """Return the row of a leaf, which trains tokens sampled on its path and not trained before."""
    ids = _ids(trajectories[leaf])
    mask = np.zeros(len(ids), np.uint8)
    logprobs = np.zeros(len(ids), np.float32)
    has_logprobs = all(trajectory.recorded_logprobs is not None for trajectory in trajectories)
    for trajectory, length in zip(trajectories, shared, strict=True):
        assert trajectory.mask is not None
        new = (trajectory.mask[:length] == 1) & (mask[:length] == 0)
        mask[:length][new] = 1
        if has_logprobs:
            values = trajectory.logprobs
            assert values is not None
            logprobs[:length][new] = values[:length][new]
    mask[:trained_before] = 0
    logprobs[mask == 0] = 0
    return CutRow(trajectories[leaf], ids, mask, logprobs if has_logprobs else None)


def _shared(recording: Recording) -> list[list[int]]:
    ids = [_ids(trajectory) for trajectory in recording.trajectories]
    paths = recording.paths
    if paths is not None:
        return [[_shared_nodes(a, b) if i != j else len(ids[i]) for j, b in enumerate(paths)]
                for i, a in enumerate(paths)]  # fmt: skip
    return [[_common_prefix(a, b) for b in ids] for a in ids]


def _shared_nodes(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> int:
    shared = (
        end for (node, end), (other_node, _) in zip(left, right, strict=False) if node == other_node
    )
    return max(shared, default=0)


def _common_prefix(left: Ids, right: Ids) -> int:
    size = min(len(left), len(right))
    differs = left[:size] != right[:size]
    return int(differs.argmax()) if differs.any() else size


def _ids(trajectory: Trajectory) -> Ids:
    assert trajectory.ids is not None  # require_sound raises
    return trajectory.ids
