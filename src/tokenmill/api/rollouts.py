"""Recorded rollouts: checked (`check_rollouts`), and made into stores (`from_rollouts`).

Dumps that torch wrote are turned into rows first, once for each content, and kept in the cache;
everything else is read where it is.
"""

from __future__ import annotations

import ast
import contextlib
import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tokenmill import fingerprint
from tokenmill.api.recipes import Sources, resolve_call, run_recipe
from tokenmill.errors import SourceError, UsageError
from tokenmill.store import Row, Store

if TYPE_CHECKING:
    from tokenmill.dataset import View
    from tokenmill.report.drift import RolloutReport


def check_rollouts(
    sources: Sources,
    tokenizer: Any = None,
    format: str = "auto",  # noqa: A002 - a name of the contract
    *,
    progress: Any = None,
    **given: Any,
) -> RolloutReport:
    """Compare recorded rollouts with what template and tokenizer make of their messages.

    Args:
        sources: Files of rollouts, in any of the formats that docs/rollouts.md lists.
        tokenizer: As for `prepare`.
        format: ``auto`` looks at each row's columns; a name reads every row so.
        progress: As for `prepare`.
        given: Of the other arguments of `prepare` those that concern rendering (``chat_template``,
            ``template_kwargs``, ``date``, ``thinking_opener``) and running (``num_workers``,
            ``cache_dir``, ``executor``, ``engine``, ``renderer``, ``rehash``).
    """
    from tokenmill.report.drift import run_check
    from tokenmill.work import executor_for

    readable, names = _readable(sources, given.get("cache_dir"))
    recipe, options = resolve_call(readable, tokenizer, given)
    with executor_for(options.executor, options.num_workers) as workers:
        return run_check(recipe, options, workers, format=format, names=names, progress=progress)


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
    from tokenmill.build.recorded import RECORDED, attach_recorded
    from tokenmill.work.blocks import cache_of, open_sources

    if pairs not in (None, "best_worst"):
        raise UsageError(f"pairs={pairs!r}: choose best_worst, or leave it out")
    for name in ("format", "train_on", "expand"):
        if name in given:
            raise UsageError(f"{name} has no meaning for rollouts: what was sampled is trained")
    readable, _ = _readable(sources, given.get("cache_dir"))
    carried = tuple(dict.fromkeys((*RECORDED, *carry)))
    made = {**given, "format": "rollouts", "carry": carried}
    expression = None if where is None else in_carried(where, carried)
    store = run_recipe(readable, tokenizer, progress=progress, **made).store
    own = store.private_directory  # with disable_cache, where everything is made
    cache = cache_of(given.get("cache_dir") if own is None else own.path)

    def with_values(found: Store, source: Any) -> Store:
        attach_recorded(found, open_sources(source, cache))
        return found

    store = with_values(store, readable)
    chosen: Store | View = store if expression is None else store.filter(expression)
    if pairs is None:
        return chosen
    path = _write_pairs(chosen, cache.root)
    found = run_recipe(path, tokenizer, progress=progress, **made).store
    return with_values(found, [path])


def in_carried(where: str, carried: Sequence[str]) -> str:
    """A filter in which carried columns go by their bare names."""
    from tokenmill.dataset.where import NAMES, parse_filter

    class Named(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in carried and node.id not in NAMES:
                return ast.Attribute(ast.Name("carried", ast.Load()), node.id, ast.Load())
            return node

    return ast.unparse(ast.fix_missing_locations(Named().visit(parse_filter(where))))


# Best and worst


def _write_pairs(rows: Store | View, root: Path) -> str:
    """Pairs as rows of a file in the cache, named by what they were made of."""
    from tokenmill.build.recorded import MADE_BY

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
    """Of each group, in the order of its first row, the numbers of the best row and the worst.

    Of equal rewards the first row counts. A prompt comes again in later steps: another group.
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
    carried = {name: value for name, value in row.carried.items() if value is not None}
    carried.pop("drift", None)
    carried.pop("findings", None)
    return {
        **carried,
        "token_ids": row.input_ids.tolist(),
        "loss_mask": row.loss_mask.tolist(),
    }


# Dumps of torch


def _readable(sources: Any, cache_dir: str | os.PathLike[str] | None) -> tuple[Any, dict[str, str]]:
    """Sources that can be read as rows, and the dumps that were turned into rows for it."""
    from tokenmill.integrations.miles.saved import DUMP_ENDINGS, rows_of_dump
    from tokenmill.work.blocks import cache_of

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
    """A file of the cache, in a directory that is named by its name and content."""
    from tokenmill.files.sealed import publish_files
    from tokenmill.store.layout import CacheLayout

    place = CacheLayout(root).rollouts / fingerprint.key([name, fingerprint.checksum(data)])
    if not (place / name).exists():
        publish_files(root, place, {name: data})
    with contextlib.suppress(OSError):
        os.utime(place)  # in use: no collector takes it before a store names it
    return str(place / name)
