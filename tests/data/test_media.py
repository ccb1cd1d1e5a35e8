"""Images in batches, against the processor of transformers called on the rows of the batch."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import pkgutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import tokenmill as tm
from tests.build.image_rows import Album, asked, part, text
from tests.build.making import write_rows
from tests.build.test_weights import HOSTS
from tests.media import processors
from tokenmill.build import processor as work_processor
from tokenmill.build.calls import run_recipe
from tokenmill.data.batch_media import PlacedMedia
from tokenmill.data.cursor import Cursor
from tokenmill.data.images import StoredImages
from tokenmill.errors import SourceChanged, SourceMissing, UsageError
from tokenmill.store import Store, sidecars

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.usefixtures("answered"),
]

IMAGES = ((0,), (1, 2), (), (3,), (2,), (0, 0, 3), (1,), (), (3, 2), (0,), (2, 1), (3,))

FAST = ("qwen2_vl", "llava", "llava_next", "pixtral", "idefics3")
FAMILIES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.soak)
    for name in processors.FAMILIES
]
BY_ROW = ("idefics3",)  # pixels have one line for every row, with images or without
UNKNOWN = ("idefics3",)  # no token types

LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"batch_size": 4},
    "padded left": {"batch_size": 3, "padding_side": "left", "pad_to_multiple_of": 8},
    "packs": {"batch_size": 1, "pack": {}},
    "slabs": {"batch_size": 6, "micro_batches": {"align": tm.Align(sequence=4)}},
    "micro padded": {"batch_size": 6, "micro_batches": {"layout": "padded"}},
    "packs in slabs": {"batch_size": 2, "pack": {}, "micro_batches": {}},
}


class ImageStores:
    def __init__(self, directory: Path, family: str, **more: Any) -> None:
        self.family = family
        self.raw = processors.make(family)
        if family == "idefics3":  # fewer tiles, for time
            self.raw.image_processor.size = {"longest_edge": 728}
        self.album = Album(directory)
        self.conversations = [
            asked(
                [*[{"type": "image"}, text(" and ")] * len(numbers), text(f"What is {row}?")],
                answer="A cat. " * (1 + row % 3),
            )
            for row, numbers in enumerate(IMAGES)
        ]
        rows = []
        for numbers, (question, answer) in zip(IMAGES, self.conversations, strict=True):
            parts = iter([part(self.album.name(number)) for number in numbers])
            content = [
                next(parts) if one["type"] == "image" else one for one in question["content"]
            ]
            rows.append({"messages": [{**question, "content": content}, answer]})
        self.source = write_rows(directory / "rows.jsonl", rows)
        self.store = prepare(self.source, self.raw, **{"cache_dir": directory / "cache", **more})
        assert len(self.store) == len(IMAGES)

    @property
    def longest(self) -> int:
        return int(self.store.lengths.max())

    def wishes(self, layout: str) -> dict[str, Any]:
        capacity_left = self.longest * 2 // 8 * 8
        kinds = {"pack": tm.Pack, "micro_batches": tm.MicroBatches}
        return {
            name: kinds[name](capacity_left, **value) if name in kinds else value
            for name, value in LAYOUTS[layout].items()
        }

    def loader(self, data: Any = None, **more: Any) -> tm.Loader:
        given = {"media": "pixels", "seed": 5, "pad_token_id": 0} | more
        return tm.Loader(self.store if data is None else data, **given)

    def oracle(self, rows: list[int]) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
        """Ids, token types and features that transformers' processor gives for rows."""
        shown = [row for row in rows if IMAGES[row] or self.family in BY_ROW]
        found: dict[str, Any] = {}
        types: dict[int, list[int]] = {}
        ids: dict[int, list[int]] = {}
        plain = [row for row in rows if row not in shown or not any(IMAGES[one] for one in shown)]
        for group in (plain, [row for row in shown if row not in plain]):
            if not group:
                continue
            chats = [self.conversations[row] for row in group]
            images = [[self.album.open(number) for number in IMAGES[row]] for row in group]
            made = self.raw(
                text=[self.raw.apply_chat_template(chat, tokenize=False) for chat in chats],
                images=images if any(images) else None,
                text_kwargs={"add_special_tokens": False, "return_tensors": None,
                             "return_mm_token_type_ids": True},
                images_kwargs={"return_tensors": "pt"},
            )  # fmt: skip
            kinds = made.get("mm_token_type_ids", made.get("token_type_ids"))
            for place, row in enumerate(group):
                ids[row], types[row] = list(made["input_ids"][place]), list(kinds[place])
            texty = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
            found |= {name: value for name, value in made.items() if name not in texty}
        return [ids[row] for row in rows], [types[row] for row in rows], found


def prepare(source: Path, raw: Any, **more: Any) -> Store:
    given = {"executor": "inline", "progress": False, "raise_for_rejections": False}
    return run_recipe(str(source), processor=raw, **(given | more)).store


MADE: dict[str, ImageStores] = {}


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageStores:
    family = getattr(request, "param", "qwen2_vl")
    if family not in MADE:
        MADE[family] = ImageStores(tmp_path_factory.mktemp(family), family)
    return MADE[family]


def flat(loader: Any) -> Iterator[dict[str, Any]]:
    for step in loader:
        yield from step if isinstance(step, list) else [step]


def stretches(batch: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Line, start and stop of every row in a batch, by its masks alone."""
    if "seq_idx" in batch:
        masks = [(line, names == n) for line, names in enumerate(batch["seq_idx"])
                 for n in range(int(names.max()) + 1)]  # fmt: skip
    else:
        masks = [(line, mask == 1) for line, mask in enumerate(batch["attention_mask"])]
    places = [(line, np.flatnonzero(mask)) for line, mask in masks if mask.any()]
    return [(line, int(found[0]), int(found[-1]) + 1) for line, found in places]


def require_same(found: Any, expected: Any) -> None:
    wanted = expected.float() if expected.dtype.is_floating_point else expected
    assert found.shape == tuple(wanted.shape)
    assert np.array_equal(np.asarray(found), wanted.numpy())


def require_right(made: ImageStores, batch: dict[str, Any], *, pixels: bool = True) -> None:
    rows = batch["indices"].tolist()
    ids, types, features = made.oracle(rows)
    lies = stretches(batch)
    assert len(lies) == len(rows)
    expected = []
    kinds = np.zeros_like(batch["input_ids"])
    for row, (line, start, stop), own, kind in zip(rows, lies, ids, types, strict=True):
        assert batch["input_ids"][line, start:stop].tolist() == own
        kinds[line, start:stop] = kind
        for number, one in enumerate(made.store[row].media):
            expected.append(PlacedMedia(one, row, number, line, start + one.start))
    assert batch["media"] == expected
    for one in batch["media"]:
        assert batch["labels"][one.line, one.start : one.start + one.media.count].max() == -100
    names = {name for name in batch if name.startswith(("pixel", "image"))}
    if not pixels:
        assert "mm_token_type_ids" not in batch
        assert not names
        return
    if made.family in UNKNOWN:
        assert "mm_token_type_ids" not in batch
    else:
        assert np.array_equal(batch["mm_token_type_ids"], kinds)
        assert batch["mm_token_type_ids"].any() == bool(expected)
    if made.family == "gemma3":
        assert np.array_equal(batch["token_type_ids"], kinds)
    if "seq_idx" in batch and made.family in BY_ROW:
        _, _, features = made.oracle([row for row in rows if IMAGES[row]])
    wanted = features if expected else {}
    assert names | (set(wanted) & set(batch)) == set(wanted)
    for name, value in wanted.items():
        require_same(batch[name], value)


@pytest.mark.parametrize("made", FAMILIES, indirect=True)
@pytest.mark.parametrize("layout", ["padded", pytest.param("packs", marks=pytest.mark.soak)])
def test_pixels_are_the_processors_own(made: ImageStores, layout: str) -> None:
    seen: set[int] = set()
    for batch in flat(made.loader(made.store[:6], indices=True, **made.wishes(layout))):
        require_right(made, batch)
        seen |= set(batch["indices"].tolist())
    assert seen == set(range(6))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(made: ImageStores, layout: str) -> None:
    for media in ("pixels", "references"):
        loader = made.loader(media=media, indices=True, **made.wishes(layout))
        seen: set[int] = set()
        for batch in flat(loader):
            require_right(made, batch, pixels=media == "pixels")
            seen |= set(batch["indices"].tolist())
        assert seen == set(range(len(IMAGES)))


# Same batches, whoever serves them


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and one and isinstance(one[0], dict):
        return len(one) == len(other) and all(map(equal, one, other))
    return one.keys() == other.keys() and all(
        np.array_equal(np.asarray(one[name]), np.asarray(other[name]))
        if hasattr(one[name], "shape")
        else one[name] == other[name]
        for name in one
    )


@pytest.mark.parametrize("layout", ["packs", "slabs"])
def test_prefetch_workers_and_resume(made: ImageStores, layout: str) -> None:
    pytest.importorskip("torch")
    wishes = made.wishes(layout)
    plain = list(made.loader(**wishes))
    assert all(map(equal, plain, made.loader(prefetch=3, **wishes)))
    again = made.loader(**wishes)
    next(iter(again))
    state = again.state_dict()
    resumed = made.loader(prefetch=1, **wishes)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == len(plain) - 1
    assert all(map(equal, plain[1:], rest))
    tensors = list(
        made.store.torch(num_workers=2, media="pixels", seed=5, pad_token_id=0, **wishes)
    )
    assert len(tensors) == len(plain)
    assert all(map(equal, plain, tensors))
    first = tensors[0][0] if isinstance(tensors[0], list) else tensors[0]
    assert type(first["pixel_values"]).__name__ == type(first["input_ids"]).__name__ == "Tensor"


def test_state_does_not_depend_on_media(made: ImageStores) -> None:
    """What is served beside the tokens is part of no state; a pack's second budget is."""
    states = [made.loader(media=media).state_dict() for media in ("pixels", "references")]
    assert states[0] == states[1]
    pack = tm.Pack(made.longest)
    budgets = [tm.MicroBatches(made.longest, max_patches=most) for most in (10_000, None)]
    bounded, free = (
        made.loader(media="references", pack=pack, micro_batches=budget) for budget in budgets
    )
    with pytest.raises(tm.errors.StateError, match="packing"):
        bounded.load_state_dict(free.state_dict())
    assert "max_patches" not in free.state_dict()["packing"]


@pytest.mark.parametrize("made", ["qwen2_vl", "llava_next"], indirect=True)
def test_copied_store_contains_processor_and_images(
    made: ImageStores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tm.push(made.store, tmp_path / "copy", embed_media=True)
    monkeypatch.setattr(work_processor, "_given", {})
    alone = tm.open_store(tmp_path / "copy", media_root=tmp_path)
    filler = made.loader(alone, batch_size=4, indices=True).filler
    assert len(pickle.dumps(filler)) < 16 << 10
    step = next(made.loader(batch_size=4).steps(Cursor(), 1))[0]
    for one in (filler, pickle.loads(pickle.dumps(filler))):
        batch = one.fill(step)
        batch["media"] = [
            replace(placed, media=made.store[placed.row].media[placed.number])
            for placed in batch["media"]  # the same digests in another store
            if placed.media.digest == made.store[placed.row].media[placed.number].digest
        ]
        require_right(made, batch)


@pytest.mark.parametrize("layout", ["padded", "packs", "micro padded"])
def test_a_rank_opens_the_images_of_its_rows(
    made: ImageStores, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each once per batch."""
    opened: list[str] = []
    read = StoredImages.read

    def watched(self: StoredImages, media: Any) -> bytes:
        opened.append(media.digest)
        return read(self, media)

    monkeypatch.setattr(StoredImages, "read", watched)
    for rank in range(2):
        for step in made.loader(rank=rank, world_size=2, indices=True, **made.wishes(layout)):
            batches = step if isinstance(step, list) else [step]
            per_batch = [{one.media.digest for one in batch["media"]} for batch in batches]
            assert Counter(opened) == Counter(itertools.chain(*per_batch))
            for batch in batches:
                require_right(made, batch)
            opened.clear()
    list(made.loader(media="references"))
    assert not opened


# What is refused


@pytest.fixture
def own(tmp_path: Path) -> ImageStores:
    """A store whose images a test may change."""
    return ImageStores(tmp_path, "llava", cache_dir=tmp_path / "cache")


def test_changed_or_missing_image_is_reported(own: ImageStores) -> None:
    """Before anything of its batch is served; batches without it are."""
    loader = own.loader(batch_size=1, shuffle=False)
    batches = iter(loader)
    next(batches)
    own.album.draw(2, (200, 310), seed=1)
    with pytest.raises(SourceChanged, match=r"images/2\.png .*expected") as caught:
        next(batches)
    assert str(caught.value.path) == str(own.source)
    assert caught.value.row == 1
    assert loader.state_dict()["position"] == 1
    own.album.path(2).unlink()
    with pytest.raises(SourceMissing, match=r"images/2\.png"):
        next(iter(loader))
    own.album.draw(2, (200, 310))
    references = [one.media.reference for one in next(iter(loader))["media"]]
    assert references == ["images/1.png", "images/2.png"]


def test_loader_without_media_warns(made: ImageStores) -> None:
    with pytest.warns(UserWarning, match="have images, but batches will contain only their tokens"):
        loader = tm.Loader(made.store, batch_size=2, pad_token_id=0)
    assert {"media", "pixel_values", "mm_token_type_ids"}.isdisjoint(next(iter(loader)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text_alone = made.store.filter("images == 0")
        assert len(text_alone) == IMAGES.count(())
        made.loader(media="references")


def test_invalid_media_arguments_are_rejected(made: ImageStores) -> None:
    shards = {"micro_batches": tm.MicroBatches(4096, context_parallel=2), "world_size": 2}
    for wish, message in (
        ({"media": "pixel"}, "media must be one of references, pixels, got 'pixel'"),
        ({"media": "references", "processor": made.raw}, "requires media='pixels'"),
        (shards, "context_parallel would split"),
    ):
        with pytest.raises(UsageError, match=message):
            made.loader(**wish)


@pytest.mark.parametrize("oversize", ["truncate", "split"])
def test_rows_with_images_are_not_truncated(made: ImageStores, oversize: str) -> None:
    row = int(np.argmax(made.store.lengths * (made.store.images > 0)))
    with pytest.raises(UsageError, match=f"row {row} has images and {made.longest} tokens"):
        made.loader(pack=tm.Pack(made.longest - 1, oversize=oversize))
    fits = made.loader(pack=tm.Pack(made.longest, oversize=oversize), indices=True, batch_size=1)
    for batch in fits:
        require_right(made, batch)
    # Others are: a row of text is cut as ever.
    plain = made.store.filter("images == 0")
    assert list(made.loader(plain, pack=tm.Pack(8, oversize=oversize)))


def test_another_processor_is_refused(made: ImageStores, tmp_path: Path) -> None:
    same = made.loader(processor=made.raw, batch_size=2, indices=True)
    require_right(made, next(iter(same)))
    with pytest.raises(UsageError, match=r"another processor \(configuration and answers differ"):
        made.loader(processor=_smaller())
    other = prepare(made.source, _smaller(), cache_dir=tmp_path)
    with pytest.raises(UsageError, match="prepared with different processors"):
        made.loader(tm.concat([made.store, other]))
    both = made.loader(tm.concat([made.store, other]), media="references", batch_size=24)
    assert len(next(iter(both))["media"]) == 2 * sum(map(len, IMAGES))


def _smaller() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    small = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
    other = processors.make("qwen2_vl")
    other.image_processor = Qwen2VLImageProcessorPil(size=small)
    return other


# The second budget


def test_row_over_the_budget_of_patches_is_refused(made: ImageStores) -> None:
    patches = made.store.patches
    row = int(patches.argmax())
    with pytest.raises(UsageError, match=rf"row {row} has {patches[row]} patches.*<= 9'"):
        made.loader(micro_batches=tm.MicroBatches(made.longest, max_patches=9))
    assert len(made.store.filter("patches <= 9")) == int((patches <= 9).sum())


@pytest.mark.parametrize("layout", ["slabs", "micro padded", "packs in slabs"])
def test_packs_and_micro_batches_keep_both_budgets(made: ImageStores, layout: str) -> None:
    many = made.store.select(list(range(len(IMAGES))) * 5)
    patches = made.store.patches.astype(np.int64)
    wishes = made.wishes(layout)
    most = int(patches.max()) * 5 // 4
    bounded = dataclasses.replace(wishes["micro_batches"], max_patches=most)
    for budget, kept in ((wishes["micro_batches"], False), (bounded, True)):
        given = {**wishes, "micro_batches": budget}
        found = list(flat(made.loader(many, media="references", indices=True, **given)))
        rows = [batch["indices"] for batch in found]
        assert all(patches[own % len(IMAGES)].sum() <= most for own in rows) == kept
        assert all(batch["input_ids"].size <= made.longest * 2 for batch in found)
        assert sorted(np.concatenate(rows).tolist()) == [*range(len(many))]


# Groups


def with_generation_prompt(
    album: Album, answers: Callable[[int], dict[str, Any]]
) -> list[dict[str, Any]]:
    return [
        {
            "images": [album.name(number)],
            "prompt": asked(f"<image>What is {number}?")[:1],
            **answers(number),
        }
        for number in range(4)
    ]


def test_sides_of_pairs_have_their_own_pixels(tmp_path: Path) -> None:
    album = Album(tmp_path)
    raw = processors.make("qwen2_vl")
    rows = with_generation_prompt(
        album, lambda _: {"chosen": "A cat.", "rejected": "No idea at all."}
    )
    store = prepare(write_rows(tmp_path / "pairs.jsonl", rows), raw)
    batch = next(
        iter(tm.Loader(store, batch_size=4, shuffle=False, media="pixels", pad_token_id=0))
    )
    images = [[album.open(number)] for number in range(4)]
    made = raw(text=[raw.image_token] * 4, images=images, images_kwargs={"return_tensors": "pt"})
    for side in ("chosen", "rejected"):
        require_same(batch[f"{side}_pixel_values"], made["pixel_values"])
        require_same(batch[f"{side}_image_grid_thw"], made["image_grid_thw"])
        assert [one.line for one in batch[f"{side}_media"]] == [0, 1, 2, 3]
        ids = batch[f"{side}_input_ids"]
        counts = (batch[f"{side}_mm_token_type_ids"] == 1).sum(axis=1)
        assert counts.tolist() == (ids == raw.image_token_id).sum(axis=1).tolist()
    assert "pixel_values" not in batch
    assert "indices" not in batch
    mixed = tm.Loader(store, batch_size=4, pad_token_id=0, media="pixels", layout="interleaved")
    assert len(next(iter(mixed))["image_grid_thw"]) == 8


def test_kto_rows_have_references_only(tmp_path: Path) -> None:
    def answers(number: int) -> dict[str, Any]:
        return {"completion": asked("", answer=f"A cat {number}.")[1:], "label": number % 2 == 0}

    rows = with_generation_prompt(Album(tmp_path), answers)
    source = write_rows(tmp_path / "kto.jsonl", rows)
    store = prepare(source, processors.make("llava"), format="kto")
    with pytest.raises(UsageError, match="does not support KTO rows"):
        tm.Loader(store, media="pixels", pad_token_id=0)
    batch = next(iter(tm.Loader(store, batch_size=4, media="references", pad_token_id=0)))
    assert [one.line for one in batch["media"]] == [0, 1, 2, 3]


def test_sidecar_named_like_pixels_is_rejected(
    own: ImageStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in next(iter(own.loader(batch_size=2))):
        with pytest.raises(UsageError, match=f"'{name}' is reserved"):
            own.store.attach_writer(name, producer="t")
    monkeypatch.setattr(sidecars, "RESERVED", frozenset())  # as for a name of another model
    own.store.attach("pixel_values", np.zeros(len(own.store)), producer="t")
    with pytest.raises(UsageError, match="'pixel_values'"):
        next(iter(own.loader(batch_size=2)))
    assert next(iter(own.loader(batch_size=2, sidecars=())))["pixel_values"].ndim == 4


WITH_IMAGES = ("TRL", "verl", "SkyRL")  # they serve images, or say what is missing for it


@pytest.mark.parametrize("name", [name for name in HOSTS if name not in WITH_IMAGES])
def test_readers_without_image_support_are_rejected(made: ImageStores, name: str) -> None:
    for library in ("torch", "datasets"):
        pytest.importorskip(library)
    reader, arguments = HOSTS[name]
    with pytest.raises(UsageError, match=f"this data has images, which {name} does not support"):
        pkgutil.resolve_name(f"tokenmill.integrations.{reader}")(*arguments(made.store))
