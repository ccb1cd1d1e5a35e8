"""What the tests of several trainers share: stores, a tokenizer, stand-ins for modules."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import EXAMPLES, INLINE, TOKENIZER, write_rows
from tests.build.test_groups import pair
from tests.store.making import make_columns, make_store
from tokenmill.store import Store


def labels_of(row: Any) -> list[int]:
    pairs = zip(row.input_ids[1:].tolist(), row.loss_mask[1:].tolist(), strict=True)
    return [-100, *(token if trained else -100 for token, trained in pairs)]


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> Any:
    parent, words = None, name.split(".")
    for depth in range(1, len(words) + 1):
        dotted = ".".join(words[:depth])
        module = sys.modules.get(dotted)
        if module is None:
            module = ModuleType(dotted)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, dotted, module)
        if parent is not None:
            monkeypatch.setattr(parent, words[depth - 1], module, raising=False)
        parent = module
    for attribute, value in attributes.items():
        monkeypatch.setattr(module, attribute, value, raising=False)
    return module


def typed_parts(text: str, images: list[Any]) -> list[dict[str, Any]]:
    """A text with placeholders as parts; it takes its images from the list."""
    pieces = filter(None, re.split("(<image>)", text))
    return [
        {"type": "image", "image": images.pop(0)}
        if piece == "<image>"
        else {"type": "text", "text": piece}
        for piece in pieces
    ]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(1).integers(3, 40, 43).tolist()
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(lengths)], pad_token_id=9)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Another store of the same tokenizer."""
    root, columns = tmp_path_factory.mktemp("cache"), make_columns([5, 17, 31, 9, 12], seed=2)
    return make_store(root, [columns], name="other", pad_token_id=9)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return tm.prepare(
        EXAMPLES / "conversations.jsonl",
        tokenizer=EXAMPLES / "tokenizer",
        executor="inline",
        cache_dir=tmp_path_factory.mktemp("cache"),
    )


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Store:
    place = tmp_path_factory.mktemp("pairs")
    rows = write_rows(place / "pairs.jsonl", map(pair, range(20)))
    return tm.prepare(str(rows), str(TOKENIZER), cache_dir=place / "cache", **INLINE)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))
