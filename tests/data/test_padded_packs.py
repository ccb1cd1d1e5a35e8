"""Padded packs and shards: position of every token; attention equals that of single rows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.data.fill import Piece, fill_padded_packs, fill_rows, shard

PAD = 7
SHARDS = ("zigzag", "contiguous")


def pieces_of(lengths: list[int], seed: int = 0) -> list[Piece]:
    """Rows whose tokens occur once each."""
    rng, found, token = np.random.default_rng(seed), [], 100
    for length in lengths:
        ids = np.arange(token, token + length, dtype=np.int32)
        found.append((ids, (rng.random(length) < 0.6).astype(np.uint8)))
        token += length
    return found


def rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def plain_slab(pieces: list[Piece], sequence: int, slab: int) -> dict[str, list[int]]:
    """The reference: token by token."""
    columns: dict[str, list[int]] = {
        name: [] for name in ("input_ids", "labels", "position_ids", "loss_mask", "seq_idx")
    }
    for number, (ids, mask) in enumerate(pieces):
        place = rounded(len(ids), sequence)
        if number == len(pieces) - 1:
            held = len(columns["input_ids"]) + place
            place += max(rounded(held, slab), slab) - held
        for at in range(place):
            real = at < len(ids)
            trained = real and at > 0 and mask[at] == 1
            columns["input_ids"].append(int(ids[at]) if real else PAD)
            columns["labels"].append(int(ids[at]) if trained else -100)
            columns["position_ids"].append(at)
            columns["loss_mask"].append(int(trained))
            columns["seq_idx"].append(number if real else -1)
    return columns


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    sequence=st.sampled_from([1, 2, 3, 8]),
    slab=st.sampled_from([1, 4, 16]),
)
def test_padded_pack_has_the_rows_tokens(lengths: list[int], sequence: int, slab: int) -> None:
    pieces = pieces_of(lengths)
    batch = fill_padded_packs([pieces], PAD, sequence=sequence, multiple=slab)
    expected = plain_slab(pieces, sequence, slab)
    for name, values in expected.items():
        assert batch[name].tolist() == [values], name
    assert np.diff(batch["cu_seqlens"]).tolist() == lengths
    capacity_left = np.diff(batch["cu_seqlens_padded"])
    assert capacity_left[:-1].tolist() == [rounded(length, sequence) for length in lengths[:-1]]
    assert batch["cu_seqlens_padded"][-1] == batch["input_ids"].size
    assert batch["input_ids"].size % slab == 0
    assert batch["max_seqlen"] == capacity_left.max()


def test_no_rows_give_one_pack_of_padding() -> None:
    batch = fill_padded_packs([], PAD, sequence=4, multiple=16)
    assert batch["input_ids"].tolist() == [[PAD] * 16]
    assert set(batch["labels"][0].tolist()) == {-100}
    assert batch["cu_seqlens"].tolist() == [0, 0]
    assert batch["cu_seqlens_padded"].tolist() == [0, 16]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=6),
    ranks=st.sampled_from([2, 3, 4]),
    kind=st.sampled_from(SHARDS),
    padded=st.booleans(),
)
def test_shards_of_all_ranks_are_the_batch(
    lengths: list[int], ranks: int, kind: str, padded: bool
) -> None:
    pieces, multiple = pieces_of(lengths), 2 * ranks
    if padded:
        batch = fill_rows(pieces, PAD, multiple=multiple)
    else:
        batch = fill_padded_packs([pieces], PAD, sequence=multiple, multiple=multiple)
    total = batch["input_ids"].size
    width = batch["input_ids"].shape[1]
    bounds = list(range(0, total + 1, width)) if padded else batch["cu_seqlens_padded"].tolist()
    following = [-100] * total
    labels = batch["labels"].reshape(-1).tolist()
    for first, stop in pairwise(bounds):
        following[first:stop] = [*labels[first + 1 : stop], -100] if stop > first else []
    cuts = list(range(0, total + 1, width)) if kind == "contiguous" else bounds
    for rank in range(ranks):
        wanted: list[int] = []
        for first, stop in pairwise(cuts):
            places = list(range(first, stop))
            parts = [rank] if kind == "contiguous" else [rank, 2 * ranks - 1 - rank]
            each = len(places) // (len(parts) * ranks)
            for part in parts:
                wanted += places[part * each : (part + 1) * each]
        own = shard(batch, rank, ranks, kind)
        assert own["input_ids"].shape[1] * ranks == width
        for name in ("input_ids", "labels", "loss_mask"):
            whole = batch[name].reshape(-1)
            assert own[name].reshape(-1).tolist() == whole[wanted].tolist(), name
        assert own["shift_labels"].reshape(-1).tolist() == [following[place] for place in wanted]


# Attention.


def vectors(ids: Any, part: int, torch: Any) -> Any:
    """A fixed query, key or value (heads, tokens, size) for every token id, with its position."""
    ids = torch.as_tensor(ids, dtype=torch.float64).reshape(-1)
    angles = torch.arange(1, 17, dtype=torch.float64) * (0.37 + 0.11 * part)
    return torch.sin(ids[:, None] * angles).reshape(len(ids), 2, 8).transpose(0, 1)


def alone(pieces: list[Piece], torch: Any) -> dict[int, Any]:
    """Output of causal attention for every token, each row run by itself."""
    found = {}
    for ids, _ in pieces:
        if not len(ids):
            continue
        query, key, value = (vectors(ids, part, torch) for part in range(3))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        found |= {int(token): out[:, at] for at, token in enumerate(ids)}
    return found


def sequences(batch: dict[str, Any]) -> Any:
    """The number of the sequence that every place belongs to, padding included."""
    bounds = batch.get("cu_seqlens_padded")
    rows, width = batch["input_ids"].shape
    if bounds is None:
        return np.repeat(np.arange(rows), width)
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", SHARDS)
@pytest.mark.parametrize("layout", ["slab", "aligned", "packs", "padded"])
def test_attention_of_packed_aligned_and_sharded_rows_equals_single_rows(
    layout: str, kind: str, ranks: int
) -> None:
    """Every rank holds the queries of its shard; keys and values are gathered from all."""
    torch = pytest.importorskip("torch")
    lengths = [5, 12, 1, 9, 16, 3]
    pieces = pieces_of(lengths)
    multiple = 2 * ranks if ranks > 1 else 1
    if layout == "slab":
        batch = fill_padded_packs([pieces], PAD, sequence=multiple, multiple=multiple)
    elif layout == "aligned":
        batch = fill_padded_packs([pieces], PAD, sequence=8, multiple=32)
    elif layout == "packs":
        packs = [pieces[:3], pieces[3:]]
        batch = fill_padded_packs(packs, PAD, sequence=multiple, multiple=multiple, length=64)
    else:
        batch = fill_rows(pieces, PAD, multiple=8)
    shards = [shard(batch, rank, ranks, kind) for rank in range(ranks)]
    # Which sequence a place belongs to is known to the ring from the whole batch's bounds.
    owner = sequences(batch)
    places = np.arange(batch["input_ids"].size).reshape(batch["input_ids"].shape)
    numbered = [
        shard({**batch, "input_ids": places}, r, ranks, kind)["input_ids"] for r in range(ranks)
    ]
    every = [np.concatenate([part.reshape(-1) for part in parts])
             for parts in ([s["input_ids"] for s in shards], [s["position_ids"] for s in shards],
                           numbered)]  # fmt: skip
    key_owner, key_position = owner[every[2]], every[1]
    key, value = vectors(every[0], 1, torch), vectors(every[0], 2, torch)
    expected = alone(pieces, torch)
    seen = set()
    for own, numbers in zip(shards, numbered, strict=True):
        query = vectors(own["input_ids"], 0, torch)
        query_owner = owner[numbers.reshape(-1)]
        visible = (query_owner[:, None] == key_owner[None, :]) & (
            own["position_ids"].reshape(-1)[:, None] >= key_position[None, :]
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=torch.as_tensor(visible)
        )
        for at, token in enumerate(own["input_ids"].reshape(-1).tolist()):
            if token != PAD:
                assert torch.allclose(out[:, at], expected[token], atol=1e-12), (token, at)
                seen.add(token)
    assert seen == set(expected)
