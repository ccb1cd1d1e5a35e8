"""The samples of a whole run by number, for hosts that walk through a list.

A host that owns the sampler (TRL's trainer, say) wants one list for the whole run. `WholeRun` is
that list: sample i of ``epochs`` epochs behind each other, each in our order, a row or a pack. It
is a function of (seed, i), so the host's own "skip the first n" is an exact resume, in any process
and with any number of workers.

Nothing is held per row. With packing, the number of packs in every window of every epoch is held
(8 bytes per 65,536 rows and epoch): the length of the list must be known, so all windows are
packed once when it is made. They travel with the pickled list; workers do not count again.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from typing import Any, SupportsIndex

import numpy as np

from tokenmill.dataset import Mixture, View, as_view
from tokenmill.errors import UsageError
from tokenmill.loader.cursor import StreamSpec
from tokenmill.loader.samples import PackSamples
from tokenmill.loader.stream import LengthGrouped, Stream
from tokenmill.packing import Pack, Packs, Piece, Slots
from tokenmill.sampling import Int64Array, unroll
from tokenmill.store import Store


class WholeRun:
    """The samples of a run by number.

    Args:
        data: A store, a view or a mixture.
        epochs: How many epochs follow each other.
        seed: Of the order.
        order: As for the loader.
        pack: Samples are packs instead of rows.
        slots: How much of a pack a row takes; then whoever reads a pack pads its rows.
        world_size: Ranks; only packing with ``balanced`` asks for them.
        unit: Samples are rows, or groups; rows of groups are served as they stand and not else.
        ends: Where each window's packs end, when already counted.
    """

    def __init__(
        self,
        data: Store | View | Mixture,
        *,
        epochs: int = 1,
        seed: int = 42,
        order: str | LengthGrouped = "feistel",
        pack: Pack | None = None,
        slots: Slots | None = None,
        world_size: int = 1,
        unit: str = "rows",
        ends: Int64Array | None = None,
    ) -> None:
        if isinstance(epochs, bool) or not isinstance(epochs, int | np.integer) or epochs < 1:
            raise UsageError(f"epochs must be a positive whole number, not {epochs!r}")
        self.epochs = int(epochs)
        self._data = data if isinstance(data, Mixture) else as_view(data)
        view = self._data.view if isinstance(self._data, Mixture) else self._data
        if view.is_mapped:
            raise UsageError(
                "exports and other libraries' datasets are named by their content, and the "
                "function of a map is part of no name: serve mapped rows with a Loader, or prepare "
                "them as they shall be"
            )
        if view.has_groups and unit == "rows" and (order != "sequential" or pack is not None):
            raise UsageError(
                "the rows of this data belong to groups, which would be parted: take them in the "
                "order sequential and without packs, or serve groups with a Loader"
            )
        self.pad_id = view.pad_id
        self.unit = unit
        self._options: dict[str, Any] = {
            "seed": seed,
            "order": order,
            "pack": pack,
            "slots": slots,
            "world_size": world_size,
            "unit": unit,
        }
        # Samples are handed out as they are: padding plays no part.
        self._stream = Stream(self._data, pad_id=0, **self._options)
        self._stream.checked_epoch(self.epochs - 1)
        self._per_epoch = self._stream.order.rows
        self._ends = ends
        if ends is None and isinstance(self._stream.samples, PackSamples):
            counts = map(self._stream.samples.window_counts, range(self.epochs))
            self._ends = np.cumsum([count for epoch in counts for count in epoch], dtype=np.int64)
        if not len(self):
            raise UsageError("there is nothing to serve: an epoch has no samples")

    def __reduce__(self) -> Any:
        made = partial(WholeRun, epochs=self.epochs, ends=self._ends, **self._options)
        return made, (self._data,)

    def __len__(self) -> int:
        if self._ends is None:
            return self._per_epoch * self.epochs
        return int(self._ends[-1])

    @property
    def view(self) -> View:
        """The rows beneath."""
        return self._stream.view

    @property
    def slots(self) -> Slots | None:
        """How much of a pack a row takes, where it is not just its tokens."""
        return self._stream.slots

    @property
    def spec(self) -> StreamSpec:
        """Which data, order and packing this is, by content."""
        return self._stream.spec

    @property
    def tokens(self) -> int:
        """About how many tokens all samples have together: of every epoch, all rows."""
        total = self.view.total("lengths")
        return round(total / len(self.view) * self._per_epoch * self.epochs)

    def packs(self, indices: Iterable[SupportsIndex]) -> Packs:
        """Samples by number, as integers: a row is a pack of one piece, a group one of several."""
        numbers = np.asarray([int(index) for index in indices], dtype=np.int64)
        wrong = (numbers < 0) | (numbers >= len(self))
        if wrong.any():
            raise IndexError(f"sample {int(numbers[wrong][0])} of {len(self)}")
        if self._ends is None:
            return self._stream.units.as_packs(unroll(self._stream.order, numbers))
        return self._stream.units.expand(self._packs(numbers, self._ends))

    def pieces(self, indices: Iterable[SupportsIndex]) -> list[list[Piece]]:
        """Samples by number: ids and mask of their pieces, as views onto the stored tokens."""
        packs = self.packs(indices)
        pieces = self.read(packs)
        return [pieces[first:stop] for first, stop in pairwise(packs.bounds.tolist())]

    def read(self, packs: Packs) -> list[Piece]:
        """Ids and mask of every piece of some packs, one after the other.

        With slots a piece has at most as many tokens as its slot, and what takes no place in it.
        """
        slots = self.slots
        if slots is None:
            return self._stream.reader.read(packs, 0, packs.rows.size)
        stops = packs.starts + packs.lengths + slots.unpredicted
        bounds = zip(packs.starts.tolist(), stops.tolist(), strict=True)
        return [
            (row.input_ids[start:stop], row.loss_mask[start:stop])
            for row, (start, stop) in zip(self.view.rows(packs.rows), bounds, strict=True)
        ]

    def _packs(self, numbers: Int64Array, ends: Int64Array) -> Packs:
        samples = self._stream.samples
        assert isinstance(samples, PackSamples)
        windows = np.searchsorted(ends, numbers, side="right")
        found: list[Packs] = []
        places: list[Int64Array] = []
        for window in np.unique(windows).tolist():
            here = np.flatnonzero(windows == window)
            begin = int(ends[window - 1]) if window else 0
            packed = samples.packed(*divmod(window, samples.windows))
            found.append(packed.take(numbers[here] - begin))
            places.append(here)
        if len(found) <= 1:
            return Packs.join(found)
        back = np.argsort(np.concatenate(places), kind="stable")
        return Packs.join(found).take(back)
