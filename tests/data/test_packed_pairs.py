"""Packed pairs train what padded pairs train: per-pair log-probabilities on a tiny model agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.store.making import make_group_columns, make_store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


def log_probabilities(logits: Any, labels: Any) -> Any:
    """Of every position's next token where it is trained, else 0."""
    targets = labels[:, 1:]
    found = torch.log_softmax(logits[:, :-1].double(), -1)
    taken = found.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(targets == -100, 0.0, taken)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=64_000, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config).eval()


def tensor(array: Any) -> Any:
    return torch.from_numpy(array.astype(np.int64))


@pytest.mark.slow
@torch.no_grad()
def test_packed_pairs_have_the_log_probabilities_of_padded_ones(model: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_group_columns([2] * 12, pairs=True, longest=20)])
    padded: dict[tuple[int, ...], list[float]] = {}
    for batch in tm.Loader(store, batch_size=5):
        sums = []
        for side in ("chosen", "rejected"):
            ids, mask = (tensor(batch[f"{side}_{n}"]) for n in ("input_ids", "attention_mask"))
            logits = model(input_ids=ids, attention_mask=mask).logits
            sums.append(log_probabilities(logits, tensor(batch[f"{side}_labels"])).sum(1))
        lengths = batch["chosen_attention_mask"].sum(axis=1)
        for place, row in enumerate(batch["chosen_input_ids"]):
            key = tuple(row[: lengths[place]].tolist())
            padded[key] = [float(side[place]) for side in sums]
    packs = 0
    for batch in tm.Loader(store, batch_size=1, pack=tm.Pack(length=128)):
        packs += 1
        bounds = batch["cu_seqlens"]
        segment = tensor(np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)))
        # A token sees its own segment up to itself.
        seen = (segment[:, None] == segment[None, :]) & torch.ones(128, 128).tril().bool()
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        ids, positions = tensor(batch["input_ids"]), tensor(batch["position_ids"])
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        each = log_probabilities(logits, tensor(batch["labels"]))[0]
        sums = torch.zeros(int(segment.max()) + 1, dtype=torch.float64)
        sums.index_add_(0, segment[1:], each)
        for chosen, rejected in batch["pair_index"].tolist():
            first, stop = bounds[chosen : chosen + 2]
            expected = padded.pop(tuple(batch["input_ids"][0, first:stop].tolist()))
            np.testing.assert_allclose([sums[chosen], sums[rejected]], expected, rtol=1e-5)
    assert not padded
    assert 1 < packs < 12
