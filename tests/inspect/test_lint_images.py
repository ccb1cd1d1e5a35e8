"""Lint and stats of rows with images: each problem on its own line, nothing on clean rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tokenmill as tm
from tests.build.image_rows import Album, asked, part, text
from tests.build.making import write_rows
from tests.inspect.crafted import GOLDEN_OF_IMAGES
from tests.inspect.test_lint import lines
from tests.media import processors
from tokenmill.inspect.lint.checks import image_copies
from tokenmill.inspect.stats import store_stats

QUICK: dict[str, Any] = {"executor": "inline", "progress": False}


@pytest.fixture(scope="module")
def processor() -> Any:
    return processors.make("llava")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one row per problem, after a clean one."""
    album = Album(tmp_path_factory.mktemp("album"))
    images = album.directory / "images"
    shutil.copy(images / "0.png", images / "copy.png")
    (images / "broken.png").write_bytes((images / "1.png").read_bytes()[:900])
    Image.new("L", (5000, 4000)).save(images / "huge.png")
    name = album.name
    rows = [
        {"messages": asked(part(name(0)), text("What is the first thing here?"))},
        {"messages": asked(part("images/gone.png"), text("Second question, another word?"))},
        {"messages": asked(part("images/broken.png"), text("Third: which colour is it?"))},
        {"messages": asked(part("images/huge.png"), text("Fourth, how many are there?"))},
        {"messages": asked("Fifth <image>, and nothing more?"), "images": [name(1), name(2)]},
        {"messages": asked(part(name(2)), part(name(2)), text("Sixth: which differs?"))},
        {"messages": asked(part("images/copy.png"), text("Seventh and of another name?"))},
        {"messages": asked(part(name(3)), text("What is the first thing here?"))},
        {"messages": asked(part(name(3)), text("What is the first thing here?"))},
    ]
    return write_rows(album.directory / "rows.jsonl", rows)


def test_each_fault_of_images_is_found_on_its_own_line(source: Path, processor: Any) -> None:
    report = tm.lint(str(source), processor=processor, cache_dir=source.parent / "cache", **QUICK)
    # Line 8 says the same of another image, line 9 of the same.
    about_rows = {rule: found for rule, found in lines(report).items() if found}
    assert about_rows == {**GOLDEN_OF_IMAGES, "duplicate": [9]}
    detail = {finding.rule: finding.detail for finding in report.findings}
    assert "images/gone.png" in detail["missing_image"]
    assert "images/broken.png" in detail["bad_media"]
    assert "5,000 × 4,000" in detail["large_image"]
    assert "rows.jsonl:1" in detail["duplicate_image"]


def test_lengths_count_the_tokens_of_images(source: Path, processor: Any) -> None:
    given = {"processor": processor, "cache_dir": source.parent / "cache", **QUICK}
    report = tm.lint(f"{source}@[0:1]", max_length=200, only=["overlong"], **given)
    assert lines(report) == {"overlong": [1]}


def test_stats_count_images_and_patches(source: Path, processor: Any) -> None:
    store = tm.prepare(str(source), processor=processor, cache_dir=source.parent / "cache", **QUICK)
    detail = store_stats(store)
    shown = [len(row.media) for row in store]
    assert detail["images"] == sum(shown) == 7
    assert detail["rows_with_images"] == len(shown) == 6
    assert detail["patches"] == int(store.patches.sum()) > 0


def test_copies_are_images_of_one_content_under_several_names() -> None:
    rows = np.array([0, 1, 2, 3, 4, 5])
    # Content and name; 0 is no name.
    named = np.array([(7, 1), (7, 1), (8, 2), (7, 3), (8, 0), (0, 9)], np.uint64)
    assert image_copies(rows, named) == [(3, 0)]
    assert image_copies(rows[:0], named[:0]) == []
