"""Fixtures of the suite: one corpus, one nursery of processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.consistency.child import Nursery
from tests.consistency.corpus import Corpus, build


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    root = tmp_path_factory.mktemp("corpus")
    build(root)
    return Corpus(root)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    found = Nursery()
    yield found
    found.close()
