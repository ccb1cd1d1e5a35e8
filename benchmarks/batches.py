"""Micro-batches: balance, padding and planning time, compared with verl and slime.

One step of 512 rows over 8 ranks, 16,384 tokens a micro-batch, on lognormal lengths and on those of
the shared corpora (rows drawn from all of them, as Qwen3 encodes them). *Imbalance* is the work of
the slowest rank over the mean of all; *in step* sums the slowest rank of every micro-batch, because
ranks that gather weights layer by layer wait for each other. Work is
6 × 4,096 × tokens + Σ length².
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import tokenmill as tm
from benchmarks.balancing import Plan, slime, verl
from benchmarks.data import corpora, shared
from benchmarks.report import Report, seconds
from tokenmill.data.micro import Align, MicroBatches
from tokenmill.data.packs import Packs

RANKS, ROWS, BUDGET, LONGEST = 8, 512, 16384, 8192
MAX_IMBALANCE, MAX_PADDING = 1.02, 1.0  # over the mean; percent
CORPORA = ("alpaca_eval_en.jsonl", "smilechat_zh.jsonl")

Lengths = np.ndarray[Any, Any]


def lognormal(rows: int, seed: int = 0) -> Lengths:
    drawn = np.random.default_rng(seed).lognormal(6, 1, rows)
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


def of_corpora(root: Path) -> Lengths:
    """Return the lengths of the shared conversations, shuffled."""
    tokenizer = shared() / "tokenizers" / "qwen3"
    stores = [
        tm.prepare(path, tokenizer=tokenizer, cache_dir=root, num_workers=2, trailing="trim")
        for path in corpora(CORPORA)
    ]
    lengths = np.concatenate([store.lengths for store in stores]).astype(np.int64)
    return np.random.default_rng(0).permutation(lengths[lengths <= LONGEST])


def as_packs(lengths: Lengths) -> Packs:
    rows = np.arange(len(lengths) + 1)
    return Packs(rows[:-1], np.zeros_like(lengths), lengths, rows)


def work_of(lengths: Lengths) -> Lengths:
    return 6 * 4096 * lengths + lengths * lengths


def figures(report: Report, name: str, who: str, plan: Plan, lengths: Lengths, **most: Any) -> Any:
    """Report the imbalance of a plan and its number of micro-batches over the budget."""
    costs = np.asarray([[work_of(lengths[part]).sum() for part in rank] for rank in plan])
    tokens = np.asarray([[lengths[part].sum() for part in rank] for rank in plan])
    per_rank = costs.sum(axis=1)
    slowest = float(per_rank.max() / per_rank.mean())
    in_step = float(costs.max(axis=0).sum() / per_rank.mean())
    report.figure(f"{name}: imbalance, {who}", slowest, "x", **most)
    report.figure(f"{name}: imbalance in step, {who}", in_step, "x", **most)
    over = int((tokens > BUDGET).sum())
    report.figure(
        f"{name}: micro-batches over the budget, {who}", over, "", note=f"of {tokens.size}"
    )
    return slowest, in_step


def balance(report: Report, name: str, lengths: Lengths) -> None:
    peers = []
    as_list = lengths.tolist()
    for who, plan in (
        ("verl", verl(as_list, work_of(lengths).tolist(), RANKS, BUDGET)),
        ("slime", slime(as_list, RANKS, BUDGET)),
    ):
        peers.append(figures(report, name, who, plan, lengths))
    options = MicroBatches(BUDGET)
    numbers, each = options.plan(as_packs(lengths), lengths, RANKS)
    plan = [
        [np.flatnonzero(numbers == rank * each + at).tolist() for at in range(each)]
        for rank in range(RANKS)
    ]
    slowest, in_step = figures(report, name, "ours", plan, lengths, at_most=MAX_IMBALANCE)
    for at, figure in enumerate((slowest, in_step)):
        what = ("imbalance", "imbalance in step")[at]
        lower = min(peer[at] for peer in peers) - 1
        report.figure(
            f"{name}: {what} beyond 1, ours",
            figure - 1,
            "",
            at_most=lower,
            note="lowest of the peers",
        )


def padding(report: Report, name: str, lengths: Lengths) -> None:
    for align in (Align(), Align(sequence=4, slab=64)):
        options = MicroBatches(BUDGET, align=align)
        numbers, each = options.plan(as_packs(lengths), lengths, RANKS)
        tokens = np.bincount(numbers, options.padded(lengths), RANKS * each)
        slabs = (-(-tokens // options.multiple) * options.multiple).sum()
        report.figure(
            f"{name}: padding, sequences × {align.sequence}, slabs × {align.slab}",
            float(100 * (1 - lengths.sum() / slabs)), "%", at_most=MAX_PADDING,
        )  # fmt: skip


def planning(report: Report) -> None:
    lengths = lognormal(4096)
    packs, options = as_packs(lengths), MicroBatches(BUDGET)
    spent = seconds(lambda: options.plan(packs, lengths, 512), repeat=5)
    report.figure("plan of 4,096 rows over 512 ranks", spent * 1e3, "ms", at_most=20)
    lengths = lognormal(10**6)
    packs = as_packs(lengths)
    for options in (MicroBatches(BUDGET), MicroBatches(BUDGET, layout="padded")):
        spent = seconds(lambda options=options: options.plan(packs, lengths, 512))
        report.figure(f"plan of 1M rows over 512 ranks, {options.layout}", spent, "s", at_most=2)


def run(report: Report) -> None:
    planning(report)
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        for name, lengths in (
            ("lognormal", lognormal(ROWS)),
            ("corpora", of_corpora(Path(directory))[:ROWS]),
        ):
            balance(report, name, lengths)
            padding(report, name, lengths)
