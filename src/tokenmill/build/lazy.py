"""`LazyRows`: rows that are tokenized when they are requested, by the pipeline of the build.

Opening indexes the files. Every process loads the tokenizer once, and fastokens when it has read so
many bytes that this pays. A process that was forked uses the tokenizer of its parent and the
reference engine, because the threads of fastokens do not survive a fork.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import zlib
from collections import defaultdict
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill._core.collector import without_collector
from tokenmill._core.origin import Origin
from tokenmill._core.process import PrivateDirectory, ProcessLock
from tokenmill.build.blocks import BlockJob, cache_of
from tokenmill.build.executors import executor_for
from tokenmill.build.plan import Limit
from tokenmill.build.recipe import Recipe, RunOptions, serialize
from tokenmill.build.run import find_store, media_options, plan, require_tokenizer
from tokenmill.errors import RowError, UsageError
from tokenmill.sources.block import BlockRows
from tokenmill.sources.rows import Rows
from tokenmill.store import CacheLayout, Media, Row
from tokenmill.store.by_source import (
    SourceRows,
    StoreBySource,
    Unit,
    key_by_source,
    kind_of,
    probe_kind,
    require_one_unit,
)
from tokenmill.store.columns import SliceColumns
from tokenmill.store.record import GROUP_COLUMNS, decode_media
from tokenmill.store.views import images_of
from tokenmill.tokenizers.cache import SMALL_JOB_BYTES

if TYPE_CHECKING:
    from tokenmill.build.pipeline import Pipeline
    from tokenmill.data.images import StoredImages
    from tokenmill.tokenizers.tokenizer import Tokenizer

log = logging.getLogger("tokenmill.build")


def open_lazily(recipe: Recipe, options: RunOptions) -> SourceRows:
    """Index the sources and return their rows; from the finished store if the cache has it."""
    require_one_unit(recipe.expand, recipe.format)
    if options.name is not None:
        raise UsageError(("name",), " names a finished store; remove ", ("lazy",))
    limit: Any = options.max_rejected
    private = PrivateDirectory() if options.disable_cache else None
    cache = cache_of(private.path if private else options.cache_dir)
    with executor_for(options.executor, options.num_workers) as executor:
        planned = plan(recipe, options, executor, cache, hash_images=False)
        # With images the key needs their digests, and thus a scan of all rows.
        store = None if planned.processor else find_store(planned, cache, options)
        if store is not None:
            return StoreBySource(store, limit)
        planned.check_columns()
        require_tokenizer(planned, cache, executor)
        setup = BlockJob(executor, cache.root, planned.card, reference=options.reference).setup(
            "",
            planned.bytes,
            recipe=serialize(recipe),
            limit=planned.limit,
            media=media_options(recipe, options, planned.processor),
            # Pickles do not grow with the number of files.
            document={n: v for n, v in planned.document.items() if n != "sources"},
            key=key_by_source(planned.document),
            ids=planned.tokenizer,
            store=planned.key,
        )
    data = LazyRows(planned.source, setup.options, limit)
    data.private_directory = private
    return data


class LazyRows(SourceRows):
    """Source rows that are tokenized when they are requested.

    Nothing is cached: reading a row twice tokenizes it twice.
    """

    def __init__(
        self, rows: Rows, options: dict[str, Any], max_rejected: float | int | None, kind: str = ""
    ) -> None:
        self._rows = rows
        self._options = options  # of a worker of the build, and the document of the store
        self.max_rejected = max_rejected
        self.private_directory: PrivateDirectory | None = None  # removed with this object
        cache, media = CacheLayout(Path(options["cache"])), options["media"]
        self.cache_root = cache.root
        self.path = cache.store(options["store"]).directory  # of a finished store of these rows
        if media is not None:
            self.processor_key = media["processor"]["key"]
            self.processor_path = cache.processor(self.processor_key)
            self.media_root, self.media_urls = media["root"], media["urls"]
        self._lock = ProcessLock()
        self._pipelines: dict[str, Pipeline] = {}  # by the name of the engine
        self._process, self._tokens = os.getpid(), 0
        self.kind = kind
        self.kind = kind or probe_kind(self)  # also loads the pipeline before a process is forked
        self._describe(options["key"], options["document"], options["ids"])

    def __reduce__(self) -> Any:
        options = zlib.compress(msgspec.json.encode(self._options))
        return _reopen, (self._rows, options, self.max_rejected, self.kind)

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, numbers: NDArray[np.int64]) -> list[Unit]:
        units: dict[int, Unit] = {}
        with self._lock, without_collector():
            pipeline = self._pipeline()
            by_file: dict[Any, list[int]] = defaultdict(list)
            for number in dict.fromkeys(numbers.tolist()):
                # Images of a row are relative to its file.
                by_file[self._rows.file_of(number) if pipeline.expander else None].append(number)
            for file, own in by_file.items():
                unknown = np.full(len(own), -1, np.int64)
                raw = [b"%d" % number for number in own]  # its digest chooses rows to audit
                columns = () if file is None else file.columns
                values = self._rows.values(own)
                rows = BlockRows(raw, values, unknown, unknown, unknown, columns)
                if file is not None:
                    pipeline.begin(file.entry, rows, "")
                made, notes = pipeline.run(rows)
                self._tokens += len(made.ids)
                pipeline.audit_sparsely()  # later calls are small, too
                if any(of_stage.get("mismatches") for of_stage in notes.values()):
                    log.warning("a fast path differed from its reference, which is used from now")
                units.update(zip(own, self._units(made, own), strict=True))
        return [units[number] for number in numbers.tolist()]

    def _units(self, columns: SliceColumns, numbers: list[int]) -> list[Unit]:
        limit = self._options["limit"] and Limit(*self._options["limit"])
        if limit and columns.longest > limit.max_length:
            from tokenmill.build.limit import limit_columns

            columns = limit_columns(columns, limit)
        batch: Any = TokenizedRows(self, columns, numbers)
        units: list[Any] = [[] for _ in numbers]
        bounds = pairwise(columns.starts.tolist())
        for number, (row, own) in enumerate(zip(columns.row.tolist(), bounds, strict=True)):
            ids, mask = columns.ids[slice(*own)], columns.mask[slice(*own)]
            units[row].append(Row(batch, 0, number, ids, mask))
        for bad in columns.rejected:
            location = self.origin_of(numbers[bad.row]).location
            units[bad.row] = RowError(bad.detail, reason=bad.reason, **location)
        for unit in units if columns.groups is not None or self.has_groups else ():
            if self.kind and not isinstance(unit, RowError) and kind_of(unit) != self.kind:
                raise UsageError(
                    f"the row is of kind {kind_of(unit)}, earlier ones are of kind {self.kind}; "
                    "rows that are tokenized on request must be of one kind",
                    **unit[0].origin.location,
                )
        return units

    def _pipeline(self) -> Pipeline:
        options, engine = self._options, "hf"
        # The reference encodes a small job, at 4 bytes per token, while fastokens would load.
        is_main = os.getpid() == self._process and multiprocessing.parent_process() is None
        if is_main and 4 * self._tokens > SMALL_JOB_BYTES:
            engine = options["engine"]
        if engine not in self._pipelines:
            from tokenmill.build.pipeline import pipeline_of
            from tokenmill.build.slices import expander_of
            from tokenmill.tokenizers.cache import load_copy

            loaded = [pipeline.tokenizer for pipeline in self._pipelines.values()]
            tokenizer = (loaded or [load_copy(Path(options["tokenizer"]), options["card"])])[0]
            self._pipelines[engine] = pipeline_of(
                Recipe(**options["recipe"]),
                tokenizer,
                engine,
                options["renderer"],
                expander_of(options, tokenizer, hashed=False),
            )
        return self._pipelines[engine]

    def origin_of(self, number: int) -> Origin:
        return self._rows.origin(number)

    @property
    def tokenizer(self) -> Tokenizer:
        with self._lock:
            return self._pipeline().tokenizer

    def embedded_image(self, digest: str) -> bytes | None:
        return None

    @cached_property
    def stored_images(self) -> StoredImages:
        return images_of(self)


def _reopen(rows: Rows, options: bytes, max_rejected: float | int | None, kind: str) -> LazyRows:
    return LazyRows(rows, msgspec.json.decode(zlib.decompress(options)), max_rejected, kind)


class TokenizedRows:
    """The rows of one call in memory, with the methods of a store and a slice that a `Row` uses."""

    def __init__(self, data: LazyRows, columns: SliceColumns, numbers: list[int]) -> None:
        self._data = data
        self._columns = columns
        self._numbers = numbers  # of the source rows
        self.record = SimpleNamespace(has_media=columns.media is not None)

    def slice_at(self, at: int) -> TokenizedRows:
        return self

    def origin_in(self, at: int, number: int) -> Origin:
        return self._data.origin_of(self._numbers[int(self._columns.row[number])])

    @property
    def tokenizer(self) -> Tokenizer:
        return self._data.tokenizer

    def image(self, media: Media) -> bytes:
        return self._data.stored_images.read(media)

    def column(self, name: str) -> Any:
        columns: Any = self._columns
        if name in GROUP_COLUMNS and columns.groups is None:
            return np.full(len(columns.row), np.nan if name in ("score", "margin") else -1)
        return getattr(columns.groups if name in GROUP_COLUMNS else columns, name)

    def turns(self, number: int) -> list[tuple[str, int, int]]:
        columns = self._columns
        own = slice(*columns.turn_starts[number : number + 2].tolist())
        ends = columns.turn_ends[own].tolist()
        names = (columns.roles[role] for role in columns.turn_roles[own].tolist())
        return list(zip(names, [0, *ends][: len(ends)], ends, strict=True))

    def weight_runs(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        runs = self._columns.weight_runs
        if runs is None:
            return np.zeros(0, np.int32), np.zeros(0, np.float32)
        own = slice(*runs.bounds[number : number + 2].tolist())
        return runs.positions[own], runs.weights[own]

    def media(self, number: int, origin: Origin | None) -> list[Media]:
        media = self._columns.media
        return [] if media is None else decode_media(media.detail[number].encode(), origin)

    def extra_json(self, number: int) -> dict[str, str]:
        return {name: texts[number] for name, texts in self._columns.extra.items()}

    def extra(self, number: int) -> dict[str, Any]:
        return {name: msgspec.json.decode(text) for name, text in self.extra_json(number).items()}
