"""Asking a processor what it makes of pictures of certain sizes.

The processor itself runs, on a text that holds nothing but image tokens between marks, and is
stopped where it hands the text to its tokenizer: what stands there between the marks are the
expansions. It is given pictures of the sizes in question, in one of two ways:

- *hollow*: pictures without pixels (`tokenmill.media.hollow`). The processor computes the shapes
  that it would compute, and cannot look at a pixel, so its answer is good for every picture of
  these sizes. A millisecond.
- *blank*: black pictures, processed whole. As slow as the processor, and only as good as its
  indifference to what it sees, which audits with real pictures try (`Processor.reference`).

Hollow pictures are used where `BATTERY` was answered the same in both ways, and only for rows on
which the processor does not stumble; blank ones everywhere else, also for the processor's own words
about what it refuses.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import msgspec

from tokenmill.errors import UsageError
from tokenmill.media.hollow import WithoutPixels, hollow_pictures, hollowed
from tokenmill.optional import optional, transformers_muted

Size = tuple[int, int]  # width, height
Row = tuple[Size, ...]  # the pictures of a row, in order

BATTERY: tuple[Row, ...] = (
    ((97, 61),), ((640, 480),), ((333, 1000),), ((1280, 960),), ((1400, 40),),
    ((97, 61), (640, 480)),
)  # fmt: skip
"""Rows whose answers are part of a processor's identity."""

_MARK = "\ue0f1\ue0f2"  # private characters, which no processor's expansions are made of


class Answer(msgspec.Struct, frozen=True):
    """What a processor makes of one picture.

    Attributes:
        text: Its expansion.
        grid: Frames, rows and columns of patches, where the model is told.
    """

    text: str
    grid: tuple[int, ...] | None = None


class Answers(msgspec.Struct, frozen=True):
    """What a processor makes of a row's pictures.

    Attributes:
        pictures: One by one.
        patches: What the vision model sees in all: patches where there are grids, else tiles.
        refused: Where it takes no such row: why, in its own words.
    """

    pictures: tuple[Answer, ...] = ()
    patches: int = 0
    refused: str | None = None

    @property
    def weight(self) -> int:
        """About how many bytes it takes to remember."""
        return 200 + sum(len(answer.text) + 100 for answer in self.pictures)


class _Handed(Exception):
    """The text has reached the tokenizer."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text


class _Listener:
    """Stands where the tokenizer is, and stops the processor when it is called."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        raise _Handed(text)


class _Watched:
    """Stands where the image processor is, and keeps what it gave."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor
        self.made: Any = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._image_processor, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.made = self._image_processor(*args, **kwargs)
        return self.made


class Asking:
    """Asks one processor.

    Args:
        processor: Of transformers.
        token: Its image token.
        options: What it is given at every call.
    """

    def __init__(self, processor: Any, token: str, options: dict[str, Any]) -> None:
        self._processor = processor
        self._token = token
        self._options = options
        self._hollow = hollowed(processor.image_processor)
        self._without_pixels = WithoutPixels(processor.image_processor)

    def with_blanks(self, row: Row) -> Answers:
        """Its answer for black pictures of these sizes, or that it takes none such."""
        with optional("PIL", "asking a processor"):
            from PIL import Image

        return self.with_pictures(row, [Image.new("RGB", size) for size in row])

    def with_pictures(self, row: Row, pictures: list[Any]) -> Answers:
        """Its answer for these very pictures, or that it does not take them."""
        try:
            with transformers_muted():
                return self._ask(row, pictures, self._processor.image_processor)
        except (UsageError, MemoryError):
            raise
        except Exception as error:
            return Answers(refused=str(error) or type(error).__name__)

    def hollow(self, row: Row) -> Answers | None:
        """Its answer for pictures without pixels; None where it has none."""
        if self._hollow is None:
            return None
        try:
            with self._without_pixels():
                return self._ask(row, hollow_pictures(row), self._hollow)
        except MemoryError:
            raise
        except Exception:  # whatever it stumbles over, real pixels will show
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
    """How many pictures of one size the vision model is given for a row."""
    if isinstance(pixels, list | tuple):
        return sum(_tiles(one) for one in pixels)
    return math.prod(pixels.shape[:-3]) if hasattr(pixels, "shape") else 0
