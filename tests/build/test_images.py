"""Rows with images: the ids are the processor's own, or the row is rejected and says why."""

from __future__ import annotations

import functools
import io
import json
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import tokenmill as tm
from tests.build.image_rows import Album, asked, cases, oracle, part, text
from tests.build.making import INLINE, files_of, small_cuts, write_rows
from tests.media import processors
from tests.media.drawing import unusual
from tokenmill._core.fingerprint import checksum
from tokenmill.build import expansion, slices
from tokenmill.build.calls import run_recipe
from tokenmill.build.expansion import Folding, unfolded
from tokenmill.errors import CorruptionError, SourceChanged, SourceMissing, UsageError
from tokenmill.media import ImageExpansion, Processor, RowExpansion
from tokenmill.sources.bytefile import Signature
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("answered")

made = functools.cache(processors.make)


@pytest.fixture
def album(tmp_path: Path) -> Album:
    return Album(tmp_path / "data")


def prepare(source: Any, processor: Any = None, **more: Any) -> Any:
    given = {"executor": "inline", "progress": False, "raise_for_rejections": False}
    source = str(source) if isinstance(source, Path) else source
    return run_recipe(source, processor=processor or made("qwen2_vl"), **(given | more))


FAST = ("qwen2_vl", "gemma3")
OTHERS = [pytest.param(name, marks=pytest.mark.soak) for name in processors.FAMILIES]


@pytest.mark.parametrize("name", [*FAST, *(one for one in OTHERS if one.values[0] not in FAST)])
def test_ids_of_every_form_are_the_processors(album: Album, name: str) -> None:
    processor = made(name)
    found = cases(album)
    if processor.image_token == "<image>":
        del found["no image"]  # a text may not hold it
    source = write_rows(album.directory / "a.jsonl", [row for row, _, _ in found.values()])
    store = prepare(source, processor).store
    assert store.rejected == {}
    image_ids = set(Processor(processor).media_token_ids)
    rows = iter(store)
    for case, (_, conversations, images) in found.items():
        for messages in conversations:
            row = next(rows)
            wanted = oracle(processor, messages, [album.open(number) for number in images])
            assert row.input_ids.tolist() == wanted, case
            assert [(one.width, one.height) for one in row.media] == [
                album.open(number).size for number in images
            ]
            assert [one.digest for one in row.media] == [
                checksum(album.path(number).read_bytes()) for number in images
            ]
            covered = np.zeros(len(row), bool)
            for one in row.media:
                covered[one.start : one.start + one.count] = True
            assert not row.loss_mask[covered].any()
            assert covered[np.isin(row.input_ids, list(image_ids))].all()
            trained = processor.tokenizer.decode(row.input_ids[row.loss_mask > 0])
            ends = [message["content"] + "<|im_end|>" for message in messages[1::2]]
            assert trained == "".join(ends), case
    assert next(rows, None) is None
    assert store.proof["audited_rows"]["expansion"] >= 1
    assert store.proof["audit_mismatches"]["expansion"] == 0


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])  # the latter writes lines around it
def test_media_of_an_answer_is_not_trained(album: Album, name: str) -> None:
    messages = asked("Draw.", answer=[text("Here: "), part(album.name(0)), text(" Done.")])
    source = write_rows(album.directory / "a.jsonl", [{"messages": messages}])
    processor = made(name)
    row = prepare(source, processor).store[0]
    trained = processor.tokenizer.decode(row.input_ids[row.loss_mask > 0])
    assert trained == "Here:  Done.<|im_end|>"


def test_expand_turns_gives_each_row_the_images_before_it(album: Album) -> None:
    source = write_rows(album.directory / "a.jsonl", [cases(album)["two turns"][0]])
    store = prepare(source, expand="turns").store
    names = [[one.reference for one in row.media] for row in store]
    assert names == [[album.name(0)], [album.name(0), album.name(3)]]


def video(value: Any) -> dict[str, Any]:
    return {"type": "video", "video": value}


REJECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "more images": ({"images": ["images/0.png", "images/1.png"], "messages": asked("<image>")},
                      "media_mismatch", "2 images in 'images', and 1 placeholders"),
    "fewer images": ({"images": ["images/0.png"], "messages": asked("<image><image>")},
                       "media_mismatch", "1 images in 'images', and 2 placeholders"),
    "bare without a column": ({"messages": asked([{"type": "image"}])},
                              "media_mismatch", "no image"),
    "no place": ({"images": ["images/0.png"], "messages": asked("Hello")},
                 "media_mismatch", "0 placeholders"),
    "own token": ({"messages": asked("say <|image_pad|>")}, "media_mismatch", "<|image_pad|>"),
    "own token beside an image": (
        {"images": ["images/0.png"], "messages": asked("<image> say <|image_pad|>")},
        "media_mismatch", "<|image_pad|>"),
    "missing": ({"messages": asked([part("images/none.png")])}, "bad_media", "images/none.png"),
    "a pair": ({"images": ["images/none.png"], "prompt": asked("<image>")[:1], "chosen": "a",
                "rejected": "b"}, "bad_media", "images/none.png"),
    "outside": ({"messages": asked([part("../out.png")])}, "bad_media", "out.png"),
    "no image at all": ({"messages": asked([part("a.jsonl")])}, "bad_media", "a.jsonl"),
    "an address": ({"messages": asked([part("http://h/a.png")])}, "bad_media", "not allowed"),
    "a number": ({"messages": asked([part(7)])}, "bad_media", "7"),
    "a video file": ({"messages": asked([video("a.mp4")])}, "bad_media", "a.mp4"),
    "frames of a model with videos": ({"messages": asked([video(["images/0.png"])])}, "bad_media",
                                      "video"),
    "a sound": ({"messages": asked([{"type": "audio", "audio": "a.wav"}])}, "bad_media", "audio"),
    "a column of videos": ({"videos": ["a.mp4"], "messages": asked("<video>What?")}, "bad_media",
                           "a video"),
}  # fmt: skip


def test_what_cannot_be_shown_is_rejected_with_its_reason(album: Album) -> None:
    album.path(0).rename(album.directory.parent / "out.png")
    album.draw(0, (64, 48))
    rows = [row for row, _, _ in REJECTED.values()]
    source = write_rows(album.directory / "a.jsonl", [*rows, {"messages": asked("Hello?")}])
    store = prepare(source).store
    detail = {origin.row: (reason, detail) for origin, reason, detail in store.rejected_rows()}
    for number, (name, (_, reason, words)) in enumerate(REJECTED.items()):
        assert detail[number][0] == reason, (name, detail[number])
        assert words in detail[number][1], (name, detail[number])
        assert str(album.directory) not in detail[number][1], "a path of this machine in a slice"
    assert len(store) == 1


@pytest.mark.parametrize("column", ["images", "image", "pics"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "table", "dataset"])
def test_null_column_of_images_is_an_empty_list(album: Album, kind: str, column: str) -> None:
    """A null must not turn the placeholder into text; a row without the column has no images."""
    rows = [
        {"messages": asked("Look: <image>"), column: [album.name(0)]},
        {"messages": asked("Look: <image>"), column: []},
        {"messages": asked("Look: <image>"), column: None},
        {"messages": asked("Hello?"), column: None},
    ]
    source: Any = album.directory / f"a.{kind}"
    table = pa.Table.from_pylist(rows)
    if kind == "jsonl":
        write_rows(source, rows)
    elif kind == "parquet":
        pq.write_table(table, source)
    elif kind == "arrow":
        with pa.ipc.new_file(source, table.schema) as writer:
            writer.write_table(table)
    elif kind == "table":
        source = table
    else:
        source = pytest.importorskip("datasets").Dataset(table)
    columns = {"images": "pics"} if column == "pics" else None
    options = {
        "executor": "inline", "progress": False, "columns": columns, "media_root": album.directory
    }  # fmt: skip
    store = prepare(source, **options).store
    assert {origin.row: reason for origin, reason, _ in store.rejected_rows()} == {
        1: "media_mismatch",
        2: "media_mismatch",
    }
    assert [len(row.media) for row in store] == [1, 0]
    linted = tm.lint(source, processor=made("qwen2_vl"), **options)
    assert [one.count for one in linted.findings if one.rule == "media_mismatch"] == [2]


@pytest.mark.parametrize("executor", ["inline", pytest.param("local", marks=pytest.mark.soak)])
def test_tokenizer_that_is_not_the_processors_own_is_refused_by_a_worker(
    album: Album, executor: str
) -> None:
    source = write_rows(album.directory / "a.jsonl", [{"messages": asked([part(album.name(0))])}])
    given = {"tokenizer": str(processors.EXAMPLE), "executor": executor, "num_workers": 1}
    with pytest.raises(UsageError, match=r"not the processor's own.*image_pad"):
        prepare(source, **given)


def test_text_that_holds_the_token_cannot_stand_in_for_a_image_that_is_not_printed(
    album: Album,
) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        "{% elif m.role == 'user' %}<|image_pad|>{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
        "{% endfor %}"
    )
    answer = [part(album.name(0)), text("A cat.")]
    rows = [{"messages": asked(said, answer=answer)} for said in ("Say <|image_pad|>", "Say")]
    source = write_rows(album.directory / "a.jsonl", [*rows, {"messages": asked("Hello?")}])
    store = prepare(source, chat_template=template).store
    assert store.rejected == {"media_mismatch": 2}


def test_frames_are_images_where_the_model_knows_no_videos(album: Album) -> None:
    frames = [album.name(0), album.name(1)]
    rows = [{"messages": asked(video(frames), text("?"))}]
    source = write_rows(album.directory / "a.jsonl", rows)
    row = prepare(source, made("gemma3")).store[0]
    bare = {"type": "image"}
    wanted = oracle(made("gemma3"), asked(bare, bare, text("?")), [album.open(0), album.open(1)])
    assert row.input_ids.tolist() == wanted


def test_rows_with_images_are_rejected_without_a_processor(album: Album) -> None:
    plain = ("no image", "empty list")
    rows = [row for name, (row, _, _) in cases(album).items() if name not in plain]
    source = write_rows(album.directory / "a.jsonl", [*rows, {"messages": asked("Hi <image>")}])
    store = tm.prepare(source, processors.EXAMPLE, **INLINE)
    assert store.rejected == {"bad_media": len(rows)}
    assert all("a processor is required" in detail for _, _, detail in store.rejected_rows())
    assert store.manifest["format"] == 1
    assert store[0].media == []
    document = store.manifest["document"]
    assert set(document) == {"format", "recipe", "tokenizer", "sources"}
    assert not {"processor", "media_root", "media_urls"} & set(document["recipe"])
    assert tm.prepare(source, processors.EXAMPLE, media_root="/", **INLINE).key == store.key


def many(album: Album, count: int = 60) -> Path:
    rows = [
        {"id": number, "messages": asked(part(album.name(number % 4)), text("amber " * 40))}
        for number in range(count)
    ]
    return write_rows(album.directory / "a.jsonl", rows)


def test_changed_image_is_a_miss_and_a_moved_one_a_hit(
    album: Album, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    rows = [
        {"messages": asked(part(album.name(0 if n < 50 else 1)), text(f"{n} amber " * 40))}
        for n in range(60)
    ]
    source = write_rows(album.directory / "a.jsonl", rows)
    first = prepare(source)
    assert not first.hit
    assert prepare(source).hit
    moved = shutil.copytree(album.directory / "images", album.directory.parent / "m" / "images")
    other = prepare(source, media_root=str(moved.parent))
    assert other.hit
    assert other.store.media_root == str(moved.parent)
    album.draw(1, (97, 61), seed=1)
    changed = prepare(source)
    assert not changed.hit
    assert changed.store.key != first.store.key
    assert 0 < changed.build_stats.slices_built < changed.build_stats.slices, (
        "only slices that show it"
    )
    assert prepare(source, media_root=str(moved.parent)).store.key == first.store.key


def test_image_that_was_missing_is_noticed_when_it_is_there(album: Album) -> None:
    album.path(0).unlink()
    rows = [{"messages": asked([part(album.name(n))])} for n in (0, 1)]
    source = write_rows(album.directory / "a.jsonl", rows)
    assert prepare(source).store.rejected == {"bad_media": 1}
    album.draw(0, (64, 48))
    assert prepare(source).store.rejected == {}


def test_force_recache_reads_images_again_that_seem_unchanged(
    album: Album,
) -> None:
    source = write_rows(album.directory / "a.jsonl", [{"messages": asked([part(album.name(0))])}])
    path = album.draw(0, (64, 48))
    first = prepare(source)
    # As with a clock that stands still, the state of the file does not show the change.
    same = Signature(1, 2, 3, 4)
    with mock.patch("tokenmill.build.referenced._signature", return_value=same):
        assert prepare(source).hit
        other = path.read_bytes()[:-20] + b"\0" * 20
        path.write_bytes(other)
        assert prepare(source).hit, "the change is not seen"
        again = prepare(source, force_recache=True)
        assert not again.hit
        assert again.store.key != first.store.key
        assert prepare(source).store.key == again.store.key, "and remembered"


def test_processor_is_in_the_key_and_where_images_are_is_not(album: Album) -> None:
    source = many(album, 3)
    key = prepare(source).store.key
    assert prepare(source, made("qwen3_vl")).store.key != key
    assert prepare(source, media_root=str(album.directory), media_urls=True).store.key == key


def test_image_that_changes_during_the_build_is_noticed(album: Album) -> None:
    source = many(album, 3)
    real = slices.open_builder

    def later(options: dict[str, Any]) -> Any:
        album.draw(0, (64, 48), seed=2)
        return real(options)

    with mock.patch.object(slices, "open_builder", later), pytest.raises(SourceChanged):
        prepare(source)
    assert len(prepare(source).store) == 3


def test_a_limit_drops_rows_and_never_cuts_a_image(album: Album) -> None:
    rows = [
        {"messages": asked(part(album.name(0)), text("short"))},
        {"messages": asked(text("word " * 30), part(album.name(1)), answer="late image")},
        {"messages": asked(part(album.name(0)), text("s"), answer="long " * 200)},
    ]
    source = write_rows(album.directory / "a.jsonl", rows)
    whole = prepare(source).store
    limit = whole[1].media[0].start + 2
    cut = prepare(source, max_length=limit, overlong="truncate").store
    assert [row.origin.row for row in cut] == [0, 2]
    assert cut.rejected == {"overlong": 1}
    assert len(cut[1]) == limit
    assert cut[1].media == whole[2].media
    dropped = prepare(source, max_length=limit, overlong="drop")
    assert dropped.build_stats.slices_derived == 1
    assert [row.origin.row for row in dropped.store] == [0]
    assert dropped.store[0].media == whole[0].media
    derived = files_of(dropped.store.cache_root, "slices")
    again = prepare(source, max_length=limit, overlong="drop", force_recache=True)
    assert files_of(again.store.cache_root, "slices") == derived
    write_rows(source, [{"messages": asked("Hello?")}, rows[1]])
    assert prepare(source).store.has_media
    assert not prepare(source, max_length=limit).store.has_media


def test_wrong_computed_expansion_is_detected_and_its_slices_are_rebuilt(
    album: Album, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    source = many(album)
    right = {row.origin.row: row.input_ids.tolist() for row in prepare(source).store}
    expansion_for = Processor.expansion_for

    def lying(self: Processor, sizes: Any) -> Any:
        found = expansion_for(self, sizes)
        if not self._disabled_stages and tuple(sizes) == ((97, 61),):
            first = found.expansion.images[0]
            wrong = ImageExpansion(first.text + first.text, first.grid)
            return found._replace(expansion=RowExpansion((wrong,), found.expansion.patches))
        return found

    monkeypatch.setattr(Processor, "expansion_for", lying)
    processor = processors.make("qwen2_vl")
    outcome = prepare(source, processor, force_recache=False, cache_dir=album.directory / "c2")
    assert {row.origin.row: row.input_ids.tolist() for row in outcome.store} == right
    assert outcome.build_stats.mismatched == ["expand"]
    assert outcome.store.proof["used"]["expand.expansion"].keys() == {"processor"}
    assert outcome.store.proof["audit_mismatches"]["expansion"] >= 1
    assert "expansion" in outcome.store.proof["notices"][0]


@pytest.mark.parametrize("computed", [True, False])
def test_what_the_processor_computed_from_sizes_is_audited_less_often(
    album: Album, monkeypatch: pytest.MonkeyPatch, computed: bool
) -> None:
    monkeypatch.setattr(expansion, "AUDIT_PROBED_ONE_IN", 1)
    monkeypatch.setattr(expansion, "AUDIT_COMPUTED_ONE_IN", 1 << 62)
    processor = processors.make("qwen2_vl")
    if not computed:
        processor.image_processor.do_convert_rgb = False  # then no answer is one for all images
    store = prepare(many(album, 20), processor, cache_dir=album.directory / "c2").store
    assert store.proof["audited_rows"]["expansion"] == (1 if computed else 20)


def test_store_gives_the_bytes_that_rows_were_prepared_from(album: Album) -> None:
    found = cases(album)
    source = write_rows(album.directory / "a.jsonl", [row for row, _, _ in found.values()])
    store = prepare(source).store
    for row in store:
        for number, one in enumerate(row.media):
            assert checksum(row.image(number)) == one.digest
    assert "#/messages/0/content/0/image_url/url" in [m.reference for r in store for m in r.media]
    row = next(row for row in store.select([1]))
    album.draw(1, (333, 190), seed=3)
    with pytest.raises(SourceChanged, match=rf"{album.name(1)}.*expected {row.media[0].digest}"):
        row.image()
    album.path(1).unlink()
    with pytest.raises(SourceMissing, match=rf"{album.name(1)}.*{row.media[0].digest}"):
        row.image()
    (album.directory.parent / "m" / "images").mkdir(parents=True)
    album.draw(1, (333, 190)).rename(album.directory.parent / "m" / album.name(1))
    moved = tm.open_store(store.path, media_root=album.directory.parent / "m")
    assert moved[1].image(0)


def test_views_include_images_and_their_counts(album: Album) -> None:
    store = prepare(many(album, 8)).store
    view = tm.concat([store.select([3, 1]), store[4:6]])
    assert view.has_media
    assert [row.media[0].reference for row in view] == [album.name(n) for n in (3, 1, 0, 1)]
    assert view.images_at(np.arange(4)).tolist() == [1, 1, 1, 1]
    assert view.patches_at(np.arange(2)).tolist() == store.patches[[3, 1]].tolist()
    assert [int(np.prod(row.media[0].grid)) for row in view][:2] == store.patches[[3, 1]].tolist()
    kept = store.filter("images == 1 and patches < 100")
    assert {row.media[0].reference for row in kept} == {
        album.name(n) for n in range(4) if store.patches[n] < 100
    }


def test_copy_with_embedded_images_stands_alone(album: Album) -> None:
    source = many(album, 8)
    store = prepare(source).store
    target = album.directory.parent / "copy"
    tm.push(store, target, embed_media=True)
    referring = album.directory.parent / "referring"
    tm.push(store, referring)
    pulled = tm.pull(target, cache_dir=album.directory.parent / "cache2")
    shutil.rmtree(album.directory)
    names = sorted(path.name for path in (target / "media").rglob("*") if path.is_file())
    assert names == sorted({row.media[0].digest for row in store}), "each once"
    copy = tm.open_store(target)
    assert copy.manifest["media"]["images"] == 4
    assert checksum(copy[5].image()) == copy[5].media[0].digest
    assert checksum(pulled[5].image()) == pulled[5].media[0].digest
    with pytest.raises(SourceMissing):
        tm.open_store(referring)[0].image()
    assert copy.verify() > store.verify()
    assert copy.processor_path is not None
    assert Processor.load(copy.processor_path).key == copy.processor_key
    (target / "media" / names[0][:2] / names[0]).write_bytes(b"other")
    with pytest.raises(CorruptionError, match=names[0]):
        copy.verify()


def test_remote_store_brings_processor_and_images(album: Album) -> None:
    store = prepare(many(album, 4)).store
    place = f"memory://{album.directory.name}-{store.key[:8]}/store"
    tm.push(store, place, embed_media=True)
    tm.push(store, place, embed_media=True)  # what is there and equal is passed over
    cache = album.directory.parent / "cache3"
    pulled = tm.pull(place, cache_dir=cache)
    shutil.rmtree(album.directory)
    for found in (tm.open_store(place, cache_dir=cache), pulled):
        assert checksum(found[2].image()) == store[2].media[0].digest
        assert found.processor_path is not None
        assert Processor.load(found.processor_path).key == store.processor_key
    assert pulled.verify() > 0


def test_export_has_images_and_refuses_where_the_format_has_none(album: Album) -> None:
    store = prepare(many(album, 4)).store
    out = tm.export(store, "jsonl", album.directory / "rows.jsonl").path
    first = json.loads(out.read_text().splitlines()[0])
    assert first["media"][0]["reference"] == album.name(0)
    assert first["media"][0]["start"] == store[0].media[0].start
    out = tm.export(store, "parquet", album.directory / "rows.parquet", embed_media=True).path
    table = pq.read_table(out).to_pylist()
    assert table[1]["media"][0]["bytes"] == album.path(1).read_bytes()
    assert table[1]["media"][0]["grid"] == list(store[1].media[0].grid or ())
    for name in ("hf", "axolotl", "megatron"):
        with pytest.raises(UsageError, match="images"):
            tm.export(store, name, album.directory / name)


MODES = ("RGB", "L", "P", "RGBA", "CMYK", "I;16", "1", "LA")
FORMATS = {"CMYK": "tiff", "I;16": "png"}


def drawn(album: Album, count: int) -> list[Path]:
    rng = np.random.default_rng(42)
    paths = []
    for number in range(count):
        width, height = (int(side) for side in rng.integers(30, 500, 2))
        mode = MODES[number % len(MODES)]
        noise = rng.integers(0, 255, (height, width), dtype=np.uint8)
        if mode == "I;16":
            image = Image.fromarray(noise.astype(np.uint16) * 256)
        else:
            image = Image.fromarray(noise).convert("RGB").convert(mode)
        kind = FORMATS.get(mode, "jpg" if mode in ("RGB", "L") else "png")
        path = album.directory / "images" / f"drawn{number}.{kind}"
        exif = Image.Exif()
        exif[0x0112] = number % 9 or 1
        image.save(path, exif=exif) if kind == "jpg" else image.save(path)
        paths.append(path)
    return paths


@pytest.mark.parametrize("name", [FAST[0], *OTHERS])  # the first also with a few
def test_images_of_any_size_and_mode_are_as_the_processor_has_them(
    album: Album, name: str, request: pytest.FixtureRequest
) -> None:
    from transformers.image_utils import load_image

    soak = "soak" in [mark.name for mark in request.node.own_markers]
    paths = drawn(album, 200 if soak else 24)
    rows = [{"images": [f"images/{path.name}"], "messages": asked("<image>Hm")} for path in paths]
    store = prepare(write_rows(album.directory / "a.jsonl", rows), made(name)).store
    assert len(store) == len(paths), list(store.rejected_rows())
    for row, path in zip(store, paths, strict=True):
        image = load_image(str(path))
        wanted = oracle(made(name), asked({"type": "image"}, text("Hm")), [image])
        assert row.input_ids.tolist() == wanted, path.name
        assert (row.media[0].width, row.media[0].height) == image.size


@pytest.mark.filterwarnings("ignore")  # Pillow's, of EXIF and of palettes
@pytest.mark.parametrize("name", [FAST[0], *OTHERS[1:]])
def test_unusual_images_are_exact_or_rejected_by_name(album: Album, name: str) -> None:
    from transformers.image_utils import load_image

    files = {f"{what}.jpg": data for what, data in unusual().items()}  # whatever they are
    for file, data in files.items():
        (album.directory / file).write_bytes(data)
    names = [*files, "missing.png"]
    rows = [{"messages": asked(part(file), text("Hm"))} for file in names]
    source = write_rows(album.directory / "a.jsonl", rows)
    store = prepare(source, made(name)).store
    served = {row.media[0].reference: row for row in store}
    rejected = {
        names[origin.row]: (origin, why, detail) for origin, why, detail in store.rejected_rows()
    }
    assert sorted([*served, *rejected]) == sorted(names)
    for number, file in enumerate(names):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                image = load_image(Image.open(io.BytesIO(files[file])))
            wanted = oracle(made(name), asked({"type": "image"}, text("Hm")), [image])
        except Exception:
            origin, reason, detail = rejected[file]
            assert (reason, origin.path, origin.line) == ("bad_media", str(source), number + 1)
            assert file in detail
        else:
            row = served[file]
            assert row.input_ids.tolist() == wanted, file
            assert (row.media[0].width, row.media[0].height) == image.size, file
            assert row.image(0) == files[file]
    assert len(rejected) > 20 < len(served)


@pytest.mark.shared
@pytest.mark.parametrize("name", [*FAST[:1], *(one for one in OTHERS if one.values[0] != FAST[0])])
def test_real_rows_are_as_the_processor_has_them(shared: Path, tmp_path: Path, name: str) -> None:
    source = shared / "corpora" / "math_vision" / "math_vision.jsonl"
    lines = [json.loads(line) for line in source.read_text().splitlines()[::2]]
    rows = [{"images": row["images"], "messages": asked(row["problem"])} for row in lines]
    store = prepare(
        write_rows(tmp_path / "a.jsonl", rows), made(name), media_root=str(source.parent)
    ).store
    assert len(store) == 40
    for row, line in zip(store, lines, strict=True):
        before, _, after = line["problem"].partition("<image>")
        parts = [text(before), {"type": "image"}, *([text(after)] if after else [])]
        image = Image.open(source.parent / line["images"][0]).convert("RGB")
        assert row.input_ids.tolist() == oracle(made(name), asked(*parts), [image])


PAD, VIDEO = "<|image_pad|>", "<|video_pad|>"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    backend = made("qwen2_vl").tokenizer.backend_tokenizer
    return Encoder(Tokenizer(backend.to_str().encode()), "hf")


PIECES = st.one_of(
    st.tuples(st.sampled_from([PAD, VIDEO]), st.integers(1, 9)),
    st.tuples(st.text("a é\n😀<|image_pad>", max_size=9), st.just(1)),
)


@given(st.lists(st.lists(PIECES, max_size=7), min_size=1, max_size=3))
def test_folded_texts_give_the_tokens_of_whole_ones(encoder: Encoder, rows: Any) -> None:
    folding = Folding({one: encoder.tokenizer.reference.token_to_id(one) for one in (PAD, VIDEO)})
    texts, ends, short_texts, marks, turns, folded = [], [], [], [], [], []
    for number, row in enumerate(rows):
        whole, short, borders, short_borders, runs = "", "", [], [], []
        for piece, count in row:
            one, found = folding.fold(piece * count)
            assert len(found) == (count > 1)
            runs += [run._replace(at=len(short) + run.at) for run in found]
            whole, short = whole + piece * count, short + one
            borders.append(len(whole))
            short_borders.append(len(short))
        texts.append(whole)
        ends.append(borders)
        short_texts.append(short)
        marks.append(sorted([*short_borders, *(run.at for run in runs)]))
        turns.append([marks[-1].index(border) for border in short_borders])
        folded += [(number, marks[-1].index(run.at), run) for run in runs]
    wanted = encoder.encode(texts, turn_ends=ends)
    found = unfolded(encoder.encode(short_texts, turn_ends=marks), folded)
    assert found is not None
    for name in ("ids", "mask", "row_starts"):
        assert getattr(found, name).tolist() == getattr(wanted, name).tolist(), name
    for number, places in enumerate(turns):
        assert found.row(number)[2][places].tolist() == wanted.row(number)[2].tolist()


def prepare_one(album: Album, processor: Any) -> Any:
    messages = asked(part(album.name(1)), text("What?"))
    store = prepare(
        write_rows(album.directory / "a.jsonl", [{"messages": messages}]), processor
    ).store
    wanted = oracle(processor, asked({"type": "image"}, text("What?")), [album.open(1)])
    assert store[0].input_ids.tolist() == wanted
    return store


def test_token_that_is_not_split_off_alone_is_not_folded(album: Album) -> None:
    from transformers import AddedToken

    for token in (f"~{PAD}", AddedToken(PAD, lstrip=True, special=True)):
        processor = processors.make("qwen2_vl")
        assert PAD in Processor(processor).repeatable
        processor.tokenizer.add_tokens([token], special_tokens=True)
        assert PAD not in Processor(processor).repeatable
        prepare_one(album, processor)


def test_run_that_is_encoded_as_something_else_is_left_to_the_processor(album: Album) -> None:
    with mock.patch.object(Processor, "repeatable", {PAD: 5}):
        store = prepare_one(album, processors.make("qwen2_vl"))
    assert store.proof["used"]["expand.expansion"].keys() == {"processor"}
    assert np.isin(store[0].input_ids, [5]).sum() < store[0].media[0].count
