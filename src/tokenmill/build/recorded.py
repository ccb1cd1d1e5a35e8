"""Build recorded rollouts: their ids as they were sampled, nothing encoded.

`RolloutPipeline` reads each row's trajectories, cuts them into rows that train every sampled token
once, and compares them with the template; what that finds does not reject a row. `attach_recorded`
attaches log-probabilities, rewards and the like to the finished store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill.build.pipeline import TokenizedPipeline, digests_of
from tokenmill.build.recipe import Recipe
from tokenmill.chat import Rendering
from tokenmill.chat.render import GroupFacts
from tokenmill.errors import RowError
from tokenmill.rollouts import cut_rows, read_rollouts
from tokenmill.rollouts.formats import reread
from tokenmill.rollouts.trajectory import CutRow, Recording, Trajectory
from tokenmill.rollouts.verdict import Judge, Verdict, turns_by_mask
from tokenmill.source import BlockRows, Rows, read_block
from tokenmill.store import Store
from tokenmill.store.columns import SliceColumns
from tokenmill.tokenizer import Encoded, Tokenizer
from tokenmill.tokenizer.encoded import starts_of

RECORDED = ("reward", "advantage", "group", "step", "version", "finish_reason", "drift", "findings")
"""What a store of rollouts carries with every row."""
PER_ROW = ("reward", "advantage", "step")
"""What is attached per row, where every row has it."""
MADE_BY = "recorded"

_json = msgspec.json.Encoder()


class RolloutPipeline(TokenizedPipeline):
    """The pipeline of recorded rollouts."""

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, engine: str, renderer: str) -> None:
        super().__init__(recipe, tokenizer)
        self._judge = Judge(tokenizer, recipe.chat_spec(), engine, renderer)
        self._carried_values: list[dict[str, Any]] = []

    def run(self, rows: BlockRows) -> tuple[SliceColumns, dict[str, Any]]:
        """Read, cut and judge one block."""
        start = time.perf_counter()
        read = Rendering()
        cut: list[CutRow] = []
        for number, (value, raw) in enumerate(zip(rows.values, rows.raw, strict=True)):
            try:
                own, facts = read_and_cut(value, raw)
                for row in own:
                    self._require_known(row)
            except RowError as error:
                read.rejected.append((number, 0, error))
                continue
            if facts is not None:
                read.groups[len(cut)] = facts
            read.source += [number] * len(own)
            read.part += range(len(own))
            cut += own
        parsed = time.perf_counter()
        verdicts = self._judge.judge([row.trajectory for row in cut])
        turns = [_turns(row, verdict) for row, verdict in zip(cut, verdicts, strict=True)]
        read.roles = [[role for role, _ in of_row] for of_row in turns]
        self._carried_values = [
            carried_values(row.trajectory, verdict, self.recipe.carry)
            for row, verdict in zip(cut, verdicts, strict=True)
        ]
        columns = self._columns(rows, digests_of(rows), read, _encoded(cut, turns))
        self.seconds["parse"] += parsed - start
        self.seconds["check"] += time.perf_counter() - parsed
        return columns, {}

    def _carried(
        self, rows: BlockRows, kept: NDArray[np.int64], served: NDArray[np.int32]
    ) -> dict[str, list[str]]:
        """What the trajectories say, by text and not by source row: one row may give several."""
        return {
            name: [_json.encode(self._carried_values[i][name]).decode() for i in kept.tolist()]
            for name in self.recipe.carry
        }

    def _require_known(self, row: CutRow) -> None:
        if not len(row.ids):
            raise RowError("a rollout of no tokens")
        size = len(self.tokenizer.table)
        outside = np.flatnonzero(row.ids >= size)
        if len(outside):
            place = int(outside[0])
            raise RowError(
                f"token_ids[{place}] is {int(row.ids[place])}; the tokenizer's ids are below {size}"
            )


def read_and_cut(value: Any, raw: bytes) -> tuple[list[CutRow], GroupFacts | None]:
    """The rows of one source row; of a pair, also what makes them one group.

    Raises:
        RowError: It is no rollout, or none that rows can be made of.
    """
    value = reread(value, raw)
    if isinstance(value, dict) and isinstance(value.get("chosen"), dict):
        sides = [read_rollouts(value[name]).trajectories for name in ("chosen", "rejected")]
        if any(len(side) != 1 for side in sides):
            raise RowError("a pair is of two trajectories", reason="bad_group")
        [chosen], [rejected] = sides
        cut = [cut_rows(Recording([one]))[0] for one in (chosen, rejected)]
        rewards = (chosen.reward, rejected.reward)
        scores = None if None in rewards else tuple(map(float, rewards))  # type: ignore[arg-type]
        margin = None if scores is None else scores[0] - scores[1]
        return cut, GroupFacts((1, 0), scores, margin, one_prompt=True)
    return cut_rows(read_rollouts(value)), None


def carried_values(
    trajectory: Trajectory, verdict: Verdict | RowError, names: Sequence[str]
) -> dict[str, Any]:
    """What rows carry, by name: what was recorded, the verdict, and then any other column."""
    known = {
        "reward": trajectory.reward,
        "advantage": None if isinstance(trajectory.advantages, list) else trajectory.advantages,
        "group": trajectory.group,
        "step": trajectory.step,
        "version": trajectory.version,
        "finish_reason": trajectory.finish,
    }
    found: dict[str, Any] = {}
    for name in names:
        if name == "drift":
            found[name] = None if isinstance(verdict, RowError) else verdict.drift
        elif name == "findings":
            found[name] = _findings(verdict)
        else:
            found[name] = known[name] if name in known else trajectory.metadata.get(name)
    return found


def _findings(verdict: Verdict | RowError) -> list[dict[str, Any]]:
    if isinstance(verdict, RowError):
        told = {"class": None, "kind": verdict.reason, "detail": verdict.message[:300]}
        return [told]
    return [
        {"class": note.drift, **{k: v for k, v in note._asdict().items() if k != "drift"}}
        for note in verdict.notes
    ]


def _turns(row: CutRow, verdict: Verdict | RowError) -> list[tuple[str, int]]:
    found = [] if isinstance(verdict, RowError) else verdict.turns
    return found or turns_by_mask(row.trajectory)


def _encoded(rows: Sequence[CutRow], turns: Sequence[list[tuple[str, int]]]) -> Encoded:
    return Encoded(
        ids=np.concatenate([*(row.ids for row in rows), np.zeros(0, np.int32)]),
        row_starts=starts_of([len(row.ids) for row in rows]),
        mask=np.concatenate([*(row.mask for row in rows), np.zeros(0, np.uint8)]),
        turn_ends=np.array([end for own in turns for _, end in own], np.int32),
        turn_starts=starts_of([len(own) for own in turns]),
    )


# What lies beside the store


class _Missing(Exception):
    """A row has nothing of what was to be attached."""


def attach_recorded(store: Store, rows: Rows) -> list[str]:
    """Attach what was recorded per row and per token; the names that every row has."""
    there = {sidecar.name for sidecar in store.sidecars if sidecar.made_by == MADE_BY}
    names = []
    for name in ("logprobs", "advantages"):
        try:
            if name not in there:
                values = (_per_token(name, row) for row in _served(store, rows))
                store.attach(name, values, made_by=MADE_BY, per="token")
            names.append(name)
        except _Missing:
            continue
    for name in PER_ROW:
        if name in there:
            names.append(name)
            continue
        values_of_rows = [
            msgspec.json.decode(text)
            for _, columns in store.columns([f"carried.{name}"])
            for text in columns[f"carried.{name}"]
        ]
        if None not in values_of_rows:
            store.attach(name, np.array(values_of_rows, np.float64), made_by=MADE_BY, per="row")
            names.append(name)
    return names


def _per_token(name: str, row: tuple[CutRow, int]) -> NDArray[Any]:
    cut, length = row
    if name == "logprobs":
        if cut.logprobs is None:
            raise _Missing
        return cut.logprobs[:length]
    given = cut.trajectory.advantages
    if not isinstance(given, list):
        raise _Missing
    taken = np.asarray(cut.trajectory.mask) == 1
    spread = np.zeros(len(cut.ids))
    if len(given) == len(spread):
        spread[:] = given
    elif len(given) == int(taken.sum()):
        spread[taken] = given
    else:
        raise _Missing
    return np.where(cut.mask == 1, spread, 0)[:length]


def _served(store: Store, rows: Rows) -> Iterator[tuple[CutRow, int]]:
    """The rows of a store as they were recorded, with how many of their tokens are stored."""
    for at, block in enumerate(rows.blocks()):
        reader = store.slice_at(at)
        places = zip(
            reader.column("row_in_slice").tolist(),
            reader.column("part").tolist(),
            reader.column("length").tolist(),
            strict=True,
        )
        read = read_block(block)
        number, cut = -1, list[CutRow]()
        for row, part, length in places:
            if row != number:
                cut, _ = read_and_cut(read.values[row], read.raw[row])
                number = row
            yield cut[part], length
