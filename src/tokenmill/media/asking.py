"""Asking a processor what it makes of pictures of certain sizes.

The processor itself runs, on a text that holds nothing but image tokens between marks, and is
stopped where it hands the text to its tokenizer: what stands there between the marks are the
expansions. The pictures it is given are blank.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec

from tokenmill.errors import UsageError

Size = tuple[int, int]  # width, height

_MARK = "\ue0f1\ue0f2"  # private characters, which no processor's expansions are made of


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Mute what transformers says; what matters is in our own messages."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


class Answer(msgspec.Struct, frozen=True):
    """What a processor makes of one picture.

    Attributes:
        text: Its expansion.
        grid: Frames, rows and columns of patches, where the model is told.
        patches: How many patches the vision model sees; tiles, where there is no grid.
    """

    text: str
    grid: tuple[int, ...] | None
    patches: int


class Refused(msgspec.Struct, frozen=True):
    """That a processor takes no pictures of such sizes, in its own words."""

    why: str


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
        backend = getattr(processor.image_processor, "backend", "")
        self.tensors = "pt" if backend == "torchvision" else "np"

    def ask(self, sizes: tuple[Size, ...]) -> tuple[Answer, ...] | Refused:
        """Answers for a row's pictures, or that it takes no such row."""
        from PIL import Image

        return self._asked(sizes, [Image.new("RGB", size) for size in sizes])

    def _asked(self, sizes: tuple[Size, ...], pictures: list[Any]) -> tuple[Answer, ...] | Refused:
        twin = copy.copy(self._processor)
        twin.tokenizer = _Listener(self._processor.tokenizer)
        twin.image_processor = watched = _Watched(self._processor.image_processor)
        text = _MARK + "".join(self._token + _MARK for _ in sizes)
        try:
            with quietly():
                twin(text=[text], images=[pictures], **self._options)
        except _Handed as handed:
            expanded = self._pieces(handed.text, len(sizes))
        except Exception as error:
            return Refused(str(error) or type(error).__name__)
        else:
            raise self._unknown_way("it calls no tokenizer")
        return self._answers(expanded, watched.made)

    def _pieces(self, handed: Any, count: int) -> list[str]:
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

    def _answers(self, expansions: list[str], made: Any) -> tuple[Answer, ...]:
        grids = made.get("image_grid_thw") if hasattr(made, "get") else None
        found = []
        for at, text in enumerate(expansions):
            grid = None if grids is None else tuple(int(n) for n in grids[at])
            found.append(Answer(text, grid, 1))
        return tuple(found)
