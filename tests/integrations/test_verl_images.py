"""verl's rows with images: message by message through the processor, as verl defines them."""

from __future__ import annotations

import json
import random
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import SourceError, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")

from tests.data.making import write_rows  # noqa: E402
from tests.data.test_images import resizing  # noqa: E402
from tests.integrations.conftest import stand_in, typed_parts  # noqa: E402
from tests.media import processors  # noqa: E402
from tests.media.drawing import draw, encode  # noqa: E402
from tokenmill.integrations import verl  # noqa: E402

pytestmark = pytest.mark.usefixtures("answered")

SEEN = processors.TEMPLATE.replace("IMAGE_TOKEN", "<|vision_start|>IMAGE_TOKEN<|vision_end|>")


def rope_index(processor: Any, input_ids: Any, image_grid_thw: Any, **others: Any) -> Any:
    """Qwen-VL's positions, a token at a time: what verl's function is documented to give."""
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    merge = processor.image_processor.merge_size
    assert others["video_grid_thw"] is None
    found: list[tuple[int, int, int]] = []
    grids = iter(image_grid_thw.tolist())
    ids, at, now = input_ids.tolist(), 0, 0
    while at < len(ids):
        if ids[at] != pad:
            found.append((now, now, now))
            at, now = at + 1, now + 1
            continue
        frames, high, wide = next(grids)
        places = [
            (now + t, now + y, now + x)
            for t in range(frames) for y in range(high // merge) for x in range(wide // merge)
        ]  # fmt: skip
        found += places
        at, now = at + len(places), max(map(max, places)) + 1
    return torch.tensor(found).T


@pytest.fixture(scope="module")
def processor() -> Any:
    return processors.make("qwen2_vl", template=SEEN)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "verl.models.transformers.qwen2_vl", get_rope_index=rope_index)
    stand_in(monkeypatch, "verl.utils.dataset.rl_dataset", RLHFDataset=RLHFDataset)
    stand_in(monkeypatch, "qwen_vl_utils", process_vision_info=resizing)


class RLHFDataset:
    """The part of verl's class that puts media in place."""

    image_key: str

    def _build_messages(self, example: dict[str, Any], key: str) -> Any:
        waiting = list(example.get(self.image_key) or [])
        if waiting:
            for message in example[key]:
                message["content"] = typed_parts(message["content"], waiting)
        assert not waiting
        return example[key]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home, rng = tmp_path_factory.mktemp("verl"), random.Random(5)
    rows = []
    for number in range(12):
        images = []
        for part in range(number % 4):
            size = rng.randint(28, 150), rng.randint(28, 150)
            name = f"{number}-{part}.png"
            (home / name).write_bytes(encode(draw(rng, *size), "PNG"))
            images.append(name)
        messages = [
            {"role": "user", "content": "<image>" * min(2, len(images)) + f"look {number}"},
            {"role": "assistant", "content": "seen"},
            {"role": "user", "content": "more <image>?" if len(images) > 2 else "and?"},
            {"role": "assistant", "content": f"no {'more ' * number}"},
        ]
        rows.append({"messages": messages, "images": images})
    write_rows(home / "rows.jsonl", rows)
    return home


def config(home: Path, **fields: Any) -> dict[str, Any]:
    ours = {"cache_dir": str(home / "cache"), "num_workers": 0, "order": "sequential"}
    ours |= fields.pop("tokenmill", {})
    stated = {"pad_mode": "no_padding", "max_length": 4096, "tokenmill": ours}
    return {**stated, **fields}


def by_verl(processor: Any, row: dict[str, Any], home: Path) -> dict[str, Any]:
    """A row by verl's definition: every message alone, joined."""
    waiting = [Image.open(home / name) for name in row["images"]]
    ids: list[int] = []
    mask: list[int] = []
    inputs: dict[str, list[Any]] = {}
    header = processor.tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    for message in row["messages"]:
        parts = typed_parts(message["content"], waiting)
        made = processor.apply_chat_template(
            [{**message, "content": parts}], tokenize=True, return_dict=True, return_tensors="np"
        )
        made = dict(made)
        found = made.pop("input_ids")[0].tolist()
        ids += found
        trained = message["role"] == "assistant"
        mask += [int(trained and place >= len(header)) for place in range(len(found))]
        for name in ("attention_mask", "mm_token_type_ids"):
            made.pop(name, None)
        for name, value in made.items():
            inputs.setdefault(name, []).append(value)
    joined = {name: np.concatenate(values) for name, values in inputs.items()}
    return {"input_ids": ids, "loss_mask": mask, "multi_modal_inputs": joined}


@pytest.mark.parametrize("pad_mode", ["no_padding", "right"])
def test_sft_rows_with_images_are_verls_own(
    home: Path, processor: Any, host: None, pad_mode: str
) -> None:
    stated = config(home, pad_mode=pad_mode)
    dataset = verl.SFTDataset(
        str(home / "rows.jsonl"), processor.tokenizer, stated, processor=processor
    )
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    assert len(dataset) == len(rows)
    for item, row in zip(dataset, rows, strict=True):
        expected = by_verl(processor, row, home)
        size = len(expected["input_ids"])
        for name in ("input_ids", "loss_mask"):
            assert item[name][:size].tolist() == expected[name]
        assert item["position_ids"].shape == (4, len(item["input_ids"]))
        assert item["position_ids"][0, :size].tolist() == list(range(size))
        assert not item["position_ids"][:, size:].any()
        if not row["images"]:
            assert "multi_modal_inputs" not in item
            assert item["position_ids"][:, :size].tolist() == [list(range(size))] * 4
            continue
        inputs = item["multi_modal_inputs"]
        assert (
            set(inputs) == set(expected["multi_modal_inputs"]) == {"pixel_values", "image_grid_thw"}
        )
        for name, wanted in expected["multi_modal_inputs"].items():
            assert inputs[name].dtype == torch.from_numpy(wanted).dtype
            assert np.array_equal(inputs[name].numpy(), wanted)
        ids = torch.tensor(expected["input_ids"])
        axes = rope_index(processor, ids, inputs["image_grid_thw"], video_grid_thw=None)
        assert item["position_ids"][1:, :size].tolist() == axes.tolist()


def test_sft_store_of_images_is_served_and_checked(
    home: Path, processor: Any, host: None, tmp_path: Path
) -> None:
    store = tm.prepare(
        home / "rows.jsonl", processor=processor, turn_end="turn", num_workers=0,
        cache_dir=tmp_path,
    )  # fmt: skip
    stated = config(home)
    served = verl.SFTDataset(str(store.path), processor.tokenizer, stated, processor=processor)
    again = verl.SFTDataset(
        str(home / "rows.jsonl"), processor.tokenizer, stated, processor=processor
    )
    wanted = again[3]["multi_modal_inputs"]["pixel_values"]
    assert torch.equal(served[3]["multi_modal_inputs"]["pixel_values"], wanted)
    with pytest.raises(UsageError, match="verl passed no processor"):
        verl.SFTDataset(str(store.path), processor.tokenizer, stated)
    other = processors.make("qwen3_vl", template=SEEN)
    with pytest.raises(UsageError, match="prepared with another processor"):
        verl.SFTDataset(str(store.path), processor.tokenizer, stated, processor=other)


def test_sft_limits_never_separate_images_from_their_tokens(
    home: Path, processor: Any, host: None
) -> None:
    arguments = (str(home / "rows.jsonl"), processor.tokenizer)
    with pytest.raises(SourceError, match="would cut tokens of images"):
        verl.SFTDataset(*arguments, config(home, max_length=60, truncation="left"), processor)
    cut = verl.SFTDataset(*arguments, config(home, max_length=60, truncation="right"), processor)
    assert 3 <= len(cut) < 12
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    for item in cut:
        if "multi_modal_inputs" in item:
            grid = item["multi_modal_inputs"]["image_grid_thw"]
            assert int((item["input_ids"] == pad).sum()) == int(grid.prod(dim=1).sum()) // 4


def test_sft_unsupported_media_are_refused(
    home: Path, processor: Any, host: None, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.png").write_bytes(encode(draw(random.Random(1), 60, 60), "PNG"))
    source = write_rows(tmp_path / "r.jsonl", [{"messages": turns, "pics": ["a.png"]}])
    stated = config(tmp_path, image_key="pics")
    with pytest.raises(UsageError, match="must be called images or image"):
        verl.SFTDataset(str(source), processor.tokenizer, stated, processor=processor)
    source = write_rows(tmp_path / "v.jsonl", [{"messages": turns, "videos": ["a.mp4"]}])
    with pytest.raises(UsageError, match="use verl's own dataset for videos"):
        verl.SFTDataset(str(source), processor.tokenizer, config(tmp_path), processor=processor)
    tiled = processors.make("idefics3")
    source = write_rows(tmp_path / "i.jsonl", [{"messages": turns, "images": ["a.png"]}])
    dataset = verl.SFTDataset(str(source), tiled.tokenizer, config(tmp_path), processor=tiled)
    with pytest.raises(UsageError, match="of Idefics3Processor cannot be concatenated"):
        _ = dataset[0]


def test_rl_prompts_with_images_are_kept_by_the_processors_length(
    home: Path, processor: Any, host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    rows = [json.loads(line) for line in (home / "rows.jsonl").read_text().splitlines()]
    source = write_rows(
        tmp_path / "rl.jsonl",
        [{"prompt": row["messages"][:1], "images": row["images"][:2]} for row in rows],
    )
    limit = 28
    stated = {
        "max_prompt_length": limit,
        "tokenmill": {"cache_dir": str(tmp_path), "num_workers": 0, "order": "sequential"},
    }
    dataset = verl.RLDataset(str(source), processor.tokenizer, stated, processor=processor)
    expected = []
    for line in source.read_text().splitlines():
        row = json.loads(line)
        built = types.SimpleNamespace(image_key="images")
        messages = RLHFDataset._build_messages(built, row, key="prompt")  # type: ignore[arg-type]
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        images, _ = resizing(messages, processor.image_processor.patch_size)
        given = {"images": images} if images else {}
        if len(processor(text=text, **given)["input_ids"][0]) <= limit:
            expected.append(messages)
    assert 3 < len(expected) < len(rows)
    assert [item["raw_prompt"] for item in dataset] == expected
    assert not any("images" in item for item in dataset)
