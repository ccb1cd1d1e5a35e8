"""Samples for Megatron, against a plain model; and its own builder if installed."""

from __future__ import annotations

import importlib.util
import pickle
import sys
from typing import Any

import numpy as np
import pytest

from tests.store.making import make_columns, make_store
from tokenmill.data.packs import Pack
from tokenmill.data.view import as_view
from tokenmill.errors import UsageError
from tokenmill.integrations import megatron
from tokenmill.integrations.megatron import PackedSamples
from tokenmill.store import Row, Store

LENGTHS = np.random.default_rng(5).integers(1, 40, 120).tolist()
PAD = 9


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    columns = make_columns(LENGTHS)
    columns.mask[0] = 1  # a row whose first token is trained
    return make_store(tmp_path_factory.mktemp("cache"), [columns], pad_token_id=PAD)


def model(rows: list[Row], length: int, multiple: int) -> dict[str, list[int]]:
    tokens, labels, mask, positions, bounds = [], [], [], [], [0]
    for row in rows:
        ids, trained = row.input_ids.tolist()[:length], row.loss_mask.tolist()
        slot = -(-len(ids) // multiple) * multiple
        for place in range(slot):
            predicts = place + 1 < len(ids)
            tokens.append(ids[place] if place < len(ids) else PAD)
            labels.append(ids[place + 1] if predicts else PAD)
            mask.append(trained[place + 1] if predicts else 0)
            positions.append(place)
        bounds.append(len(tokens))
    tail = length - len(tokens)
    return {
        "tokens": tokens + [PAD] * tail,
        "labels": labels + [PAD] * tail,
        "loss_mask": mask + [0] * tail,
        "position_ids": positions + list(range(tail)),
        "cu_seqlens": bounds + [length] * (length + 1 - len(bounds)),
        "max_seqlen": max([tail, *np.diff(bounds).tolist()]),
    }


@pytest.mark.parametrize("context_parallel", [1, 2, 4])
@pytest.mark.parametrize("length", [40, 64, 256])
def test_samples_are_those_of_the_model(store: Store, length: int, context_parallel: int) -> None:
    pack = Pack(length, window=50)
    samples = PackedSamples(as_view(store), pack, context_parallel=context_parallel)
    multiple = 1 if context_parallel == 1 else 2 * context_parallel
    seen: list[int] = []
    for number in range(len(samples)):
        rows = samples.run.packs([number]).rows.tolist()
        sample = samples[number]
        wanted = model([store[row] for row in rows], length, multiple)
        assert {name: value.tolist() for name, value in sample.items()} == wanted
        seen += rows
    assert sorted(seen) == list(range(len(store)))
    assert {name: str(value.dtype) for name, value in samples[0].items()} == {
        "tokens": "int64", "labels": "int64", "loss_mask": "float32", "position_ids": "int64",
        "cu_seqlens": "int32", "max_seqlen": "int32"}  # fmt: skip


def test_epochs_follow_each_other_until_there_are_enough_samples(store: Store) -> None:
    view, pack = as_view(store), Pack(64)
    one = PackedSamples(view, pack)
    for count in (1, len(one), len(one) + 1, 7 * len(one) + 3):
        many = PackedSamples(view, pack, count=count)
        assert len(many) >= count
        assert len(many) < count + 2 * len(one)
        assert all(np.array_equal(many[0][name], one[0][name]) for name in one[0])
    many = PackedSamples(view, pack, count=count, context_parallel=4)
    copy = pickle.loads(pickle.dumps(many))
    assert np.array_equal(copy[len(many) - 1]["tokens"], many[len(many) - 1]["tokens"])


def test_rows_that_do_not_fit_are_refused_truncated_or_dropped(store: Store) -> None:
    with pytest.raises(UsageError, match="tokens, a pack has 16"):
        PackedSamples(as_view(store), Pack(16))
    samples = PackedSamples(as_view(store), Pack(16, oversize="truncate"))
    trained = sum(int(samples[number]["loss_mask"].sum()) for number in range(len(samples)))
    assert trained == sum(int(row.loss_mask[1:16].sum()) for row in store)
    with pytest.raises(UsageError, match="must be a multiple"):
        PackedSamples(as_view(store), Pack(50), context_parallel=4)


def test_missing_megatron_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    # A test with a stand-in may have imported the class before.
    monkeypatch.delitem(vars(megatron), "SFTDataset", raising=False)
    monkeypatch.delitem(sys.modules, f"{megatron.__name__}.dataset", raising=False)
    if importlib.util.find_spec("megatron") is None:
        with pytest.raises(UsageError, match="needs Megatron-LM"):
            _ = megatron.SFTDataset


def test_its_builder_makes_splits_and_repeats_the_dataset(store: Store) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    class Tokenizer:
        eod, pad, vocab_size = 1, PAD, 50_000
        unique_identifiers = ()

    def build(**more: Any) -> list[Any]:
        config = GPTDatasetConfig(
            random_seed=3, sequence_length=64, tokenizer=Tokenizer(),
            blend=([str(store.path)], None), split="80,20,0", reset_position_ids=False,
            reset_attention_mask=False, eod_mask_loss=False,
            **{"create_attention_mask": False, **more},
        )  # fmt: skip
        sizes = [200, None, None]
        made = BlendedMegatronDatasetBuilder(megatron.SFTDataset, sizes, lambda: True, config)
        return list(made.build())

    train, valid, test = build()
    assert (len(train), test) == (200, None)
    cut = round(0.8 * len(store))
    for data, rows in ((train, as_view(store)[:cut]), (valid, as_view(store)[cut:])):
        wanted = PackedSamples(rows, Pack(64), count=data.num_samples, seed=3)
        for number in (0, len(data) - 1):
            sample = data[number]
            assert all(sample[name].tolist() == v.tolist() for name, v in wanted[number].items())
    assert not train[None]["loss_mask"].any()
    with pytest.raises(UsageError, match="cu_seqlens"):
        build(create_attention_mask=True)
    whole = megatron.SFTDataset(as_view(store), None, None, 5, train.index_split, train.config)
    assert whole.samples.run.view.key == as_view(store).key
