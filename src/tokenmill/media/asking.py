"""Find out what a processor makes of images of certain sizes, and keep the answers.

The processor runs on a text of image tokens between marks, and is stopped where it passes the text
to its tokenizer: the text between the marks are the expansions. It gets *hollow* images, without
pixels (`tokenmill.media.hollow`), where these and *blank* (black) ones gave the same answers to
`BATTERY` and the row raises nothing; else blank ones, which take as long as the processor does.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenmill._core import fingerprint
from tokenmill._core.optional import optional, transformers_muted
from tokenmill._core.sealed import SealedKind
from tokenmill.errors import CacheError, UsageError
from tokenmill.media.hollow import WithoutPixels, hollow_pictures, hollowed

Size = tuple[int, int]  # width, height
Row = tuple[Size, ...]  # the pictures of a row, in order

BATTERY: tuple[Row, ...] = (  # rows whose answers are part of a processor's identity
    ((97, 61),), ((640, 480),), ((333, 1000),), ((1280, 960),), ((1400, 40),),
    ((97, 61), (640, 480)),
)  # fmt: skip

_MARK = "\ue0f1\ue0f2"  # private characters, which no expansion contains
_MEMO = SealedKind("memo", "", raw=True)
_MAX_CHARS = 1 << 28  # of an answer, whatever a damaged file says


class Answer(msgspec.Struct, frozen=True):
    """What a processor makes of one image."""

    text: str  # its expansion
    grid: tuple[int, ...] | None = None  # frames, rows and columns of patches, if the model uses it


class Answers(msgspec.Struct, frozen=True):
    """What a processor makes of the images of a row."""

    pictures: tuple[Answer, ...] = ()
    patches: int = 0  # of the row for the vision model: patches where there are grids, else tiles
    refused: str | None = None  # the processor's error, if it raises one for such a row

    @property
    def weight(self) -> int:
        return 200 + sum(len(answer.text) + 100 for answer in self.pictures)


class _Handed(Exception):
    """The text has reached the tokenizer."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text


class _Listener:
    """Replaces the tokenizer, and stops the processor when it is called."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        raise _Handed(text)


class _Watched:
    """Wraps the image processor, and keeps its result."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor
        self.made: Any = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._image_processor, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.made = self._image_processor(*args, **kwargs)
        return self.made


class Asking:
    def __init__(self, processor: Any, token: str, options: dict[str, Any]) -> None:
        self._processor = processor
        self._token = token
        self._options = options
        self._hollow = hollowed(processor.image_processor)
        self._without_pixels = WithoutPixels(processor.image_processor)

    def with_blanks(self, row: Row) -> Answers:
        with optional("PIL", "asking a processor"):
            from PIL import Image

        return self.with_pictures(row, [Image.new("RGB", size) for size in row])

    def with_pictures(self, row: Row, pictures: list[Any]) -> Answers:
        try:
            with transformers_muted():
                return self._ask(row, pictures, self._processor.image_processor)
        except (UsageError, MemoryError):
            raise
        except Exception as error:
            return Answers(refused=str(error) or type(error).__name__)

    def hollow(self, row: Row) -> Answers | None:
        """The answer for images without pixels; None where it cannot be computed."""
        if self._hollow is None:
            return None
        try:
            with self._without_pixels():
                return self._ask(row, hollow_pictures(row), self._hollow)
        except MemoryError:
            raise
        except Exception:  # the caller runs it with real pixels
            return None

    def _ask(self, row: Row, pictures: list[Any], image_processor: Any) -> Answers:
        twin = copy.copy(self._processor)
        twin.tokenizer = _Listener(self._processor.tokenizer)
        twin.image_processor = watched = _Watched(image_processor)
        text = _MARK + "".join(self._token + _MARK for _ in row)
        try:
            twin(text=[text], images=[pictures], **self._options)
        except _Handed as handed:
            expansions = self._expansions(handed.text, len(row))
        else:
            raise self._unknown_way("it calls no tokenizer")
        made = watched.made
        grids = made.get("image_grid_thw")
        if grids is None:
            return Answers(tuple(map(Answer, expansions)), _tiles(made.get("pixel_values")))
        shapes = [tuple(int(side) for side in grid) for grid in grids]
        return Answers(
            tuple(map(Answer, expansions, shapes)), sum(math.prod(shape) for shape in shapes)
        )

    def _expansions(self, handed: Any, count: int) -> list[str]:
        text = handed[0] if isinstance(handed, list | tuple) and len(handed) == 1 else handed
        if not isinstance(text, str):
            raise self._unknown_way(f"its tokenizer is given a {type(text).__name__}")
        parts = text.split(_MARK)
        if len(parts) != count + 2 or parts[0] or parts[-1]:
            raise self._unknown_way("the text around a picture changes")
        return parts[1:-1]

    def _unknown_way(self, how: str) -> UsageError:
        return UsageError(
            f"{type(self._processor).__name__} does not expand its image token in the text that it"
            f" encodes ({how}), so what it would give cannot be known without running it"
        )


def _tiles(pixels: Any) -> int:
    """The number of images of one size that the vision model is given for a row."""
    if isinstance(pixels, list | tuple):
        return sum(_tiles(one) for one in pixels)
    return math.prod(pixels.shape[:-3]) if hasattr(pixels, "shape") else 0


class Battery(msgspec.Struct, frozen=True):
    answers: tuple[Answers, ...]
    hollow: bool


Kept = TypeVar("Kept", Battery, Answers)


class Memory:
    """The answers of one processor in a cache directory; None keeps nothing.

    One file for the battery, and one for each row of sizes that needed blank images. ``question``
    names the processor by its class, code, configuration and options.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None, question: str) -> None:
        self._root = None if cache_dir is None else Path(cache_dir)
        self._directory = Path(cache_dir or "") / "processors" / "answers" / question

    def recall(self, row: Row | None, kind: type[Kept]) -> Kept | None:
        """The answers to a row, or to the battery (None)."""
        if self._root is None:
            return None
        with contextlib.suppress(CacheError, zlib.error, msgspec.DecodeError):
            data = _MEMO.admit_or_none(self._directory / _name(row), self._root)
            if data is not None:
                text = zlib.decompressobj().decompress(data, _MAX_CHARS)
                return msgspec.json.decode(text, type=kind)
        return None

    def remember(self, row: Row | None, value: Answers | Battery) -> None:
        if self._root is not None:
            data = zlib.compress(msgspec.json.encode(value), 1)
            with contextlib.suppress(CacheError):
                _MEMO.write(self._root, self._directory / _name(row), data)


def _name(row: Row | None) -> str:
    if row is None:
        return "battery"
    return fingerprint.key({"sizes": [list(size) for size in row]})
