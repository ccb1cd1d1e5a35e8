"""Draw images of every size, mode, orientation and format, reproducible by seed."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

# format → modes it can be written in
MODES = {
    "JPEG": ("RGB", "L", "CMYK"),
    "PNG": ("RGB", "L", "LA", "RGBA", "P", "1", "I;16"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "P", "1"),
    "TIFF": ("RGB", "L", "CMYK", "I;16", "1", "RGBA"),
    "PPM": ("RGB", "L"),
    "AVIF": ("RGB",),
    "JPEG2000": ("RGB", "L"),
}
ORIENTED = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")  # can contain EXIF


def draw(rng: random.Random, width: int, height: int, mode: str = "RGB") -> Image.Image:
    noise = np.frombuffer(rng.randbytes(width * height * 3), np.uint8).reshape(height, width, 3)
    image = Image.fromarray(noise.copy())
    pen = ImageDraw.Draw(image)
    for _ in range(8):
        ends = [rng.randint(0, max(width, height)) for _ in range(4)]
        colour = tuple(rng.randint(0, 255) for _ in range(3))
        pen.line(ends, fill=colour, width=rng.randint(1, 5))
    pen.text((width // 4, height // 4), f"{width}×{height}", fill=(255, 0, 0))
    if mode == "I;16":
        grey = np.asarray(image.convert("L"), np.uint16)
        return Image.fromarray(grey * 257 // 3)
    if mode in ("LA", "RGBA"):
        image.putalpha(image.convert("L"))
    return image.convert(mode)


def encode(image: Image.Image, form: str, orientation: int = 1) -> bytes:
    if orientation == 1:
        return _saved(image, form)
    exif = Image.Exif()
    exif[0x0112] = orientation
    return _saved(image, form, exif=exif)


def any_image(rng: random.Random, longest: int = 700) -> tuple[bytes, str]:
    form = rng.choice(sorted(form for form in MODES if form in _writable()))
    mode = rng.choice(MODES[form])
    orientation = rng.randint(1, 8) if form in ORIENTED else 1
    width, height = rng.randint(20, longest), rng.randint(20, longest)
    data = encode(draw(rng, width, height, mode), form, orientation)
    return data, f"{form} {mode} {width}×{height} orientation {orientation}"


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def bomb(width: int, height: int, *chunks: bytes) -> bytes:
    """Return a small PNG with a large size in its header, and chunks before its pixels."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = _chunk(b"IDAT", zlib.compress(bytes(100)))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + pixels + _chunk(b"IEND", b"")


def unusual() -> dict[str, bytes]:
    """Return odd and broken files, by a description."""
    rng = random.Random(99)
    image = draw(rng, 141, 83)
    files = {"empty": b"", "no image": b"not an image"}
    for form, modes in MODES.items():
        if form in _writable():
            files.update(
                (f"{form} {mode}", encode(draw(rng, 90, 61, mode), form)) for mode in modes
            )
    for form in ORIENTED:
        if form in _writable():
            for orientation in range(1, 9):
                files[f"{form} turned {orientation}"] = encode(image, form, orientation)
    for form in ("JPEG", "PNG", "WEBP", "GIF", "TIFF"):
        whole = encode(image.convert("P") if form == "GIF" else image, form)
        for quarter in (1, 2, 3):
            files[f"{form} cut at {quarter} of 4"] = whole[: len(whole) * quarter // 4]
        files[f"{form} without its last byte"] = whole[:-1]
        files[f"{form} with more behind it"] = whole + b"more"
    more = [draw(rng, 141, 83) for _ in range(2)]
    for form in ("GIF", "WEBP", "PNG", "TIFF", "MPO"):
        files[f"{form} of three frames"] = _saved(image, form, save_all=True, append_images=more)
    palette = image.quantize(16)
    files["PNG palette with one transparent colour"] = _saved(palette, "PNG", transparency=3)
    files["PNG palette of opacities"] = _saved(
        palette, "PNG", transparency=bytes(range(0, 160, 10))
    )
    files["GIF with a transparent colour"] = _saved(palette, "GIF", transparency=3)
    files["PNG with a transparent colour"] = _saved(image, "PNG", transparency=(1, 2, 3))
    for mode in ("RGB", "L", "CMYK"):
        files[f"JPEG progressive {mode}"] = _saved(image.convert(mode), "JPEG", progressive=True)
    jpeg = encode(image, "JPEG")
    files["JPEG with a profile"] = _saved(image, "JPEG", icc_profile=bytes(70_000))
    files["JPEG with broken EXIF"] = _saved(image, "JPEG", exif=b"Exif\0\0II*\0garbage")
    files["JPEG that ends early"] = jpeg[: len(jpeg) // 2] + b"\xff\xd9"
    frame = jpeg.index(b"\xff\xc0") + 5
    files["JPEG that says it is large"] = jpeg[:frame] + b"\xff\xdc\xff\xdc" + jpeg[frame + 4 :]
    files["JPEG without height"] = jpeg[:frame] + b"\0\0" + jpeg[frame + 2 :]
    files["JPEG of 12 bits"] = jpeg[: frame - 1] + b"\x0c" + jpeg[frame:]
    files["PNG that says it is huge"] = bomb(60_000, 60_000)
    files["PNG that says it is large"] = bomb(10_000, 9_000)
    files["PNG with fewer pixels than it says"] = bomb(3_000, 2_000)
    files["PNG of no width"] = bomb(0, 10)
    text = b"key\0\0" + zlib.compress(bytes(1 << 26), 9)
    files["PNG with a text that unpacks to much"] = bomb(9, 9, _chunk(b"zTXt", text))
    return files


def _saved(image: Image.Image, form: str, **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def _writable() -> set[str]:
    Image.init()
    return set(Image.SAVE)
