"""Pictures that are drawn: every size, mode, orientation and format, the same for one seed."""

from __future__ import annotations

import io
import random
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
ORIENTED = ("JPEG", "PNG", "WEBP", "TIFF", "AVIF")  # can carry EXIF


def draw(rng: random.Random, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture with noise, lines and letters."""
    noise = np.frombuffer(rng.randbytes(width * height * 3), np.uint8).reshape(height, width, 3)
    picture = Image.fromarray(noise.copy())
    pen = ImageDraw.Draw(picture)
    for _ in range(8):
        ends = [rng.randint(0, max(width, height)) for _ in range(4)]
        colour = tuple(rng.randint(0, 255) for _ in range(3))
        pen.line(ends, fill=colour, width=rng.randint(1, 5))
    pen.text((width // 4, height // 4), f"{width}×{height}", fill=(255, 0, 0))
    if mode == "I;16":
        grey = np.asarray(picture.convert("L"), np.uint16)
        return Image.fromarray(grey * 257 // 3)
    if mode in ("LA", "RGBA"):
        picture.putalpha(picture.convert("L"))
    return picture.convert(mode)


def encode(picture: Image.Image, form: str, orientation: int = 1) -> bytes:
    """The bytes of a file."""
    file = io.BytesIO()
    more: dict[str, Any] = {}
    if orientation != 1:
        exif = Image.Exif()
        exif[0x0112] = orientation
        more["exif"] = exif
    picture.save(file, form, **more)
    return file.getvalue()


def any_picture(rng: random.Random, longest: int = 700) -> tuple[bytes, str]:
    """A file of any kind, and what it is called."""
    form = rng.choice(sorted(form for form in MODES if form in _writable()))
    mode = rng.choice(MODES[form])
    orientation = rng.randint(1, 8) if form in ORIENTED else 1
    width, height = rng.randint(20, longest), rng.randint(20, longest)
    data = encode(draw(rng, width, height, mode), form, orientation)
    return data, f"{form} {mode} {width}×{height} orientation {orientation}"


def _writable() -> set[str]:
    Image.init()
    return set(Image.SAVE)
