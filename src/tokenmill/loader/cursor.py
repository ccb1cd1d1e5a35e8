"""The cursor: a few integers that say where in the stream a run stands.

A `Cursor` is (epoch, position), position counting samples of that epoch, at a boundary of global
batches; when packing, also the window's number and the packs before it, so that a resume packs one
window only. A `Passport` says which stream it belongs to: dataset, seed, order, packing. Both
together are the *state*: a flat JSON-able dict under 1 KB, the same on every rank, that loads under
any number of ranks, workers and any batch size, and that another stream refuses by name.

Of a mixture with a schedule only what lies behind the cursor counts: `Scheduled` says what the
stream up to there is made of, so a run may go on with another tail of its schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenmill.errors import StateError
from tokenmill.sampling import ORDER_VERSION, admit_state

STATE_VERSION = 1
_KIND = "tokenmill.Loader"


@dataclass(frozen=True)
class Cursor:
    """A place in the stream, between two global batches.

    Args:
        epoch: Epoch of the next sample.
        position: Samples of that epoch already handed out.
        window: Packing window of the next pack.
        packs_before: Packs of this epoch before that window.
    """

    epoch: int = 0
    position: int = 0
    window: int = 0
    packs_before: int = 0

    def next_epoch(self) -> Cursor:
        """The start of the next epoch."""
        return Cursor(self.epoch + 1)


@dataclass(frozen=True)
class Scheduled:
    """What the stream of a mixture with a schedule is made of, up to a cursor.

    Args:
        sources: Key of the mixture without its schedules.
        up_to: Key of the schedules as far as they shaped what lies before a cursor.
    """

    sources: str
    up_to: Callable[[Cursor], str]


@dataclass(frozen=True)
class Passport:
    """Which stream a cursor belongs to.

    Args:
        dataset: Key of the data's content.
        seed: Of the run.
        order: Name of the order, with its parameters.
        packing: What packs depend on; None when rows are not packed.
        scheduled: Of a mixture with a schedule: what its states say instead of ``dataset``.
    """

    dataset: str
    seed: int
    order: str
    packing: dict[str, Any] | None
    scheduled: Scheduled | None = None

    @property
    def _fields(self) -> dict[str, Any]:
        """What a state and its stream must have in common."""
        dataset = self.dataset if self.scheduled is None else self.scheduled.sources
        names = {"seed": self.seed, "order": self.order, "packing": self.packing}
        return {"dataset": dataset, **names}

    def stamp(self, cursor: Cursor, first_epoch: int) -> dict[str, Any]:
        """The state to save."""
        state: dict[str, Any] = {
            "kind": _KIND,
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "epoch": cursor.epoch,
            "position": cursor.position,
            "first_epoch": first_epoch,
            **self._fields,
        }
        if self.packing is not None:
            state["window"] = cursor.window
            state["packs_before"] = cursor.packs_before
        if self.scheduled is not None:
            state["schedule"] = self.scheduled.up_to(cursor)
        return state

    def admit(self, state: Any) -> tuple[Cursor, int]:
        """The cursor and first epoch of a saved state.

        Raises:
            StateError: The state is of another version, dataset, seed, order or packing; the
                message says which, with both values.
        """
        names = ["epoch", "position", "first_epoch"]
        if self.packing is not None:
            names += ["window", "packs_before"]
        numbers = admit_state(
            state,
            kind=_KIND,
            owner="loader",
            version=STATE_VERSION,
            fields=self._fields,
            numbers=names,
        )
        first_epoch = numbers.pop("first_epoch")
        cursor = Cursor(**numbers)
        if cursor.packs_before > cursor.position:
            raise StateError(
                f"the state has {cursor.packs_before} packs before its window, but only "
                f"{cursor.position} before its position"
            )
        stated = state.get("schedule")
        if self.scheduled is not None and (
            not isinstance(stated, str) or stated != self.scheduled.up_to(cursor)
        ):
            raise StateError(
                "the mixture's schedule differs before the state's position: only what lies behind "
                "it may be changed"
            )
        return cursor, first_epoch
