"""Prompts with images: lengths from headers, against the processor with the real ones."""

from __future__ import annotations

import base64
import io
import json
import logging
import os
import pickle
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.data.making import TOKENIZER, open_prompts, write_rows
from tokenmill import PromptDataset
from tokenmill.errors import RowError, UsageError
from tokenmill.integrations.miles import MILES, SLIME

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from tests.media.conftest import raw  # noqa: E402
from tests.media.drawing import any_image, draw, encode  # noqa: E402
from tests.sampling import sampled  # noqa: E402
from tokenmill.media import Images, Processor, reference_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("answered")

PROCESSORS = ("qwen2_vl", "llava", "gemma3", pytest.param("idefics3", marks=pytest.mark.soak))
KEYS = {"image": "images"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("prompts")
    rng = random.Random(16)
    (home / "art").mkdir()
    made: list[dict[str, Any]] = [{"text": "no image", "images": []}]
    for number in range(12):
        images: list[Any] = []
        for part in range(rng.randint(1, 3)):
            data, name = any_image(rng, 200)
            path = home / "art" / f"{number}-{part}-{name.split()[0]}"
            path.write_bytes(data)
            images.append(f"art/{path.name}")
        if number % 5 == 0:
            images[0] = (
                "data:image/any;base64,"
                + base64.b64encode((home / images[0]).read_bytes()).decode()
            )
        text = "".join(f"{'why ' * rng.randint(0, 3)}<image>\n" for _ in images)
        made.append({"text": text + "?", "images": images})
    turned = home / "art" / "turned.jpg"
    turned.write_bytes(encode(draw(rng, 120, 60), "JPEG", orientation=6))
    parts = [{"type": "image"}, {"type": "text", "text": "which way?"}]
    made.append({"text": [{"role": "user", "content": parts}], "images": ["art/turned.jpg"]})
    return write_rows(home / "rows.jsonl", made)


def opened(source: Path, cache: Path, processor: Any, **more: Any) -> PromptDataset:
    stated: dict[str, Any] = {
        "tokenizer": None, "multimodal_keys": KEYS, "apply_chat_template": True,
        "cache_dir": cache, "tokenizer_backend": "auto",
    }  # fmt: skip
    return open_prompts(source, processor=processor, **{**stated, **more})


@pytest.mark.parametrize("name", sampled(["qwen2_vl", "llava", "gemma3", "idefics3"], 2))
def test_lengths_and_images_are_the_processors_own(rows: Path, tmp_path: Path, name: str) -> None:
    processor = raw(name)
    prompts = opened(rows, tmp_path, processor)
    assert prompts.rejected == {}
    images = Images(rows.parent)
    sources = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(prompts) == len(sources)
    for prompt, source in zip(prompts, sources, strict=True):
        wanted = [images.open(images.read(reference_of(one))) for one in source["images"]]
        assert isinstance(prompt.prompt, str)
        given: dict[str, Any] = {"images": wanted} if wanted else {}
        ids = processor(text=prompt.prompt, **given)["input_ids"][0]
        if wanted:  # without any the tokenizer alone counts, without special tokens
            assert prompt.length == len(ids)
        assert prompt.multimodal_inputs is not None
        found = prompt.multimodal_inputs["images"] or []
        assert [one.tobytes() for one in found] == [one.tobytes() for one in wanted]
        assert [one.size for one in found] == [one.size for one in wanted]


def test_special_tokens_that_a_processor_adds_are_counted(rows: Path, tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    processor = raw("qwen2_vl")
    tokenizer = processor.tokenizer
    token, number = next((t, n) for t, n in tokenizer.get_vocab().items() if "image" not in t)
    adding = TemplateProcessing(single=f"{token} $A {token}", special_tokens=[(token, number)])
    plain = opened(rows, tmp_path / "plain", processor).lengths
    tokenizer.backend_tokenizer.post_processor = adding
    found = opened(rows, tmp_path / "adding", processor)
    assert (found.lengths[1:] - plain[1:] == 2).all()
    ids = processor(text=found[1].prompt, images=found[1].multimodal_inputs["images"])["input_ids"]
    assert found[1].length == len(ids[0])


def test_no_image_is_decoded_but_those_of_audits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most are known by their headers; serving opens those of the requested prompt."""
    rng = random.Random(1)
    for number in range(9):
        (tmp_path / f"{number}.png").write_bytes(encode(draw(rng, 130 + number, 140), "PNG"))
    lines = [{"text": f"<image>{number}", "images": f"{number}.png"} for number in range(9)]
    source = write_rows(tmp_path / "r.jsonl", lines)
    decoded = []
    plain = Images.open

    def counting(self: Any, data: bytes, name: str = "the image") -> Any:
        decoded.append(name)
        return plain(self, data, name)

    monkeypatch.setattr(Images, "open", counting)
    prompts = opened(source, tmp_path / "cache", raw("qwen2_vl"))
    assert decoded == ["0.png"]
    assert prompts[5].multimodal_inputs["images"][0].size == (135, 140)
    assert decoded == ["0.png", "5.png"]


def test_image_changed_in_place_makes_another_index_and_a_moved_one_the_same(
    rows: Path, tmp_path: Path
) -> None:
    home, cache, processor = tmp_path / "a", tmp_path / "cache", raw("qwen2_vl")
    home.mkdir()
    (home / "x.png").write_bytes(encode(draw(random.Random(1), 60, 60), "PNG"))
    source = write_rows(home / "r.jsonl", [{"text": "<image>", "images": ["x.png"]}])
    os.utime(home / "x.png", (1, 1))
    first = opened(source, cache, processor)
    assert opened(source, cache, processor).hit
    (tmp_path / "b").mkdir()
    os.rename(home / "x.png", tmp_path / "b" / "x.png")
    gone = opened(source, cache, processor)
    assert gone.rejected == {"bad_media": 1}
    ((origin, reason, detail),) = gone.rejected_rows()
    assert (origin.line, reason) == (1, "bad_media")
    assert "x.png does not exist" in detail
    assert opened(source, cache, processor, media_root=tmp_path / "b").key == first.key
    (home / "x.png").write_bytes(encode(draw(random.Random(1), 600, 600), "PNG"))
    larger = opened(source, cache, processor)
    assert not larger.hit
    assert larger[0].length > 4 * first[0].length


def test_bad_images_are_rejected_with_reason_and_name(tmp_path: Path) -> None:
    whole = encode(draw(random.Random(1), 60, 60), "PNG")
    (tmp_path / "whole.png").write_bytes(whole)
    (tmp_path / "cut.png").write_bytes(whole[:-300])
    (tmp_path / "thin.png").write_bytes(encode(draw(random.Random(1), 900, 2), "PNG"))
    (tmp_path / "text.png").write_text("no image")
    images = [
        ("cut.png", "bad_media", "cut.png"),
        ("thin.png", "bad_media", "900×2"),
        ("text.png", "bad_media", "text.png is not an image"),
        ("../out.png", "bad_media", "../out.png does not exist"),
        ("https://example.org/a.png", "bad_media", "URLs are not allowed"),
        (7, "bad_media", "7"),
    ]
    lines: list[Any] = [{"text": "a <image>", "images": [one]} for one, _, _ in images]
    lines.append({"text": "<|image_pad|><image>", "images": ["whole.png"]})
    lines.append({"text": [{"role": "user", "content": [{"type": "image"}]}]})
    lines.append({"text": "<image>", "images": ["whole.png"]})
    prompts = opened(write_rows(tmp_path / "r.jsonl", lines), tmp_path / "c", raw("qwen2_vl"))
    assert prompts.rejected == {"bad_media": 6, "media_mismatch": 2}
    details = [(reason, detail) for _, reason, detail in prompts.rejected_rows()]
    for (_, reason, part), (found, detail) in zip(images, details, strict=False):
        assert found == reason
        assert part in detail
    assert len(prompts) == 1
    (tmp_path / "whole.png").unlink()
    with pytest.raises(RowError, match="does not exist") as refused:
        _ = prompts[0]
    assert (refused.value.line, refused.value.reason) == (9, "bad_media")


def test_wrong_computed_expansion_is_replaced_by_the_processor(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    honest = opened(rows, tmp_path / "honest", raw("qwen2_vl")).lengths.tolist()
    plain = Processor.expand

    def lying(self: Any, text: str, sizes: Any, answers: Any = None) -> Any:
        made = plain(self, text, sizes, answers)
        return type(made)(made.text + "!", made.pieces)

    monkeypatch.setattr(Processor, "expand", lying)
    caplog.set_level(logging.WARNING)
    prompts = opened(rows, tmp_path / "lied", raw("qwen2_vl"))
    assert "measured with the processor" in caplog.text
    assert prompts.lengths.tolist() == honest


def test_processor_by_directory_brings_its_tokenizer_and_template(
    rows: Path, tmp_path: Path
) -> None:
    Processor(raw("llava")).save(tmp_path / "processor")
    by_path = opened(rows, tmp_path / "c", tmp_path / "processor")
    by_object = opened(rows, tmp_path / "c", raw("llava"))
    assert by_path.lengths.tolist() == by_object.lengths.tolist()
    again = pickle.loads(pickle.dumps(by_path))
    assert again[3].multimodal_inputs["images"][0] == by_path[3].multimodal_inputs["images"][0]
    with pytest.raises(UsageError, match="cannot load the processor"):
        opened(rows, tmp_path / "c", tmp_path / "nothing")
    with pytest.raises(UsageError, match="not the processor's own"):
        opened(rows, tmp_path / "c", raw("llava"), tokenizer=TOKENIZER)


def resizing(messages: Any, image_patch_size: int) -> tuple[Any, Any]:
    """As ``qwen_vl_utils`` does it: no orientation, sides that are multiples of two patches."""
    found = []
    for message in messages:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if "image" in part:
                image = part["image"]
                if not isinstance(image, Image.Image):
                    inline = image.startswith("data:")
                    data = base64.b64decode(image.partition(",")[2]) if inline else b""
                    image = Image.open(io.BytesIO(data or Path(image).read_bytes()))
                step = 2 * image_patch_size
                most = part.get("max_side", 140)
                sides = [max(step, min(most, side) // step * step) for side in image.size]
                found.append(image.convert("RGB").resize(sides))
    return found or None, None


@pytest.fixture
def qwen_vl_utils(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("qwen_vl_utils")
    module.process_vision_info = resizing  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "qwen_vl_utils", module)


@pytest.mark.parametrize("convention", [MILES, SLIME])
def test_under_a_hosts_convention_its_own_loading_counts(
    rows: Path, tmp_path: Path, qwen_vl_utils: None, convention: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Working directory, no orientation, resized first: what the eager datasets do."""
    monkeypatch.chdir(rows.parent)
    processor = raw("qwen2_vl")
    lines = [json.loads(line) for line in rows.read_text().splitlines()[:-1]]
    part = {"type": "image", "image": "art/turned.jpg", "max_side": 60}
    lines.append({"text": "<image>", "images": [part]})
    source = write_rows(tmp_path / "r.jsonl", lines)
    prompts = opened(
        source, tmp_path / "c", processor, convention=convention,
        tokenizer=processor.tokenizer, chat_template=processor.chat_template,
        tokenizer_backend="transformers",
    )  # fmt: skip
    assert prompts.rejected == {}
    patch = processor.image_processor.patch_size
    for prompt in prompts:
        images, _ = resizing(prompt.messages, patch)
        found = prompt.multimodal_inputs["images"]
        assert [one.tobytes() for one in found or ()] == [one.tobytes() for one in images or ()]
        if images:
            ids = processor(text=prompt.prompt, images=images)["input_ids"][0]
            assert prompt.length == len(ids)
    assert prompts[len(prompts) - 1].multimodal_inputs["images"][0].size == (56, 56)
    own = opened(source, tmp_path / "c", processor, media_root=rows.parent)
    assert own.key != prompts.key
