"""How a processor is asked: what it may depend on, whom it is believed, and what names it."""

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
from tokenmill.media import processor as room
from tokenmill.media.asking import BATTERY, Asking
from tokenmill.media.hollow import Hollow, PixelsWanted


def changed(name: str = "llava", **members: Any) -> Any:
    """A processor of its own, with other methods or attributes in its image processor."""
    made = processors.make(name)
    for member, value in members.items():
        setattr(made.image_processor, member, value)
    return made


# Hollow arrays


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
def test_hollow_arrays_have_the_shapes_of_real_ones(operation: Any) -> None:
    rng = random.Random(3)
    for _ in range(20):
        shape = shapes(rng)
        for dtype in (np.uint8, np.float32):
            real, hollow = operation(np.ones(shape, dtype)), operation(Hollow(shape, dtype))
            assert isinstance(hollow, Hollow)
            assert (hollow.shape, hollow.dtype) == (real.shape, real.dtype)


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
def test_nobody_looks_at_a_hollow_array(look: Any) -> None:
    with pytest.raises(PixelsWanted):
        look(Hollow((3, 4, 5), np.uint8))


def test_other_threads_notice_nothing() -> None:
    """While one thread asks without pixels, another's processor works with pixels as ever."""
    from PIL import Image

    made = raw("idefics3")  # which makes room for pixels and masks by np.zeros
    asking = Asking(made, made.image_token, {})
    picture = Image.radial_gradient("L").convert("RGB")
    found = []

    def work() -> None:
        size = {"longest_edge": 728}  # fewer tiles than by default
        found.append(made.image_processor([[picture]], size=size, return_tensors="np"))

    work()
    with asking._without_pixels():
        other = threading.Thread(target=work)
        other.start()
        other.join()
    work()
    for made_then in found[1:]:
        for name, expected in found[0].items():
            assert not isinstance(made_then[name], Hollow), name
            assert np.array_equal(made_then[name], expected), name


def test_one_that_looks_at_pixels_is_asked_with_pixels() -> None:
    """A processor that crops black margins: hollow pictures give it no answer."""
    made = changed()
    own = type(made.image_processor)

    def resize(self: Any, image: Any, **more: Any) -> Any:
        return own.resize(self, image[:, :, :10] if image.max() > 300 else image, **more)

    made.image_processor.__class__ = type(own.__name__, (own,), {"resize": resize})
    processor = Processor(made)
    assert not processor.asks_hollow
    assert processor.expand("<image>", [(70, 50)]).text == known("llava").expand(
        "<image>", [(70, 50)]
    ).text  # fmt: skip


def test_one_whose_hollow_answers_differ_is_asked_with_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lie in one answer of the battery is enough."""
    truth, key = Asking.hollow, known("qwen2_vl").key

    def lying(self: Asking, row: Any) -> Any:
        answers = truth(self, row)
        if row == BATTERY[-1]:
            return truth(self, BATTERY[0] * 2)
        return answers

    monkeypatch.setattr(Asking, "hollow", lying)
    processor = Processor(raw("qwen2_vl"))
    assert not processor.asks_hollow
    assert processor.key == key


def test_distrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hollow pictures taught is forgotten, and they are not asked again."""
    processor = Processor(raw("qwen2_vl"))
    size = [(123, 77)]
    truth = processor.expand(processor.image_token, size).text
    other = processor.learned([(300, 300)])
    lie = Asking.hollow(processor._asking, ((300, 300),))
    monkeypatch.setattr(processor._asking, "hollow", lambda row: lie)
    processor._known.clear()
    assert processor.learned(size) == other  # the lie
    processor.distrust()
    assert processor.expand(processor.image_token, size).text == truth
    assert not processor.asks_hollow


def test_answers_may_depend_on_neighbours() -> None:
    """A processor that treats a picture differently where it is not alone."""
    made = processors.make("llava")
    own = type(made).replace_image_token

    def replace(image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        text = own(made, image_inputs, image_idx, **kwargs)
        return text if len(image_inputs["pixel_values"]) == 1 else f"[{text}]"

    made.replace_image_token = replace
    processor = Processor(made)
    alone = processor.expand("<image>", [(40, 40)]).text
    assert processor.expand("<image><image>", [(40, 40)] * 2).text == f"[{alone}][{alone}]"
    assert processor.expand("<image>", [(40, 40)]).text == alone


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_REMEMBERED", 20_000)
    processor = Processor(raw("llava"))
    weights = [processor.learned([(side, 30)]).answers.weight for side in range(20, 40)]
    assert sum(weights) > 20_000 >= processor._known.bytes > 0


# What others learned


def test_answers_are_kept_in_the_cache_and_damage_only_costs_time(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = changed(do_convert_rgb=False)  # not to be asked without pixels
    first = Processor(made, cache_dir=own_cache)
    key, expanded = first.key, first.expand("<image>", [(70, 50)])

    def asked(*args: Any) -> None:
        raise AssertionError("asked again")

    with monkeypatch.context() as patch:
        patch.setattr(Asking, "with_blanks", asked)
        second = Processor(made, cache_dir=own_cache)
        assert (second.key, second.expand("<image>", [(70, 50)])) == (key, expanded)
        with pytest.raises(AssertionError, match="asked again"):
            second.expand("<image>", [(71, 50)])
        with pytest.raises(AssertionError, match="asked again"):
            Processor(made).key  # noqa: B018
    for path in (own_cache / "processors").rglob("*"):
        if path.is_file():
            path.chmod(0o644)
            path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    third = Processor(made, cache_dir=own_cache)
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


def test_the_key_is_the_same_everywhere(tmp_path: Path) -> None:
    """Another object, another tokenizer, a template, a path in its configuration: no difference."""
    plain = known("llava").key
    other = processors.make("llava", template=None)
    other.image_processor._name_or_path = str(tmp_path)
    assert Processor(copy.copy(other)).key == plain
    assert Processor(other, {}).key == plain


def test_answers_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only what it does differs, not what it says of itself."""
    made = processors.make("llava")
    own = type(made).replace_image_token
    made.replace_image_token = lambda *args, **kwargs: own(made, *args, **kwargs) + "<image>"
    assert Processor(made).key != known("llava").key


# Refused


def test_what_is_no_processor_of_pictures(tmp_path: Path) -> None:
    tokenizer = raw("llava").tokenizer
    with pytest.raises(UsageError, match="takes no pictures"):
        Processor.load(tokenizer)
    with pytest.raises(UsageError, match="cannot be loaded"):
        Processor.load(tmp_path)
    nameless = processors.make("llava")
    nameless.image_token = None
    with pytest.raises(UsageError, match="image_token"):
        Processor(nameless)
    with pytest.raises(UsageError, match="cannot be written down"):
        Processor(changed(size=object()))
    with pytest.raises(UsageError, match="options"):
        Processor(raw("llava"), {"size": object()})


@pytest.mark.parametrize("handed", [[[1, 2, 3]], ["no marks"], ["{} more"], ["before {}"]], ids=str)
def test_one_that_works_otherwise_is_refused(handed: list[Any]) -> None:
    """By ids, or with other words around its pictures: nobody knows what it would give."""
    made = processors.make("llava")

    def replaced(text: list[str], *args: Any, **kwargs: Any) -> Any:
        return [one.format(text[0]) if isinstance(one, str) else one for one in handed], []

    made.get_text_with_replacements = replaced
    with pytest.raises(UsageError, match="cannot be known without running it"):
        Processor(made).expand("<image>", [(9, 9)])


def test_one_that_refuses_everything_is_refused() -> None:
    with pytest.raises(UsageError, match="refuses pictures of every size"):
        Processor(changed(size={"shortest_edge": -1})).key  # noqa: B018
