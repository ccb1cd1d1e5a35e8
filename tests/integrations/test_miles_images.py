"""miles and slime: prompts with images that are opened lazily."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import write_rows
from tests.integrations.conftest import stand_in, typed_parts
from tests.integrations.stand_in_miles import flags, install
from tokenmill.integrations import miles

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from tests.data.test_images import resizing  # noqa: E402
from tests.media.conftest import raw  # noqa: E402
from tests.media.drawing import draw, encode  # noqa: E402

pytestmark = pytest.mark.usefixtures("answered")

LIMIT = 30


def process_vision_info(prompt: Any, processor: Any) -> dict[str, Any]:
    images, videos = resizing(prompt, image_patch_size=processor.image_processor.patch_size)
    return {"images": images, "videos": videos}


def eager(rows: list[dict[str, Any]], processor: Any) -> list[tuple[str, Any]]:
    kept = []
    for row in rows:
        prompt = [{"role": "user", "content": typed_parts(row["input"], list(row["pics"]))}]
        text = processor.tokenizer.apply_chat_template(
            prompt, tokenize=False, add_generation_prompt=True
        )
        inputs = process_vision_info(prompt, processor)
        if inputs["images"] is None:
            ids = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = processor(text=text, **inputs)["input_ids"][0]
        if len(ids) <= LIMIT:
            kept.append((text, inputs))
    return kept


@pytest.mark.parametrize("framework", ["miles", "slime"])
def test_samples_with_images_equal_the_frameworks_and_are_opened_lazily(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    processor = raw("qwen2_vl")
    processor.tokenizer.chat_template = processor.chat_template
    install(monkeypatch, framework)
    seen: list[Any] = []

    def watched(prompt: Any, given: Any) -> dict[str, Any]:
        found = process_vision_info(prompt, given)
        seen.extend(part["image"] for part in prompt[0]["content"] if "image" in part)
        return found

    tools = {"process_vision_info": watched, "load_processor": lambda *_, **__: processor}
    stand_in(monkeypatch, f"{framework}.utils.processing_utils", **tools)
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    rng, rows = random.Random(3), []
    for number in range(16):
        names = [f"{number}-{part}.jpg" for part in range(number % 3)]
        for name in names:
            image = draw(rng, rng.randint(20, 160), rng.randint(20, 160))
            data = encode(image, "JPEG", orientation=rng.choice((1, 6)))
            (tmp_path / name).write_bytes(data)
        rows.append({"input": "a<image>" * len(names) + f"b{number}", "pics": names})
    monkeypatch.setattr(
        "tokenmill.integrations.miles.source.Flags.tokenizer",
        {"tokenizer": processor.tokenizer, "tokenizer_backend": "transformers"},
    )
    source = miles.DataSource(
        flags(
            prompt_data=str(write_rows(tmp_path / "rows.jsonl", rows)),
            hf_checkpoint=str(tmp_path), apply_chat_template=True, rollout_shuffle=False,
            multimodal_keys={"image": "pics"}, rollout_max_prompt_len=LIMIT,
        )
    )  # fmt: skip
    real = [one for one in seen if isinstance(one, str)]
    assert real == ["1-0.jpg"]  # the audited row; the others were measured by their headers
    expected = eager(rows, processor)
    assert 4 < len(expected) < 16
    groups = source.get_samples(len(expected))
    for (sample,), (text, inputs) in zip(groups, expected, strict=True):
        assert sample.prompt == text
        assert set(sample.multimodal_inputs) == {"images", "videos"}
        found, wanted = sample.multimodal_inputs["images"], inputs["images"]
        assert (found is None) == (wanted is None)
        for mine, theirs in zip(found or (), wanted or (), strict=True):
            assert (mine.size, mine.mode) == (theirs.size, theirs.mode)
            assert mine.tobytes() == theirs.tobytes()
