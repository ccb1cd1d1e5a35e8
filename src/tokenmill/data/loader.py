"""The loader: numpy batches of data in an order, with a small resumable state.

A `Loader` has one position, a `Cursor` between two global batches. All iterators of a loader share
it, and continue from there after the loader was moved.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

from tokenmill._core.process import at_end
from tokenmill.data.batch_media import MEDIA, MediaFiller, Pixels
from tokenmill.data.by_source import REJECTED, RankPacks, Rejections, SourceFiller, check_options
from tokenmill.data.cursor import Cursor
from tokenmill.data.fill import check_multiple
from tokenmill.data.filler import Attached, Filler, MicroFiller, SidecarNames
from tokenmill.data.group_batches import LAYOUTS, GroupFiller, group_kind
from tokenmill.data.micro import MicroBatches
from tokenmill.data.mixture import Mixture
from tokenmill.data.packs import Pack, Packs, Slots, check_pack
from tokenmill.data.samples import Step
from tokenmill.data.stream import Stream
from tokenmill.data.view import View
from tokenmill.errors import UsageError, check_bool, check_integer, check_one_of, check_positive
from tokenmill.store import Store
from tokenmill.store.by_source import SourceRows

T = TypeVar("T")
_Ready = queue.Queue[tuple[T | None, BaseException | None]]  # an item, or the end

BatchFiller = Filler | GroupFiller | MicroFiller | MediaFiller | SourceFiller


class Loader:
    """Iterate over a store, view or mixture in batches of numpy arrays.

    The order is a function of the seed, and a saved state resumes at the next sample.

    Args:
        data: A store, a view, or a mixture.
        batch_size: Samples (rows, groups or packs) per rank.
        shuffle: False serves the rows in their stored order.
        seed: Seed of the order.
        group_by_length: Put rows of similar length into a batch to reduce padding: sort windows of
            8192 positions by length and shuffle groups of 64 rows.
        drop_last: Drop the last global batch of an epoch if it is short. False serves it, shared
            evenly among the ranks; a rank without rows gets one row of padding. `repeat` has no
            short batches and ignores this.
        rank: This rank.
        world_size: Number of ranks that share every global batch.
        pad_token_id: None takes the tokenizer's padding token, else its end-of-sequence token.
        padding_side: right or left.
        pad_to_multiple_of: Round widths up to a multiple of this.
        pack: A `Pack` puts several rows into sequences of one length instead of padding them.
        micro_batches: A `MicroBatches` makes every step a list of batches under a token budget,
            equally many on every rank.
        prefetch: Number of batches that a thread fills ahead; 0 fills them on demand.
        indices: Add ``indices`` to batches: the row number of every row.
        sidecars: Sidecars to add to batches: their names, or a mapping from names to producers.
            None: all that are attached to the data now; ``()``: none.
        unit: What a sample is: rows or groups. auto: groups if the data has any.
        layout: How pairs are served: sides (``chosen_*`` and ``rejected_*``) or interleaved (one
            matrix, row by row). Other groups and packs are always interleaved.
        media: How images are served: references adds ``media``, which lists them; pixels also adds
            the processor's arrays under the names of its model. None serves token ids only, with
            a warning.
        processor: Computes the pixels; None takes the copy in the stores.
    """

    def __init__(
        self,
        data: Store | SourceRows | View | Mixture,
        batch_size: int = 8,
        *,
        shuffle: bool = True,
        seed: int = 42,
        group_by_length: bool = False,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        pad_token_id: int | None = None,
        padding_side: str = "right",
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
        check_bool("drop_last", drop_last)
        check_bool("group_by_length", group_by_length)
        check_one_of("layout", layout, LAYOUTS)
        if group_by_length and not shuffle:
            raise UsageError("group_by_length=True requires shuffle=True")
        check_one_of("padding_side", padding_side, ("right", "left"))
        pad_to_multiple_of = check_multiple(pad_to_multiple_of)
        if pack is not None:
            _check_pack(pack, padding_side, pad_to_multiple_of)
        batch_size = check_positive("batch_size", batch_size)
        world_size = check_positive("world_size", world_size)
        rank = check_integer("rank", rank, 0)
        if rank >= world_size:
            raise UsageError(f"rank must be less than world_size={world_size}, got {rank}")
        micro, shared, slots = micro_batches, 1, None
        if micro is not None:
            _check_micro_batches(micro, pack, world_size, padding_side, pad_to_multiple_of)
            shared = micro.context_parallel
            slots = Slots(micro.sequence) if pack is not None and micro.sequence > 1 else None
        self.drop_last = drop_last
        self.prefetch = check_integer("prefetch", prefetch, 0)
        # Ranks that share a packed sequence get the same samples.
        self._rank, self._world_size = rank // shared, world_size // shared
        self._global_batch = batch_size * self._world_size
        self.stream = Stream(
            data,
            rank=self._rank,
            seed=seed,
            order="length_grouped" if group_by_length else "feistel" if shuffle else "sequential",
            unit=unit,
            pack=pack,
            slots=slots,
            ranks=self._world_size,
            max_patches=None if micro is None else micro.max_patches,
        )
        view, units, draws = self.stream.view, self.stream.units, self.stream.draws
        if draws is not None:
            check_options(view, micro_batches=micro, sidecars=sidecars)
            if pack is not None:  # this rank's own packs
                self._rank, self._world_size, self._global_batch = 0, 1, batch_size
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
            _pad_token_id(view, pad_token_id),
            padding_side=padding_side,
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
                "rows of this data have images, but batches will contain only their tokens; set "
                "media='pixels' or media='references'",
                stacklevel=2,
            )
        if draws is not None:
            self.filler = SourceFiller(draws, self.filler, indices)
        limits = [getattr(store, "max_rejected", None) for store in view.stores]
        self.rejections = Rejections(
            min((limit for limit in limits if limit is not None), default=None)
        )
        self.cursor = Cursor()
        self.first_epoch = 0  # `repeat` counts epochs from here

    def __iter__(self) -> LoaderIterator:
        """Iterate over the rest of the current epoch, or over the next one after its end."""
        return LoaderIterator(self)

    def repeat(self, epochs: int | None = None) -> LoaderIterator:
        """Iterate without end, or over ``epochs`` epochs from the start of the run.

        There are no short batches: the last global batch of an epoch is filled from the next one.
        The run ends with the batch that contains the end of its last epoch.

        Raises:
            UsageError: A global batch is larger than an epoch.
        """
        if epochs is not None:
            epochs = check_positive("epochs", epochs)
        if not self._is_large_enough(self.cursor.epoch):
            raise self._too_small(self.stream.samples.count(self.cursor.epoch))
        return LoaderIterator(self, repeat=True, epochs=epochs)

    def __len__(self) -> int:
        """Number of global batches of the current epoch. With packing, packs the whole epoch."""
        size = self._global_batch
        before = self.cursor.position // size
        left = self.stream.samples.count(self.cursor.epoch) - self.cursor.position
        return before + (left // size if self.drop_last else -(-left // size))

    @property
    def epoch(self) -> int:
        """Epoch of the next sample."""
        return self.cursor.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the loader is in it already.

        Call it at the start of every epoch, also of one that is resumed. `repeat` counts epochs
        from the epoch that the loader was moved to.
        """
        epoch = self.stream.checked_epoch(epoch)
        if epoch != self.cursor.epoch:
            self.cursor, self.first_epoch = Cursor(epoch), epoch

    def __repr__(self) -> str:
        spec, more = self.stream.spec, ""
        if spec.packing is not None:
            more = f", pack of {spec.packing['length']:,} tokens"
        if self._world_size > 1:
            more += f", rank {self._rank} of {self._world_size}"
        size = self._global_batch // self._world_size
        at = f"epoch {self.cursor.epoch}, position {self.cursor.position:,}"
        return (
            f"Loader({self.stream.view!r}, batch_size={size}, seed={spec.seed}, "
            f"order={spec.order}{more}, {at})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch; the same on every rank."""
        return self.stream.spec.save(self.cursor, self.first_epoch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            StateError: The state belongs to another dataset, seed, order, packing or version.
        """
        cursor, first_epoch = self.stream.spec.load(state)
        self.stream.check(cursor)
        self.cursor, self.first_epoch = cursor, first_epoch

    def served(self) -> dict[str, dict[str, Any]]:
        """Return what each source of a mixture has served; other data is the source ``data``.

        The counts are ``rows``, complete ``passes``, ``tokens`` and ``trained_tokens``. They are
        computed from the position, so a resume does not change them. Rows that ``drop_last=True``
        drops are included. Of source rows (`Store.by_source`), tokens are unknown; ``rejected`` has
        by reason how many rejected rows of this rank this object replaced, and the first ones. With
        packing, ``data`` counts the rows of this rank in complete windows, of all sources together.
        """
        served: dict[str, dict[str, Any]] = dict(self.stream.served(self.cursor))
        for source, rejected in self.rejections.by_source.items():
            served.setdefault(source, {})["rejected"] = rejected
        return served

    def steps(
        self, cursor: Cursor, end: int | None, *, repeat: bool = False
    ) -> Iterator[tuple[Step, Cursor]]:
        """Yield the steps from a cursor to the epoch ``end``, each with the next cursor."""
        size, samples = self._global_batch, self.stream.samples
        while end is None or cursor.epoch < end:
            packs, next_cursor = samples.take(cursor, size)
            if len(packs) == size:
                ends = self.drop_last and not repeat and next_cursor.epoch == cursor.epoch
                if ends and not samples.has(next_cursor, size):
                    next_cursor = cursor.next_epoch()
            else:
                if cursor == Cursor(cursor.epoch):  # the whole epoch is shorter than a batch
                    drops = self.drop_last and not repeat
                    if not len(packs) or ((repeat or drops) and not self._is_large_enough(0)):
                        raise self._too_small(len(packs))
                    if drops:
                        warnings.warn(
                            f"drop_last=True drops epoch {cursor.epoch}, which has {len(packs)} "
                            f"packs, fewer than a global batch of {size}",
                            stacklevel=2,
                        )
                if repeat:
                    more, next_cursor = samples.take(next_cursor, size - len(packs))
                    if len(packs) + len(more) < size:
                        raise self._too_small(len(more))
                    packs = Packs.join([packs, more])
                elif self.drop_last or not len(packs):
                    return
            yield Step.of_rank(packs, self._rank, self._world_size), next_cursor
            cursor = next_cursor

    def _is_large_enough(self, epoch: int) -> bool:
        """Return whether an epoch, or epoch 0, has a global batch; numbers of packs vary."""
        samples = self.stream.samples
        return any(samples.has(Cursor(one), self._global_batch) for one in {epoch, 0})

    def _too_small(self, samples: int) -> UsageError:
        if not samples:
            return UsageError("the data has no samples to serve")
        return UsageError(
            f"a global batch of {self._global_batch} samples is larger than an epoch of "
            f"{samples}; reduce batch_size, or iterate over single epochs with drop_last=False"
        )


class LoaderIterator(Iterator[Any]):
    """Iterates over a loader: dicts of arrays; with ``micro_batches``, lists of them."""

    def __init__(self, loader: Loader, *, repeat: bool = False, epochs: int | None = None) -> None:
        if isinstance(loader.stream.samples, RankPacks) and (epochs or not repeat):
            raise UsageError(
                "packs of source rows have no epochs, because their number is unknown; use "
                "loader.repeat() without epochs"
            )
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
                self._loader.cursor = Cursor(self._end)  # a short batch was dropped
            raise
        except BaseException:  # also KeyboardInterrupt, because a failed generator is exhausted
            self._items = None
            raise
        self._cursor = self._loader.cursor = cursor
        if isinstance(batch, dict) and (found := batch.pop(REJECTED, None)) is not None:
            self._loader.rejections.count(*found)
        return batch

    def close(self) -> None:
        """End the prefetching thread; not needed if the iterator is garbage-collected."""
        if isinstance(self._items, Prefetcher):
            self._items.close()


_POLL_S = 0.1  # how often a waiting thread checks whether its prefetcher is closed


class Prefetcher(Iterator[T]):
    """Runs an iterator in a daemon thread, with at most ``depth`` items ready.

    Items contain their next cursor, so prefetched batches do not count as served. The thread has
    no reference to the prefetcher, and ends within `_POLL_S` after its garbage collection.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._ready: _Ready[T] = queue.Queue(depth)
        self._closed = threading.Event()
        self._end: BaseException | None = None  # StopIteration, or the iterator's error
        at_end(self, self._closed.set)
        args = items, self._ready, self._closed
        threading.Thread(target=_run, args=args, name="tokenmill-prefetch", daemon=True).start()

    def __next__(self) -> T:
        if self._end is None:
            item, self._end = self._ready.get()
        if self._end is not None:
            raise self._end
        return item  # type: ignore[return-value]

    def close(self) -> None:
        self._closed.set()


def _run(items: Iterator[T], ready: _Ready[T], closed: threading.Event) -> None:
    def put(item: T | None, end: BaseException | None = None) -> bool:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((item, end), timeout=_POLL_S)
                return True
        return False

    try:
        for item in items:
            if not put(item):
                return
        put(None, StopIteration())
    except BaseException as error:
        put(None, error)


# Options of a loader.


def _pad_token_id(view: View, pad_token_id: int | None) -> int:
    pad_token_id = view.pad_token_or(pad_token_id)
    if pad_token_id is None:
        raise UsageError(
            "the tokenizer has no pad and no eos token, or the stores have different ones; set "
            "pad_token_id"
        )
    return pad_token_id


def _check_pack(pack: Pack, padding_side: str, multiple: int | None) -> None:
    check_pack(pack)
    if padding_side == "left":
        raise UsageError("pack requires padding_side='right', got 'left'")
    if multiple is not None and pack.length % multiple:
        raise UsageError(
            f"the pack length {pack.length} must be a multiple of pad_to_multiple_of={multiple}"
        )


def _check_micro_batches(
    micro: MicroBatches, pack: Pack | None, world_size: int, padding_side: str, multiple: int | None
) -> None:
    if not isinstance(micro, MicroBatches):
        known = isinstance(micro, int)
        advice = f"; write micro_batches=tm.MicroBatches(max_tokens={micro})" if known else ""
        raise UsageError(f"micro_batches must be a tm.MicroBatches, got {micro!r}{advice}")
    if multiple is not None:
        raise UsageError(
            "pad_to_multiple_of cannot be used with micro_batches; use MicroBatches(align=…)"
        )
    if micro.layout == "slab" and padding_side == "left":
        raise UsageError("MicroBatches(layout='slab') requires padding_side='right', got 'left'")
    if world_size % micro.context_parallel:
        raise UsageError(
            f"world_size={world_size} must be a multiple of "
            f"context_parallel={micro.context_parallel}"
        )
    if pack is None:
        return
    if micro.layout != "slab":
        raise UsageError("pack requires MicroBatches(layout='slab'), got 'padded'")
    if pack.length % micro.multiple or pack.length > micro.budget:
        raise UsageError(
            f"the pack length must be a multiple of {micro.multiple} (align and context_parallel) "
            f"and at most {micro.budget} (max_tokens × context_parallel), got {pack.length}"
        )


def _check_media(stream: Stream, media: str | None, processor: Any, context_parallel: int) -> None:
    if media is not None:
        check_one_of("media", media, MEDIA)
    if processor is not None and media != "pixels":
        raise UsageError("processor requires media='pixels'")
    if not stream.view.has_media:
        return
    if context_parallel > 1:
        raise UsageError(
            "rows of this data have images, which context_parallel would split; use "
            "context_parallel=1 and Align(sequence=…), and let the model shard its embeddings"
        )
    if media == "pixels" and stream.units.grouped and group_kind(stream.view) == "kto":
        raise UsageError("media='pixels' does not support KTO rows; use media='references'")


def _group_filler(
    reader: Filler, layout: str, seed: int, micro: MicroBatches | None
) -> GroupFiller:
    groups = GroupFiller.of(reader, layout, seed)
    if micro is None:
        return groups
    if groups.kind == "kto" and micro.context_parallel > 1:
        raise UsageError(
            "KTO rows require context_parallel=1, because mismatched answers are not sharded"
        )
    # Sides need padded rows that are not sharded.
    whole = micro.layout == "padded" and micro.context_parallel == 1
    return replace(groups, sides=groups.sides and whole)
