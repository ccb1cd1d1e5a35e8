"""Read stores: rows by number.

Stores are immutable, pickled as their path and key, and usable from threads and after a fork. This
module imports no pyarrow, tokenizer or template engine.
"""

from __future__ import annotations

import html
import math
import os
import re
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from tokenmill._core import fingerprint
from tokenmill._core.origin import Origin
from tokenmill._core.paths import checked_path, is_network
from tokenmill._core.process import ProcessLock
from tokenmill._core.remote import is_remote
from tokenmill._core.remote_path import as_remote
from tokenmill.errors import CorruptionError, UsageError, check_bool, check_one_of, public_path
from tokenmill.store import layout as names
from tokenmill.store.access import ByteFile, reading_errors, require_checksum, require_size
from tokenmill.store.columns import (
    require_iterable,
    row_number,
    row_numbers,
    trained_within,
    weighed_within,
    weights_along,
)
from tokenmill.store.groups import Groups
from tokenmill.store.layout import StoreLayout
from tokenmill.store.manifest import (
    Document,
    check_file,
    check_table,
    load_table,
    read_manifest,
    read_proof,
    units_out,
)
from tokenmill.store.named import find_store
from tokenmill.store.record import EXTRA, FIXED_COLUMNS, Media
from tokenmill.store.sidecars import COLUMN, Sidecar, attached, choose, sidecar_checks, sidecar_of
from tokenmill.store.slices import SliceReader, read_counts
from tokenmill.store.views import ViewMethods, images_of, tokenizer_of

if TYPE_CHECKING:
    from tokenmill.data.images import StoredImages
    from tokenmill.data.view import View
    from tokenmill.store.by_source import StoreBySource
    from tokenmill.store.sidecar_writer import SidecarWriter

VERIFY = ("lazy", "open", "off")
MAX_CHECKED_AT_OPEN_BYTES = 256 << 20  # per file, about 0.1 s; larger files: on first use
MAX_LISTED_SLICES = 1 << 14  # of more slices, first rows are searched in the mapped table
MAX_OPEN_SLICES = 4096  # the limit of file descriptors may lower it


class Row(msgspec.Struct, eq=False, gc=False):
    """One training row. Arrays are views of the store; the rest is read on access."""

    # Creating a struct takes half the time of an ordinary object. It is part of no cycle.

    _store: Store
    _slice: int
    _number: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def labels(self) -> NDArray[np.int32]:
        """The token ids, -100 where a token is not trained."""
        return np.where(self.loss_mask > 0, self.input_ids, np.int32(-100))

    @property
    def text(self) -> str:
        """The decoded tokens."""
        return self._decode(0, len(self))

    def show(self) -> None:
        """Print origin and text; trained tokens are between ⟦ and ⟧."""
        print(self)
        for text, is_trained in self._runs():
            print(f"⟦{text}⟧" if is_trained else text, end="")
        print()

    def _runs(self) -> Iterator[tuple[str, bool]]:
        """Yield the text in runs of untrained and trained tokens, alternating."""
        edges = np.flatnonzero(np.diff(self.loss_mask, prepend=0, append=0)).tolist()
        for number, (start, stop) in enumerate(pairwise([0, *edges, len(self)])):
            yield self._decode(start, stop), number % 2 == 1

    def _repr_html_(self) -> str:
        """Show the row in a notebook; trained tokens are highlighted."""
        runs = ((html.escape(text), is_trained) for text, is_trained in self._runs())
        body = "".join(f"<mark>{text}</mark>" if is_trained else text for text, is_trained in runs)
        head = html.escape(repr(self))
        return f'<code>{head}</code><pre style="white-space: pre-wrap">{body}</pre>'

    def _decode(self, start: int, stop: int) -> str:
        pieces = self._store.tokenizer.pieces(self.input_ids[start:stop].tolist())
        return b"".join(pieces).decode("utf-8", "replace")

    @property
    def origin(self) -> Origin:
        return self._store.origin_in(self._slice, self._number)

    @property
    def turns(self) -> list[tuple[str, int, int]]:
        """``(role, start, end)`` of every turn, in tokens, without gaps."""
        return self._store.slice_at(self._slice).turns(self._number)

    @property
    def weights(self) -> NDArray[np.float32]:
        """The loss weight of each token; 0 where it is untrained."""
        runs = self._store.slice_at(self._slice).weight_runs(self._number)
        return weights_along(*runs, self.loss_mask)

    @property
    def media(self) -> list[Media]:
        """Its images in order, each with its token span."""
        reader = self._store.slice_at(self._slice)
        return reader.media(self._number, self.origin if reader.record.has_media else None)

    def image(self, number: int = 0) -> bytes:
        """Return the bytes of one of its images; see `Store.image`."""
        media = self.media
        return self._store.image(media[int(row_numbers([number], len(media), "image")[0])])

    @property
    def part(self) -> int:
        """Number of the row in its group; with ``expand``, of its first turn; else 0."""
        return int(self._column("part"))

    def _column(self, name: str) -> Any:
        return self._store.slice_at(self._slice).column(name)[self._number]

    @property
    def label(self) -> bool | None:
        """Whether this answer of a group is preferred; None if unknown."""
        label = int(self._column("label"))
        return None if label < 0 else bool(label)

    @property
    def score(self) -> float | None:
        return self._number_or_none("score")

    @property
    def margin(self) -> float | None:
        return self._number_or_none("margin")

    def _number_or_none(self, column: str) -> float | None:
        number = float(self._column(column))
        return None if math.isnan(number) else number

    @property
    def prompt_tokens(self) -> int | None:
        count = int(self._column("prompt_tokens"))
        return None if count < 0 else count

    @property
    def extra(self) -> dict[str, Any]:
        """The extra columns, decoded."""
        return self._store.slice_at(self._slice).extra(self._number)

    @property
    def extra_json(self) -> dict[str, str]:
        return self._store.slice_at(self._slice).extra_json(self._number)

    def with_tokens(self, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> Row:
        return Row(self._store, self._slice, self._number, input_ids, loss_mask)

    def __repr__(self) -> str:
        trained = int(self.loss_mask.sum())
        return f"Row({len(self)} tokens, {trained} trained, {self.origin})"


_PUBLIC = (
    "attach", "attach_writer", "batch", "by_source", "count", "filter", "group_count", "group_size",
    "groups", "has_groups", "has_media", "has_weights", "image", "images", "index", "key",
    "lengths", "manifest", "map", "media_root", "patches", "path", "proof", "rejected",
    "rejected_rows", "select", "shuffle", "sidecar", "sidecars", "sources", "split", "tokenizer",
    "tokenizer_path", "torch", "trained", "verify",
)  # fmt: skip


class Store(ViewMethods, Sequence[Row]):
    """The rows of a finished store by number; open one with `open_store`.

    ``paths`` are the source files in the manifest's order; None: those in ``proof.json``.
    """

    is_by_source = False

    def __init__(
        self,
        path: str | os.PathLike[str],
        verify: str = "lazy",
        *,
        paths: Sequence[str] | None = None,
        media_root: str | os.PathLike[str] | None = None,
        media_urls: bool = False,
    ) -> None:
        check_one_of("verify", verify, VERIFY)
        self.path = self._locate(path)
        self._options: dict[str, Any] = {
            "paths": None if paths is None else tuple(paths),
            "media_root": None if media_root is None else os.fspath(media_root),
            "media_urls": media_urls,
        }
        self._verify = verify
        self.checks_blocks = verify != "off"
        self.layout = StoreLayout(self.path)
        self.manifest: Document = read_manifest(self.layout)
        self.key: str = self.manifest["key"]
        self.cache_root = self.layout.cache_root  # None when the store is self-contained
        self.media_urls = media_urls
        self.has_media = names.IMAGES in self.manifest["files"]
        self.has_weights = names.WEIGHT_RUNS in self.manifest["files"]  # any other than 1
        self.has_groups = "groups" in self.manifest["totals"]
        self.group_count = units_out(self.manifest["totals"])  # of rows without groups
        self._lock = ProcessLock()
        self._open: dict[int, SliceReader] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._sidecars: dict[tuple[str, str], Sidecar] = {}
        self._max_open = _max_open_slices()
        self.private_directory: Any = None  # removed with this store (``disable_cache``)
        self._check_own_files()
        table = self._own_file(names.TABLE)
        self.table = load_table(ByteFile(table, mapped=self._maps_own))
        check_table(self.manifest, table, content=self.checks_blocks)
        firsts = self.table["first_row"]
        # Searching plain integers (a list or a memory view) is much faster than numpy's.
        self._first_rows: Sequence[int]
        if len(firsts) <= MAX_LISTED_SLICES:
            self._first_rows = firsts.tolist()
        else:
            self._first_rows = (firsts if self._maps_own else np.ascontiguousarray(firsts)).data
        self._rows: int = self.manifest["totals"]["rows"]
        if verify == "open":
            self.verify()

    def _locate(self, path: str | os.PathLike[str]) -> Path:
        """Return the directory; set whether slices and the store's files are memory-mapped."""
        if is_remote(path):
            raise UsageError("Store() opens local stores; use open_store for a URL", path=path)
        self._mapped = self._maps_own = not is_network(path)
        return Path(path)

    def _own_file(self, name: str) -> Path:
        return self.layout.file(name)

    def _check_own(self, name: str, expected_file: Document) -> int:
        check_file(self.layout.file(name), expected_file, content=True)
        return int(expected_file["size"])

    def _check_own_files(self) -> None:
        for name in (*self.manifest["files"], names.PROOF):
            self.layout.require_inside(self.layout.file(name))
        for name, expected_file in self.manifest["files"].items():
            large = expected_file["size"] > MAX_CHECKED_AT_OPEN_BYTES
            # `check_table` hashes the table while it recounts the totals.
            content = self.checks_blocks and not large and name != names.TABLE
            check_file(self.layout.file(name), expected_file, content=content)

    # Rows

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> View: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | View:
        if type(index) is int:
            i = index
        elif isinstance(index, slice):
            return self._range(range(self._rows)[index])
        else:
            i = row_number(index)
        if not 0 <= i < self._rows:
            if not -self._rows <= i < 0:
                raise IndexError(f"row {index} is out of range: there are {self._rows}")
            i += self._rows
        first_rows = self._first_rows
        at = bisect_right(first_rows, i) - 1
        reader = self._open.get(at) or self.slice_at(at)
        number = i - first_rows[at]
        ids, mask, starts = reader.ids, reader.mask, reader.starts
        if ids is None or mask is None or not reader.tokens.verified:
            return Row(self, at, number, *reader.row(number))
        # Inlined, because nearly every row takes this path in a trainer's inner loop.
        start, stop = starts[number], starts[number + 1]
        return Row(self, at, number, ids[start:stop], mask[start:stop])

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        return [self[i] for i in require_iterable(indices)]

    def __iter__(self) -> Iterator[Row]:
        for at in range(len(self.table)):
            reader = self.slice_at(at)
            for number in range(reader.record.rows):
                ids, mask = reader.row(number)
                yield Row(self, at, number, ids, mask)

    def slice_at(self, at: int) -> SliceReader:
        reader = self._open.get(at)
        if reader is not None:
            return reader
        entry = self.table[at]
        files = self.layout.slice(entry["key"].tobytes().hex())
        expected = entry["record"].tobytes().hex()
        reader = SliceReader(files, expected, mapped=self._mapped, check=self.checks_blocks)
        if reader.record.rows != entry["rows"] or reader.record.tokens != entry["tokens"]:
            raise CorruptionError(
                f"slice has {reader.record.rows} rows and {reader.record.tokens} tokens, the "
                f"store expects {entry['rows']} and {entry['tokens']}",
                path=files.record,
            )
        with self._lock:
            while len(self._open) >= self._max_open:
                self._open.pop(next(iter(self._open)))
            self._open[at] = reader
        return reader

    # Columns

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of every row."""
        return self.own_array(names.LENGTHS)

    @property
    def trained(self) -> NDArray[np.int32]:
        """Trained tokens of every row."""
        return self.own_array(names.TRAINED)

    trained_within = trained_within
    weighed_within = weighed_within

    # Images

    @property
    def images(self) -> NDArray[np.int32]:
        """Number of images of every row."""
        return self._of_media(names.IMAGES)

    @property
    def patches(self) -> NDArray[np.int32]:
        """Vision-model patches of every row."""
        return self._of_media(names.PATCHES)

    def _of_media(self, name: str) -> NDArray[np.int32]:
        return self.own_array(name) if self.has_media else np.zeros(self._rows, np.int32)

    @property
    def media_root(self) -> str | None:
        """Base directory of relative image paths: the given one, else that of the first build."""
        known = self._options["media_root"] or self.proof.get("media_root")
        return known if isinstance(known, str) else None

    def image(self, media: Media) -> bytes:
        """Return the bytes of an image, the same that the row was prepared with.

        Raises:
            SourceMissing: The image is gone.
            SourceChanged: Its bytes changed.
        """
        return self._images.read(media)

    @cached_property
    def _images(self) -> StoredImages:
        return images_of(self)

    def embedded_image(self, digest: str) -> bytes | None:
        """Return the copy of an image in this store or its cache, or None.

        Raises:
            CorruptionError: It is damaged, or missing though the manifest counts it.
        """
        if not re.fullmatch(r"[0-9a-f]{32}", digest):
            raise CorruptionError(f"{digest!r} is not the digest of an image", path=self.path)
        embedded = "media" in self.manifest
        path = self.layout.image(digest)
        remote = as_remote(path)
        if not embedded and (remote is not None or not path.exists()):
            return None
        self.layout.require_inside(path)
        with reading_errors(path):
            if remote is None:
                data = path.read_bytes()
            else:
                data = remote.read_cached(
                    f"{digest}.image", lambda found: fingerprint.checksum(found) == digest
                )
        require_checksum(path, fingerprint.checksum(data), digest)
        return data

    def distinct_media(self) -> Iterator[Media]:
        """Yield every image that rows refer to, once for each digest."""
        seen: set[bytes] = set()
        for row in self:
            for media in row.media:
                digest = bytes.fromhex(media.digest)
                if digest not in seen:
                    seen.add(digest)
                    yield media

    @property
    def processor_path(self) -> Path | None:
        """Path of the store's copy of its processor, if any."""
        if not self.processor_key:
            return None
        path = self.layout.processor(self.processor_key)
        self.layout.require_inside(path)
        return path

    @property
    def processor_key(self) -> str:
        identity = self.manifest["document"].get("processor")
        return "" if identity is None else fingerprint.key_of_parsed(identity)

    def own_array(self, name: str) -> NDArray[Any]:
        """Return an array of `layout.ARRAYS`; a large file is checked now."""
        array = self._arrays.get(name)
        if array is None:
            expected_file, path = self.manifest["files"][name], self._own_file(name)
            if self._verify == "lazy" and expected_file["size"] > MAX_CHECKED_AT_OPEN_BYTES:
                check_file(path, expected_file, content=True)
            count = self._rows
            if name == names.MASK_RUNS and count:  # up to the end of the last row's
                count = int(self.own_array(names.MASK_RUN_ENDS)[-1])
            elif name in (names.WEIGHT_RUNS, names.RUN_WEIGHTS):
                count = int(self.own_array(names.WEIGHT_RUN_ENDS)[-1])
            elif name in names.GROUP_FILES:
                count = self.group_count
            dtype = np.dtype(names.ARRAYS[name])
            file = ByteFile(path, mapped=self._maps_own)
            require_size(path, file.size, count * dtype.itemsize)
            array = self._arrays[name] = np.frombuffer(file.view(0, file.size), dtype)
        return array

    # Groups

    @property
    def groups(self) -> Groups:
        return Groups(self)

    def group_starts(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the first row of each group; for `group_count`, the number of rows."""
        if not self.has_groups:
            return groups
        ends = self.own_array(names.GROUP_ENDS)
        starts = np.where(groups > 0, ends[np.maximum(groups, 1) - 1], 0)
        if starts.size and int(starts.max()) > self._rows:
            raise CorruptionError(
                f"a group ends at row {int(starts.max())}, the store has {self._rows} rows",
                path=self.layout.file(names.GROUP_ENDS),
            )
        return starts.astype(np.int64)

    @property
    def group_size(self) -> int | None:
        """Rows per group; None if that differs."""
        if not self.has_groups:
            return 1
        counts = self.manifest["totals"]["groups"]
        if counts["ranked"]:
            return None
        sizes = {2} if counts["preference"] else set()
        sizes |= {1} if counts["kto"] or counts["single"] else set()
        return sizes.pop() if len(sizes) == 1 else None

    def by_source(self) -> StoreBySource:
        """Return the source rows of this store by number, including rejected ones.

        A `Loader` of them gives the same batches as one of ``prepare(..., lazy=True)``.
        """
        from tokenmill.store.by_source import StoreBySource

        return StoreBySource(self)

    def columns(self, column_names: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Read meta columns slice by slice, for filters and splits.

        Args:
            column_names: Fixed columns (``digest``, ``length``, …), ``source`` (index of the source
                file), ``extra.<name>`` (JSON texts), or a sidecar's `column_of`.

        Yields:
            Number of the first row, and each column over the slice's rows.
        """
        column_names = list(column_names)
        sidecars = {
            name: sidecar_of(self, name) for name in column_names if name.startswith(COLUMN)
        }
        for at, first in enumerate(self._first_rows):
            reader = self.slice_at(at)
            columns: dict[str, Any] = {}
            for name in column_names:
                if name == "source":
                    source = int(self.table[at]["source"])
                    columns[name] = np.full(reader.record.rows, source, np.int32)
                elif name in sidecars:
                    rows = np.arange(first, first + reader.record.rows)
                    columns[name] = sidecars[name].batch(rows)
                elif name in FIXED_COLUMNS:
                    columns[name] = reader.column(name)
                elif name in (extra := [EXTRA + one for one in reader.record.extra]):
                    columns[name] = reader.extra_texts(name.removeprefix(EXTRA))
                else:
                    known = [*FIXED_COLUMNS, "source", *extra]
                    raise UsageError(f"no column {name!r}; choose from {', '.join(known)}")
            yield first, columns

    # Sidecars

    def attach(
        self,
        name: str,
        values: npt.ArrayLike | Iterable[npt.ArrayLike],
        *,
        producer: str,
        per: str = "row",
    ) -> Sidecar:
        """Attach one float32 per row or per token to the store.

        Args:
            name: Name of the values in batches and filters.
            values: An array; or an iterable of consecutive arrays, per token each of whole rows.
                Per token also a list with one array for each row.
            producer: What computed them: a digest of the model, or a text. One name may have
                values of several producers.
            per: ``row`` or ``token``.

        Raises:
            UsageError: The number of values is wrong, or one is not a number.
            NonDeterminismError: Other values with this name and producer are attached.
        """
        from tokenmill.store.sidecar_writer import attach_values

        return attach_values(self, name, values, producer=producer, per=per)

    def attach_writer(self, name: str, *, producer: str, per: str = "row") -> SidecarWriter:
        """Return a writer for values that several processes compute, in any order.

            with store.attach_writer("ref_logps", producer=digest, per="token") as writer:
                for row in writer.share(rank, world_size):
                    writer.write(row, log_probabilities(store[row].input_ids))

        After a crash, start the same program again: rows that were flushed are not in ``share``.

        Args:
            name: Name of the values in batches and filters.
            producer: What computes them: a digest of the model, or a text.
            per: ``row`` or ``token``.
        """
        from tokenmill.store.sidecar_writer import SidecarWriter

        return SidecarWriter(self, name, producer=producer, per=per)

    def sidecar(self, name: str, producer: str | None = None) -> Sidecar:
        """Return the values attached under a name; ``producer`` is needed where there are several.

        Raises:
            UsageError: There are none, or several.
            CorruptionError: They are damaged.
        """
        if producer is not None and not isinstance(producer, str):
            raise UsageError(("producer",), f" must be a string, got {producer!r:.200}")
        # Without a producer the name is looked up again, because another sidecar of that name may
        # have been attached since.
        sidecar = None if producer is None else self._sidecars.get((name, producer))
        if sidecar is None:
            chosen = choose(self, name, producer)
            sidecar = self._sidecars.setdefault((name, chosen.producer), chosen)
        return sidecar

    @property
    def sidecars(self) -> list[Sidecar]:
        """All sidecars, by name and producer."""
        return attached(self)

    # Where rows come from

    @cached_property
    def sources(self) -> tuple[str | None, ...]:
        """Paths of the source files: the given ones, else those of the first build."""
        known = self._options["paths"]
        if known is None:
            known = self.proof.get("paths", [])
        count = len(self.manifest["document"].get("sources", known))
        return (*known, *[None] * (count - len(known)))

    def origin_in(self, at: int, number: int) -> Origin:
        reader = self.slice_at(at)
        return self._origin(
            at,
            int(reader.column("row_in_slice")[number]),
            int(reader.column("line_in_slice")[number]),
            int(reader.column("offset_in_slice")[number]),
            int(reader.column("raw_length")[number]),
        )

    def _origin(self, at: int, row: int, line: int, offset: int, length: int) -> Origin:
        entry = self.table[at]
        first_line, first_offset = int(entry["line"]), int(entry["offset"])
        return Origin(
            path=self.sources[int(entry["source"])],
            row=int(entry["source_row"]) + row,
            line=first_line + line if first_line and line >= 0 else None,
            offset=first_offset + offset if first_offset >= 0 and offset >= 0 else None,
            length=length,
        )

    @property
    def rejected(self) -> dict[str, int]:
        """Rejected rows by reason."""
        return dict(self.manifest["totals"]["rejected"])

    def rejected_rows(self) -> Iterator[tuple[Origin, str, str]]:
        """Yield origin, reason and detail of every rejected row."""
        for at in np.flatnonzero(self.table["rejected"]):
            for row in self.slice_at(int(at)).record.rejected:
                origin = self._origin(int(at), row.row, row.line, row.offset, row.length)
                yield origin, row.reason, row.detail

    @cached_property
    def proof(self) -> Document:
        """How the store was built: engine, audits, versions. Empty, with a warning, if damaged."""
        return read_proof(self.layout.file(names.PROOF))

    @cached_property
    def tokenizer(self) -> Any:
        return tokenizer_of(self)

    @property
    def tokenizer_path(self) -> Path:
        """Path of the store's copy of its tokenizer."""
        path = self.layout.tokenizer(self.manifest["tokenizer"]["identity"])
        self.layout.require_inside(path)
        return path

    # Checks and copies

    def slice_keys(self) -> Iterator[str]:
        return (entry["key"].tobytes().hex() for entry in self.table)

    def verify(self) -> int:
        """Check every checksum; return the bytes checked or raise `CorruptionError`."""
        checked, errors = self.check_everything()
        if errors:
            raise errors[0]
        return checked

    def check_everything(self) -> tuple[int, list[CorruptionError]]:
        """Check every checksum; return the bytes checked and the first error of each part."""
        checked, errors = 0, []
        for check in self._checks():
            try:
                checked += check()
            except CorruptionError as error:
                errors.append(error)
        return checked, errors

    def _checks(self) -> Iterator[Callable[[], int]]:
        for name, expected_file in self.manifest["files"].items():
            yield partial(self._check_own, name, expected_file)
        for at in range(len(self.table)):
            yield partial(self._check_slice, at)
        if "media" in self.manifest:
            for media in self.distinct_media():
                yield partial(self._check_image, media.digest)
        yield from sidecar_checks(self)

    def _check_image(self, digest: str) -> int:
        return len(self.embedded_image(digest) or b"")

    def _check_slice(self, at: int) -> int:
        reader, row = self.slice_at(at), self._first_rows[at]
        checked = reader.check_all()
        counts = read_counts(reader.files, reader.record_digest)
        run, weight_run = (
            int(self.own_array(name)[row - 1]) if row and name in self.manifest["files"] else 0
            for name in (names.MASK_RUN_ENDS, names.WEIGHT_RUN_ENDS)
        )
        firsts = {
            names.MASK_RUNS: run,
            names.WEIGHT_RUNS: weight_run,
            names.RUN_WEIGHTS: weight_run,
        }
        if self.has_groups:
            ends = self.own_array(names.GROUP_ENDS)
            firsts[names.GROUP_ENDS] = int(np.searchsorted(ends, row, side="right"))
        for name, values in counts.columns_after(row, run, weight_run).items():
            if name in self.manifest["files"]:
                first = firsts.get(name, row)
                if not np.array_equal(self.own_array(name)[first : first + len(values)], values):
                    raise CorruptionError(
                        f"differs from the store's {name}", path=reader.files.meta
                    )
        return checked

    def __reduce__(self) -> Any:
        options = dict(self._options)
        if list(options["paths"] or ()) == self.proof.get("paths"):
            options["paths"] = None  # there may be many; they are read from proof.json again
        open_again = partial(type(self), **options)
        path = getattr(self.path, "url", None) or str(self.path)
        return _reopen, (open_again, path, self._verify, self.key)

    def __repr__(self) -> str:
        facts = ", ".join(f"{count} {name}" for name, count in self._facts().items())
        return f"Store({self.key[:12]}, {facts})"

    def _facts(self) -> dict[str, str]:
        totals = self.manifest["totals"]
        tokens, trained = totals["tokens"], totals["trained_tokens"]
        return {
            "rows": f"{totals['rows']:,}",
            "tokens": f"{tokens:,}",
            "trained": f"{trained / max(tokens, 1):.1%}",
            "rejected": f"{sum(totals['rejected'].values()):,}",
        }

    def _repr_html_(self) -> str:
        sources = ", ".join(public_path(path or "?") for path in self.sources[:3])
        more = f" and {len(self.sources) - 3} more" if len(self.sources) > 3 else ""
        facts = {"store": str(self.path), "sources": sources + more, **self._facts()}
        cells = "".join(
            f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>"
            for name, value in facts.items()
        )
        return f"<table>{cells}</table>"

    def __dir__(self) -> list[str]:
        return list(_PUBLIC)  # without what only other modules use


def _reopen(open_again: Callable[[str, str], Store], path: str, verify: str, key: str) -> Store:
    """Open a pickled store; raise if another store is at its path now."""
    store = open_again(path, verify)
    if store.key != key:
        message = f"the pickled store was {key}, this is now {store.key}; open it and start again"
        raise CorruptionError(message, path=store.path)
    return store


def _max_open_slices() -> int:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, min(MAX_OPEN_SLICES, allowed // 4))


def open_store(
    path_or_url: str | os.PathLike[str],
    verify: str = "lazy",
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    media_root: str | os.PathLike[str] | None = None,
    media_urls: bool = False,
) -> Store:
    """Open a finished store.

    Args:
        path_or_url: The directory that ``tokenmill prepare`` printed or wrote (``--out``), or the
            URL of a store written by ``tokenmill push``. Also the name of a store of the cache, the
            start of its key, or ``@last``: that of the last ``tokenmill prepare``.
        verify: ``lazy`` checks every block before its first row is served, ``open`` checks all
            blocks now, ``off`` checks sizes only.
        cache_dir: Has the names, and blocks of remote stores; None: the default cache directory.
        media_root: Base directory of relative image paths; None: as in `prepare`.
        media_urls: Fetch images whose rows contain a URL.

    Raises:
        CorruptionError: The store's own files are damaged.
        CacheError: A remote store could not be read, after several tries.
        SourceMissing: There is no such directory.
        UsageError: The directory is not a store.
    """
    path = checked_path("path_or_url", path_or_url)
    if cache_dir is not None:
        cache_dir = checked_path("cache_dir", cache_dir)
    if media_root is not None:
        media_root = checked_path("media_root", media_root)
    check_bool("media_urls", media_urls)
    if is_remote(path):
        from tokenmill.store.remote import RemoteStore

        return RemoteStore(
            path,
            verify,
            cache_dir=cache_dir,
            media_root=media_root,
            media_urls=media_urls,
        )
    path = find_store(path, cache_dir)
    return Store(path, verify, media_root=media_root, media_urls=media_urls)
