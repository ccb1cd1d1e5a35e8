"""Find the images of a row and their places in its conversation; nothing here opens an image.

An image is a typed part with its value, or a bare part or ``<image>`` in a text, whose images are
in the column ``images`` or ``image``. Without such a column ``<image>`` is ordinary text. A row
whose images and places differ in number is rejected (media_mismatch).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenmill.chat.calls import IMAGE_PARTS, VIDEO_PARTS, is_media, strings
from tokenmill.chat.spec import ChatSpec
from tokenmill.errors import RowError

PLACEHOLDER = "<image>"
COLUMNS = ("images", "image")  # the first that is not null counts

_ANSWERS = ("chosen", "rejected", "responses", "completions")
_OTHER_COLUMNS = {"videos": "<video>", "audios": "<audio>"}
VALUES = ("image", "image_url", "url", "path", "base64", "bytes", "data", "source")
"""Members of a part that may hold its image, which may be an object with one of `_INNER`."""
_INNER = ("url", "data")

Place = tuple[str | int, ...]  # keys and indices from a row to a value in it


class MediaTokens(NamedTuple):
    """What a processor's template prints for one image, and for one video if it knows videos."""

    image: str
    video: str | None = None


class Picture(NamedTuple):
    value: Any  # a path, a URL, a data URI, base64, bytes, or an object with one of these
    place: Place


class Parts(list[Any]):
    """A content that stays a list of parts, for templates of image models."""


def refuse_pictures(row: Any) -> None:
    """Reject a row whose texts hold placeholders for images of a column.

    Without a processor such a row would be trained as if it had no images.
    """
    if not isinstance(row, dict):
        return
    for name in COLUMNS:
        value = row.get(name)
        if value and not isinstance(value, bool | int | float):
            others = (item for key, item in row.items() if key not in COLUMNS)
            if any(PLACEHOLDER in text for item in others for text in strings(item)):
                raise RowError(
                    f"its texts hold {PLACEHOLDER} for pictures of column {name!r}: prepare rows "
                    "with pictures with processor=",
                    reason="bad_media",
                )


@dataclass(slots=True)
class RowPictures:
    own: dict[int, Picture]  # of parts, by the `id` of the part as `take_pictures` gave it
    column: list[Picture] | None  # of the row's column, where it has one
    name: str  # of the column

    def __bool__(self) -> bool:
        return bool(self.own) or self.column is not None

    def place(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[int, Any]]:
        """Return the messages with a part for every image, and the images by `id` of the part."""
        parts = list(image_parts(messages))
        if not parts and self.column is not None:
            messages = [_split(message) for message in messages]
            parts = list(image_parts(messages))
        bare = [part for part in parts if id(part) not in self.own]
        column = self.column or []
        if len(bare) != len(column):
            raise _mismatch(len(column), self.name, len(bare))
        placed = {id(part): self.own[id(part)] for part in parts if id(part) in self.own}
        placed.update((id(part), one) for part, one in zip(bare, column, strict=True))
        return messages, placed

    def replace_in(self, texts: Iterable[str], token: str) -> tuple[list[str], list[Picture]]:
        """Return texts that no template renders, with the processor's token for every image."""
        column = self.column or []
        made = list(texts)
        if self.column is not None:
            made = [text.replace(PLACEHOLDER, token) for text in made]
        places = sum(text.count(token) for text in made)
        if places != len(column):
            raise _mismatch(len(column), self.name, places)
        return made, column


def _mismatch(pictures: int, column: str, places: int) -> RowError:
    told = f"{pictures} pictures in {column!r}" if pictures else "no picture in a column"
    return RowError(
        f"{told}, and {places} places for them ({PLACEHOLDER} or parts without a picture)",
        reason="media_mismatch",
    )


def image_parts(messages: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield the parts of messages that stand for images, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and part.get("type") == "image":
                    yield part


def refuse_tokens(texts: list[Any], tokens: MediaTokens, *, placeholders: RowPictures) -> None:
    """Reject a row whose own texts hold a token that stands for media.

    Where the token is the placeholder, as LLaVA's is, rows with a column of images may hold it.
    """
    mine = placeholders.column is not None and PLACEHOLDER
    for text in strings(texts):
        for token in tokens:
            if token is not None and token != mine and token in text:
                raise RowError(
                    f"a text of the row holds {token!r}, which stands for media in this model",
                    reason="media_mismatch",
                )


def take_pictures(
    row: dict[str, Any], spec: ChatSpec, tokens: MediaTokens
) -> tuple[dict[str, Any], RowPictures]:
    """Return a row with every image as a bare part, and its images."""
    taker = _Taker(tokens)
    columns = (*spec.message_columns, spec.prompt_key, spec.completion_key, *_ANSWERS)
    rewritten = {
        name: taker.rewrite(row[name], (name,))
        for name in dict.fromkeys(columns)
        if isinstance(row.get(name), list | dict)
    }
    for name, placeholder in _OTHER_COLUMNS.items():
        if row.get(name) and any(placeholder in text for text in strings(list(row.values()))):
            raise _not_a_picture(name.removesuffix("s"), row[name])
    column, pictures = COLUMNS[0], None
    for column in COLUMNS:
        value = row.get(column)
        if isinstance(value, list):
            pictures = [Picture(item, (column, number)) for number, item in enumerate(value)]
        elif value is not None:
            pictures = [Picture(value, (column,))]
        if pictures is not None:
            break
    return {**row, **rewritten}, RowPictures(taker.own, pictures, column)


class _Taker:
    def __init__(self, tokens: MediaTokens) -> None:
        self._tokens = tokens
        self.own: dict[int, Picture] = {}

    def rewrite(self, value: Any, place: Place) -> Any:
        """Rewrite a message, messages, or lists of them; anything else stays."""
        if isinstance(value, list):
            return [self.rewrite(item, (*place, number)) for number, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        for name in ("content", "value"):
            if name not in value:
                continue
            content = value[name]
            if isinstance(content, dict) and content.get("type"):
                content = [content]
            if isinstance(content, list):
                return {**value, name: self._parts(content, (*place, name))}
        return value

    def _parts(self, parts: list[Any], place: Place) -> Parts:
        made = Parts()
        for number, part in enumerate(parts):
            if isinstance(part, dict) and is_media(part):
                made += self._media(part, (*place, number))
            else:
                made.append(part)
        return made

    def _media(self, part: dict[str, Any], place: Place) -> list[dict[str, Any]]:
        kind = part.get("type") or "image"
        if kind in IMAGE_PARTS:
            return [self._bare(_own_picture(part, place))]
        frames = part.get("video")
        if kind in VIDEO_PARTS and isinstance(frames, list) and self._tokens.video is None:
            return [
                self._bare(Picture(frame, (*place, "video", number)))
                for number, frame in enumerate(frames)
            ]
        raise _not_a_picture(kind, next((part[n] for n in (*VALUES, kind) if part.get(n)), frames))

    def _bare(self, picture: Picture | None) -> dict[str, Any]:
        part = {"type": "image"}
        if picture is not None:
            self.own[id(part)] = picture
        return part


def _own_picture(part: dict[str, Any], place: Place) -> Picture | None:
    for name in VALUES:
        value = part.get(name)
        if value is None:
            continue
        if isinstance(value, dict):
            for inner in _INNER:
                if isinstance(value.get(inner), str | bytes):
                    return Picture(value[inner], (*place, name, inner))
        return Picture(value, (*place, name))
    return None


def _not_a_picture(kind: str, value: Any) -> RowError:
    told = f" ({value!r:.60})" if isinstance(value, str) else ""
    if "video" in kind:
        return RowError(
            f"a video{told}: frames of videos are not chosen here; give them as image parts",
            reason="bad_media",
        )
    return RowError(f"a part of type {kind!r}{told}: sounds are not prepared", reason="bad_media")


def _split(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if isinstance(content, str):
        return message if PLACEHOLDER not in content else {**message, "content": _pieces(content)}
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        parts += _pieces(text) if isinstance(text, str) and PLACEHOLDER in text else [part]
    return {**message, "content": parts}


def _pieces(text: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        if number:
            parts.append({"type": "image"})
        if piece:
            parts.append({"type": "text", "text": piece})
    return parts
