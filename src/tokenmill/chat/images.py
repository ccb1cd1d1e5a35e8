"""Find the images of a row and their positions in its conversation, without opening them.

A message contains an image as a typed part with a value, or as a placeholder: a part without a
value or ``<image>`` in a text. The images of placeholders are in the column ``images`` or
``image``, where null is an empty list; without such a column ``<image>`` is ordinary text. A row
whose numbers of images and placeholders differ is rejected (media_mismatch).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenmill.chat.calls import IMAGE_PARTS, VIDEO_PARTS, is_media, strings
from tokenmill.chat.spec import ChatSpec
from tokenmill.errors import RowError

PLACEHOLDER = "<image>"

_RANKED = ("responses", "completions")
_OTHER_COLUMNS = {"videos": "<video>", "audios": "<audio>"}
VALUES = ("image", "image_url", "url", "path", "base64", "bytes", "data", "source")
"""Keys of a part that may contain its image, which may be an object with one of `_INNER`."""
_INNER = ("url", "data")

Place = tuple[str | int, ...]  # keys and indices from a row to a value in it


class MediaTokens(NamedTuple):
    """The tokens that a processor's template prints for one image and one video."""

    image: str
    video: str | None = None  # if the processor supports videos


class Image(NamedTuple):
    value: Any  # a path, a URL, a data URI, base64, bytes, or an object with one of these
    place: Place


class Parts(list[Any]):
    """Content that stays a list of parts, for templates of image models."""


def reject_images(row: Any, spec: ChatSpec) -> None:
    """Reject a row whose texts contain placeholders for images of a column.

    Without a processor such a row would be trained as if it had no images.
    """
    if not isinstance(row, dict):
        return
    columns = spec.image_columns
    for name in columns:
        value = row.get(name)
        if value and not isinstance(value, bool | int | float):
            others = (item for key, item in row.items() if key not in columns)
            if any(PLACEHOLDER in text for item in others for text in strings(item)):
                raise RowError(
                    f"its texts contain {PLACEHOLDER} for images of column {name!r}; a processor"
                    " is required for rows with images",
                    reason="bad_media",
                )


@dataclass(slots=True)
class RowImages:
    own: dict[int, Image]  # of parts, by the `id` of the part that `take_images` returned
    column: list[Image] | None  # of the row's column, if it has one
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

    def replace_in(self, texts: Iterable[str], token: str) -> tuple[list[str], list[Image]]:
        """Replace placeholders in plain texts by the processor's token; return texts and images."""
        column = self.column or []
        replaced = list(texts)
        if self.column is not None:
            replaced = [text.replace(PLACEHOLDER, token) for text in replaced]
        places = sum(text.count(token) for text in replaced)
        if places != len(column):
            raise _mismatch(len(column), self.name, places)
        return replaced, column


def _mismatch(images: int, column: str, places: int) -> RowError:
    detail = f"{images} images in {column!r}" if images else "no image in a column"
    return RowError(
        f"{detail}, and {places} placeholders ({PLACEHOLDER} or parts without an image)",
        reason="media_mismatch",
    )


def image_parts(messages: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Yield the image parts of messages, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and part.get("type") == "image":
                    yield part


def reject_tokens(texts: list[Any], tokens: MediaTokens, *, placeholders: RowImages) -> None:
    """Reject a row whose own texts contain a media token.

    If the token is the placeholder, as in LLaVA, rows with a column of images may contain it.
    """
    allowed = placeholders.column is not None and PLACEHOLDER
    for text in strings(texts):
        for token in tokens:
            if token is not None and token != allowed and token in text:
                raise RowError(
                    f"a text of the row contains {token!r}, which represents media in this model",
                    reason="media_mismatch",
                )


def restore_null_images(rows: Iterable[Any], columns: Iterable[str], spec: ChatSpec) -> None:
    """Add the image columns of a table to its rows; reading a table drops nulls."""
    names = set(columns).intersection(spec.image_columns)
    for row in rows if names else ():
        if isinstance(row, dict):
            row.update({name: None for name in names if name not in row})


def take_images(
    row: dict[str, Any], spec: ChatSpec, tokens: MediaTokens
) -> tuple[dict[str, Any], RowImages]:
    """Return a row in which image parts have no value, and its images."""
    taker = _Taker(tokens)
    roles = ("prompt", "completion", "chosen", "rejected")
    columns = (*spec.message_columns, *(spec.column_of[role] for role in roles), *_RANKED)
    rewritten = {
        name: taker.rewrite(row[name], (name,))
        for name in dict.fromkeys(columns)
        if isinstance(row.get(name), list | dict)
    }
    for name, placeholder in _OTHER_COLUMNS.items():
        if row.get(name) and any(placeholder in text for text in strings(list(row.values()))):
            raise _not_an_image(name.removesuffix("s"), row[name])
    column, images = "images", None
    columns = spec.image_columns
    for column in columns:
        value = row.get(column)
        if isinstance(value, list):
            images = [Image(item, (column, number)) for number, item in enumerate(value)]
        elif value is not None:
            images = [Image(value, (column,))]
        if images is not None:
            break
    if images is None and any(name in row for name in columns):
        images = []  # a null column has no images, as an empty list
    return {**row, **rewritten}, RowImages(taker.own, images, column)


class _Taker:
    def __init__(self, tokens: MediaTokens) -> None:
        self._tokens = tokens
        self.own: dict[int, Image] = {}

    def rewrite(self, value: Any, place: Place) -> Any:
        """Rewrite a message, messages, or lists of them; return other values unchanged."""
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
        result = Parts()
        for number, part in enumerate(parts):
            if isinstance(part, dict) and is_media(part):
                result += self._media(part, (*place, number))
            else:
                result.append(part)
        return result

    def _media(self, part: dict[str, Any], place: Place) -> list[dict[str, Any]]:
        kind = part.get("type") or "image"
        if kind in IMAGE_PARTS:
            return [self._bare(_own_image(part, place))]
        frames = part.get("video")
        if kind in VIDEO_PARTS and isinstance(frames, list) and self._tokens.video is None:
            return [
                self._bare(Image(frame, (*place, "video", number)))
                for number, frame in enumerate(frames)
            ]
        raise _not_an_image(kind, next((part[n] for n in (*VALUES, kind) if part.get(n)), frames))

    def _bare(self, image: Image | None) -> dict[str, Any]:
        part = {"type": "image"}
        if image is not None:
            self.own[id(part)] = image
        return part


def _own_image(part: dict[str, Any], place: Place) -> Image | None:
    for name in VALUES:
        value = part.get(name)
        if value is None:
            continue
        if isinstance(value, dict):
            for inner in _INNER:
                if isinstance(value.get(inner), str | bytes):
                    return Image(value[inner], (*place, name, inner))
        return Image(value, (*place, name))
    return None


def _not_an_image(kind: str, value: Any) -> RowError:
    detail = f" ({value!r:.60})" if isinstance(value, str) else ""
    if "video" in kind:
        return RowError(
            f"a video{detail}: videos are not supported; give its frames as image parts",
            reason="bad_media",
        )
    return RowError(f"a part of type {kind!r}{detail}: audio is not supported", reason="bad_media")


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
