"""The loader: data × order × packing → numpy batches, with a small resumable state.

A `Loader` has one position, a `Cursor` between two global batches. All iterators of a loader share
it: one that finds the loader moved continues from there.
"""

from __future__ import annotations

import os
import queue
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from tokenmill._core.process import at_end
from tokenmill.data.batch_media import WAYS, MediaFiller, Pixels
from tokenmill.data.cursor import Cursor
from tokenmill.data.filler import Attached, Filler, MicroFiller, SidecarNames
from tokenmill.data.group_batches import GroupFiller, group_kind
from tokenmill.data.micro import MicroBatches
from tokenmill.data.mixture import Mixture
from tokenmill.data.packs import Pack, Packs, Slots
from tokenmill.data.samples import Step
from tokenmill.data.stream import LengthGrouped, Stream
from tokenmill.data.view import View
from tokenmill.errors import UsageError, check_one_of, check_positive
from tokenmill.store import Store

T = TypeVar("T")

BatchFiller = Filler | GroupFiller | MicroFiller | MediaFiller


class Loader:
    """Batches of a store, view or mixture in a deterministic order, resumable to the sample.

    Args:
        data: A store, a view, or a mixture.
        batch_size: Samples (rows, groups or packs) per rank.
        seed: Of the order.
        shuffle: False serves the rows in their stored order.
        group_by_length: Serve rows of similar length together, so that batches need less padding:
            windows of 8192 positions are sorted by length and groups of 64 rows are shuffled. A
            `LengthGrouped` sets other numbers.
        drop_last: Whether an epoch ends with its last full global batch. False serves the rest as a
            short batch, shared evenly among the ranks; a rank without rows gets one row of padding.
            `repeat` has no short batches and ignores this.
        rank: This rank.
        world_size: How many ranks share every global batch.
        pad_id: Token of the padding; None takes the tokenizer's pad, else its eos.
        pad_side: right or left.
        pad_to_multiple_of: Widths are rounded up to this.
        pack: A `Pack` puts several rows into sequences of one length instead of padding them.
        micro_batches: A `MicroBatches` makes every step a list of batches under a token budget,
            equally many on every rank; see ``docs/batches.md``.
        prefetch: Batches that a thread fills ahead; 0 fills them on demand.
        indices: Also hand out ``indices``: the row number of every row in the batch.
        sidecars: Which sidecars to hand out under their names: names, or a mapping from names to
            what made each. None: all that are attached to the data now; ``()``: none.
        unit: What a sample is: rows or groups; auto: groups where the data has any.
        layout: How pairs are served: sides (``chosen_*`` and ``rejected_*``) or interleaved (one
            matrix, row by row). Other groups and packs are always interleaved.
        media: Of rows with images: references names them (``media``), pixels also hands out what
            the processor makes of them, under its model's names; see ``docs/images.md``. None
            serves their ids alone, with a warning.
        processor: Makes the pixels; None takes the copy that the stores keep.
    """

    def __init__(
        self,
        data: Store | View | Mixture,
        batch_size: int = 8,
        *,
        seed: int = 42,
        shuffle: bool = True,
        group_by_length: bool | LengthGrouped = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pad_id: int | None = None,
        pad_side: str = "right",
        pad_to_multiple_of: int | None = None,
        pack: Pack | None = None,
        micro_batches: MicroBatches | None = None,
        prefetch: int = 0,
        indices: bool = False,
        sidecars: SidecarNames = None,
        unit: str = "auto",
        layout: str = "sides",
        media: str | None = None,
        processor: Any = None,
    ) -> None:
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise UsageError(f"prefetch must be a non-negative integer, got {prefetch!r}")
        if not isinstance(drop_last, bool):
            raise UsageError(f"drop_last must be True or False, got {drop_last!r}")
        if group_by_length and not shuffle:
            raise UsageError("group_by_length=True shuffles: it excludes shuffle=False")
        check_one_of("pad_side", pad_side, ("right", "left"))
        if pad_to_multiple_of is not None:
            check_positive("pad_to_multiple_of", pad_to_multiple_of)
        if pack is not None:
            _check_pack(pack, pad_side, pad_to_multiple_of)
        check_positive("batch_size", batch_size)
        check_positive("world_size", world_size)
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise UsageError(f"rank must be an integer, got {rank!r}")
        if not 0 <= rank < world_size:
            raise UsageError(f"rank {rank} of {world_size} ranks")
        micro, shared, slots = micro_batches, 1, None
        if micro is not None:
            _check_micro_batches(micro, pack, world_size, pad_side, pad_to_multiple_of)
            shared = micro.context_parallel
            slots = Slots(micro.sequence) if pack is not None and micro.sequence > 1 else None
        self.drop_last = drop_last
        self.prefetch = prefetch
        # The ranks that share a slab get the same samples.
        self._rank, self._world_size = rank // shared, world_size // shared
        self._global_batch = batch_size * self._world_size
        grouping = LengthGrouped() if group_by_length is True else group_by_length
        self.stream = Stream(
            data,
            seed=seed,
            order=grouping or ("feistel" if shuffle else "sequential"),
            unit=unit,
            pack=pack,
            slots=slots,
            ranks=self._world_size,
            max_patches=None if micro is None else micro.max_patches,
        )
        view, units = self.stream.view, self.stream.units
        if micro is not None and pack is None:
            self.stream.require_at_most(
                lambda numbers: micro.tokens_of(units.as_packs(numbers)),
                micro.budget,
                "tokens",
                "the budget of a micro-batch",
            )
        _check_media(self.stream, media, processor, shared)
        serves_media = media is not None and view.has_media
        reader = Filler(
            view,
            _pad_id(view, pad_id),
            pad_side=pad_side,
            multiple=pad_to_multiple_of,
            pack_length=None if pack is None else pack.length,
            indices=indices or serves_media,
            attached=Attached.of(view, sidecars),
        )
        groups = None
        if units.grouped:
            groups = _group_filler(reader, layout, self.stream.seed, micro)
        self.filler: BatchFiller = groups or reader
        if micro is not None:
            self.filler = MicroFiller(reader, micro, rank, world_size, groups)
        if serves_media:
            pixels = Pixels(view, processor) if media == "pixels" else None
            self.filler = MediaFiller(self.filler, view, indices, pixels)
        elif view.has_media:
            warnings.warn(
                "rows of this data have pictures, and batches will have their tokens alone: say "
                "media='pixels' to serve what the model sees, or media='references'",
                stacklevel=2,
            )
        self.cursor = Cursor()
        self.first_epoch = 0  # of the run: `repeat` counts its epochs from here

    def __iter__(self) -> LoaderIterator:
        """The rest of the current epoch; after the end of an epoch, the next one."""
        return LoaderIterator(self)

    def repeat(self, epochs: int | None = None) -> LoaderIterator:
        """Batches without end, or of ``epochs`` epochs from the start of the run.

        Epochs follow each other without short batches: a global batch that an epoch cannot fill is
        completed from the next one. The run ends with the batch that completes its last epoch.

        Raises:
            UsageError: A global batch is larger than an epoch.
        """
        if epochs is not None:
            check_positive("epochs", epochs)
        if not self.stream.samples.has(Cursor(self.cursor.epoch), self._global_batch):
            raise self._too_small(self.stream.samples.count(self.cursor.epoch))
        return LoaderIterator(self, repeat=True, epochs=epochs)

    def __len__(self) -> int:
        """Global batches of the current epoch. With packing, packs the epoch once to count."""
        wanted = self._global_batch
        before = self.cursor.position // wanted
        left = self.stream.samples.count(self.cursor.epoch) - self.cursor.position
        return before + (left // wanted if self.drop_last else -(-left // wanted))

    @property
    def epoch(self) -> int:
        """Epoch of the next sample."""
        return self.cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader is in it already.

        So trainers may call it at the top of every epoch, also of one that they resume. The epochs
        of `repeat` count from an epoch that the loader was moved to.
        """
        epoch = self.stream.checked_epoch(epoch)
        if epoch != self.cursor.epoch:
            self.cursor, self.first_epoch = Cursor(epoch), epoch

    def state_dict(self) -> dict[str, Any]:
        """The position, counting what was handed out; the same on every rank."""
        return self.stream.spec.save(self.cursor, self.first_epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            StateError: The state belongs to another dataset, seed, order, packing or version.
        """
        cursor, first_epoch = self.stream.spec.load(state)
        self.stream.check(cursor)
        self.cursor, self.first_epoch = cursor, first_epoch

    def served(self) -> dict[str, dict[str, int]]:
        """What each source of a mixture served so far; a plain dataset is one source, ``data``.

        Of every source: ``rows``, whole ``passes`` over it, ``tokens`` and ``trained_tokens`` of
        those rows. Computed from the position alone, so a resume does not change it. What
        ``drop_last=True`` leaves out of an epoch is included.
        """
        return self.stream.served(self.cursor)

    def steps(
        self, cursor: Cursor, end: int | None, *, repeat: bool = False
    ) -> Iterator[tuple[Step, Cursor]]:
        """The steps from a cursor to the epoch ``end``, each with the next cursor."""
        wanted, samples = self._global_batch, self.stream.samples
        while end is None or cursor.epoch < end:
            packs, next_cursor = samples.take(cursor, wanted)
            if len(packs) == wanted:
                ends = self.drop_last and not repeat and next_cursor.epoch == cursor.epoch
                if ends and not samples.has(next_cursor, wanted):
                    next_cursor = cursor.next_epoch()
            else:
                is_whole_epoch = cursor == Cursor(cursor.epoch)
                if is_whole_epoch and (repeat or self.drop_last or not len(packs)):
                    raise self._too_small(len(packs))
                if repeat:
                    more, next_cursor = samples.take(next_cursor, wanted - len(packs))
                    if len(packs) + len(more) < wanted:
                        raise self._too_small(len(more))
                    packs = Packs.join([packs, more])
                elif self.drop_last or not len(packs):
                    return
            yield Step.of_rank(packs, self._rank, self._world_size), next_cursor
            cursor = next_cursor

    def _too_small(self, samples: int) -> UsageError:
        if not samples:
            return UsageError("there is nothing to serve: an epoch has no samples")
        return UsageError(
            f"a global batch of {self._global_batch} samples is larger than an epoch of "
            f"{samples}: take a smaller batch, or loop over single epochs with drop_last=False"
        )


class LoaderIterator(Iterator[Any]):
    """A loop over a loader: dicts of arrays; with ``micro_batches``, lists of them."""

    def __init__(self, loader: Loader, *, repeat: bool = False, epochs: int | None = None) -> None:
        self._loader = loader
        self._repeat = repeat
        self._epochs = epochs
        self._items: Iterator[tuple[Any, Cursor]] | None = None
        self._ended = False

    def _start(self) -> Iterator[tuple[Any, Cursor]]:
        self.close()
        loader = self._loader
        self._process = os.getpid()
        self._cursor = loader.cursor
        self._end: int | None = loader.cursor.epoch + 1
        if self._repeat:
            self._end = None if self._epochs is None else loader.first_epoch + self._epochs
        return self._open(self._cursor, self._end)

    def _open(self, cursor: Cursor, end: int | None) -> Iterator[tuple[Any, Cursor]]:
        loader = self._loader
        steps = loader.steps(cursor, end, repeat=self._repeat)
        batches = ((loader.filler.fill(step), next_cursor) for step, next_cursor in steps)
        return Prefetcher(batches, loader.prefetch) if loader.prefetch else batches

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        has_moved = self._items is not None and self._loader.cursor is not self._cursor
        # A prefetching thread does not survive a fork.
        if self._items is None or has_moved or self._process != os.getpid():
            self._items = self._start()
        try:
            batch, cursor = next(self._items)
        except StopIteration:
            self._ended = True
            if self._end is not None and self._loader.cursor.epoch < self._end:
                self._loader.cursor = Cursor(self._end)  # too little was left for a batch
            raise
        except BaseException:  # KeyboardInterrupt, too: a failed iterator looks exhausted
            self._items = None
            raise
        self._cursor = self._loader.cursor = cursor
        return batch

    def close(self) -> None:
        """End a prefetching thread; not needed where the iterator is simply dropped."""
        if isinstance(self._items, Prefetcher):
            self._items.close()


_POLL_S = 0.1  # how often the thread of a full queue checks whether its prefetcher is gone


class _End:
    """The last item of the queue: the iterator's end, or what it raised."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetcher(Iterator[T]):
    """Runs an iterator ahead in a daemon thread, with at most ``depth`` items ready.

    Items carry their next cursor, so prefetched batches are not counted as served. The thread holds
    no reference to the prefetcher: when that is dropped the thread ends within a tenth of a second.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: queue.Queue[T | _End] = queue.Queue(depth)
        self._closed = threading.Event()
        self._ended: _End | None = None
        at_end(self, self._closed.set)
        given = items, self._ready, self._closed
        threading.Thread(target=_run, args=given, name="tokenmill-prefetch", daemon=True).start()

    def __next__(self) -> T:
        item: T | _End = self._ended if self._ended is not None else self._ready.get()
        if not isinstance(item, _End):
            return item
        self._ended = item
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        self._closed.set()


def _run(items: Iterator[T], ready: queue.Queue[T | _End], closed: threading.Event) -> None:
    def put(item: T | _End) -> bool:
        while not closed.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    try:
        for item in items:
            if not put(item):
                return
    except BaseException as error:
        put(_End(error))
    else:
        put(_End(None))


# Options of a loader.


def _pad_id(view: View, pad_id: int | None) -> int:
    found = view.pad_id if pad_id is None else pad_id
    if found is None:
        raise UsageError(
            "the tokenizer names neither a pad nor an eos token (or the stores disagree): "
            "say pad_id"
        )
    return int(found)


def _check_pack(pack: Pack, pad_side: str, multiple: int | None) -> None:
    if not isinstance(pack, Pack):
        raise UsageError(f"pack must be a tm.Pack, not {type(pack).__name__}")
    if pad_side == "left":
        raise UsageError("packs have their padding at the tail: pad_side='left' has no meaning")
    if multiple is not None and pack.length % multiple:
        raise UsageError(
            f"packs of {pack.length} tokens are no multiple of pad_to_multiple_of={multiple}"
        )


def _check_micro_batches(
    micro: MicroBatches, pack: Pack | None, world_size: int, pad_side: str, multiple: int | None
) -> None:
    if not isinstance(micro, MicroBatches):
        raise UsageError(f"micro_batches must be a tm.MicroBatches, not {micro!r}")
    if multiple is not None:
        raise UsageError(
            "micro_batches and pad_to_multiple_of exclude each other: MicroBatches has align"
        )
    if micro.layout == "slab" and pad_side == "left":
        raise UsageError("slabs have no padding at the left: pad_side='left' has no meaning")
    if world_size % micro.context_parallel:
        raise UsageError(
            f"world_size={world_size} is no multiple of context_parallel="
            f"{micro.context_parallel}: ranks that share a slab follow each other"
        )
    if pack is None:
        return
    if micro.layout != "slab":
        raise UsageError("pack and MicroBatches(layout='padded') exclude each other")
    if pack.length % micro.slab or pack.length > micro.budget:
        raise UsageError(
            f"packs of {pack.length} tokens: they must be a multiple of {micro.slab} (align and "
            f"context_parallel) and at most {micro.budget} (max_tokens × context_parallel)"
        )


def _check_media(stream: Stream, media: str | None, processor: Any, context_parallel: int) -> None:
    if media is not None:
        check_one_of("media", media, WAYS)
    if processor is not None and media != "pixels":
        raise UsageError("processor= makes pixels: say media='pixels'")
    if not stream.view.has_media:
        return
    if context_parallel > 1:
        raise UsageError(
            "rows of this data have pictures, which shards would cut through: leave "
            "context_parallel=1, set Align(sequence=…), and let the model shard its embeddings"
        )
    if media == "pixels" and stream.units.grouped and group_kind(stream.view) == "kto":
        raise UsageError(
            "the mismatched answers of KTO rows come without pixels: media='references' serves them"
        )


def _group_filler(
    reader: Filler, layout: str, seed: int, micro: MicroBatches | None
) -> GroupFiller:
    groups = GroupFiller.of(reader, layout, seed)
    if micro is None:
        return groups
    if groups.kind == "kto" and micro.context_parallel > 1:
        raise UsageError(
            "the mismatched answers of KTO rows are not shared among ranks: "
            "context_parallel must be 1"
        )
    # By sides only where every row has a line of its own, whole.
    whole = micro.layout == "padded" and micro.context_parallel == 1
    return replace(groups, sides=groups.sides and whole)
