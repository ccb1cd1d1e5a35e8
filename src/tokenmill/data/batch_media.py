"""Add images to batches: their positions and pixels (docs/guides/images.md).

Pixels are bitwise those of the processor. Only images of this rank's rows are opened, each once per
batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.data.fill import Batch
from tokenmill.data.filler import Filler, MicroFiller
from tokenmill.data.group_batches import SIDES, GroupFiller, segments_of_rows
from tokenmill.data.order import Int64Array
from tokenmill.data.samples import Step
from tokenmill.data.view import View
from tokenmill.errors import UsageError
from tokenmill.store import Media, Row

if TYPE_CHECKING:
    from tokenmill.media import Processor

MEDIA = ("references", "pixels")
TOKEN_TYPES = "mm_token_type_ids"

_NEEDS_TEXT = ("cross_attention_mask",)  # features of text and images together


class PlacedMedia(msgspec.Struct, frozen=True):
    media: Media  # as in `Row.media`; its ``start`` is relative to the row
    row: int  # number in the data
    number: int  # among the row's images: ``data[row].image(number)`` returns its bytes
    line: int  # row or pack of the batch
    start: int  # first token in the line


@dataclass(frozen=True)
class MediaFiller:
    filler: Filler | GroupFiller | MicroFiller  # adds ``indices`` to batches
    view: View
    indices: bool  # whether batches keep ``indices``
    pixels: Pixels | None  # None: only references

    def fill(self, step: Step) -> Any:
        filled = self.filler.fill(step)
        if isinstance(filled, list):
            return [self._with_media(batch) for batch in filled]
        return self._with_media(filled)

    def _with_media(self, batch: Batch) -> Batch:
        numbers: Int64Array = batch["indices"] if self.indices else batch.pop("indices")
        sides = [f"{side}_" for side in SIDES if f"{side}_input_ids" in batch]
        for place, prefix in enumerate(sides or [""]):
            own = numbers[place :: len(sides)] if sides else numbers
            for name, value in self._added(batch, prefix, own).items():
                if prefix + name in batch:
                    raise UsageError(
                        f"batches with images have {name!r}, which is also a sidecar; attach it "
                        "under another name, or leave it out with sidecars=[…]"
                    )
                batch[prefix + name] = value
        return batch

    def _added(self, batch: Batch, prefix: str, numbers: Int64Array) -> Batch:
        rows = self.view.rows(numbers)
        media = [row.media for row in rows]
        width = batch[f"{prefix}input_ids"].shape[1]
        firsts = _firsts(batch, prefix, len(rows)).tolist()
        placed = []
        for number, first, own in zip(numbers.tolist(), firsts, media, strict=True):
            for at, one in enumerate(own):
                line, start = divmod(first + one.start, width)
                placed.append(PlacedMedia(one, number, at, line, start))
        added: Batch = {"media": placed}
        if self.pixels is not None:
            ids = batch[f"{prefix}input_ids"]
            packed = "cu_seqlens" in batch
            added |= self.pixels.token_types(ids, zip(firsts, rows, media, strict=True))
            # Padded rows without images need features, too; packed ones do not.
            shown = [pair for pair in zip(rows, media, strict=True) if pair[1] or not packed]
            added |= self.pixels.features(shown)
        return added


def _firsts(batch: Batch, prefix: str, count: int) -> Int64Array:
    """Return the first token of every row in the flattened batch."""
    if "cu_seqlens" in batch:
        name = "cu_seqlens_padded" if "cu_seqlens_padded" in batch else "cu_seqlens"
        begins: Int64Array = batch[name][segments_of_rows(batch)].astype(np.int64)
        return begins
    mask = batch[f"{prefix}attention_mask"][:count]
    firsts: Int64Array = np.arange(count) * mask.shape[1] + mask.argmax(axis=1)
    return firsts


class Pixels:
    """Computes pixels with the processor that rows were prepared with.

    ``processor`` is a processor or its path; None takes the copy in the stores. Worker processes
    load it with their first batch.
    """

    def __init__(self, view: View, processor: Any = None) -> None:
        stores = {store.processor_key: store for store in view.stores if store.has_media}
        if len(stores) > 1:
            paths = " and ".join(os.fspath(store.path) for store in stores.values())
            raise UsageError(
                f"{paths} were prepared with different processors; prepare them with the same, or "
                "use media='references'"
            )
        self._store = next(iter(stores.values()))
        self._requested = processor
        self._loaded: Processor | None = None
        layout = self.processor.layout  # loaded now, to raise errors early
        own = layout.types_name or TOKEN_TYPES
        self._types = tuple({TOKEN_TYPES: 1, own: 1}) if layout.has_image_types else ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    @property
    def processor(self) -> Processor:
        from tokenmill.build.processor import processor_of

        if self._loaded is None:
            self._loaded = processor_of(self._store, self._requested)
        return self._loaded

    def features(self, rows: Sequence[tuple[Row, list[Media]]]) -> Batch:
        from tokenmill.media import Images

        opened: dict[str, Any] = {}
        images = Images()
        for row, media in rows:
            for number, one in enumerate(media):
                if one.digest not in opened:
                    opened[one.digest] = images.open(row.image(number), one.reference)
        features = self.processor.features([[opened[one.digest] for one in own] for _, own in rows])
        for name in _NEEDS_TEXT:
            if name in features:
                raise UsageError(
                    f"the model needs {name}, which depends on texts and images; use "
                    "media='references'"
                )
        return features

    def token_types(
        self, ids: npt.NDArray[np.int64], rows: Iterator[tuple[int, Row, list[Media]]]
    ) -> Batch:
        """Return arrays in the shape of the ids: 1 at tokens of images, else 0."""
        if not self._types:
            return {}
        flat, types = ids.reshape(-1), np.zeros(ids.size, dtype=np.int64)
        for first, row, media in rows:
            if media:
                own = slice(first, first + len(row))
                counts = [one.count for one in media]
                types[own] = self.processor.token_types(flat[own].tolist(), counts)
        return {name: types.reshape(ids.shape).copy() for name in self._types}
