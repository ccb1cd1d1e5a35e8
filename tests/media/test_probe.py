"""Probing a processor: shape-only arrays, the cache of expansions, identity, errors."""

from __future__ import annotations

import copy
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.media import processors
from tests.media.conftest import known, raw
from tokenmill.errors import UsageError
from tokenmill.media import Processor
from tokenmill.media import processor as processor_module
from tokenmill.media.probe import PROBE_ROWS, Probe
from tokenmill.media.shape_only import PixelAccess, ShapeOnlyArray


def changed(name: str = "llava", **members: Any) -> Any:
    """Make a processor with other methods or attributes in its image processor."""
    processor = processors.make(name)
    for member, value in members.items():
        setattr(processor.image_processor, member, value)
    return processor


# Shape-only arrays


def shapes(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randint(1, 5) for _ in range(3))


OPERATIONS = [
    lambda a: a * 0.5,
    lambda a: (a.T - np.ones(a.shape[0], np.float32)) / 2,
    lambda a: a.astype(np.float64)[..., None],
    lambda a: np.transpose(a, (2, 0, 1)),
    lambda a: np.moveaxis(a, 0, -1)[:2],
    lambda a: a.reshape(-1),
    lambda a: np.stack([a, a], axis=1),
    lambda a: np.concatenate([a, a, a], axis=2),
    lambda a: np.pad(a, ((0, 1), (2, 0), (1, 1)), mode="constant"),
    lambda a: np.repeat(a, 3, 1),
    lambda a: np.broadcast_to(a[:, :, :, None], (*a.shape, 4)),
    lambda a: np.zeros_like(a, shape=(7, 2)),
    lambda a: a[:, 1:, ::2],
    lambda a: np.expand_dims(a, 0).squeeze(0).copy(),
    lambda a: a > 3,
]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_shape_only_arrays_have_the_shapes_of_real_ones(operation: Any) -> None:
    rng = random.Random(3)
    for _ in range(20):
        shape = shapes(rng)
        for dtype in (np.uint8, np.float32):
            real = operation(np.ones(shape, dtype))
            shape_only = operation(ShapeOnlyArray(shape, dtype))
            assert isinstance(shape_only, ShapeOnlyArray)
            assert (shape_only.shape, shape_only.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize(
    "look",
    [
        lambda a: a[0, 0, 0], lambda a: bool(a[0, 0, 0:1]), lambda a: a.max(), lambda a: a.item(),
        lambda a: np.max(a), lambda a: np.where(a > 0), lambda a: list(a.ravel()),
        lambda a: a.tolist(), lambda a: 1 if (a > 0).any() else 0, lambda a: np.unique(a),
        lambda a: a.mean(axis=0), lambda a: np.add.reduce(a), lambda a: a.tobytes(),
        lambda a: np.add(a, 1, out=np.zeros(a.shape)),
    ],
)  # fmt: skip
def test_reading_a_shape_only_array_raises(look: Any) -> None:
    with pytest.raises(PixelAccess):
        look(ShapeOnlyArray((3, 4, 5), np.uint8))


def test_other_threads_are_not_affected() -> None:
    """While one thread runs without pixels, a processor of another thread uses pixels."""
    from PIL import Image

    original = raw("idefics3")  # it allocates pixels and masks with np.zeros
    probe = Probe(original, original.image_token, {})
    image = Image.radial_gradient("L").convert("RGB")
    outputs = []

    def work() -> None:
        size = {"longest_edge": 728}  # fewer tiles than by default
        outputs.append(original.image_processor([[image]], size=size, return_tensors="np"))

    work()
    with probe._without_pixels():
        other = threading.Thread(target=work)
        other.start()
        other.join()
    work()
    for output in outputs[1:]:
        for name, expected in outputs[0].items():
            assert not isinstance(output[name], ShapeOnlyArray), name
            assert np.array_equal(output[name], expected), name


def test_a_processor_that_reads_pixels_gets_pixels() -> None:
    """A processor that crops black margins cannot run on shape-only images."""
    original = changed()
    own = type(original.image_processor)

    def resize(self: Any, image: Any, **more: Any) -> Any:
        return own.resize(self, image[:, :, :10] if image.max() > 300 else image, **more)

    original.image_processor.__class__ = type(own.__name__, (own,), {"resize": resize})
    processor = Processor(original)
    assert not processor.uses_shape_only
    assert processor.expand("<image>", [(70, 50)]).text == known("llava").expand(
        "<image>", [(70, 50)]
    ).text  # fmt: skip


def test_one_wrong_shape_only_expansion_disables_them(monkeypatch: pytest.MonkeyPatch) -> None:
    correct, key = Probe.shape_only, known("qwen2_vl").key

    def wrong(self: Probe, row: Any) -> Any:
        return correct(self, PROBE_ROWS[0] * 2 if row == PROBE_ROWS[-1] else row)

    monkeypatch.setattr(Probe, "shape_only", wrong)
    processor = Processor(raw("qwen2_vl"))
    assert not processor.uses_shape_only
    assert processor.key == key


def test_disable_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops shape-only expansions from the cache and computes no more of them."""
    processor = Processor(raw("qwen2_vl"))
    size = [(123, 77)]
    expected = processor.expand(processor.image_token, size).text
    other = processor.expansion_for([(300, 300)])
    wrong = Probe.shape_only(processor._probe, ((300, 300),))
    monkeypatch.setattr(processor._probe, "shape_only", lambda row: wrong)
    processor._expansions.clear()
    assert processor.expansion_for(size) == other
    processor.disable_fast_path()
    assert processor.expand(processor.image_token, size).text == expected
    assert not processor.uses_shape_only


def test_expansions_may_depend_on_other_images() -> None:
    """A processor may treat the images of a row with several images differently."""
    original = processors.make("llava")
    own = type(original).replace_image_token

    def replace(image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        text = own(original, image_inputs, image_idx, **kwargs)
        return text if len(image_inputs["pixel_values"]) == 1 else f"[{text}]"

    original.replace_image_token = replace
    processor = Processor(original)
    alone = processor.expand("<image>", [(40, 40)]).text
    assert processor.expand("<image><image>", [(40, 40)] * 2).text == f"[{alone}][{alone}]"
    assert processor.expand("<image>", [(40, 40)]).text == alone


def test_memory_of_expansions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_module, "MAX_CACHED_BYTES", 20_000)
    processor = Processor(raw("llava"))
    weights = [processor.expansion_for([(side, 30)]).expansion.weight for side in range(20, 40)]
    assert sum(weights) > 20_000 >= processor._expansions.bytes > 0


# The cache on disk


def test_expansions_are_cached_and_damaged_files_are_replaced(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = changed(do_convert_rgb=False)  # it cannot run without pixels
    first = Processor(original, cache_dir=own_cache)
    key, expanded = first.key, first.expand("<image>", [(70, 50)])

    def run(*args: Any) -> None:
        raise AssertionError("ran again")

    with monkeypatch.context() as patch:
        patch.setattr(Probe, "with_blanks", run)
        second = Processor(original, cache_dir=own_cache)
        assert (second.key, second.expand("<image>", [(70, 50)])) == (key, expanded)
        with pytest.raises(AssertionError, match="ran again"):
            second.expand("<image>", [(71, 50)])
        with pytest.raises(AssertionError, match="ran again"):
            Processor(original).key  # noqa: B018
    for path in (own_cache / "processors").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    third = Processor(original, cache_dir=own_cache)
    assert (third.key, third.expand("<image>", [(70, 50)])) == (key, expanded)


# Identity


def settings() -> dict[str, Processor]:
    tokens = processors.make("llava")
    tokens.num_additional_image_tokens = 2
    strategy = processors.make("llava")
    strategy.vision_feature_select_strategy = "full"
    return {
        "size": Processor(changed(size={"shortest_edge": 224})),
        "crop": Processor(changed(crop_size={"height": 224, "width": 224})),
        "mean": Processor(changed(image_mean=(0.5, 0.5, 0.5))),
        "resample": Processor(changed(resample=2)),
        "no crop": Processor(changed(do_center_crop=False)),
        "tokens": Processor(tokens),
        "strategy": Processor(strategy),
        "options": Processor(processors.make("llava"), {"do_rescale": False}),
        "class": known("llava_next"),
        "plain": known("llava"),
    }


def test_one_changed_setting_changes_the_key() -> None:
    keys = {name: processor.key for name, processor in settings().items()}
    assert len(set(keys.values())) == len(keys), keys


def test_the_key_ignores_template_and_paths(tmp_path: Path) -> None:
    plain = known("llava").key
    other = processors.make("llava", template=None)
    other.image_processor._name_or_path = str(tmp_path)
    assert Processor(copy.copy(other)).key == plain
    assert Processor(other, {}).key == plain


def test_expansions_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors with equal settings that behave differently have different keys."""
    original = processors.make("llava")
    own = type(original).replace_image_token
    original.replace_image_token = lambda *args, **kwargs: own(original, *args, **kwargs) + "x"
    assert Processor(original).key != known("llava").key


# Errors


def test_unusable_processors(tmp_path: Path) -> None:
    tokenizer = raw("llava").tokenizer
    with pytest.raises(UsageError, match="must have an image processor"):
        Processor.load(tokenizer)
    with pytest.raises(UsageError, match="cannot load the processor"):
        Processor.load(tmp_path)
    nameless = processors.make("llava")
    nameless.image_token = None
    with pytest.raises(UsageError, match="image_token"):
        Processor(nameless)
    with pytest.raises(UsageError, match="must be JSON"):
        Processor(changed(size=object()))
    with pytest.raises(UsageError, match="options"):
        Processor(raw("llava"), {"size": object()})


@pytest.mark.parametrize("texts", [[[1, 2, 3]], ["no marks"], ["{} more"], ["before {}"]], ids=str)
def test_a_processor_that_changes_other_text_is_not_supported(texts: list[Any]) -> None:
    original = processors.make("llava")

    def replaced(text: list[str], *args: Any, **kwargs: Any) -> Any:
        return [one.format(text[0]) if isinstance(one, str) else one for one in texts], []

    original.get_text_with_replacements = replaced
    with pytest.raises(UsageError, match="must replace image tokens in the text"):
        Processor(original).expand("<image>", [(9, 9)])


def test_a_processor_that_rejects_every_size_is_refused() -> None:
    with pytest.raises(UsageError, match="rejects images of every size"):
        Processor(changed(size={"shortest_edge": -1})).key  # noqa: B018
