"""Every served row against the store and against the eager reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.consistency.cases import CASES, arguments_of, data_of, loader_of, run_of
from tests.consistency.corpus import SIZES, Corpus
from tests.consistency.model import Model
from tokenmill import fingerprint
from tokenmill.loader import Loader


def row_checksum(ids: np.ndarray, mask: np.ndarray) -> int:
    data = np.asarray(ids, np.int32).tobytes() + np.asarray(mask, np.uint8).tobytes()
    return fingerprint.checksum64(data)


def test_store_rows_are_those_that_were_written(corpus: Corpus) -> None:
    served = [row for store in corpus.stores.values() for row in store]
    assert len(served) == sum(SIZES.values())
    for row, (ids, mask) in zip(served, corpus.rows, strict=True):
        assert row_checksum(row.input_ids, row.loss_mask) == row_checksum(ids, mask)


@pytest.mark.parametrize("name", CASES)
def test_stream_three_epochs_equal_the_eager_reference(corpus: Corpus, name: str) -> None:
    """Content decides: rows are recognised by their tokens, and every label is checked."""
    expected = Model(corpus, name).run(6, 3)
    served = [corpus.samples(batch) for batch in run_of(loader_of(corpus, name), name, 3)]
    assert len(served) == len(expected)
    for number, (ours, theirs) in enumerate(zip(served, expected, strict=True)):
        assert ours == [sample for sample in theirs if sample], f"step {number}"


@pytest.mark.parametrize("name", [name for name in CASES if "split" not in name])
def test_stream_serves_whole_rows_bit_by_bit(corpus: Corpus, name: str) -> None:
    """Checksums of what lies in the batches, against checksums of what lies in the store."""
    stored = {
        row_checksum(np.asarray(ids), np.asarray([0, *mask[1:]])): row
        for row, (ids, mask) in enumerate(corpus.rows)
    }
    seen = set()
    for batch in run_of(loader_of(corpus, name), name, 2):
        ids, mask = batch["input_ids"].ravel(), batch["loss_mask"].ravel()
        if "cu_seqlens" in batch:
            ends, real = batch["cu_seqlens"].tolist(), batch["seq_idx"].ravel() >= 0
            cuts = [(a, b) for a, b in itertools.pairwise(ends) if real[a]]
        else:
            width = batch["input_ids"].shape[1]
            sizes = batch["attention_mask"].sum(axis=1).tolist()
            cuts = [(k * width, k * width + size) for k, size in enumerate(sizes) if size]
        for first, stop in cuts:
            seen.add(stored[row_checksum(ids[first:stop], mask[first:stop])])
    expected = SIZES["one"] if "mix" not in CASES[name] else sum(SIZES.values())
    if name == "packed_dropping":
        expected = sum(len(ids) <= 20 for ids, _ in corpus.rows[: SIZES["one"]])
    if CASES[name].get("mix", {}).get("exhausted") != "stop":
        assert len(seen) >= expected - (5 if CASES[name].get("last") == "drop" else 0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_num_trained_tokens_counts_labels_of_all_ranks(
    corpus: Corpus, name: str, world_size: int
) -> None:
    data = data_of(corpus, name)
    ranks = [
        Loader(data, **arguments_of(name, rank=rank, world_size=world_size, batch_size=2))
        for rank in range(world_size)
    ]
    steps = 0
    for batches in zip(*(run_of(rank, name, 2) for rank in ranks), strict=True):
        counted = sum(int((batch["labels"] != -100).sum()) for batch in batches)
        assert [batch["num_trained_tokens"] for batch in batches] == [counted] * world_size
        steps += 1
    assert steps > 3


@pytest.mark.parametrize("name", [name for name in CASES if "mix" in CASES[name]])
def test_served_account_equals_counting_along(corpus: Corpus, name: str) -> None:
    """From the position alone, at every step, and the same after a resume."""
    loader = loader_of(corpus, name)
    counts = {source: {"rows": 0, "tokens": 0, "trained_tokens": 0} for source in SIZES}
    for batch in run_of(loader, name, 2):
        for sample in corpus.samples(batch):
            for row, first, size in sample:
                source = "one" if row < SIZES["one"] else "two"
                counts[source]["rows"] += first == 0
                counts[source]["tokens"] += size
                mask = corpus.rows[row][1]
                counts[source]["trained_tokens"] += sum(mask[first : first + size])
        served = loader.served()
        assert {s: {k: served[s][k] for k in counts[s]} for s in SIZES} == counts
        for source, size in SIZES.items():
            assert served[source]["passes"] == counts[source]["rows"] // size
        resumed = loader_of(corpus, name, batch_size=3, world_size=2, rank=1)
        if "balanced" not in name:
            resumed.load_state_dict(loader.state_dict())
            assert resumed.served() == served


def test_served_account_of_a_plain_dataset_is_one_source(corpus: Corpus) -> None:
    for name in ("rows", "grouped", "packed"):
        loader = loader_of(corpus, name)
        tokens = 0
        for batch in run_of(loader, name, 2):
            tokens += sum(piece[2] for sample in corpus.samples(batch) for piece in sample)
            assert loader.served()["data"]["tokens"] == tokens
