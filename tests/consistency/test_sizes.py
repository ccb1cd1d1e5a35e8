"""States are smaller than 1 KB, pickles for workers smaller than 16 KiB."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from tests.consistency.cases import CASES, data_of, loader_of
from tests.consistency.corpus import Corpus
from tests.store.making import make_columns, make_store
from tokenmill.data.cursor import Cursor
from tokenmill.data.loader import Loader
from tokenmill.data.mixture import mix
from tokenmill.data.packs import Pack
from tokenmill.data.view import concat


@pytest.mark.parametrize("name", CASES)
def test_state_is_under_1_kb_and_everything_sent_to_workers_under_16_kib(
    corpus: Corpus, name: str
) -> None:
    loader = loader_of(corpus, name, seed=2**64 - 1)
    huge = 2**62
    state = loader.stream.spec.save(Cursor(huge, huge, huge, huge), huge)
    assert len(json.dumps(state).encode()) < 1000
    step, _ = next(loader.steps(Cursor(), None))
    for value in (data_of(corpus, name), loader.filler, step):
        assert len(pickle.dumps(value)) < 16 << 10


def test_sizes_do_not_grow_with_rows_or_sources(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([4] * 100_000)])
    kept = store.filter("length == 4")
    train = kept.split({"train": 0.9, "val": 0.1})["train"]
    mixture = mix({f"source {n}": train[n * 1000 :] for n in range(30)})
    for value in (store, kept, train, concat([kept, train]), mixture):
        assert len(pickle.dumps(value)) < 16 << 10
    loader = Loader(mixture, batch_size=64, pack=Pack(128))
    next(iter(loader))
    assert len(json.dumps(loader.state_dict())) < 1000
    assert isinstance(pickle.loads(pickle.dumps(kept)).row_index._numbers, np.memmap)
