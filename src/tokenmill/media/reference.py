"""Parse the image values of a row into references.

A value is a path, ``file://``, a URL, a member of an archive (``shard.tar::b.png``,
``zip://b.png::shard.zip``), bytes, base64, a data URI, or a mapping with one of these (such as a
Parquet image cell). Paths stay as written in the row, so they are valid in another directory too.
"""

from __future__ import annotations

import base64
import binascii
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tokenmill.errors import RowError, hide_secrets, shown

Kind = Literal["file", "member", "url", "inline"]

_KEYS = ("bytes", "url", "image_url", "path", "file", "image", "data")  # of a mapping, in order
_MAGIC = (
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*", b"II+\0",
    b"MM\0+",
    b"\0\0\0\x0cjP", b"\xff\x4f\xff\x51",  # JPEG 2000
    *(bytes([size, 0, 0, 0]) for size in (12, 40, 52, 56, 64, 108, 124)),  # DIB
)  # fmt: skip
_MAGIC_PATTERN = re.compile(rb"P(?:[1-6f]|0CMYK|yP|yRGBA|yCMYK)\s|.{4}ftyp", re.S)  # PPM; AVIF
_BASE64_LENGTH = 64  # characters; no image is smaller, and few file names are that long
_MAX_SHOWN = 120  # characters of a value in a message
_MAX_DEPTH = 4  # mappings in mappings


class Reference(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: Kind
    path: str = ""  # of the file or the archive, as written in the row
    member: str = ""  # of the archive
    url: str = ""
    data: bytes | None = None  # of an inline image; not part of `text`

    @property
    def name(self) -> str:
        if self.kind == "inline":
            return "the image in the row"
        name = shown(self.url) or (f"{self.path}::{self.member}" if self.member else self.path)
        return name if len(name) <= _MAX_SHOWN else f"{name[: _MAX_SHOWN - 1]}…"

    def text(self) -> str:
        """Return JSON without the bytes; `reference_from_text` reads it."""
        without_data = self if self.data is None else msgspec.structs.replace(self, data=None)
        return msgspec.json.encode(without_data).decode()


def reference_from_text(text: str | bytes) -> Reference:
    return msgspec.json.decode(text, type=Reference)


def reference_of(value: Any) -> Reference:
    """Parse an image value; raise `RowError` (``bad_media``) if it is none."""
    return _of(value, 0)


def _of(value: Any, depth: int) -> Reference:
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return Reference("inline", data=bytes(value))
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        for name in _KEYS:
            member = value.get(name)
            if member is None:
                continue
            if name in ("bytes", "data") and isinstance(member, str):
                return Reference("inline", data=_decoded(member))
            return _of(member, depth + 1)
        raise bad_media(f"the image {_shown(value)} has none of the keys {', '.join(_KEYS)}")
    raise bad_media(
        f"an image must be a path, a URL, base64 text or bytes, got {_shown(value)}"
        f" ({type(value).__name__})"
    )


def _of_text(text: str) -> Reference:
    if not text or "\0" in text:
        raise bad_media(f"an image must be a path, a URL or base64 text, got {_shown(text)}")
    scheme = text[:8].lower()
    if scheme.startswith("data:"):
        return Reference("inline", data=_of_data_uri(text))
    if scheme.startswith(("http://", "https://")):
        return Reference("url", url=text)
    if len(text) >= _BASE64_LENGTH and _looks_inline(text):
        return Reference("inline", data=_decoded(text))
    if scheme.startswith("file://"):
        parts = urllib.parse.urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise bad_media(f"{_shown(text)} is a file of another machine; give a local path")
        return Reference("file", path=urllib.parse.unquote(parts.path))
    if scheme.startswith(("zip://", "tar://")):
        member, separator, archive = text[6:].partition("::")
        if not (separator and member and archive):
            raise bad_media(f"{_shown(text)} is incomplete; write zip://MEMBER::ARCHIVE")
        return Reference("member", path=archive, member=member)
    if "://" in text:
        raise bad_media(
            f"{_shown(text)} has an unsupported scheme; give a path, file://, http://, https://,"
            " data:, zip:// or tar://"
        )
    archive, separator, member = text.partition("::")
    if separator:
        if not (archive and member):
            raise bad_media(f"{_shown(text)} is incomplete; write ARCHIVE::MEMBER")
        return Reference("member", path=archive, member=member)
    return Reference("file", path=text)


def _looks_inline(text: str) -> bool:
    """Return whether a text is base64 that begins with the magic bytes of an image format."""
    try:
        start = base64.b64decode(text[:16], validate=True)
    except (binascii.Error, ValueError):
        return False
    is_image = start.startswith(_MAGIC) or _MAGIC_PATTERN.match(start)
    return bool(is_image) and "." not in text[:_BASE64_LENGTH]


def _of_data_uri(text: str) -> bytes:
    head, separator, body = text.partition(",")
    if not separator:
        raise bad_media(f"{_shown(text)} is a data URI without data")
    if head.lower().endswith(";base64"):
        return _decoded(urllib.parse.unquote(body) if "%" in body else body)
    return urllib.parse.unquote_to_bytes(body)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_media(f"{_shown(text)} is not base64 ({error})") from error


def _shown(value: Any) -> str:
    text = hide_secrets(repr(value))
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


class MissingImage(RowError):
    pass


def bad_media(message: str) -> RowError:
    return RowError(message, reason="bad_media")


def missing(message: str) -> MissingImage:
    return MissingImage(message, reason="bad_media")


def require_size(size: int, limit: int, name: str) -> None:
    if size > limit:
        raise bad_media(f"{name} has {size} bytes or more; {limit} are allowed")
    if size == 0:
        raise bad_media(f"{name} is empty")
