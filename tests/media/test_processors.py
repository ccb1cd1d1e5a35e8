"""Expansions computed from sizes equal those of the processor, for eleven families."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media import processors
from tests.media.conftest import known, raw
from tests.media.drawing import any_image
from tests.sampling import sampled
from tokenmill.errors import RowError
from tokenmill.media import Images, Processor, reference_of

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

IMAGES = Images()
TEXTS = (
    "",
    "Look:",
    "\n",
    " two  spaces ",
    "Ünïcode 你好 🙂\n\n",
    "<|im_start|>user\n",
    "<row_1>",
    "x" * 40,
)


def row_of(rng: random.Random, token: str, longest: int) -> tuple[str, list[bytes]]:
    files = [any_image(rng, longest)[0] for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    text = rng.choice(TEXTS) + "".join(token + rng.choice(TEXTS) for _ in files)
    return text, files


def require_equal(
    name: str, text: str, files: list[bytes], processor: Processor, real: Path | None = None
) -> None:
    """Compare a row expanded from image headers with the processor's output for real pixels."""
    original = raw(name) if real is None else raw(name, real)
    sizes = [(facts.width, facts.height) for facts in map(IMAGES.facts, files)]
    images = [IMAGES.open(data) for data in files]
    output = original(
        text=[text],
        images=[images],
        add_special_tokens=False,
        return_tensors="pt",
        **processors.OPTIONS.get(name, {}),
    )
    expected = output["input_ids"][0].tolist()
    expanded = processor.expand(text, sizes)
    encoding = processor.tokenizer(
        expanded.text, add_special_tokens=False, return_offsets_mapping=True
    )
    assert encoding["input_ids"] == expected, (name, sizes, text)

    expansion = processor.expansion_for(sizes).expansion
    assert [expanded.text[slice(*piece)] for piece in expanded.pieces] == [
        image.text for image in expansion.images
    ]
    between = [0, *(edge for piece in expanded.pieces for edge in piece), len(expanded.text)]
    kept = [expanded.text[a:b] for a, b in zip(between[::2], between[1::2], strict=True)]
    assert processor.image_token.join(kept) == text

    referenced = processor.reference(text, images)
    assert referenced.ids == expected
    counts = [
        sum(start < after and before < end for before, after in encoding["offset_mapping"])
        for start, end in expanded.pieces
    ]
    if referenced.token_types is not None:
        assert processor.token_types(expected, counts) == referenced.token_types
    for one in (referenced.features, processor.features([images])):
        require_same_features(output, one)
    grids = [image.grid for image in expansion.images]
    if "image_grid_thw" in output:
        assert [list(grid or ()) for grid in grids] == output["image_grid_thw"].tolist()
        assert expansion.patches == len(output["pixel_values"])
    else:
        assert grids == [None] * len(sizes)


def require_same_features(output: Any, features: dict[str, Any]) -> None:
    names = set(output) - {
        "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids",
    }  # fmt: skip
    assert set(features) == names
    for name in names:
        tensor = output[name]
        expected = (tensor.float() if tensor.dtype.is_floating_point else tensor).numpy()
        assert features[name].shape == expected.shape, name
        assert np.array_equal(features[name], expected), name


@pytest.mark.parametrize(
    ("rows", "longest"),
    [(1, 260), pytest.param(200, 1300, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
@pytest.mark.parametrize("name", sampled(processors.NAMES, 2))
def test_rows_equal_the_processor_output(name: str, rows: int, longest: int) -> None:
    processor = known(name)
    rng = random.Random(f"rows {name}")
    for _ in range(rows):
        require_equal(name, *row_of(rng, processor.image_token, longest), processor)


REAL = {
    "qwen2_5_vl": "qwen2.5",
    "qwen3_vl": "qwen3",
    "gemma3": "gemma3",
    "llama4": "llama3.1",
    "pixtral": "mistral-nemo",
    "idefics3": "smollm2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(REAL, 2))
def test_real_rows_over_real_tokenizers(name: str, shared: Path) -> None:
    """Rows of MATH-Vision, with images relative to their file."""
    directory = shared / "tokenizers" / REAL[name]
    processor = Processor(raw(name, directory))
    corpus = shared / "corpora" / "math_vision"
    rows = [json.loads(line) for line in (corpus / "math_vision.jsonl").read_bytes().splitlines()]
    for row in rows[7::80]:
        files = [IMAGES.read(reference_of(value), corpus) for value in row["images"]]
        text = row["problem"].replace("<image>", processor.image_token) + row["answer"]
        require_equal(name, text, files, processor, directory)
    words = {
        processor.tokenizer.convert_ids_to_tokens(number) for number in processor.media_token_ids
    }
    assert processor.image_token in words
    assert not any(word.isspace() for word in words), "newlines occur in texts, too"


@pytest.mark.parametrize("name", processors.NAMES)
def test_shape_only_expansions_equal_those_of_blank_images(name: str) -> None:
    """For sizes at every edge; if the processor rejects a blank image, shape-only gives None."""
    processor = known(name)
    rng = random.Random(f"shape only {name}")
    edges = (1, 2, 3, 13, 14, 28, 29, 100, 335, 336, 337, 448, 449)
    for _ in range(4):
        row = tuple((rng.choice(edges), rng.choice(edges)) for _ in range(rng.choice((1, 1, 2))))
        blank, shape_only = processor._probe.with_blanks(row), processor._probe.shape_only(row)
        assert shape_only in ((None,) if blank.error is not None else (blank, None)), row
        if processor.uses_shape_only and blank.error is None:
            assert shape_only is not None, row


def test_all_families_run_without_pixels() -> None:
    assert [name for name in processors.NAMES if not known(name).uses_shape_only] == []


@pytest.mark.parametrize(
    "name", sampled(["qwen2_vl", "pixtral", "gemma3", "llava", "llava_next", "glm4v"], 2)
)
def test_features_of_a_batch(name: str) -> None:
    """Features of a batch equal the processor's, also with a row without images."""
    processor = known(name)
    rng = random.Random(f"batch {name}")
    rows = [[IMAGES.open(any_image(rng, 300)[0]) for _ in range(count)] for count in (1, 0, 2, 1)]
    output = raw(name)(
        text=[processor.image_token * len(row) for row in rows if row],
        images=[row for row in rows if row],
        images_kwargs={"return_tensors": "pt"},
        text_kwargs={"return_tensors": None},
    )
    features = processor.features(rows)
    require_same_features(output, features)
    alone = [processor.features([row]) for row in rows if row]
    for feature, value in features.items():
        if feature in processor.layout.joined:
            assert np.array_equal(np.concatenate([one[feature] for one in alone]), value)
    assert processor.features([[], []]) == {}


def test_rows_without_images_count_in_the_first_axis() -> None:
    processor = known("idefics3")
    image = IMAGES.open(any_image(random.Random(1), 100)[0])
    pixels = processor.features([[image], [], [image]])["pixel_values"]
    assert len(pixels) == 3
    assert not pixels[1].any()
    assert np.array_equal(pixels[0], pixels[2])


def test_images_and_image_tokens_must_agree() -> None:
    processor = known("llava")
    token = processor.image_token
    for text, sizes in ((token, []), ("", [(9, 9)]), (token * 3, [(9, 9)] * 2)):
        with pytest.raises(RowError, match=r"image\(s\), but its text has") as caught:
            processor.expand(text, sizes)
        assert caught.value.reason == "media_mismatch"
    assert processor.expand("text", []).text == "text"


def test_an_image_too_thin_for_the_processor_is_rejected() -> None:
    processor = known("qwen2_vl")
    with pytest.raises(RowError, match="2000×5 pixels: absolute aspect ratio") as caught:
        processor.expand(processor.image_token, [(2000, 5)])
    assert caught.value.reason == "bad_media"
    thin = IMAGES.open(any_image(random.Random(2), 30)[0]).resize((2000, 5))
    with pytest.raises(RowError, match="absolute aspect ratio"):
        processor.reference(processor.image_token, [thin])
    with pytest.raises(RowError, match="absolute aspect ratio"):
        processor.features([[thin]])


def test_media_tokens() -> None:
    processor = known("gemma3")
    words = {
        processor.tokenizer.convert_ids_to_tokens(number) for number in processor.media_token_ids
    }
    assert words == {"<start_of_image>", "<end_of_image>", "<image_soft_token>"}


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3", "internvl"])
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """The key does not depend on the path; processors without a video processor load too."""
    processor = known(name)
    for directory in (tmp_path / "a", tmp_path / "other" / "b"):
        directory.mkdir(parents=True)
        processor.save(directory)
        loaded = Processor.load(directory)
        assert loaded.key == processor.key
        assert loaded.chat_template == processor.chat_template
        text = f"a {processor.image_token} b"
        ids = [
            one.tokenizer.encode(one.expand(text, [(50, 40)]).text, add_special_tokens=False)
            for one in (loaded, processor)
        ]
        assert ids[0] == ids[1]
