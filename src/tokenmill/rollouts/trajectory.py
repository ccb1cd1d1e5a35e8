"""A trajectory: one recorded sequence, what of it was sampled, and what is known about it.

`formats` makes trajectories of rows, `tree` cuts rows out of them, `verdict` judges them. Ids and
masks are kept as they were recorded; `Trajectory.faults` lists what is wrong with them by
themselves, before any template is asked: a check reports that, a build refuses the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.errors import RowError

Ids = NDArray[np.int32]
Bits = NDArray[np.uint8]
Logprobs = NDArray[np.float32]

TRUNCATED = ("length", "truncated", "aborted", "abort", "max_tokens")
"""What formats call the end of a trajectory that was cut off."""


class Fault(NamedTuple):
    """What is wrong with the columns of a trajectory by themselves."""

    kind: str
    token: int | None
    expected: str
    found: str


@dataclass
class Trajectory:
    """One recorded rollout.

    Attributes:
        format: Which format it was read from.
        ids: Prompt and everything after it; None where only texts were recorded.
        mask: 1 on what was sampled, as recorded: one number for each id, if it is sound.
        given_logprobs: As recorded, NaN where one is missing: one for each id, or one for each
            sampled id.
        prompt_length: How many ids the prompt has, where that was recorded.
        messages: The conversation, where it was recorded.
        tools: Its tools.
        prompt: The prompt as text, where that was recorded.
        response: What follows it as text.
        finish: Why it ended, in the recorder's word.
        reward: What it earned.
        advantages: One number, or one for each id.
        group: Trajectories of one prompt have one group.
        step: Training step.
        version: Version of the weights that sampled it.
        metadata: Whatever else the row has.
        among: Whether others were recorded with it, which may hold the mask of what it has as
            context.
    """

    format: str
    ids: Ids | None = None
    mask: Bits | None = None
    given_logprobs: NDArray[np.float64] | None = None
    prompt_length: int | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    prompt: str | None = None
    response: str | None = None
    finish: str | None = None
    reward: float | None = None
    advantages: list[float] | float | None = None
    group: Any = None
    step: int | None = None
    version: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    among: bool = False

    @property
    def truncated(self) -> bool:
        """Whether the recorder says that it was cut off."""
        return self.finish in TRUNCATED

    @property
    def logprobs(self) -> Logprobs | None:
        """One for each id, 0 on what was not sampled; None where none were recorded.

        Where `faults` finds nothing wrong with them.
        """
        given, mask = self.given_logprobs, self.mask
        if given is None or mask is None:
            return None
        taken = mask.astype(bool)
        spread = np.zeros(len(mask), np.float32)
        spread[taken] = given[taken] if len(given) == len(mask) else given
        return spread

    def faults(self) -> Iterator[Fault]:
        """What is wrong with mask and log-probabilities, whatever the ids say."""
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
        if self.given_logprobs is not None:
            yield from self._logprob_faults(self.mask, self.given_logprobs)

    def _logprob_faults(self, mask: Bits, given: NDArray[np.float64]) -> Iterator[Fault]:
        size, places = len(mask), np.flatnonzero(mask)
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
        """Refuse a trajectory that no row can be made of."""
        if self.ids is None:
            raise RowError(
                f"a rollout of format {self.format!r} without token ids: what was sampled is never"
                " encoded again"
            )
        for fault in self.faults():
            where = "" if fault.token is None else f" at token {fault.token}"
            raise RowError(f"{fault.kind}{where}: {fault.found} where {fault.expected} belongs")
