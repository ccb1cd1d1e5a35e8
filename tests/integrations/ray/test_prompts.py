"""The prompt-length index of RL prompts, measured on Ray: the lengths of any other executor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tokenmill
from tests.faults.world import TOKENIZER
from tokenmill.integrations.ray import RayExecutor

pytest.importorskip("tokenmill.prompts")

PROMPTS = Path(tokenmill.__file__).parent / "examples" / "prompts.jsonl"


@pytest.mark.usefixtures("joined")
def test_prompt_lengths_measured_on_ray_are_those_of_an_inline_index(tmp_path: Path) -> None:
    from tokenmill.prompts import PromptDataset

    def lengths(name: str, executor: object) -> np.ndarray:
        opened = PromptDataset(
            PROMPTS, TOKENIZER, 4096, tokenizer_backend="file",
            cache_dir=tmp_path / name, executor=executor,
        )  # type: ignore[arg-type] # fmt: skip
        return np.asarray(opened.lengths)

    expected = lengths("inline", "inline")
    assert len(expected) > 1
    with RayExecutor(2) as executor:
        assert np.array_equal(lengths("ray", executor), expected)
