"""Stores as readers see them: rows by integer.

Stores are immutable, picklable as their path, and usable from threads and after a fork. Nothing
here imports pyarrow, a tokenizer or a template engine.
"""

from __future__ import annotations

import math
import os
import re
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import msgspec
import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from tokenmill._core import fingerprint
from tokenmill._core.origin import Origin
from tokenmill._core.paths import is_network
from tokenmill._core.process import ProcessLock
from tokenmill._core.remote import is_remote, local_path
from tokenmill._core.remote_path import as_remote
from tokenmill.errors import CorruptionError, UsageError, check_one_of
from tokenmill.store import layout as names
from tokenmill.store.access import ByteFile, reading_errors, require_checksum, require_size
from tokenmill.store.columns import trained_within, weighed_within, weights_along
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
from tokenmill.store.record import CARRIED, FIXED_COLUMNS, Media
from tokenmill.store.sidecars import COLUMN, Sidecar, attached, choose, sidecar_checks, sidecar_of
from tokenmill.store.slices import SliceReader, read_counts
from tokenmill.store.views import ViewMethods, pictures_of

if TYPE_CHECKING:
    from tokenmill.data.pictures import StoredPictures
    from tokenmill.data.view import View

VERIFY = ("lazy", "open", "off")
CHECKED_AT_OPEN_BYTES = 256 << 20  # of a file: about 0.1 s; larger ones are checked on first use
LISTED_FIRST_ROWS = 1 << 14  # slices; a longer column is searched in the mapped table
MOST_OPEN_SLICES = 4096  # each holds a descriptor, so the process's limit may lower it


class Row(msgspec.Struct, eq=False, gc=False):
    """One training row: views of token ids and loss mask.

    Origin, turns and extra columns are read from the slice's meta file on access.
    """

    # A struct is created in half the time of an ordinary object; it is part of no cycle.

    _store: Store
    _slice: int
    _number: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def origin(self) -> Origin:
        return self._store.origin_in(self._slice, self._number)

    @property
    def turns(self) -> list[tuple[str, int, int]]:
        """``(role, start, end)`` over tokens; turns follow one another without a gap."""
        return self._store.slice_at(self._slice).turns(self._number)

    @property
    def weights(self) -> NDArray[np.float32]:
        """The loss weight of each token; 0 where it is untrained."""
        runs = self._store.slice_at(self._slice).weight_runs(self._number)
        return weights_along(*runs, self.loss_mask)

    @property
    def media(self) -> list[Media]:
        """Its images in order, with the tokens that stand for them."""
        reader = self._store.slice_at(self._slice)
        return reader.media(self._number, self.origin if reader.record.has_media else None)

    def picture(self, number: int = 0) -> bytes:
        """Return the bytes of one of its images; see `Store.picture`."""
        return self._store.picture(self.media[number])

    @property
    def part(self) -> int:
        """Number within its group, or of its (first) turn under ``expand``, else 0."""
        return int(self._column("part"))

    def _column(self, name: str) -> Any:
        return self._store.slice_at(self._slice).column(name)[self._number]

    @property
    def label(self) -> bool | None:
        """Whether this answer of a group is preferred; None where that is not known."""
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
    def carried(self) -> dict[str, Any]:
        """The extra columns, decoded."""
        return self._store.slice_at(self._slice).carried(self._number)

    @property
    def carried_json(self) -> dict[str, str]:
        return self._store.slice_at(self._slice).carried_json(self._number)

    def with_tokens(self, input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8]) -> Row:
        return Row(self._store, self._slice, self._number, input_ids, loss_mask)

    def __repr__(self) -> str:
        trained = int(self.loss_mask.sum())
        return f"Row({len(self)} tokens, {trained} trained, {self.origin})"


class Store(ViewMethods, Sequence[Row]):
    """Rows by integer; open one with `open_store`, which describes the arguments.

    ``paths`` are the source files in the manifest's order; None: those in ``proof.json``.
    """

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
        self.has_media = names.PICTURES in self.manifest["files"]
        self.has_weights = names.WEIGHT_RUNS in self.manifest["files"]  # any other than 1
        self.has_groups = "groups" in self.manifest["totals"]
        self.group_count = units_out(self.manifest["totals"])  # of rows without groups
        self._lock = ProcessLock()
        self._open: dict[int, SliceReader] = {}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._sidecars: dict[tuple[str, str], Sidecar] = {}
        self._most_open = _most_open()
        self.private_directory: Any = None  # removed with this store (``disable_cache``)
        self._check_own_files()
        table = self._own_file(names.TABLE)
        self.table = load_table(ByteFile(table, mapped=self._maps_own))
        check_table(self.manifest, table, content=self.checks_blocks)
        firsts = self.table["first_row"]
        # Plain integers, of a list or a memory view, are searched much faster than numpy's.
        self._first_rows: Sequence[int]
        if len(firsts) <= LISTED_FIRST_ROWS:
            self._first_rows = firsts.tolist()
        else:
            self._first_rows = (firsts if self._maps_own else np.ascontiguousarray(firsts)).data
        self._rows: int = self.manifest["totals"]["rows"]
        if verify == "open":
            self.verify()

    def _locate(self, path: str | os.PathLike[str]) -> Path:
        """Return the directory; set whether slices and the store's own files are mapped."""
        if is_remote(path):
            raise UsageError("open a remote store with open_store", path=path)
        self._mapped = self._maps_own = not is_network(path)
        return Path(path)

    def _own_file(self, name: str) -> Path:
        return self.layout.file(name)

    def _check_own(self, name: str, stated: Document) -> int:
        check_file(self.layout.file(name), stated, content=True)
        return int(stated["size"])

    def _check_own_files(self) -> None:
        for name in (*self.manifest["files"], names.PROOF):
            self.layout.require_inside(self.layout.file(name))
        for name, stated in self.manifest["files"].items():
            large = stated["size"] > CHECKED_AT_OPEN_BYTES
            # The table's content is compared while its totals are recounted.
            content = self.checks_blocks and not large and name != names.TABLE
            check_file(self.layout.file(name), stated, content=content)

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
            i = index.__index__()
        if not 0 <= i < self._rows:
            if not -self._rows <= i < 0:
                raise IndexError(f"row {index} of {self._rows}")
            i += self._rows
        first_rows = self._first_rows
        at = bisect_right(first_rows, i) - 1
        reader = self._open.get(at) or self.slice_at(at)
        number = i - first_rows[at]
        ids, mask, starts = reader.ids, reader.mask, reader.starts
        if ids is None or mask is None or not reader.tokens.clean:
            return Row(self, at, number, *reader.row(number))
        # The way of nearly every row, without another call: this is a trainer's inner loop.
        start, stop = starts[number], starts[number + 1]
        return Row(self, at, number, ids[start:stop], mask[start:stop])

    def batch(self, indices: Iterable[SupportsIndex]) -> list[Row]:
        return [self[i] for i in indices]

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
            while len(self._open) >= self._most_open:
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

    # Pictures

    @property
    def pictures(self) -> NDArray[np.int32]:
        """Number of images of every row."""
        return self._of_media(names.PICTURES)

    @property
    def patches(self) -> NDArray[np.int32]:
        """Vision-model patches of every row."""
        return self._of_media(names.PATCHES)

    def _of_media(self, name: str) -> NDArray[np.int32]:
        return self.own_array(name) if self.has_media else np.zeros(self._rows, np.int32)

    @property
    def media_root(self) -> str | None:
        """Directory that image paths start from: as given, else as first seen."""
        known = self._options["media_root"] or self.proof.get("media_root")
        return known if isinstance(known, str) else None

    def picture(self, media: Media) -> bytes:
        """Return the bytes of an image, which are those that the row was prepared from.

        Raises:
            SourceMissing: It is not where it was.
            SourceChanged: Its bytes changed.
        """
        return self._pictures.read(media)

    @cached_property
    def _pictures(self) -> StoredPictures:
        return pictures_of(self)

    def embedded_picture(self, digest: str) -> bytes | None:
        """The copy of a picture in this store or its cache; None where there is none.

        Raises:
            CorruptionError: It is damaged, or missing though the manifest counts it.
        """
        if not re.fullmatch(r"[0-9a-f]{32}", digest):
            raise CorruptionError(f"{digest!r} is not the digest of a picture", path=self.path)
        embedded = "media" in self.manifest
        path = self.layout.picture(digest)
        remote = as_remote(path)
        if not embedded and (remote is not None or not path.exists()):
            return None
        self.layout.require_inside(path)
        with reading_errors(path):
            if remote is None:
                data = path.read_bytes()
            else:
                data = remote.read_kept(
                    f"{digest}.picture", lambda found: fingerprint.checksum(found) == digest
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
        """The copy of the processor this store was made with, if any."""
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
        """One of the arrays that `layout` names; a large one is checked now."""
        array = self._arrays.get(name)
        if array is None:
            stated, path = self.manifest["files"][name], self._own_file(name)
            if self._verify == "lazy" and stated["size"] > CHECKED_AT_OPEN_BYTES:
                check_file(path, stated, content=True)
            count = self._rows
            if name == names.MASK_RUNS and count:  # as many as the last row's end says
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
        """The first row of groups by number; the number of groups gives the number of rows."""
        if not self.has_groups:
            return groups
        ends = self.own_array(names.GROUP_ENDS)
        starts = np.where(groups > 0, ends[np.maximum(groups, 1) - 1], 0)
        if starts.size and int(starts.max()) > self._rows:
            raise CorruptionError(
                f"a group ends at row {int(starts.max())} of {self._rows}",
                path=self.layout.file(names.GROUP_ENDS),
            )
        return starts.astype(np.int64)

    @property
    def group_size(self) -> int | None:
        """Rows of every group; None where they differ."""
        if not self.has_groups:
            return 1
        counts = self.manifest["totals"]["groups"]
        if counts["ranked"]:
            return None
        sizes = {2} if counts["preference"] else set()
        sizes |= {1} if counts["kto"] or counts["single"] else set()
        return sizes.pop() if len(sizes) == 1 else None

    def columns(self, wanted: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Read meta columns slice by slice, for filters and splits.

        Args:
            wanted: Names of fixed columns (``digest``, ``length``, …), ``source`` (index of the
                source file), ``carried.<name>`` (JSON texts), or what `column_of` gives for a
                sidecar.

        Yields:
            Number of the first row, and each column over the slice's rows.
        """
        wanted = list(wanted)
        sidecars = {name: sidecar_of(self, name) for name in wanted if name.startswith(COLUMN)}
        for at, first in enumerate(self._first_rows):
            reader = self.slice_at(at)
            columns: dict[str, Any] = {}
            for name in wanted:
                if name == "source":
                    source = int(self.table[at]["source"])
                    columns[name] = np.full(reader.record.rows, source, np.int32)
                elif name in sidecars:
                    rows = np.arange(first, first + reader.record.rows)
                    columns[name] = sidecars[name].batch(rows)
                elif name in FIXED_COLUMNS:
                    columns[name] = reader.column(name)
                elif name in (carried := [CARRIED + one for one in reader.record.carried]):
                    columns[name] = reader.carried_texts(name.removeprefix(CARRIED))
                else:
                    known = [*FIXED_COLUMNS, "source", *carried]
                    raise UsageError(f"no column {name!r}; there are {', '.join(known)}")
            yield first, columns

    # Sidecars: what was attached to rows later

    def attach(
        self,
        name: str,
        values: npt.ArrayLike | Iterable[npt.ArrayLike],
        *,
        made_by: str,
        per: str = "row",
    ) -> Sidecar:
        """Attach one float32 per row or per token: written whole, beside the store.

        Args:
            name: What batches and filters will call the values.
            values: An array, mapped or not; per token also a list with one array for each row; or
                an iterable of arrays that follow one another, per token each of whole rows.
            made_by: What computed them: a digest of the model, or a text. Name and made_by have one
                content; values of another made_by are kept beside these.
            per: ``row`` or ``token``.

        Raises:
            UsageError: The number of values is wrong, or one is not a number.
            NonDeterminismError: Other values with this name and made_by are attached.
        """
        from tokenmill.store.sidecar_writer import attach_values

        return attach_values(self, name, values, made_by=made_by, per=per)

    def sidecar(self, name: str, made_by: str | None = None) -> Sidecar:
        """Return the values attached under a name; ``made_by`` is needed where there are several.

        Raises:
            UsageError: There are none, or several.
            CorruptionError: They are damaged.
        """
        # One that was named is kept open: it can only be that one. Which ones a bare name means is
        # looked up again, because something may have been attached meanwhile.
        kept = None if made_by is None else self._sidecars.get((name, made_by))
        if kept is None:
            found = choose(self, name, made_by)
            kept = self._sidecars.setdefault((name, found.made_by), found)
        return kept

    @property
    def sidecars(self) -> list[Sidecar]:
        """All sidecars, by name and made_by."""
        return attached(self)

    # Where rows come from

    @cached_property
    def sources(self) -> tuple[str | None, ...]:
        """Paths of the source files: as given, else as first seen."""
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
        """Engine, renderer, audits, versions: advisory, empty with a warning when damaged."""
        return read_proof(self.layout.file(names.PROOF))

    @property
    def tokenizer_path(self) -> Path:
        """The copy of the tokenizer this store was made with."""
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
        """As `verify`, but go on after an error; return the first one of each part."""
        checked, errors = 0, []
        for check in self._checks():
            try:
                checked += check()
            except CorruptionError as error:
                errors.append(error)
        return checked, errors

    def _checks(self) -> Iterator[Callable[[], int]]:
        for name, stated in self.manifest["files"].items():
            yield partial(self._check_own, name, stated)
        for at in range(len(self.table)):
            yield partial(self._check_slice, at)
        if "media" in self.manifest:
            for media in self.distinct_media():
                yield partial(self._check_picture, media.digest)
        yield from sidecar_checks(self)

    def _check_picture(self, digest: str) -> int:
        return len(self.embedded_picture(digest) or b"")

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
        return partial(type(self), **self._options), (str(self.path), self._verify)

    def __repr__(self) -> str:
        totals = self.manifest["totals"]
        return f"Store({self.key[:12]}, {totals['rows']:,} rows, {totals['tokens']:,} tokens)"


def _most_open() -> int:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(16, min(MOST_OPEN_SLICES, allowed // 4))


def open_store(
    path: str | os.PathLike[str],
    verify: str = "lazy",
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    media_root: str | os.PathLike[str] | None = None,
    media_urls: bool = False,
) -> Store:
    """Open a finished store.

    Args:
        path: What ``tokenmill prepare`` printed, the directory given to ``--out``, or the URL given
            to ``tokenmill push``.
        verify: ``lazy`` checks every block before its first row is served, ``open`` checks all of
            it now, ``off`` checks sizes only.
        cache_dir: Where blocks of a remote store are kept; None: the user's own cache.
        media_root: Directory that image paths start from; None: the one that the rows were prepared
            with.
        media_urls: Fetch images whose rows give a URL.

    Raises:
        CorruptionError: The store's own files are damaged.
        CacheError: A remote store could not be read, after several tries.
        SourceMissing: There is no such directory.
        UsageError: The directory is not a store.
    """
    if is_remote(path):
        from tokenmill.store.remote import RemoteStore

        return RemoteStore(
            os.fspath(path),
            verify,
            cache_dir=cache_dir,
            media_root=media_root,
            media_urls=media_urls,
        )
    place = local_path(os.fspath(path))
    return Store(place, verify, media_root=media_root, media_urls=media_urls)
