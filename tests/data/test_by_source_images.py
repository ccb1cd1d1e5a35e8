"""Rows with images that are tokenized on request, against the finished store."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.data.test_media import ImageStores, prepare

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("answered"),
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


@pytest.mark.parametrize("options", [{}, {"pack": tm.Pack(2000, window=6)}], ids=["rows", "packs"])
def test_images_and_pixels_are_those_of_the_store(tmp_path: Path, options: Any) -> None:
    made = ImageStores(tmp_path, "qwen2_vl")
    made.album.path(3).unlink()  # rows with this image are rejected
    (tmp_path / "finished").mkdir()
    store = prepare(made.source, made.raw, cache_dir=tmp_path / "finished")
    given: dict[str, Any] = {"executor": "inline", "cache_dir": tmp_path / "lazy", "lazy": True}
    lazy = tm.prepare(str(made.source), processor=made.raw, **given)
    finished = store.by_source()
    assert lazy.key == finished.key
    assert store.rejected == {"bad_media": 4}
    for number in (0, 1, 2):
        assert lazy[number].media == finished[number].media
    loaders = [
        tm.Loader(part, 3, media="pixels", pad_token_id=0, **options) for part in (lazy, finished)
    ]
    for ours, theirs in itertools.islice(zip(*(one.repeat() for one in loaders), strict=True), 6):
        assert ours.keys() == theirs.keys() > {"pixel_values", "media"}
        for name, value in ours.items():
            assert same(value, theirs[name]), name
    counts = [loader.served()["data"].get("rejected", {}) for loader in loaders]
    assert [set(count) for count in counts] == [{"bad_media"}] * 2
