"""Fixtures that the tests of several hosts share: a small store, one of the bundled examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.store.making import make_columns, make_store
from tokenmill.store import Store

EXAMPLES = Path(tm.__file__).parent / "examples"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(1).integers(3, 40, 43).tolist()
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(lengths)], pad_id=9)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return tm.prepare(
        EXAMPLES / "conversations.jsonl",
        tokenizer=EXAMPLES / "tokenizer",
        executor="inline",
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))
