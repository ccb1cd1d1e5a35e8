"""The loader: dataset × order × packing → numpy batches, with a small cursor as its state.

A `Loader` composes a view (or a mixture), an order and, where wished, packing into one global
stream, and hands out this rank's part of every global batch. It stands between two batches at any
time: `state_dict` says where, counting what was handed out; `load_state_dict` goes there, in any
process, under any number of ranks. ``iter(loader)`` runs from there to the end of the epoch: a loop
that was left and entered again goes on, and behind the end of an epoch stands the next one.
``loader.repeat()`` runs on over the ends of epochs. One epoch after the other they are the same
batches. After `set_epoch` or `load_state_dict` running iterators follow.

`Stream` is the part that does not move: everything needed to turn a cursor into a batch and the
next cursor. It is what adapters for host frameworks build on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

from tokenmill.dataset import Mixture, View
from tokenmill.errors import UsageError, check_positive
from tokenmill.loader.attached import Wanted
from tokenmill.loader.cursor import Cursor
from tokenmill.loader.prefetch import Prefetcher
from tokenmill.loader.stream import LengthGrouped, Stream
from tokenmill.packing import MicroBatches, Pack
from tokenmill.store import Store

Handed = tuple[Any, Cursor]


class Loader:
    """Batches of a store, view or mixture, in an order of our own, resumable to the sample.

    Args:
        data: A store, a view, or a mixture.
        batch_size: Samples (rows, or packs) per rank. With ``max_tokens`` it plays no part.
        seed: Of the order.
        shuffle: False serves the rows as they stand.
        order: feistel, miles, sequential or length_grouped (or a `LengthGrouped` with numbers).
        rank: This rank.
        world_size: How many ranks share every global batch.
        epochs: How many epochs the run has, over all loops together; behind them a loop ends at
            once. None sets no bound. With ``last="wrap"`` the run ends with the batch that
            completes them: ⌈epochs × samples / global batch⌉ in all.
        last: At the end of an epoch: wrap into the next, drop the rest, or keep a short batch.
        pad_id: Token of the padding; None takes the tokenizer's pad, else its eos.
        pad_side: right or left.
        pad_to_multiple_of: Widths are rounded up to this, as context parallelism wants.
        max_tokens: Micro-batches by token budget instead of a fixed number of rows.
        pack: A `Pack` lays rows side by side instead of padding them.
        prefetch: Batches that a thread fills ahead; 0 fills them when asked.
        indices: Also hand out ``indices``: the row number of every row in the batch.
        micro_batches: A `MicroBatches` makes every step a list of batches under a token budget,
            equally many on every rank; see ``docs/batches.md``.
        sidecars: Which sidecars to hand out under their names: names, or a mapping from names to
            what made each. None: all that are attached to the data now; ``()``: none.
        unit: What a sample is: rows or groups; auto: groups where the data has any. They are never
            parted.
        layout: How pairs are served: sides (``chosen_*`` and ``rejected_*``) or interleaved (one
            matrix, row by row). Other groups are always interleaved, and packs lie as they do.
        media: Of rows with pictures: references names them (``media``), pixels also hands out what
            the processor makes of them, under its model's names; see ``docs/images.md``. None
            serves their ids alone, which is warned of.
        max_patches: A second budget beside ``max_tokens``, of micro-batches and packs: patches of
            their pictures.
        processor: Makes the pixels; None takes the copy that the stores keep.
    """

    def __init__(
        self,
        data: Store | View | Mixture,
        batch_size: int = 8,
        seed: int = 42,
        shuffle: bool = True,
        order: str | LengthGrouped = "feistel",
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        last: str = "wrap",
        pad_id: int | None = None,
        pad_side: str = "right",
        pad_to_multiple_of: int | None = None,
        max_tokens: int | None = None,
        pack: Pack | None = None,
        *,
        prefetch: int = 0,
        indices: bool = False,
        micro_batches: MicroBatches | None = None,
        sidecars: Wanted = None,
        unit: str = "auto",
        layout: str = "sides",
        media: str | None = None,
        max_patches: int | None = None,
        processor: Any = None,
    ) -> None:
        if epochs is not None:
            check_positive("epochs", epochs)
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise UsageError(f"prefetch must be a number of batches from 0, not {prefetch!r}")
        self.stream = Stream(
            data,
            batch_size=batch_size,
            seed=seed,
            shuffle=shuffle,
            order=order,
            rank=rank,
            world_size=world_size,
            last=last,
            pad_id=pad_id,
            pad_side=pad_side,
            pad_to_multiple_of=pad_to_multiple_of,
            max_tokens=max_tokens,
            pack=pack,
            indices=indices,
            micro_batches=micro_batches,
            sidecars=sidecars,
            unit=unit,
            layout=layout,
            media=media,
            max_patches=max_patches,
            processor=processor,
        )
        if media is None and self.stream.view.has_media:
            warnings.warn(
                "rows of this data have pictures, and batches will have their tokens alone: say "
                "media='pixels' to serve what the model sees, or media='references'",
                stacklevel=2,
            )
        self.epochs = epochs
        self.prefetch = prefetch
        self.cursor = Cursor()  # where the loader stands
        self._first_epoch = 0
        self.jumps = 0  # how often it was told to stand elsewhere
        self._keeps_place = False  # whether announcing the epoch leaves the loader where it is
        self._ending: Cursor | None = None  # before the last batch of an epoch, until its loop ends

    def __iter__(self) -> LoaderIterator:
        """The rest of the epoch; when a loop came to its end, the next epoch."""
        self._ending = None
        return LoaderIterator(self)

    def repeat(self) -> LoaderIterator:
        """On and on from where the loader stands, or to the end of ``epochs``."""
        return LoaderIterator(self, repeat=True)

    def __len__(self) -> int:
        """Batches that begin in the epoch the loader stands in, those behind it included.

        In the body of a loop that is the loop's epoch, also at its last batch. With ``last="wrap"``
        an epoch whose first samples went to the one before has fewer. Packs and token budgets are
        cut through once to count.
        """
        return self.stream.stepper.count(self._ending or self.cursor, self._first_epoch)

    @property
    def epoch(self) -> int:
        """Epoch of the next sample."""
        return self.cursor.epoch

    @property
    def end(self) -> int | None:
        """The first epoch that is not part of the run."""
        return None if self.epochs is None else self._first_epoch + self.epochs

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; ``epochs`` counts from there.

        A loader that came into this epoch by serving the one before, or by `load_state_dict`, and
        has handed out nothing since keeps its place: trainers call this at the top of every epoch,
        also of one that they resume, or that lent its first samples to a wrapped batch.
        """
        epoch = self.stream.checked_epoch(epoch)
        keeps = self._keeps_place and self.cursor.epoch == epoch
        self.jump(self.cursor if keeps else Cursor(epoch), epoch)
        self._keeps_place = keeps

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, counting what was handed out; the same on every rank."""
        return self.stream.spec.save(self.cursor, self._first_epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where a saved state stands.

        Raises:
            StateError: The state is of another dataset, seed, order, packing or version.
        """
        cursor, first_epoch = self.stream.spec.load(state)
        self.stream.check(cursor)
        self.jump(cursor, first_epoch)
        self._keeps_place = True

    def jump(self, cursor: Cursor, first_epoch: int) -> None:
        """Stand at a cursor; running iterators follow."""
        self.cursor = cursor
        self._first_epoch = first_epoch
        self.jumps += 1
        self._keeps_place = False
        self._ending = None

    def handed_out(self, cursor: Cursor) -> None:
        """Count a batch as consumed: the loader now stands behind it."""
        self._keeps_place = cursor.epoch != self.cursor.epoch
        self._ending = self.cursor if self._keeps_place else None
        self.cursor = cursor

    def loop_ended(self) -> None:
        """From now on it stands in the epoch behind the loop."""
        self._ending = None

    def stop(self, *, repeat: bool) -> int | None:
        """The first epoch that is not part of a loop from here; None where it never ends."""
        if repeat or (self.end is not None and self.cursor.epoch >= self.end):
            return self.end
        return self.cursor.epoch + 1

    def served(self) -> dict[str, dict[str, int]]:
        """What each source of a mixture gave up to here; a plain dataset is one source, ``data``.

        Computed from the position alone, so it survives any resume. Of every source: ``rows``
        handed out, whole ``passes`` over it, ``tokens`` and ``trained_tokens`` of those rows. What
        ``last="drop"`` leaves out of an epoch counts with it.
        Tokens of a pass that is not finished are added up on demand.
        """
        return self.stream.served(self.cursor)


class LoaderIterator(Iterator[Any]):
    """A loop over a loader from where it stands; several may run at once.

    It gives dicts of arrays; with ``micro_batches``, lists of them.

    Args:
        loader: Its state follows the batches that any of its iterators hands out.
        repeat: Go on over the ends of epochs.
    """

    def __init__(self, loader: Loader, *, repeat: bool = False) -> None:
        self._loader = loader
        self._repeat = repeat
        self._ended = False
        self._start()

    def _start(self) -> None:
        self._jumps: int | None = self._loader.jumps
        self._process = os.getpid()
        self._cursor = self._loader.cursor
        self._stop = self._loader.stop(repeat=self._repeat)
        self._items = self._open(self._cursor, self._stop)

    def _open(self, cursor: Cursor, stop: int | None) -> Iterator[Handed]:
        """Batches from a cursor to the start of an epoch, each with the cursor behind it."""
        items = self._loader.stream.batches(cursor, stop)
        return Prefetcher(items, self._loader.prefetch) if self._loader.prefetch else items

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._process != os.getpid():
            self._start()  # a prefetching thread stays behind in the parent
        elif self._jumps != self._loader.jumps:
            self.close()
            self._start()
        try:
            batch, self._cursor = next(self._items)
        except StopIteration:
            self._ended = True
            if self._stop is not None and self._cursor.epoch < self._stop:
                # A state of another geometry may stand where too little is left for a batch.
                self._loader.handed_out(Cursor(self._stop))
            self._loader.loop_ended()
            raise
        except BaseException:  # Ctrl-C, too
            self._jumps = None  # start anew when asked again: what raised would look finished
            raise
        self._loader.handed_out(self._cursor)
        return batch

    def close(self) -> None:
        """Let a prefetching thread end; not needed where the iterator is simply dropped."""
        if isinstance(self._items, Prefetcher):
            self._items.close()
