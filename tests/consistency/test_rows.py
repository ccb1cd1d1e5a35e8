"""Every served row against the store and against the eager reference."""

from __future__ import annotations

import itertools

import pytest

from tests.consistency.cases import CASES, loader_of, run_of
from tests.consistency.corpus import SIZES, Corpus
from tests.consistency.model import Model


def test_store_rows_are_those_that_were_written(corpus: Corpus) -> None:
    served = [
        (row.input_ids.tolist(), row.loss_mask.tolist())
        for store in corpus.stores.values()
        for row in store
    ]
    assert served == corpus.rows


@pytest.mark.parametrize("name", CASES)
def test_stream_three_epochs_equal_the_eager_reference(corpus: Corpus, name: str) -> None:
    """Content decides: rows are recognised by their tokens, and every label is checked."""
    expected = Model(corpus, name).run(6, 3)
    served = [corpus.samples(batch) for batch in run_of(loader_of(corpus, name), name, 3)]
    assert served == expected


@pytest.mark.parametrize(
    "name", ["rows", "grouped", "packed", *(name for name in CASES if "mix" in CASES[name])]
)
def test_served_counts_equal_counting_batches(corpus: Corpus, name: str) -> None:
    """From the position alone, at every step, and the same after a resume."""
    loader = loader_of(corpus, name)
    sizes = SIZES if "mix" in CASES[name] else {"data": SIZES["one"]}
    counts = {source: {"rows": 0, "tokens": 0, "trained_tokens": 0} for source in sizes}
    for batch in run_of(loader, name, 2):
        for row, first, size in itertools.chain.from_iterable(corpus.samples(batch)):
            source = list(sizes)[row >= SIZES["one"]]
            counts[source]["rows"] += first == 0
            counts[source]["tokens"] += size
            counts[source]["trained_tokens"] += sum(corpus.rows[row][1][first : first + size])
        served = loader.served()
        assert served == {
            source: {**counts[source], "passes": counts[source]["rows"] // size}
            for source, size in sizes.items()
        }
        resumed = loader_of(corpus, name, batch_size=3, world_size=2, rank=1)
        resumed.load_state_dict(loader.state_dict())
        assert resumed.served() == served
