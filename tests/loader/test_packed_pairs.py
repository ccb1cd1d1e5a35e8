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


@pytest.mark.slow
def test_packed_pairs_have_the_log_probabilities_of_padded_ones(model: Any, tmp_path: Path) -> None:
    columns = make_group_columns([2] * 12, pairs=True, longest=20)
    store = make_store(tmp_path, [columns])
    padded: dict[tuple[int, ...], tuple[float, float]] = {}
    for batch in tm.Loader(store, batch_size=5):
        sums = []
        for side in ("chosen", "rejected"):
            arrays = {
                name: torch.from_numpy(batch[f"{side}_{name}"].astype(np.int64))
                for name in ("input_ids", "attention_mask", "labels")
            }
            with torch.no_grad():
                out = model(input_ids=arrays["input_ids"], attention_mask=arrays["attention_mask"])
            sums.append(log_probabilities(out.logits, arrays["labels"]).sum(1))
        for place, row in enumerate(batch["chosen_input_ids"]):
            length = int(batch["chosen_attention_mask"][place].sum())
            both = (float(sums[0][place]), float(sums[1][place]))
            padded[tuple(row[:length].tolist())] = both
    packs = 0
    for batch in tm.Loader(store, batch_size=1, pack=tm.Pack(length=128)):
        packs += 1
        ids = torch.from_numpy(batch["input_ids"])
        segment = torch.from_numpy(
            np.repeat(np.arange(len(batch["cu_seqlens"]) - 1), np.diff(batch["cu_seqlens"]))
        )
        # A token sees its own segment up to itself.
        seen = (segment[:, None] == segment[None, :]) & torch.ones(
            128, 128, dtype=torch.bool
        ).tril()
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        with torch.no_grad():
            out = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=torch.from_numpy(batch["position_ids"]),
            )
        each = log_probabilities(out.logits, torch.from_numpy(batch["labels"]))[0]
        sums = torch.zeros(int(segment.max()) + 1, dtype=torch.float64)
        sums.index_add_(0, segment[1:], each)
        for chosen, rejected in batch["pair_index"].tolist():
            first, stop = batch["cu_seqlens"][chosen : chosen + 2]
            expected = padded.pop(tuple(batch["input_ids"][0, first:stop].tolist()))
            np.testing.assert_allclose([sums[chosen], sums[rejected]], expected, rtol=1e-5)
    assert not padded
    assert 1 < packs < 12
