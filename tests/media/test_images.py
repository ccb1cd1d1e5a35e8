"""Images are read exactly as transformers loads them, or rejected with their name."""

from __future__ import annotations

import base64
import contextlib
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

from tests.media.drawing import MODES, ORIENTED, any_image, bomb, draw, encode
from tokenmill.errors import RowError, UsageError
from tokenmill.media import Images, Limits, Reference, reference_from_text, reference_of
from tokenmill.media.images import FORMATS, _formats, _is_complete, _plain_jpeg

IMAGES = Images()


def reference(data: bytes) -> Image.Image:
    from transformers.image_utils import load_image

    return load_image(base64.b64encode(data).decode())


def require_as_the_reference(data: bytes, what: str) -> None:
    expected = np.asarray(reference(data))
    facts = IMAGES.facts(data)
    assert (facts.height, facts.width) == expected.shape[:2], what
    opened = IMAGES.open(data)
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
    facts = IMAGES.facts(data)
    assert facts.width == (23 if orientation >= 5 else 41)
    with Image.open(io.BytesIO(data)) as image:
        image.load()  # Pillow itself turns TIFF files
        assert facts.stored_size == image.size


@pytest.mark.soak
def test_two_thousand_files_of_any_kind() -> None:
    rng = random.Random(2000)
    for _ in range(2000):
        require_as_the_reference(*any_image(rng, longest=300))


def test_orientation_outside_the_header() -> None:
    """In XMP, and in a PNG after the pixels."""
    image = draw(random.Random(1), 41, 23)
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    file = io.BytesIO()
    image.save(file, "JPEG", xmp=xmp)
    require_as_the_reference(file.getvalue(), "xmp")
    assert IMAGES.facts(file.getvalue()).width == 23

    plain = encode(image, "PNG")
    oriented = encode(image, "PNG", 6)
    at = oriented.index(b"eXIf") - 4
    length = struct.unpack_from(">I", oriented, at)[0] + 12
    end = plain.index(b"IEND") - 4
    late = plain[:end] + oriented[at : at + length] + plain[end:]
    require_as_the_reference(late, "eXIf after IDAT")
    assert IMAGES.facts(late).width == 23


def test_complete_files_are_recognized_without_decoding() -> None:
    image = draw(random.Random(3), 64, 48)
    for form, complete in (("JPEG", True), ("PNG", True), ("WEBP", True), ("GIF", False)):
        data = encode(image, form)
        assert _is_complete(data, Image.open(io.BytesIO(data))) is complete
    data = encode(image, "JPEG", 6)
    thumbnail_end = data.index(b"\xff\xda")  # cut so that it ends like an image, before the scan
    assert not _is_complete(data[:thumbnail_end] + b"\xff\xd9", Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("form", [form for form in MODES if form in _formats()])
def test_a_truncated_image_is_rejected_or_exact(form: str) -> None:
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
                IMAGES.facts(short, "p.bin")
            assert caught.value.reason == "bad_media"
            assert "p.bin" in caught.value.message
            refused += 1
        else:
            assert (IMAGES.facts(short).height, IMAGES.facts(short).width) == expected.shape[:2]
    assert refused > len(cuts) // 2


def test_plain_jpegs_are_read_as_pillow_reads_them() -> None:
    """Also with random changes of the bytes before the pixels."""
    rng = random.Random(11)
    read = 0
    for number in range(1500):
        mode = rng.choice(("RGB", "RGB", "L", "CMYK"))
        data = bytearray(plain_jpeg(mode, rng.randint(1, 40), 23, progressive=number % 3 == 0))
        scan = data.index(b"\xff\xda") + 14
        for _ in range(number % 4):
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
    image = draw(random.Random(width), width, height, mode)
    image.save(file, "JPEG", comment=b"comment", **more)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"not an image", "is not an image"),
        (b"", "is not an image"),
        (bomb(60_000, 60_000), "too large"),
        (bomb(10_000, 9_000), "pixels"),
        (bomb(0, 10), "PNG|pixels|decoded|format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not an image"),
        (encode(draw(random.Random(0), 9, 9), "PNG").replace(b"IHDR", b"IHDX"), "decoded|format"),
    ],
)
def test_hostile_bytes_are_rejected_with_their_name(data: bytes, words: str) -> None:
    for look in (IMAGES.facts, IMAGES.open):
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
        assert IMAGES.facts(file.getvalue()).animated


def test_facts() -> None:
    data = encode(draw(random.Random(5), 30, 20, "CMYK"), "JPEG")
    facts = IMAGES.facts(data)
    assert (facts.width, facts.height, facts.format, facts.mode) == (30, 20, "JPEG", "CMYK")
    assert (facts.size, facts.animated) == (len(data), False)
    other = IMAGES.facts(data + b"\0")
    assert other.digest != facts.digest


# References


DATA = encode(draw(random.Random(7), 12, 8), "PNG")
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    ("value", "reference"),
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
def test_reference_of(value: object, reference: Reference) -> None:
    parsed = reference_of(value)
    assert parsed == reference
    stored = reference_from_text(parsed.text())
    assert stored.data is None
    assert (stored.kind, stored.path, stored.member, stored.url) == (
        parsed.kind, parsed.path, parsed.member, parsed.url,
    )  # fmt: skip
    assert len(parsed.text()) < 200


@pytest.mark.parametrize("form", FORMATS)
def test_base64_of_every_format_is_an_image_in_the_row(form: str) -> None:
    if form not in _formats():
        pytest.skip(f"this Pillow cannot write {form}")
    data = encode(draw(random.Random(7), 12, 8), form)
    for value in (data, base64.b64encode(data).decode(), base64.encodebytes(data).decode()):
        assert reference_of(value) == Reference("inline", data=data)


@pytest.mark.parametrize("start", [b"P5\n# made", b"P3 12 8", b"\xff\x4f\xff\x51", b"MM\0+"])
def test_base64_of_other_headers_is_an_image_in_the_row(start: bytes) -> None:
    data = start + bytes(60)
    assert reference_of(base64.b64encode(data).decode()) == Reference("inline", data=data)


@pytest.mark.parametrize(
    "value",
    ["", 7, None, [], {}, {"type": "image"}, "s3://b/p.png", "file://host/p.png", "zip://p.png",
     "::p.png", "data:image/png;base64", "data:image/png;base64,%%%", {"bytes": "no, base64!"},
     "a\0b", {"image": {"image": {"image": {"image": {"image": "x"}}}}}],
)  # fmt: skip
def test_values_that_are_no_image_are_rejected(value: object) -> None:
    with pytest.raises(RowError) as caught:
        reference_of(value)
    assert caught.value.reason == "bad_media"


# Allowed files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    inside, outside = tmp_path / "root", tmp_path / "outside"
    (inside / "art").mkdir(parents=True)
    outside.mkdir()
    (inside / "art" / "a.png").write_bytes(DATA)
    (outside / "b.png").write_bytes(DATA)
    (inside / "link.png").symlink_to(inside / "art" / "a.png")
    (inside / "linked.png").symlink_to(outside / "b.png")
    (inside / "linked").symlink_to(outside)
    (inside / "empty.png").write_bytes(b"")
    (inside / "large.png").write_bytes(bytes(2000))
    os.mkfifo(inside / "pipe.png")
    return inside


def read(value: object, base: Path | None = None, images: Images = IMAGES) -> bytes:
    return images.read(reference_of(value), base)


def test_files_below_the_root(root: Path) -> None:
    rooted = Images(root)
    for images, base in ((IMAGES, root), (rooted, None), (rooted, Path("/nowhere"))):
        assert read("art/a.png", base, images) == DATA
        assert read("./art/../art/a.png", base, images) == DATA
        assert read("link.png", base, images) == DATA
        assert read(str(root / "art" / "a.png"), base, images) == DATA
    two = Images([root / "art", root.parent / "outside"])
    assert read("b.png", None, two) == read("a.png", None, two) == DATA
    assert read(str(root.parent / "outside" / "b.png"), None, Images([root, "/"])) == DATA


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("../outside/b.png", "outside of"),
        ("linked.png", "outside of"),
        ("linked/b.png", "outside of"),
        ("/etc/hostname", "outside of"),
        ("file:///etc/hostname", "outside of"),
        ("missing.png", "does not exist"),
        ("art", "not a file"),
        ("art/a.png/b", "does not exist"),
        ("pipe.png", "not a file"),
        ("empty.png", "empty"),
        ("clip.mp4", "frames"),
        ("x" * 300, "cannot be opened"),
        ("https://example.com/p.png", "URLs are not allowed"),
    ],
)
def test_files_that_are_not_read(root: Path, value: str, words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        read(value, root)
    assert caught.value.reason == "bad_media"
    assert value[:100].removeprefix("file://") in caught.value.message


def test_limits(root: Path) -> None:
    small = Images(limits=Limits(size=1000, pixels=50))
    with pytest.raises(RowError, match="2000 bytes"):
        read("large.png", root, small)
    with pytest.raises(RowError, match="1000 are allowed"):
        read(bytes(1001), None, small)
    with pytest.raises(RowError, match="12×8 pixels; 50 are allowed"):
        small.facts(DATA, "a.png")
    with pytest.raises(RowError, match="no file to be relative to"):
        read("a.png")
    with pytest.raises(UsageError, match="must be a directory"):
        Images(root / "art" / "a.png")


def test_pickle(root: Path) -> None:
    images = Images(root, urls=True, limits=Limits(size=1000))
    read("art/a.png", None, images)
    copy = pickle.loads(pickle.dumps(images))
    assert (copy.roots, copy.urls, copy.limits) == ((root,), True, Limits(size=1000))
    assert pickle.loads(pickle.dumps(IMAGES)).roots == ()


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
    images = Images(archives, limits=Limits(size=1_000_000))
    for _ in range(2):  # the second time from the cached directory
        assert read("p.zip::in/a.png", None, images) == DATA
        assert read("p.tar::in/a.png", None, images) == DATA
        assert read("zip://in/a.png::p.zip", None, images) == DATA
    with zipfile.ZipFile(archives / "p.zip", "w") as archive:  # another one under that name
        archive.writestr("in/a.png", b"other")
    assert read("p.zip::in/a.png", None, images) == b"other"


@pytest.mark.parametrize(
    ("value", "words"),
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
        ("cut.tar::in/a.png", "unpacked|truncated|not in the archive"),
        ("../x.zip::a.png", "does not exist"),
    ],
)
def test_members_that_are_not_read(archives: Path, value: str, words: str) -> None:
    images = Images(archives, limits=Limits(size=1_000_000))
    with pytest.raises(RowError, match=words) as caught:
        read(value, None, images)
    assert caught.value.reason == "bad_media"


def tar_header(kind: bytes, size: int, name: bytes = b"a.png") -> bytes:
    """Return the header of an entry; a size that octal digits cannot express is in base 256."""
    field = b"%011o\0" % size if 0 <= size < 8**11 else size.to_bytes(12, "big", signed=True)
    if not field[:1].isdigit():
        field = bytes([field[0] | 0x80]) + field[1:]
    head = bytearray(name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + field)
    head += b"00000000000\0" + b" " * 8 + kind
    head += bytes(100) + b"ustar\00000" + bytes(512 - len(head) - 108)
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


SIZES = [-(2**70), -(2**63), -1536, -1024, -512, -1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**70]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [b"0", b"5", b"L", b"K", b"x", b"g", b"S", b"7"])
def test_tar_entry_with_a_wrong_size_rejects_the_row(
    tmp_path: Path, kind: bytes, size: int
) -> None:
    good = tar_header(b"0", 512, b"good.png") + bytes(512)
    (tmp_path / "p.tar").write_bytes(good + tar_header(kind, size) + good * 2)
    assert_rejected(tmp_path, "p.tar::none.png")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("size", SIZES)
def test_tar_entry_with_a_wrong_size_in_its_attributes(tmp_path: Path, size: int) -> None:
    record = f" size={size}\n"
    record = f"{len(record) + 2}{record}"
    attributes = tar_header(b"x", len(record)) + record.encode().ljust(512, b"\0")
    good = tar_header(b"0", 512, b"good.png") + bytes(512)
    (tmp_path / "p.tar").write_bytes(good + attributes + good * 2)
    assert_rejected(tmp_path, "p.tar::none.png")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_damaged_archives_reject_the_row(tmp_path: Path, kind: str) -> None:
    """Random bytes of small archives are replaced."""
    for seed in range(600):
        random_ = random.Random(seed)
        name = tmp_path / f"{seed}.{kind}"
        if kind == "zip":
            with zipfile.ZipFile(name, "w", random_.choice([0, 8])) as archive:
                archive.writestr("a.png", DATA)
        else:
            with tarfile.open(name, "w", format=random_.choice([1, 2])) as archive:
                entry = tarfile.TarInfo("é" * 120 + ".png" if seed % 3 else "a.png")
                entry.size = len(DATA)
                archive.addfile(entry, io.BytesIO(DATA))
        data = bytearray(name.read_bytes())
        for _ in range(random_.randint(1, 6)):
            tail = kind == "zip" and random_.random() < 0.7
            at = random_.randrange(len(data) - 80, len(data)) if tail else random_.randrange(600)
            data[min(at, len(data) - 1)] = random_.choice([0, 0x80, 0xFF, random_.randrange(256)])
        name.write_bytes(data)
        with contextlib.suppress(RowError):
            read(f"{seed}.{kind}::a.png", None, Images(tmp_path))
        name.unlink()


def assert_rejected(root: Path, value: str) -> None:
    with pytest.raises(RowError) as caught:
        read(value, None, Images(root))
    assert caught.value.reason == "bad_media"
