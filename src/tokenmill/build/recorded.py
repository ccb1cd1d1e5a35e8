"""Build recorded rollouts: their ids as they were sampled, nothing encoded.

Rows train every sampled token once. What a comparison with the template finds rejects no row.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill._core import fingerprint
from tokenmill._core.sealed import publish_files
from tokenmill.build.blocks import cache_of, open_sources
from tokenmill.build.calls import Sources, run_recipe
from tokenmill.build.pipeline import TokenizedPipeline, digests_of
from tokenmill.build.recipe import Recipe
from tokenmill.chat import Rendering
from tokenmill.chat.render import GroupFacts
from tokenmill.errors import RowError, SourceError, UsageError
from tokenmill.rl.formats import read_rollouts, reread
from tokenmill.rl.trajectory import CutRow, Recording, Trajectory, cut_rows
from tokenmill.rl.verdict import Judge, Verdict, turns_by_mask
from tokenmill.sources.block import BlockRows, read_block
from tokenmill.sources.rows import Rows
from tokenmill.store import CacheLayout, Row, Store
from tokenmill.store.columns import SliceColumns
from tokenmill.tokenizers.encoded import Encoded, starts_of
from tokenmill.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.data.view import View

# Columns of every store of rollouts, and sidecars, where every row has a value.
RECORDED = ("reward", "advantage", "group", "step", "version", "finish_reason", "drift", "findings")
PER_ROW = ("reward", "advantage", "step")
MADE_BY = "recorded"

_json = msgspec.json.Encoder()


class RolloutPipeline(TokenizedPipeline):
    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, engine: str, renderer: str) -> None:
        super().__init__(recipe, tokenizer)
        self._judge = Judge(tokenizer, recipe.chat_spec(), engine, renderer)
        self._carried_values: list[dict[str, Any]] = []

    def run(self, rows: BlockRows) -> tuple[SliceColumns, dict[str, Any]]:
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
    """Return the rows of one source row, and for a pair its group.

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
    known = {
        "reward": trajectory.reward,
        "advantage": None if isinstance(trajectory.advantages, list) else trajectory.advantages,
        "group": trajectory.group,
        "step": trajectory.step,
        "version": trajectory.version,
        "finish_reason": trajectory.finish,
        "drift": None if isinstance(verdict, RowError) else verdict.drift,
        "findings": _findings(verdict),
    }
    return {n: known[n] if n in known else trajectory.metadata.get(n) for n in names}


def _findings(verdict: Verdict | RowError) -> list[dict[str, Any]]:
    if isinstance(verdict, RowError):
        return [{"class": None, "kind": verdict.reason, "detail": verdict.message[:300]}]
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


def attach_recorded(store: Store, rows: Rows) -> None:
    """Attach the values that every row has, per token and per row."""
    there = {sidecar.name for sidecar in store.sidecars if sidecar.made_by == MADE_BY}
    for name in ("logprobs", "advantages"):
        if name not in there:
            values = (_per_token(name, row) for row in _served(store, rows))
            with contextlib.suppress(_Missing):
                store.attach(name, values, made_by=MADE_BY, per="token")
    for name in PER_ROW:
        if name in there:
            continue
        values_of_rows = [
            msgspec.json.decode(text)
            for _, columns in store.columns([f"carried.{name}"])
            for text in columns[f"carried.{name}"]
        ]
        if None not in values_of_rows:
            store.attach(name, np.array(values_of_rows, np.float64), made_by=MADE_BY, per="row")


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
    """Yield the rows of a store as they were recorded, and how many of their tokens it has."""
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


# From dumps to a store


def from_rollouts(
    sources: Sources,
    tokenizer: Any = None,
    where: str | None = None,
    *,
    pairs: Literal["best_worst"] | None = None,
    carry: Sequence[str] = (),
    progress: Any = None,
    **given: Any,
) -> Store | View:
    """Make a store of recorded rollouts: ids as they were sampled, every sampled token once.

    Args:
        sources: Files of rollouts, as for `check_rollouts`.
        tokenizer: As for `prepare`: whose ids they are.
        where: Which rows, as an expression of ``reward``, ``advantage``, ``group``, ``step``,
            ``version``, ``drift``, ``length``, ``trained`` and what is carried; the answer is a
            view then.
        pairs: ``best_worst`` makes a store of preference pairs: of each group the trajectory with
            the highest reward and the one with the lowest, where they differ.
        carry: Further columns to keep beside the tokens.
        progress: As for `prepare`.
        given: Other arguments of `prepare`: ``max_length``, ``chat_template``, ``cache_dir``, …

    Returns:
        A store; a view of it with ``where``, a store of groups with ``pairs``.
    """
    if pairs not in (None, "best_worst"):
        raise UsageError(f"pairs={pairs!r}: choose best_worst, or leave it out")
    for name in ("format", "train_on", "expand"):
        if name in given:
            raise UsageError(f"{name} has no meaning for rollouts: what was sampled is trained")
    readable, _ = readable_sources(sources, given.get("cache_dir"))
    carried = tuple(dict.fromkeys((*RECORDED, *carry)))
    made = {**given, "format": "rollouts", "carry": carried}
    expression = None if where is None else in_carried(where, carried)
    store = run_recipe(readable, tokenizer, progress=progress, **made).store
    own = store.private_directory  # with disable_cache, where everything is made
    cache = cache_of(given.get("cache_dir") if own is None else own.path)
    attach_recorded(store, open_sources(readable, cache))
    chosen: Store | View = store if expression is None else store.filter(expression)
    if pairs is None:
        return chosen
    path = _write_pairs(chosen, cache.root)
    paired = run_recipe(path, tokenizer, progress=progress, **made).store
    attach_recorded(paired, open_sources(path, cache))
    return paired


def in_carried(where: str, carried: Sequence[str]) -> str:
    """Return a filter with ``carried.name`` for the bare names of carried columns."""
    from tokenmill.store.where import NAMES, parse_filter

    class Named(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in carried and node.id not in NAMES:
                return ast.Attribute(ast.Name("carried", ast.Load()), node.id, ast.Load())
            return node

    return ast.unparse(ast.fix_missing_locations(Named().visit(parse_filter(where))))


# Best and worst


def _write_pairs(rows: Store | View, root: Path) -> str:
    """Write pairs as rows of a file in the cache, and return its path."""
    scored = any(sidecar.name == "logprobs" for sidecar in rows.sidecars)

    def recorded(number: int) -> dict[str, Any]:
        row = _as_rollout(rows[number])
        if scored:
            row["logprobs"] = np.asarray(rows.sidecar("logprobs", MADE_BY)[number]).tolist()
        return row

    lines = [
        json.dumps({"chosen": recorded(best), "rejected": recorded(worst), "group": group})
        for group, best, worst in best_and_worst(rows)
    ]
    if not lines:
        raise SourceError("no pairs: no group has two trajectories of different rewards")
    return _kept(root, "pairs.jsonl", "\n".join(lines).encode() + b"\n")


def best_and_worst(rows: Store | View) -> Iterator[tuple[Any, int, int]]:
    """Yield each group with the numbers of its best and worst row; of equal ones the first.

    A prompt that comes again in a later step is another group.
    """
    groups: dict[str, list[tuple[float, int]]] = {}
    names: dict[str, Any] = {}
    for number, row in enumerate(rows):
        carried = row.carried
        if carried["group"] is None or carried["reward"] is None:
            continue
        key = json.dumps([carried["group"], carried["step"]], sort_keys=True)
        names[key] = carried["group"]
        groups.setdefault(key, []).append((carried["reward"], number))
    for key, members in groups.items():
        best = max(members, key=lambda one: (one[0], -one[1]))
        worst = min(members)
        if best[0] > worst[0]:
            yield names[key], best[1], worst[1]


def _as_rollout(row: Row) -> dict[str, Any]:
    found = ("drift", "findings")
    carried = {n: v for n, v in row.carried.items() if v is not None and n not in found}
    return {**carried, "token_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()}


# Dumps of torch


def readable_sources(
    sources: Any, cache_dir: str | os.PathLike[str] | None
) -> tuple[Any, dict[str, str]]:
    """Return sources that can be read as rows, and for each converted file the dump it is of."""
    from tokenmill.integrations.miles.saved import DUMP_ENDINGS, rows_of_dump

    listed = [sources] if isinstance(sources, str | os.PathLike) else sources
    if not isinstance(listed, Sequence):
        return sources, {}
    found: list[str] = []
    names: dict[str, str] = {}
    for source in listed:
        path = os.fspath(source)
        if not path.endswith(DUMP_ENDINGS):
            found.append(path)
            continue
        paths = sorted(glob.glob(path)) if any(mark in path for mark in "*?[") else [path]
        for dump in paths or [path]:
            lines = "".join(json.dumps(row) + "\n" for row in rows_of_dump(dump))
            root = cache_of(cache_dir).root
            made = _kept(root, os.path.basename(dump) + ".jsonl", lines.encode())
            names[made] = dump
            found.append(made)
    return found, names


def _kept(root: Path, name: str, data: bytes) -> str:
    """Return a file of the cache, in a directory that is named by its name and content."""
    place = CacheLayout(root).rollouts / fingerprint.key([name, fingerprint.checksum(data)])
    if not (place / name).exists():
        publish_files(root, place, {name: data})
    with contextlib.suppress(OSError):
        os.utime(place)  # in use: no collector takes it before a store names it
    return str(place / name)
