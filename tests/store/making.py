"""Small stores made directly from columns, without tokenizer or template: the public fake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tokenmill._core import fingerprint
from tokenmill.store import CacheLayout, Store
from tokenmill.store.columns import GroupColumns, SliceColumns
from tokenmill.store.commit import Placement, commit_store
from tokenmill.store.record import RejectedRow
from tokenmill.store.slice_writer import encode_slice, publish_slice

ROLES = ("system", "user", "assistant")


def make_columns(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    rejected: Sequence[RejectedRow] = (),
    extra: dict[str, list[str]] | None = None,
) -> SliceColumns:
    """Random rows of the given lengths; each has three turns and trains the last."""
    rng = np.random.default_rng(seed)
    counts = np.asarray(lengths, np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)])
    ids = rng.integers(0, 50_000, int(starts[-1]), dtype=np.int32)
    mask = np.zeros(len(ids), np.uint8)
    ends = []
    for start, count in zip(starts, counts, strict=False):
        third = int(count) // 3
        ends += [third, 2 * third, int(count)]
        mask[start + 2 * third : start + count] = 1
    rows = len(counts)
    return SliceColumns(
        ids=ids,
        mask=mask,
        starts=starts,
        row=np.arange(rows, dtype=np.int32),
        part=np.zeros(rows, np.int32),
        line=np.arange(rows, dtype=np.int64),
        offset=np.arange(rows, dtype=np.int64) * 100,
        raw_length=np.full(rows, 99, np.int64),
        digest=rng.integers(0, 2**63, rows, dtype=np.uint64),
        turn_ends=np.array(ends, np.int32),
        turn_roles=np.array([0, 1, 2] * rows, np.int8),
        turn_starts=np.arange(rows + 1, dtype=np.int64) * 3,
        roles=ROLES,
        source_rows=rows + len(rejected),
        rows_in=rows + len(rejected),
        rejected=rejected,
        extra=extra or {},
    )


def make_store(
    root: Path,
    slices: Sequence[SliceColumns],
    *,
    name: str = "fake",
    pad_token_id: int | None = 0,
    tokenizer: str = "fake",
) -> Store:
    """Publish the slices under one source and commit a store of them."""
    placements, row = [], 0
    for number, columns in enumerate(slices):
        key = publish(root, columns, name, number)
        placements.append(Placement(key, 0, row, row + 1, 100 * row))
        row += columns.source_rows
    return commit(root, placements, name, pad_token_id, tokenizer)


def publish(root: Path, columns: SliceColumns, *name: object) -> str:
    key = fingerprint.key(list(name))
    publish_slice(CacheLayout(root), encode_slice(key, columns))
    return key


def commit(
    root: Path,
    placements: Sequence[Placement],
    name: str = "fake",
    pad_token_id: int | None = 0,
    tokenizer: str = "fake",
) -> Store:
    """Commit a store of published slices."""
    document = {"format": 1, "recipe": {"name": name}, "sources": [{"digest": name}]}
    identity = fingerprint.key(tokenizer)
    entry = {"identity": identity, "pad_token_id": pad_token_id, "eos_token_id": 1}
    proof = {"paths": [f"{name}.jsonl"]}
    return Store(commit_store(CacheLayout(root), document, placements, entry, proof).directory)


def damage_slice(root: Path) -> None:
    """Flip a bit in the middle of the only slice of a cache."""
    (file,) = (path for path in (root / "slices").rglob("*.arrow") if ".meta." not in path.name)
    flip(file, 4 * file.stat().st_size)


def flip(path: Path, bit: int) -> bytes:
    """Flip one bit of a file and return what was there."""
    whole = path.read_bytes()
    data = bytearray(whole)
    data[bit // 8] ^= 1 << bit % 8
    path.chmod(0o644)
    path.write_bytes(data)
    return whole


def mtimes(*roots: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for root in roots for path in root.rglob("*")}


def make_group_columns(
    sizes: Sequence[int], *, seed: int = 0, longest: int = 12, pairs: bool = False
) -> SliceColumns:
    """Groups of the given sizes: random rows that share a prompt; the answers are trained.

    Two rows of a group are a pair where ``pairs``, one row is KTO's; all others are ranked.
    """
    rng = np.random.default_rng(seed)
    rows: list[tuple[list[int], int]] = []
    for size in sizes:
        prompt = rng.integers(0, 50_000, int(rng.integers(1, longest // 2))).tolist()
        for place in range(size):
            answer = rng.integers(0, 50_000, int(rng.integers(1, longest // 2))).tolist()
            rows.append(([*prompt, 60_000 + place, *answer], len(prompt)))
    group = np.repeat(np.arange(len(sizes)), sizes)
    part = np.concatenate([np.arange(size) for size in sizes])
    plain = make_columns([len(ids) for ids, _ in rows], seed=seed)
    prompt_tokens = np.array([prompt for _, prompt in rows], np.int32)
    mask = np.concatenate([np.arange(len(ids)) >= prompt for ids, prompt in rows])
    single = np.asarray(sizes)[group] == 1
    label = np.where(single, group % 2, np.where(pairs, part == 0, -1))
    return replace(
        plain,
        ids=np.concatenate([ids for ids, _ in rows]).astype(np.int32),
        mask=mask.astype(np.uint8),
        row=group.astype(np.int32),
        part=part.astype(np.int32),
        digest=plain.digest[np.cumsum(sizes) - 1][group],
        source_rows=len(sizes),
        rows_in=len(sizes),
        groups=GroupColumns(
            label=label.astype(np.int8),
            score=np.where(group % 3 == 0, 100.0 - part, np.nan),
            margin=np.where(group % 4 == 0, group / 2, np.nan),
            prompt_tokens=prompt_tokens,
        ),
    )
