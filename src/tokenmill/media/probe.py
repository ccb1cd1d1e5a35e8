"""Probe a processor: find the expansions of images by their sizes, and cache them.

The processor runs on a text of image tokens between marks and is stopped where it passes the text
to its tokenizer. The expansions are between the marks. The images have no pixels
(`tokenmill.media.shape_only`) if that gives the same results as blank (black) images for all of
`PROBE_ROWS` and raises nothing for the row. Otherwise they are blank, which is slower.
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
from tokenmill._core.artifact import ArtifactKind
from tokenmill._core.optional import optional, transformers_muted
from tokenmill.errors import CacheError, UsageError
from tokenmill.media.shape_only import WithoutPixels, shape_only_images, shape_only_of

Size = tuple[int, int]  # width, height
Row = tuple[Size, ...]  # the images of a row, in order

PROBE_ROWS: tuple[Row, ...] = (  # their expansions are part of a processor's identity
    ((97, 61),), ((640, 480),), ((333, 1000),), ((1280, 960),), ((1400, 40),),
    ((97, 61), (640, 480)),
)  # fmt: skip

_MARK = "\ue0f1\ue0f2"  # private characters, which no expansion contains
_MEMO = ArtifactKind("memo", "", raw=True)
_MAX_CHARS = 1 << 28  # of a decompressed file, which may be damaged


class ImageExpansion(msgspec.Struct, frozen=True):
    text: str
    grid: tuple[int, ...] | None = None  # frames, rows and columns of patches, if the model uses it


class RowExpansion(msgspec.Struct, frozen=True, rename={"error": "refused"}):  # name on disk
    images: tuple[ImageExpansion, ...] = ()
    patches: int = 0  # of the row: patches if there are grids, else tiles
    error: str | None = None  # the processor's error for such a row, if any

    @property
    def weight(self) -> int:
        return 200 + sum(len(image.text) + 100 for image in self.images)


class _TextCaptured(Exception):
    """The text has reached the tokenizer."""

    def __init__(self, text: Any) -> None:
        super().__init__()
        self.text = text


class _Proxy:
    def __init__(self, original: Any) -> None:
        self._original = original
        self.output: Any = {}  # of the last call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _CapturingTokenizer(_Proxy):
    """Stops the processor when it calls its tokenizer."""

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        raise _TextCaptured(text)


class _RecordingImageProcessor(_Proxy):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.output = self._original(*args, **kwargs)
        return self.output


class Probe:
    def __init__(self, processor: Any, token: str, options: dict[str, Any]) -> None:
        self._processor = processor
        self._token = token
        self._options = options
        self._shape_only = shape_only_of(processor.image_processor)
        self._without_pixels = WithoutPixels(processor.image_processor)

    def with_blanks(self, row: Row) -> RowExpansion:
        with optional("PIL", "running a processor"):
            from PIL import Image

        return self.with_images(row, [Image.new("RGB", size) for size in row])

    def with_images(self, row: Row, images: list[Any]) -> RowExpansion:
        try:
            with transformers_muted():
                return self._run(row, images, self._processor.image_processor)
        except (UsageError, MemoryError):
            raise
        except Exception as error:
            return RowExpansion(error=str(error) or type(error).__name__)

    def shape_only(self, row: Row) -> RowExpansion | None:
        """Return the expansion of images without pixels; None if it cannot be computed."""
        if self._shape_only is None:
            return None
        try:
            with self._without_pixels():
                return self._run(row, shape_only_images(row), self._shape_only)
        except MemoryError:
            raise
        except Exception:  # the caller uses blank images instead
            return None

    def _run(self, row: Row, images: list[Any], image_processor: Any) -> RowExpansion:
        counterpart = copy.copy(self._processor)
        counterpart.tokenizer = _CapturingTokenizer(self._processor.tokenizer)
        counterpart.image_processor = recording = _RecordingImageProcessor(image_processor)
        text = _MARK + "".join(self._token + _MARK for _ in row)
        try:
            counterpart(text=[text], images=[images], **self._options)
        except _TextCaptured as captured:
            expansions = self._expansions(captured.text, len(row))
        else:
            raise self._unsupported("it calls no tokenizer")
        output = recording.output
        grids = output.get("image_grid_thw")
        if grids is None:
            tiles = _tiles(output.get("pixel_values"))
            return RowExpansion(tuple(map(ImageExpansion, expansions)), tiles)
        shapes = [tuple(int(side) for side in grid) for grid in grids]
        return RowExpansion(
            tuple(map(ImageExpansion, expansions, shapes)),
            sum(math.prod(shape) for shape in shapes),
        )

    def _expansions(self, captured: Any, count: int) -> list[str]:
        is_batch = isinstance(captured, list | tuple) and len(captured) == 1
        text = captured[0] if is_batch else captured
        if not isinstance(text, str):
            raise self._unsupported(f"it passes a {type(text).__name__} to its tokenizer")
        parts = text.split(_MARK)
        if len(parts) != count + 2 or parts[0] or parts[-1]:
            raise self._unsupported("it changes the text around an image")
        return parts[1:-1]

    def _unsupported(self, reason: str) -> UsageError:
        return UsageError(
            f"{type(self._processor).__name__} is not supported: a processor must replace image"
            f" tokens in the text that it encodes, but {reason}"
        )


def _tiles(pixels: Any) -> int:
    if isinstance(pixels, list | tuple):
        return sum(_tiles(one) for one in pixels)
    return math.prod(pixels.shape[:-3]) if hasattr(pixels, "shape") else 0


class ProbeResults(msgspec.Struct, frozen=True):
    answers: tuple[RowExpansion, ...]
    shape_only: bool


Cached = TypeVar("Cached", ProbeResults, RowExpansion)


class ExpansionCache:
    """The expansions of one processor in a cache directory; None caches nothing.

    One file has the results for `PROBE_ROWS`, and one each row of sizes that needed blank images.
    ``key`` identifies the processor by its class, code, configuration and options.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None, key: str) -> None:
        self._root = None if cache_dir is None else Path(cache_dir)
        self._directory = Path(cache_dir or "") / "processors" / "answers" / key

    def read(self, row: Row | None, kind: type[Cached]) -> Cached | None:
        """Return the expansion of a row; ``row=None`` is the results for `PROBE_ROWS`."""
        if self._root is None:
            return None
        with contextlib.suppress(CacheError, zlib.error, msgspec.DecodeError):
            data = _MEMO.open_or_none(self._directory / _name(row), self._root)
            if data is not None:
                text = zlib.decompressobj().decompress(data, _MAX_CHARS)
                return msgspec.json.decode(text, type=kind)
        return None

    def write(self, row: Row | None, value: RowExpansion | ProbeResults) -> None:
        if self._root is not None:
            data = zlib.compress(msgspec.json.encode(value), 1)
            with contextlib.suppress(CacheError):
                _MEMO.write(self._root, self._directory / _name(row), data)


def _name(row: Row | None) -> str:
    if row is None:
        return "battery"
    return fingerprint.key({"sizes": [list(size) for size in row]})
