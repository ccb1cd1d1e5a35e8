"""Pictures are read exactly as the reference loads them, or refused by name."""

from __future__ import annotations

import base64
import functools
import io
import os
import pickle
import random
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.media.drawing import MODES, ORIENTED, any_picture, bomb, draw, encode
from tokenmill.errors import RowError, UsageError
from tokenmill.media import Limits, Pictures, Reference, reference_from_text, reference_of
from tokenmill.media.pictures import _formats, _is_whole, _plain_jpeg

PICTURES = Pictures()


def reference(data: bytes) -> Image.Image:
    from transformers.image_utils import load_image

    return load_image(base64.b64encode(data).decode())


def require_as_the_reference(data: bytes, what: str) -> None:
    expected = np.asarray(reference(data))
    facts = PICTURES.facts(data)
    assert (facts.height, facts.width) == expected.shape[:2], what
    opened = PICTURES.open(data)
    assert opened.mode == "RGB", what
    assert np.array_equal(np.asarray(opened), expected), what


FILES = [(form, mode) for form, modes in MODES.items() for mode in modes if form in _formats()]


@pytest.mark.parametrize(("form", "mode"), FILES)
def test_every_format_and_mode(form: str, mode: str) -> None:
    rng = random.Random(f"{form} {mode}")
    require_as_the_reference(encode(draw(rng, 41, 23, mode), form), f"{form} {mode}")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", [form for form in ORIENTED if form in _formats()])
def test_every_orientation(form: str, orientation: int) -> None:
    data = encode(draw(random.Random(orientation), 41, 23), form, orientation)
    require_as_the_reference(data, f"{form} {orientation}")
    facts = PICTURES.facts(data)
    assert facts.width == (23 if orientation >= 5 else 41)
    with Image.open(io.BytesIO(data)) as image:
        image.load()  # Pillow itself turns TIFF files
        assert facts.unturned == image.size


@pytest.mark.soak
def test_two_thousand_files_of_any_kind() -> None:
    rng = random.Random(2000)
    for _ in range(2000):
        require_as_the_reference(*any_picture(rng, longest=300))


def test_orientation_in_other_places() -> None:
    """In XMP, and in a PNG after the pixels, where no header has it."""
    picture = draw(random.Random(1), 41, 23)
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    file = io.BytesIO()
    picture.save(file, "JPEG", xmp=xmp)
    require_as_the_reference(file.getvalue(), "xmp")
    assert PICTURES.facts(file.getvalue()).width == 23

    plain = encode(picture, "PNG")
    oriented = encode(picture, "PNG", 6)
    at = oriented.index(b"eXIf") - 4
    length = struct.unpack_from(">I", oriented, at)[0] + 12
    end = plain.index(b"IEND") - 4
    late = plain[:end] + oriented[at : at + length] + plain[end:]
    require_as_the_reference(late, "eXIf after IDAT")
    assert PICTURES.facts(late).width == 23


def test_what_is_whole_is_known_without_decoding() -> None:
    """The shortcut is taken for ordinary files; it would be no shortcut if it never were."""
    picture = draw(random.Random(3), 64, 48)
    for form, whole in (("JPEG", True), ("PNG", True), ("WEBP", True), ("GIF", False)):
        data = encode(picture, form)
        assert _is_whole(data, Image.open(io.BytesIO(data))) is whole
    data = encode(picture, "JPEG", 6)
    thumbnail_end = data.index(b"\xff\xda")  # cut so that it ends like a picture, before the scan
    assert not _is_whole(data[:thumbnail_end] + b"\xff\xd9", Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("form", [form for form in MODES if form in _formats()])
def test_a_picture_cut_off_anywhere_is_refused_or_exact(form: str) -> None:
    rng = random.Random(form)
    data = encode(draw(rng, 61, 47), form)
    refused = 0
    cuts = sorted({*(rng.randrange(len(data)) for _ in range(25)), len(data) - 1})
    for cut in cuts:
        short = data[:cut]
        try:
            expected = np.asarray(reference(short))
        except Exception:
            with pytest.raises(RowError) as caught:
                PICTURES.facts(short, "p.bin")
            assert caught.value.reason == "bad_media"
            assert "p.bin" in caught.value.message
            refused += 1
        else:
            assert (PICTURES.facts(short).height, PICTURES.facts(short).width) == expected.shape[:2]
    assert refused > len(cuts) // 2


def test_plain_jpegs_are_read_as_pillow_reads_them() -> None:
    """Whatever becomes of the bytes before the pixels, nothing is said that Pillow does not say."""
    rng = random.Random(11)
    read = 0
    for number in range(1500):
        mode = rng.choice(("RGB", "RGB", "L", "CMYK"))
        data = bytearray(plain_jpeg(mode, rng.randint(1, 40), 23, progressive=number % 3 == 0))
        scan = data.index(b"\xff\xda") + 14
        for _ in range(number % 4):  # none, or some bytes that are others
            data[rng.randrange(2, scan)] = rng.choice((0, 1, 8, 0xFF, rng.randrange(256)))
        if number % 50 == 49:
            del data[rng.randrange(2, scan)]
        found = _plain_jpeg(bytes(data))
        if found is None:
            continue
        read += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data))
        assert (*image.size, image.mode, image.format) == (*found, "JPEG")
        assert 0x0112 not in image.getexif()
    assert read > 400
    assert _plain_jpeg(plain_jpeg("RGB", 41, 23)) == (41, 23, "RGB")
    assert _plain_jpeg(plain_jpeg("L", 41, 23)) == (41, 23, "L")


@functools.cache
def plain_jpeg(mode: str, width: int, height: int, **more: bool) -> bytes:
    file = io.BytesIO()
    picture = draw(random.Random(width), width, height, mode)
    picture.save(file, "JPEG", comment=b"comment", **more)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not a picture", "no format that is read"),
        (b"", "no format that is read"),
        (bomb(60_000, 60_000), "too large"),
        (bomb(10_000, 9_000), "pixels"),
        (bomb(0, 10), "PNG|pixels|decoded|format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no format that is read"),
        (encode(draw(random.Random(0), 9, 9), "PNG").replace(b"IHDR", b"IHDX"), "decoded|format"),
    ],
)
def test_hostile_bytes_are_refused_by_name(data: bytes, words: str) -> None:
    for look in (PICTURES.facts, PICTURES.open):
        with pytest.raises(RowError, match=words) as caught:
            look(data, "evil.png")
        assert caught.value.reason == "bad_media"
        assert "evil.png" in caught.value.message


def test_the_first_frame_of_an_animation() -> None:
    frames = [draw(random.Random(at), 20, 20) for at in range(3)]
    for form in ("GIF", "WEBP", "PNG"):
        file = io.BytesIO()
        frames[0].save(file, form, save_all=True, append_images=frames[1:])
        require_as_the_reference(file.getvalue(), form)
        assert PICTURES.facts(file.getvalue()).animated


def test_facts() -> None:
    data = encode(draw(random.Random(5), 30, 20, "CMYK"), "JPEG")
    facts = PICTURES.facts(data)
    assert (facts.width, facts.height, facts.format, facts.mode) == (30, 20, "JPEG", "CMYK")
    assert (facts.size, facts.animated) == (len(data), False)
    other = PICTURES.facts(data + b"\0")
    assert other.digest != facts.digest


# What a row says


DATA = encode(draw(random.Random(7), 12, 8), "PNG")
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    ("said", "reference"),
    [
        ("a/b.png", Reference("file", path="a/b.png")),
        ("/data/ü b.png", Reference("file", path="/data/ü b.png")),
        ("file:///data/a%20b.png", Reference("file", path="/data/a b.png")),
        ("x.zip::in/b.png", Reference("member", path="x.zip", member="in/b.png")),
        ("zip://in/b.png::x.zip", Reference("member", path="x.zip", member="in/b.png")),
        ("HTTPS://host/b.png", Reference("url", url="HTTPS://host/b.png")),
        (DATA, Reference("inline", data=DATA)),
        (TEXT, Reference("inline", data=DATA)),
        (f"data:image/png;base64,{TEXT}", Reference("inline", data=DATA)),
        ({"bytes": DATA, "path": "b.png"}, Reference("inline", data=DATA)),
        ({"bytes": None, "path": "b.png"}, Reference("file", path="b.png")),
        ({"bytes": TEXT, "path": None}, Reference("inline", data=DATA)),
        ({"type": "image_url", "image_url": {"url": "b.png"}}, Reference("file", path="b.png")),
        ({"type": "image", "image": "b.png"}, Reference("file", path="b.png")),
        ("/9j/b", Reference("file", path="/9j/b")),
    ],
)
def test_what_a_row_says(said: object, reference: Reference) -> None:
    found = reference_of(said)
    assert found == reference
    kept = reference_from_text(found.text())
    assert kept.data is None
    assert (kept.kind, kept.path, kept.member, kept.url) == (
        found.kind, found.path, found.member, found.url,
    )  # fmt: skip
    assert len(found.text()) < 200


@pytest.mark.parametrize(
    "said",
    ["", 7, None, [], {}, {"type": "image"}, "s3://b/p.png", "file://host/p.png", "zip://p.png",
     "::p.png", "data:image/png;base64", "data:image/png;base64,%%%", {"bytes": "no, base64!"},
     "a\0b", {"image": {"image": {"image": {"image": {"image": "x"}}}}}],
)  # fmt: skip
def test_what_says_nothing_is_refused(said: object) -> None:
    with pytest.raises(RowError) as caught:
        reference_of(said)
    assert caught.value.reason == "bad_media"


# Where files may be


@pytest.fixture
def house(tmp_path: Path) -> Path:
    inside, outside = tmp_path / "house", tmp_path / "street"
    (inside / "room").mkdir(parents=True)
    outside.mkdir()
    (inside / "room" / "a.png").write_bytes(DATA)
    (outside / "b.png").write_bytes(DATA)
    (inside / "link.png").symlink_to(inside / "room" / "a.png")
    (inside / "window.png").symlink_to(outside / "b.png")
    (inside / "door").symlink_to(outside)
    (inside / "empty.png").write_bytes(b"")
    (inside / "large.png").write_bytes(bytes(2000))
    os.mkfifo(inside / "pipe.png")
    return inside


def read(said: object, base: Path | None = None, pictures: Pictures = PICTURES) -> bytes:
    return pictures.read(reference_of(said), base)


def test_files_below_the_root(house: Path) -> None:
    rooted = Pictures(house)
    for pictures, base in ((PICTURES, house), (rooted, None), (rooted, Path("/nowhere"))):
        assert read("room/a.png", base, pictures) == DATA
        assert read("./room/../room/a.png", base, pictures) == DATA
        assert read("link.png", base, pictures) == DATA
        assert read(str(house / "room" / "a.png"), base, pictures) == DATA
    two = Pictures([house / "room", house.parent / "street"])
    assert read("b.png", None, two) == read("a.png", None, two) == DATA
    assert read(str(house.parent / "street" / "b.png"), None, Pictures([house, "/"])) == DATA


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("../street/b.png", "outside"),
        ("window.png", "outside"),
        ("door/b.png", "outside"),
        ("/etc/hostname", "outside"),
        ("file:///etc/hostname", "outside"),
        ("missing.png", "not there"),
        ("room", "not a file"),
        ("room/a.png/b", "not there"),
        ("pipe.png", "not a file"),
        ("empty.png", "empty"),
        ("clip.mp4", "frames"),
        ("x" * 300, "cannot be opened"),
        ("https://example.com/p.png", "media_urls"),
    ],
)
def test_files_that_are_not_read(house: Path, said: str, words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        read(said, house)
    assert caught.value.reason == "bad_media"
    assert said[:100].removeprefix("file://") in caught.value.message


def test_limits(house: Path) -> None:
    small = Pictures(limits=Limits(size=1000, pixels=50))
    with pytest.raises(RowError, match="2000 bytes"):
        read("large.png", house, small)
    with pytest.raises(RowError, match="1000 are allowed"):
        read(bytes(1001), None, small)
    with pytest.raises(RowError, match="12×8 pixels; 50 are allowed"):
        small.facts(DATA, "a.png")
    with pytest.raises(RowError, match="no directory"):
        read("a.png")
    with pytest.raises(UsageError, match="not a directory"):
        Pictures(house / "room" / "a.png")


def test_travels_to_other_processes(house: Path) -> None:
    pictures = Pictures(house, urls=True, limits=Limits(size=1000))
    read("room/a.png", None, pictures)
    there = pickle.loads(pickle.dumps(pictures))
    assert (there.roots, there.urls, there.limits) == ((house,), True, Limits(size=1000))
    assert pickle.loads(pickle.dumps(PICTURES)).roots == ()


# Archives


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "p.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("in/a.png", DATA)
        archive.writestr("bomb.png", bytes(3_000_000))
        archive.writestr("empty.png", b"")
    for name, mode in (("p.tar", "w"), ("p.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            for member, data in (("./in/a.png", DATA), ("large.png", bytes(3_000_000))):
                entry = tarfile.TarInfo(member)
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
            link = tarfile.TarInfo("link.png")
            link.type, link.linkname = tarfile.SYMTYPE, "/etc/hostname"
            archive.addfile(link)
    (tmp_path / "broken.zip").write_bytes((tmp_path / "p.zip").read_bytes()[:-40])
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / f"damaged{method}.zip", "w", method) as archive:
            archive.writestr("a.png", DATA * 50)
            member = archive.getinfo("a.png")
        whole = bytearray((tmp_path / f"damaged{method}.zip").read_bytes())
        start = member.header_offset + 30 + len("a.png") + 12  # behind its header and the codec's
        whole[start : start + 24] = b"\xff" * 24
        (tmp_path / f"damaged{method}.zip").write_bytes(whole)
    (tmp_path / "cut.tar").write_bytes((tmp_path / "p.tar").read_bytes()[:700])
    return tmp_path


def test_members_of_archives(archives: Path) -> None:
    pictures = Pictures(archives, limits=Limits(size=1_000_000))
    for _ in range(2):  # the second time from a directory that was read before
        assert read("p.zip::in/a.png", None, pictures) == DATA
        assert read("p.tar::in/a.png", None, pictures) == DATA
        assert read("zip://in/a.png::p.zip", None, pictures) == DATA
    with zipfile.ZipFile(archives / "p.zip", "w") as archive:  # another one under that name
        archive.writestr("in/a.png", b"other")
    assert read("p.zip::in/a.png", None, pictures) == b"other"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("p.zip::missing.png", "not in the archive"),
        ("p.zip::bomb.png", "bytes"),
        ("p.zip::empty.png", "empty"),
        ("p.tar::large.png", "bytes"),
        ("p.tar::link.png", "not in the archive"),
        ("p.tar.gz::in/a.png", "compressed"),
        ("broken.zip::in/a.png", "unpacked"),
        (f"damaged{zipfile.ZIP_DEFLATED}.zip::a.png", "unpacked"),
        (f"damaged{zipfile.ZIP_BZIP2}.zip::a.png", "unpacked"),
        (f"damaged{zipfile.ZIP_LZMA}.zip::a.png", "unpacked"),
        ("cut.tar::in/a.png", "unpacked|cut off|not in the archive"),
        ("../x.zip::a.png", "not there"),
    ],
)
def test_members_that_are_not_read(archives: Path, said: str, words: str) -> None:
    pictures = Pictures(archives, limits=Limits(size=1_000_000))
    with pytest.raises(RowError, match=words) as caught:
        read(said, None, pictures)
    assert caught.value.reason == "bad_media"
