"""Build stores of recorded rollouts, with the sampled ids; nothing is encoded.

Every sampled token is trained once. Differences from the template are recorded and reject no row.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill._core import fingerprint
from tokenmill._core.artifact import publish_files
from tokenmill._core.paths import checked_path
from tokenmill.build.blocks import cache_of, open_sources
from tokenmill.build.calls import Sources, run_recipe
from tokenmill.build.pipeline import TokenizedPipeline, digests_of
from tokenmill.build.recipe import Recipe
from tokenmill.chat import Rendering
from tokenmill.chat.render import GroupFacts
from tokenmill.chat.shapes import float32
from tokenmill.errors import RowError, SourceError, UsageError, check_one_of, check_strings
from tokenmill.rl.formats import FORMATS, read_rollouts, reread
from tokenmill.rl.trajectory import CutRow, Recording, Trajectory, cut_rows
from tokenmill.rl.verdict import RolloutChecker, Verdict, turns_by_mask
from tokenmill.sources.block import BlockRows, read_block
from tokenmill.sources.rows import Rows
from tokenmill.store import CacheLayout, Row, Store
from tokenmill.store.columns import SliceColumns
from tokenmill.tokenizers.encoded import Encoded, starts_of
from tokenmill.tokenizers.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenmill.data.view import View

# Extra columns of a store of rollouts; PER_ROW are also sidecars if every row has a value.
RECORDED = ("reward", "advantage", "group", "step", "version", "finish_reason", "drift", "findings")
PER_ROW = ("reward", "advantage", "step")
PRODUCER = "recorded"
MAX_STEP = 1 << 24  # larger integers are rounded in float32
WARNING = "warning"  # the kind of a finding that does not change the class

_json = msgspec.json.Encoder()


class RolloutPipeline(TokenizedPipeline):
    def __init__(self, recipe: Recipe, tokenizer: Tokenizer, engine: str, renderer: str) -> None:
        super().__init__(recipe, tokenizer)
        self._checker = RolloutChecker(tokenizer, recipe.chat_spec(), engine, renderer)
        self._extra_values: list[dict[str, Any]] = []

    def run(self, rows: BlockRows) -> tuple[SliceColumns, dict[str, Any]]:
        start = time.perf_counter()
        read = Rendering()
        cut: list[CutRow] = []
        rollout_format = self.recipe.format.partition("-")[2] or "auto"
        for number, (value, raw) in enumerate(zip(rows.values, rows.raw, strict=True)):
            try:
                own, facts = read_and_cut(value, raw, rollout_format)
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
        verdicts = self._checker.check([row.trajectory for row in cut])
        turns = [_turns(row, verdict) for row, verdict in zip(cut, verdicts, strict=True)]
        read.roles = [[role for role, _ in of_row] for of_row in turns]
        self._extra_values = [
            extra_values(row.trajectory, verdict, self.recipe.keep_columns)
            for row, verdict in zip(cut, verdicts, strict=True)
        ]
        columns = self._columns(rows, digests_of(rows), read, _encoded(cut, turns))
        self.seconds["parse"] += parsed - start
        self.seconds["check"] += time.perf_counter() - parsed
        return columns, {}

    def _extra(
        self, rows: BlockRows, kept: NDArray[np.int64], served: NDArray[np.int32]
    ) -> dict[str, list[str]]:
        return {
            name: [_json.encode(self._extra_values[i][name]).decode() for i in kept.tolist()]
            for name in self.recipe.keep_columns
        }

    def _require_known(self, row: CutRow) -> None:
        if not len(row.ids):
            raise RowError("the rollout has no tokens")
        size = len(self.tokenizer.table)
        outside = np.flatnonzero(row.ids >= size)
        if len(outside):
            place = int(outside[0])
            raise RowError(
                f"token_ids[{place}] is {int(row.ids[place])}; the tokenizer's ids are below {size}"
            )


def read_and_cut(
    value: Any,
    raw: bytes,
    format: str = "auto",  # noqa: A002 - a name of the contract
) -> tuple[list[CutRow], GroupFacts | None]:
    """Return the rows of one source row, a rollout, and for a pair its group."""
    value = reread(value, raw)
    if isinstance(value, dict) and isinstance(value.get("chosen"), dict):
        sides = [read_rollouts(value[name]).trajectories for name in ("chosen", "rejected")]
        if any(len(side) != 1 for side in sides):
            raise RowError("a pair needs one trajectory per side", reason="bad_group")
        [chosen], [rejected] = sides
        cut = [cut_rows(Recording([one]))[0] for one in (chosen, rejected)]
        scores = margin = None
        if chosen.reward is not None and rejected.reward is not None:
            scores = (float32(chosen.reward, "reward"), float32(rejected.reward, "reward"))
            margin = float32(scores[0] - scores[1], "the difference of rewards")
        _require_numbers([chosen, rejected])
        return cut, GroupFacts((1, 0), scores, margin, one_prompt=True)
    recording = read_rollouts(value, format)
    _require_numbers(recording.trajectories)
    return cut_rows(recording), None


def _require_numbers(trajectories: Sequence[Trajectory]) -> None:
    """Raise `RowError` for values that float32 sidecars cannot hold."""
    for one in trajectories:
        numbers = [("reward", one.reward or 0.0)]
        numbers += [("advantage", value) for value in np.unique(one.advantages or 0.0).tolist()]
        try:
            for name, number in numbers:
                float32(number, name)
        except RowError as error:
            raise RowError(error.message) from error  # of a row, not of a group
        if abs(one.step or 0) > MAX_STEP:
            raise RowError(f"step must be from {-MAX_STEP} to {MAX_STEP}, got {one.step}")


def extra_values(
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
        "findings": _findings(trajectory, verdict),
    }
    return {n: known[n] if n in known else trajectory.metadata.get(n) for n in names}


def _findings(trajectory: Trajectory, verdict: Verdict | RowError) -> list[dict[str, Any]]:
    found = [{"class": None, "kind": WARNING, "detail": trajectory.warning}]
    found = found if trajectory.warning else []
    if isinstance(verdict, RowError):
        return [*found, {"class": None, "kind": verdict.reason, "detail": verdict.message[:300]}]
    return found + [
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


# Sidecars


class _Missing(Exception):
    """A row lacks the value to attach."""


def attach_recorded(store: Store, rows: Rows, format: str) -> None:  # noqa: A002
    """Attach the values that every row has, per token and per row."""
    existing = {sidecar.name for sidecar in store.sidecars if sidecar.producer == PRODUCER}
    for name in ("logprobs", "advantages"):
        if name not in existing:
            values = (_per_token(name, row) for row in _served(store, rows, format))
            with contextlib.suppress(_Missing):
                store.attach(name, values, producer=PRODUCER, per="token")
    for name in PER_ROW:
        if name in existing:
            continue
        values_of_rows = [
            msgspec.json.decode(text)
            for _, columns in store.columns([f"extra.{name}"])
            for text in columns[f"extra.{name}"]
        ]
        if None not in values_of_rows:
            store.attach(name, np.array(values_of_rows, np.float64), producer=PRODUCER, per="row")


def _per_token(name: str, row: tuple[CutRow, int]) -> NDArray[Any]:
    cut, length = row
    if name == "logprobs":
        if cut.logprobs is None:
            raise _Missing
        return cut.logprobs[:length]
    given = cut.trajectory.advantages
    if not isinstance(given, list):
        raise _Missing
    is_trained = np.asarray(cut.trajectory.mask) == 1
    spread = np.zeros(len(cut.ids))
    if len(given) == len(spread):
        spread[:] = given
    elif len(given) == int(is_trained.sum()):
        spread[is_trained] = given
    else:
        raise _Missing
    return np.where(cut.mask == 1, spread, 0)[:length]


def _served(store: Store, rows: Rows, format: str) -> Iterator[tuple[CutRow, int]]:  # noqa: A002
    """Yield the recorded rows of a store, and how many of their tokens the store has."""
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
                cut, _ = read_and_cut(read.values[row], read.raw[row], format)
                number = row
            yield cut[part], length


# Build a store from recordings


def from_rollouts(
    sources: Sources,
    tokenizer: Any = None,
    where: str | None = None,
    *,
    format: str = "auto",  # noqa: A002 - a name of the contract
    pairs: Literal["best_worst"] | None = None,
    keep_columns: Sequence[str] = (),
    progress: Any = None,
    **given: Any,
) -> Store | View:
    """Make a store of recorded rollouts, with the sampled ids; each sampled token is trained once.

    Args:
        sources: Files of rollouts, as for `check_rollouts`.
        tokenizer: The tokenizer of the ids, as for `prepare`.
        where: A filter expression over ``reward``, ``advantage``, ``group``, ``step``,
            ``version``, ``drift``, ``length``, ``trained`` and kept columns; returns a view.
        format: As for `check_rollouts`.
        pairs: ``best_worst`` makes a store of preference pairs: the trajectories with the highest
            and the lowest reward of each group, if the rewards differ.
        keep_columns: Additional columns to keep with the tokens.
        progress: As for `prepare`.
        given: Other arguments of `prepare`: ``max_length``, ``chat_template``, ``cache_dir``, …

    Returns:
        A store; a view of it with ``where``, a store of groups with ``pairs``.
    """
    if pairs not in (None, "best_worst"):
        raise UsageError(("pairs",), f" must be 'best_worst' or None, got {pairs!r}")
    check_one_of("format", format, ("auto", *FORMATS))
    for name in ("train_on", "expand"):
        if name in given:
            raise UsageError((name,), " cannot be set for rollouts: the sampled tokens are trained")
    keep_columns = check_strings("keep_columns", keep_columns)
    readable, _ = readable_sources(sources, given.get("cache_dir"))
    extra = tuple(dict.fromkeys((*RECORDED, *keep_columns)))
    row_format = "rollouts" if format == "auto" else f"rollouts-{format}"
    options = {**given, "format": row_format, "keep_columns": extra}
    expression = None if where is None else in_extra(where, extra)
    store = run_recipe(readable, tokenizer, progress=progress, **options).store
    own = store.private_directory  # the directory of a build with disable_cache
    cache = cache_of(given.get("cache_dir") if own is None else own.path)
    attach_recorded(store, open_sources(readable, cache), format)
    _show_warnings(store)
    chosen: Store | View = store if expression is None else store.filter(expression)
    if pairs is None:
        return chosen
    path = _write_pairs(chosen, cache.root)
    paired: Store = run_recipe(path, tokenizer, progress=progress, **options).store
    attach_recorded(paired, open_sources(path, cache), format)
    return paired


def _show_warnings(store: Store) -> None:
    counts = Counter(
        finding["detail"]
        for _, columns in store.columns(["extra.findings"])
        for text in columns["extra.findings"]
        for finding in (msgspec.json.decode(text) if f'"{WARNING}"' in text else ())
        if finding["kind"] == WARNING
    )
    for warning, count in counts.items():
        warnings.warn(f"{count} rows: {warning}", stacklevel=3)


def in_extra(where: str, extra: Sequence[str]) -> str:
    """Return a filter with ``extra.name`` for the bare names of extra columns."""
    from tokenmill.store.where import NAMES, parse_filter

    class Named(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in extra and node.id not in NAMES:
                return ast.Attribute(ast.Name("extra", ast.Load()), node.id, ast.Load())
            return node

    return ast.unparse(ast.fix_missing_locations(Named().visit(parse_filter(where))))


# Best and worst


def _write_pairs(rows: Store | View, root: Path) -> str:
    """Write pairs as rows of a file in the cache, and return its path."""
    scored = any(sidecar.name == "logprobs" for sidecar in rows.sidecars)

    def recorded(number: int) -> dict[str, Any]:
        row = _as_rollout(rows[number])
        if scored:
            row["logprobs"] = np.asarray(rows.sidecar("logprobs", PRODUCER)[number]).tolist()
        return row

    lines = [
        json.dumps({"chosen": recorded(best), "rejected": recorded(worst), "group": group})
        for group, best, worst in best_and_worst(rows)
    ]
    if not lines:
        raise SourceError("no pairs: no group has two trajectories with different rewards")
    return _published(root, "pairs.jsonl", "\n".join(lines).encode() + b"\n")


def best_and_worst(rows: Store | View) -> Iterator[tuple[Any, int, int]]:
    """Yield each group with its best and worst row; among equal rewards, the first row.

    The same prompt in a later step is another group.
    """
    groups: dict[str, list[tuple[float, int]]] = {}
    names: dict[str, Any] = {}
    for number, row in enumerate(rows):
        extra = row.extra
        if extra["group"] is None or extra["reward"] is None:
            continue
        key = json.dumps([extra["group"], extra["step"]], sort_keys=True)
        names[key] = extra["group"]
        groups.setdefault(key, []).append((extra["reward"], number))
    for key, members in groups.items():
        best = max(members, key=lambda one: (one[0], -one[1]))
        worst = min(members)
        if best[0] > worst[0]:
            yield names[key], best[1], worst[1]


def _as_rollout(row: Row) -> dict[str, Any]:
    found = ("drift", "findings")
    extra = {n: v for n, v in row.extra.items() if v is not None and n not in found}
    return {**extra, "token_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()}


# Dumps of torch


def readable_sources(
    sources: Any, cache_dir: str | os.PathLike[str] | None
) -> tuple[Any, dict[str, str]]:
    """Convert torch dumps to row files; return all sources, and the dump of each converted file."""
    from tokenmill.integrations.miles.saved import DUMP_ENDINGS, rows_of_dump

    listed = [sources] if isinstance(sources, str | os.PathLike) else sources
    if isinstance(listed, bytes) or not isinstance(listed, Sequence):
        return sources, {}
    readable: list[str] = []
    names: dict[str, str] = {}
    for source in listed:
        path = checked_path("sources", source)
        if not path.endswith(DUMP_ENDINGS):
            readable.append(path)
            continue
        paths = sorted(glob.glob(path)) if any(mark in path for mark in "*?[") else [path]
        for dump in paths or [path]:
            lines = "".join(json.dumps(row) + "\n" for row in rows_of_dump(dump))
            root = cache_of(cache_dir).root
            converted = _published(root, os.path.basename(dump) + ".jsonl", lines.encode())
            names[converted] = dump
            readable.append(converted)
    return readable, names


def _published(root: Path, name: str, data: bytes) -> str:
    """Write a file to the cache, in a directory named after its content; return its path."""
    directory = CacheLayout(root).rollouts / fingerprint.key([name, fingerprint.checksum(data)])
    if not (directory / name).exists():
        publish_files(root, directory, {name: data})
    with contextlib.suppress(OSError):
        os.utime(directory)  # so that `cache gc` keeps it until a store refers to it
    return str(directory / name)
