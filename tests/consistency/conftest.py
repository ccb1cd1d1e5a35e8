"""Fixtures of the suite: one corpus."""

from __future__ import annotations

import pytest

from tests.consistency.corpus import Corpus, build


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("corpus")
    build(root)
    return Corpus(root)
