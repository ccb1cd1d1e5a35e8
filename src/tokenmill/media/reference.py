"""Parse what a row says of an image.

A `Reference` names files as the row does, so it stays valid in another directory. A row gives a
path, ``file://``, a URL, a member of an archive (``shard.tar::b.png``, ``zip://b.png::shard.zip``),
bytes, base64, a data URI, or a mapping that holds one of these (such as a Parquet image cell).
"""

from __future__ import annotations

import base64
import binascii
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from tokenmill.errors import RowError

Kind = Literal["file", "member", "url", "inline"]

_MEMBERS = ("bytes", "url", "image_url", "path", "file", "image", "data")  # of a mapping, in order
_MAGIC = (
    b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*",
)  # fmt: skip
_BASE64_LENGTH = 64  # characters; no picture is smaller, and few file names are that long
_SHOWN = 120  # characters of what a row says, in a message
_DEPTH = 4  # mappings in mappings


class Reference(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the bytes of an image are."""

    kind: Kind
    path: str = ""  # the file, or the archive, as the row names it
    member: str = ""  # of the archive
    url: str = ""
    data: bytes | None = None  # of an inline image; not part of `text`

    @property
    def name(self) -> str:
        if self.kind == "inline":
            return "the picture in the row"
        shown = self.url or (f"{self.path}::{self.member}" if self.member else self.path)
        return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"

    def text(self) -> str:
        """A small JSON text; `reference_from_text` reads it."""
        bare = self if self.data is None else msgspec.structs.replace(self, data=None)
        return msgspec.json.encode(bare).decode()


def reference_from_text(text: str | bytes) -> Reference:
    """The reference that `Reference.text` wrote, an inline one without its bytes."""
    return msgspec.json.decode(text, type=Reference)


def reference_of(value: Any) -> Reference:
    """Parse what a row says of an image; RowError (``bad_media``) when it names none."""
    return _of(value, 0)


def _of(value: Any, depth: int) -> Reference:
    if isinstance(value, str):
        return _of_text(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return Reference("inline", data=bytes(value))
    if isinstance(value, Mapping) and depth < _DEPTH:
        for name in _MEMBERS:
            said = value.get(name)
            if said is None:
                continue
            if name in ("bytes", "data") and isinstance(said, str):
                return Reference("inline", data=_decoded(said))
            return _of(said, depth + 1)
        raise bad_media(f"a picture is given as {_shown(value)}, which names none")
    raise bad_media(
        f"a picture is given as {_shown(value)}, a {type(value).__name__}; give a path, an"
        " address, base64 text or bytes"
    )


def _of_text(text: str) -> Reference:
    if not text or "\0" in text:
        raise bad_media(f"a picture is given as {_shown(text)}, which names none")
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
            raise bad_media(f"{_shown(text)} names a file of another machine")
        return Reference("file", path=urllib.parse.unquote(parts.path))
    if scheme.startswith(("zip://", "tar://")):
        member, found, archive = text[6:].partition("::")
        if not (found and member and archive):
            raise bad_media(f"{_shown(text)} names no member of an archive: zip://MEMBER::ARCHIVE")
        return Reference("member", path=archive, member=member)
    if "://" in text:
        raise bad_media(
            f"{_shown(text)} cannot be opened: give a path, file://, http://, https://, data:,"
            " zip:// or tar://"
        )
    archive, found, member = text.partition("::")
    if found:
        if not (archive and member):
            raise bad_media(f"{_shown(text)} names no member of an archive: ARCHIVE::MEMBER")
        return Reference("member", path=archive, member=member)
    return Reference("file", path=text)


def _looks_inline(text: str) -> bool:
    """Whether a text is an image in base64: it begins with the magic bytes of a format."""
    try:
        start = base64.b64decode(text[:16], validate=True)
    except (binascii.Error, ValueError):
        return False
    return start.startswith(_MAGIC) and "." not in text[:_BASE64_LENGTH]


def _of_data_uri(text: str) -> bytes:
    head, found, body = text.partition(",")
    if not found:
        raise bad_media(f"{_shown(text)} is a data URI without data")
    if head.lower().endswith(";base64"):
        return _decoded(urllib.parse.unquote(body) if "%" in body else body)
    return urllib.parse.unquote_to_bytes(body)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_media(f"{_shown(text)} is no base64 text ({error})") from error


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 1]}…"


class MissingPicture(RowError):
    pass


def bad_media(message: str) -> RowError:
    return RowError(message, reason="bad_media")


def missing(message: str) -> MissingPicture:
    return MissingPicture(message, reason="bad_media")


def require_size(found: int, most: int, name: str) -> None:
    if found > most:
        raise bad_media(f"{name} has {found} bytes or more; {most} are allowed")
    if found == 0:
        raise bad_media(f"{name} is empty")
