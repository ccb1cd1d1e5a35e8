"""Streams of this release equal those of every earlier one."""

from __future__ import annotations

import json

import pytest

from tests.consistency.cases import CASES
from tests.consistency.corpus import Corpus
from tests.consistency.make_golden import GOLDEN, streams


@pytest.mark.parametrize("name", CASES)
def test_stream_equals_the_golden_one(corpus: Corpus, name: str) -> None:
    golden = json.loads(GOLDEN.read_text())
    assert sorted(golden) == sorted(CASES)
    assert streams(corpus)[name] == golden[name]
