"""Add images to batches: where they are, and their pixels (docs/images.md).

Pixels are what the processor returns for the rows of the batch, to the bit. Only images of this
rank's rows are opened, each once per batch.
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

WAYS = ("references", "pixels")
TOKEN_TYPES = "mm_token_type_ids"

_BY_TEXT = ("cross_attention_mask",)  # features of a text and its images together


class PlacedMedia(msgspec.Struct, frozen=True):
    media: Media  # as in `Row.media`; its ``start`` counts within the row
    row: int  # number in the data
    number: int  # which of the row's images: ``data[row].picture(number)`` are its bytes
    line: int  # of the batch: a row or a pack
    start: int  # first token within the line


@dataclass(frozen=True)
class MediaFiller:
    filler: Filler | GroupFiller | MicroFiller  # adds ``indices`` to batches
    view: View
    indices: bool  # whether batches keep them
    pixels: Pixels | None  # None: images are only named

    def fill(self, step: Step) -> Any:
        filled = self.filler.fill(step)
        if isinstance(filled, list):
            return [self._illustrated(batch) for batch in filled]
        return self._illustrated(filled)

    def _illustrated(self, batch: Batch) -> Batch:
        numbers: Int64Array = batch["indices"] if self.indices else batch.pop("indices")
        sides = [f"{side}_" for side in SIDES if f"{side}_input_ids" in batch]
        for place, prefix in enumerate(sides or [""]):
            own = numbers[place :: len(sides)] if sides else numbers
            for name, value in self._added(batch, prefix, own).items():
                if prefix + name in batch:
                    raise UsageError(
                        f"a sidecar is called {name!r}, like what belongs to pictures: attach it "
                        "under another name, or say which others to hand out (sidecars=[…])"
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
            # Lines of padded rows may be counted along; there are none of packed ones.
            shown = [pair for pair in zip(rows, media, strict=True) if pair[1] or not packed]
            added |= self.pixels.features(shown)
        return added


def _firsts(batch: Batch, prefix: str, count: int) -> Int64Array:
    """Where rows begin in the flattened batch."""
    if "cu_seqlens" in batch:
        name = "cu_seqlens_padded" if "cu_seqlens_padded" in batch else "cu_seqlens"
        begins: Int64Array = batch[name][segments_of_rows(batch)].astype(np.int64)
        return begins
    mask = batch[f"{prefix}attention_mask"][:count]
    firsts: Int64Array = np.arange(count) * mask.shape[1] + mask.argmax(axis=1)
    return firsts


class Pixels:
    """Computes pixels with the processor that rows were prepared with.

    ``given`` is the processor or its path; None takes the copy that the stores keep. Workers load
    it again with their first batch.
    """

    def __init__(self, view: View, given: Any = None) -> None:
        stores = {store.processor_key: store for store in view.stores if store.has_media}
        if len(stores) > 1:
            places = " and ".join(os.fspath(store.path) for store in stores.values())
            raise UsageError(
                f"the rows of {places} were prepared with different processors, and a batch has "
                "pixels of one: prepare them with the same, or serve references "
                "(media='references')"
            )
        self._store = next(iter(stores.values()))
        self._given = given
        self._loaded: Processor | None = None
        processor = self.processor  # loaded now, so that errors are raised now
        own = processor.layout.types_name or TOKEN_TYPES
        self._types = tuple({TOKEN_TYPES: 1, own: 1}) if processor.layout.tells_types else ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}

    @property
    def processor(self) -> Processor:
        from tokenmill.build.processor import processor_of

        if self._loaded is None:
            self._loaded = processor_of(self._store, self._given)
        return self._loaded

    def features(self, rows: Sequence[tuple[Row, list[Media]]]) -> Batch:
        from tokenmill.media import Pictures

        opened: dict[str, Any] = {}
        pictures = Pictures()
        for row, media in rows:
            for number, one in enumerate(media):
                if one.digest not in opened:
                    opened[one.digest] = pictures.open(row.picture(number), one.reference)
        found = self.processor.features([[opened[one.digest] for one in own] for _, own in rows])
        for name in _BY_TEXT:
            if name in found:
                raise UsageError(
                    f"the model takes {name}, which is of texts and pictures together and cannot "
                    "be made of pictures alone: serve references (media='references')"
                )
        return found

    def token_types(
        self, ids: npt.NDArray[np.int64], rows: Iterator[tuple[int, Row, list[Media]]]
    ) -> Batch:
        """1 at tokens that an image's features go to, else 0, in the shape of the ids."""
        if not self._types:
            return {}
        flat, types = ids.reshape(-1), np.zeros(ids.size, dtype=np.int64)
        for first, row, media in rows:
            if media:
                own = slice(first, first + len(row))
                counts = [one.count for one in media]
                types[own] = self.processor.token_types(flat[own].tolist(), counts)
        return {name: types.reshape(ids.shape).copy() for name in self._types}
