"""SkyRL: rows with images."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.data.making import write_rows
from tokenmill.errors import UsageError
from tokenmill.media import Images
from tokenmill.store import Store

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("PIL")

from tests.media.conftest import raw
from tests.media.drawing import draw, encode
from tokenmill.integrations import skyrl


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home, rng = tmp_path_factory.mktemp("skyrl"), random.Random(2)
    rows = []
    for number in range(8):
        names = [f"{number}-{part}.png" for part in range(min(2, number))]
        for name in names:
            (home / name).write_bytes(encode(draw(rng, 30 + 20 * number, 60), "PNG"))
        turns = [
            {"role": "user", "content": "<image>" * len(names) + "?"},
            {"role": "assistant", "content": "yes " * number + "."},
        ]
        rows.append({"messages": turns, "images": names})
    return write_rows(home / "rows.jsonl", rows)


def prepared(source: Path, name: str) -> Store:
    return tm.prepare(source, processor=raw(name), num_workers=0, cache_dir=source.parent / "cache")


def test_rows_with_images_have_the_processors_two_features(source: Path) -> None:
    processor, store = raw("qwen2_vl"), prepared(source, "qwen2_vl")
    view = store.filter("images > 0")
    limit = int(np.sort(view.lengths)[-2])
    dataset: Any = skyrl.SFTDataset(view, max_length=limit)
    assert len(dataset) == len(view) - 1 == 6  # too long with images: dropped, never cut
    for item, length in zip(dataset, dataset.sequence_lengths, strict=True):
        row = next(row for row in view if row.input_ids.tolist() == item["input_ids"])
        opened = [Images().open(row.image(n)) for n in range(len(row.media))]
        text = processor.image_token * len(opened)
        wanted = processor(text=[text], images=[opened], images_kwargs={"return_tensors": "np"})
        assert len(item["input_ids"]) == length
        assert set(item) == {
            "input_ids", "attention_mask", "num_actions", "loss_mask", "pixel_values",
            "image_grid_thw",
        }  # fmt: skip
        for name in ("pixel_values", "image_grid_thw"):
            assert np.array_equal(item[name], wanted[name])
    again = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(again[2]["pixel_values"], dataset[2]["pixel_values"])


def test_rows_that_skyrl_would_refuse_in_a_run_are_refused_before(source: Path) -> None:
    with pytest.raises(UsageError, match="cannot mix them in a batch") as refused:
        skyrl.SFTDataset(prepared(source, "qwen2_vl"))
    assert refused.value.line == 1
    texts = skyrl.SFTDataset(prepared(source, "qwen2_vl").filter("images == 0"))
    assert "pixel_values" not in texts[0]
    other = prepared(source, "llava").filter("images > 0")
    with pytest.raises(
        UsageError, match="SkyRL needs the features pixel_values and image_grid_thw"
    ):
        skyrl.SFTDataset(other)
