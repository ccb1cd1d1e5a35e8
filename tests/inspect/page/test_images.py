"""Images on the page: thumbnails at their tokens, within limits."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.build.image_rows import Album, asked, part, text
from tests.build.making import write_rows
from tests.cli.harness import Shell
from tests.inspect.page.browsing import Visit, go_to, tokens
from tests.inspect.page.conftest import own_page_and_server
from tests.inspect.page.test_document import data_of
from tests.media import processors
from tokenmill import prepare
from tokenmill.errors import UsageError
from tokenmill.inspect.page.document import (
    MAX_THUMBNAIL_BYTES,
    THUMBNAIL_EDGE,
    make_page,
    thumbnail,
    thumbnails,
)
from tokenmill.inspect.page.serve import Viewer
from tokenmill.store import Media, Store

Image = pytest.importorskip("PIL.Image", reason="needs the extra: pip install 'tokenmill[vision]'")
pytest.importorskip("transformers", reason="needs the extra: pip install 'tokenmill[vision]'")

HOSTILE = "images/<img src=x onerror='window.hacked = 3'>.png"
GONE, CHANGED, LARGE = 2, 3, 4  # numbers of images


@pytest.fixture(scope="module")
def store(directory: Path) -> Store:
    album = Album(directory)
    album.draw(LARGE, (1500, 1100))
    (directory / HOSTILE).write_bytes(album.path(0).read_bytes())
    named = [HOSTILE, *(album.name(number) for number in (1, GONE, CHANGED, LARGE))]
    rows = [
        {"messages": asked([part(one), text("What is it?"), part(album.name(1)), text("And it?")])}
        for one in named
    ]
    rows.append({"messages": asked("No image.")})
    source = write_rows(directory / "rows.jsonl", rows)
    made = prepare(
        str(source), processor=processors.make("qwen2_5_vl"), cache_dir=directory / "cache",
        num_workers=0, progress=False,
    )  # fmt: skip
    assert len(made) == len(rows)
    album.path(GONE).unlink()
    album.draw(CHANGED, (97, 61), seed=5)
    return made


directory, page_file, server = own_page_and_server("images")


def opened(src: str) -> tuple[Any, int]:
    kind, _, coded = src.partition(",")
    assert kind == "data:image/jpeg;base64"
    data = base64.b64decode(coded)
    return Image.open(io.BytesIO(data)), len(data)


def test_thumbnails_are_small_and_show_the_image(store: Store) -> None:
    for row in (0, 1, LARGE):
        for one in store[row].media:
            image, size = opened(thumbnail(store, one)["src"])
            assert size <= MAX_THUMBNAIL_BYTES
            assert max(image.size) <= THUMBNAIL_EDGE
            shrunk = Image.open(io.BytesIO(store.image(one))).convert("RGB").resize((8, 8))
            difference = np.abs(np.asarray(image.resize((8, 8)), int) - np.asarray(shrunk, int))
            assert difference.mean() < 12
    assert "missing" in thumbnail(store, store[GONE].media[0])["note"]
    note = thumbnail(store, store[CHANGED].media[0])["note"]
    assert "changed" in note
    assert not any(one in note for one in ("images", store[CHANGED].media[0].digest))


def test_page_contains_each_image_once_within_its_limit(
    directory: Path, store: Store, page_file: Path
) -> None:
    digests = {one.digest for row in store for one in row.media}
    images = data_of(page_file.read_bytes())["images"]
    assert set(images) == digests
    assert len(digests) == len(store) - 1  # the last row has none
    everything = range(len(store))
    spent = [sum(len(one.get("src", "")) for one in thumbnails(store, everything, most)
                 .values()) for most in (0, 30_000, 60_000, 1 << 30)]  # fmt: skip
    assert spent == sorted(spent)
    assert spent[0] == 0 < spent[1] < 30_000
    assert spent[-1] > 30_000
    whole = page_file.stat().st_size
    for most in (whole - 2_000, whole - 20_000):
        detail = make_page(store, directory / "small.html", max_bytes=most)
        assert detail["bytes"] <= most
        assert detail["rows_in_page"] == len(store)
        kept = data_of((directory / "small.html").read_bytes())["images"]
        assert set(kept) < digests


def test_images_get_their_share_and_each_is_opened_once(
    directory: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for: list[str] = []

    def counted(_: Store, media: Media) -> dict[str, str]:
        asked_for.append(media.digest)
        return {"note": ""}

    monkeypatch.setattr("tokenmill.inspect.page.document.thumbnail", counted)
    make_page(store, directory / "small.html")
    assert sorted(asked_for) == sorted({one.digest for row in store for one in row.media})
    monkeypatch.setattr("tokenmill.inspect.page.document.MEDIA_SHARE", 1.0)
    assert make_page(store, directory / "small.html")["rows_in_page"] == 0


def test_images_are_shown_at_their_tokens(visit: Visit, address: str, store: Store) -> None:
    page = visit(address)
    page.check("#look-ids")
    for row in (0, LARGE, GONE, CHANGED):
        go_to(page, row)
        media, ids = store[row].media, store[row].input_ids
        covered = {at for one in media for at in range(one.start, one.start + one.count)}
        assert [at for _, _, at in tokens(page)] == [
            at for at in range(len(ids)) if at not in covered
        ]
        chips = page.query_selector_all("#row-body .image")
        for chip, one in zip(chips, media, strict=True):
            detail = chip.inner_text()
            assert one.reference in detail
            facts = [f"{one.width:,} × {one.height:,}", f"{one.count:,} tokens"]
            assert all(fact in detail for fact in [*facts, " × ".join(map(str, one.grid or ()))])
        page.wait_for_selector("#row-body .image:last-of-type img")
        if row in (GONE, CHANGED):
            page.wait_for_selector("#row-body .image.missing .image-note")
            assert chips[0].query_selector("img") is None
        else:
            width = page.eval_on_selector("#row-body .image img", "one => one.naturalWidth")
            assert 0 < width <= THUMBNAIL_EDGE
    chips[0].click()  # its tokens are there, folded
    first = media[0]
    shown = [at for _, _, at in tokens(page)]
    assert set(range(first.start, first.start + first.count)) <= set(shown)
    assert shown == sorted(shown)
    chips[0].click()
    assert first.start not in [at for _, _, at in tokens(page)]


def test_list_previews_the_text_without_images(visit: Visit, on_disk: str, store: Store) -> None:
    page = visit(on_disk)
    page.wait_for_selector("#item-0 .preview")
    assert page.inner_text("#item-0 .preview") == "What is it?And it?"
    assert len(store) - 1 == page.eval_on_selector_all(
        "#list .preview", "all => all.filter((e) => e.textContent.startsWith('What is')).length"
    )


def test_terminal_folds_the_tokens_of_an_image(store: Store, shell: Shell) -> None:
    said = shell("inspect", store.path, "--row", str(LARGE)).out
    for one in store[LARGE].media:
        detail = f"[image {one.reference}, {one.width}×{one.height}, grid "
        assert said.count(detail) == 1
    assert "<|image_pad|>" not in said
    document = shell("inspect", store.path, "--row", str(LARGE), "--json").json
    assert [one["start"] for one in document["media"]] == [m.start for m in store[LARGE].media]


def test_unknown_images_are_a_usage_error(store: Store) -> None:
    viewer = Viewer(store)
    assert opened(viewer.image({"number": "0", "image": "1"})["src"])
    for given in ({"number": "0", "image": "2"}, {"number": str(len(store))}, {}):
        with pytest.raises(UsageError, match=r"image must be|row \d|number"):
            viewer.image(given)
