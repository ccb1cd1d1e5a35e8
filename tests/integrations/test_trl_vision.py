"""Rows with images in TRL: batches equal those of its own collator, with the store's labels."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.data.test_media import IMAGES, ImageStores
from tests.integrations.test_page_lines import block_of
from tokenmill import Loader, Pack, concat
from tokenmill.errors import UsageError

trl = pytest.importorskip("trl")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.integrations.test_trl import recorder, settings  # noqa: E402
from tokenmill.integrations import hf  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.timeout(300),
]

MADE: dict[str, ImageStores] = {}


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageStores:
    family = getattr(request, "param", "llava")
    if family not in MADE:
        MADE[family] = ImageStores(tmp_path_factory.mktemp(family), family)
        MADE[family].raw.tokenizer.pad_token = "<|im_end|>"
    return MADE[family]


def pad_of(made: ImageStores) -> int:
    return int(made.raw.tokenizer.pad_token_id)


FAMILIES = ["llava", "qwen2_vl", pytest.param("gemma3", marks=pytest.mark.soak)]


@pytest.mark.parametrize("made", FAMILIES, indirect=True)
def test_batches_are_those_of_trls_own_collator(made: ImageStores) -> None:
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    theirs = DataCollatorForVisionLanguageModeling(made.raw, pad_to_multiple_of=8)
    ours = hf.VisionCollator(
        made.store, processor=made.raw, pad_token_id=pad_of(made), pad_to_multiple_of=8
    )
    for rows in ([0, 1, 2, 5], [3], [8, 4], [2, 7]):
        examples = [
            {
                "messages": made.conversations[row],
                "images": [made.album.open(number) for number in IMAGES[row]],
            }
            for row in rows
        ]
        expected, found = theirs(examples), ours([{"row": row} for row in rows])
        assert found.keys() == expected.keys()
        for name in found.keys() - {"labels"}:
            assert found[name].dtype == expected[name].dtype, name
            assert torch.equal(found[name], expected[name]), name
        for line, row in enumerate(rows):
            mask = made.store[row].loss_mask > 0
            detail = found["labels"][line, : mask.size].numpy()
            assert np.array_equal(detail != -100, mask)
            assert np.array_equal(detail[mask], expected["labels"][line, : mask.size].numpy()[mask])
            assert (found["labels"][line, mask.size :] == -100).all()


def tiny_llava(words: int, image: int) -> Any:
    torch.manual_seed(0)
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        image_size=336, patch_size=14, projection_dim=16,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=words, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=4096,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_id=image, vision_feature_layer=-1
    )
    return transformers.LlavaForConditionalGeneration(config)


def test_trainer_sees_the_loaders_batches(made: ImageStores, tmp_path: Path) -> None:
    dataset, arguments = hf.for_trl(made.store, epochs=1, seed=5)
    assert dataset.column_names == ["row"]
    stated = settings(
        tmp_path, per_device_train_batch_size=3, max_steps=3, save_strategy="no",
        dataloader_num_workers=1,
    )  # fmt: skip
    config = trl.SFTConfig(**stated, **arguments)
    model = tiny_llava(len(made.raw.tokenizer), made.raw.tokenizer.convert_tokens_to_ids("<image>"))
    trainer = recorder()(
        model=model, args=config, train_dataset=dataset, processing_class=made.raw,
        data_collator=hf.VisionCollator(made.store, pad_token_id=pad_of(made)),
    )  # fmt: skip
    trainer.train()
    batches = list(
        Loader(made.store, batch_size=3, seed=5, media="pixels", pad_token_id=pad_of(made))
    )
    for seen, batch in zip(trainer.seen, batches, strict=False):
        for name in seen:
            assert np.array_equal(seen[name], batch[name]), name
    assert len(trainer.seen) == 3
    assert all("pixel_values" in seen for seen in trainer.seen)
    without = recorder()(
        model=model, args=config, train_dataset=dataset, processing_class=made.raw.tokenizer
    )
    with pytest.raises(KeyError, match="input_ids"):
        without.train()


def test_what_trl_cannot_do_is_refused(made: ImageStores) -> None:
    for wish in ({"pack": Pack(4096)}, {"padding_free": True}):
        with pytest.raises(UsageError, match="cannot pack rows with images"):
            hf.for_trl(made.store, **wish)
    plain = made.store.filter("images == 0")
    assert hf.for_trl(concat([made.store, plain]))[0].column_names == ["row"]
    collator = hf.VisionCollator(made.store, pad_token_id=0)
    copied = pickle.loads(pickle.dumps(collator))
    assert torch.equal(copied([{"row": 1}])["pixel_values"], collator([{"row": 1}])["pixel_values"])


def test_lines_of_the_page_train(made: ImageStores, tmp_path: Path) -> None:
    """Run the block of docs/trainers/trl.md that needs a vision-language model."""
    image = made.raw.tokenizer.convert_tokens_to_ids("<image>")
    # The tokenizer of this store has no pad or eos token.
    padded = functools.partial(hf.VisionCollator, pad_token_id=pad_of(made))
    space: dict[str, Any] = {
        "hf": SimpleNamespace(for_trl=hf.for_trl, VisionCollator=padded),
        "SFTTrainer": trl.SFTTrainer, "SFTConfig": trl.SFTConfig, "store": made.store,
        "processor": made.raw, "model": tiny_llava(len(made.raw.tokenizer), image),
        "options": settings(
            tmp_path, per_device_train_batch_size=2, max_steps=1, save_strategy="no"
        ),
    }  # fmt: skip
    exec(block_of("trl.md", "py", "VisionCollator"), space)
    assert space["trainer"].train().global_step == 1
