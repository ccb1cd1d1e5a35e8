"""Read sidecars: one float32 per row or per token, attached to a finished store.

A sidecar is a checksummed directory: a flat file of values and a summary with the checksum of every
block. Store key, name and ``producer`` (what computed the values) identify it.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill._core import fingerprint
from tokenmill._core.artifact import Artifact, ArtifactKind
from tokenmill._core.paths import default_cache_dir, is_network
from tokenmill._core.remote_path import as_remote
from tokenmill.errors import CacheError, UsageError, check_one_of
from tokenmill.store.access import ATTACH_AGAIN, ChecksummedFile
from tokenmill.store.columns import row_numbers
from tokenmill.store.layout import SIDECAR_VALUES, CacheLayout, is_key
from tokenmill.store.record import BLOCK_BYTES, GROUP_COLUMNS, FileRecord
from tokenmill.store.where import NAMES as FILTER_NAMES

if TYPE_CHECKING:
    from tokenmill.store.store import Store

Per = Literal["row", "token"]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

SIDECAR_FORMAT = 1
PER = ("row", "token")
BYTES = 4  # of one value
MAX_NAME = 100  # characters
MAX_PRODUCER = 1000  # characters

_TOKEN_ARRAYS = ("input_ids", "attention_mask", "labels", "loss_mask", "position_ids", "seq_idx")
BATCH_NAMES = (
    *_TOKEN_ARRAYS,
    "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "num_trained_tokens", "weight_sum", "indices",
    "shift_labels", "shift_loss_weights", "local_trained_tokens", "local_weight_sum",
    # Groups.
    *GROUP_COLUMNS, "group_idx", "pair_index", *(f"kl_{name}" for name in _TOKEN_ARRAYS),
    # Images; `MediaFiller` checks other names of a model.
    "media", "mm_token_type_ids", "token_type_ids", "pixel_values", "image_grid_thw",
    "pixel_attention_mask", "image_sizes",
)  # fmt: skip
RESERVED = frozenset({*BATCH_NAMES, *FILTER_NAMES, "extra", *keyword.kwlist})
RESERVED_PREFIXES = ("chosen_", "rejected_")  # of all arrays of a pair

COLUMN = "sidecar."  # prefix of the columns that `column_of` names

KIND = ArtifactKind("sidecar", "sidecar.json", (SIDECAR_VALUES,), ATTACH_AGAIN)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The summary of a sidecar."""

    document: dict[str, Any]  # what its key is computed from: format, store, name, producer
    per: Per
    rows: int
    values: int
    checksum: str  # of all values
    blocks: tuple[str, ...]  # checksums
    low: float | None  # low, high and mean are those of the finite values
    high: float | None
    mean: float | None
    infinite: int  # number of infinite values


@dataclass(frozen=True)
class Identity:
    store: str  # its key
    name: str
    producer: str

    def __post_init__(self) -> None:
        name, producer = self.name, self.producer
        # Only ASCII, because Python normalizes other letters in the expression of a filter.
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
            raise UsageError(
                f"the name of a sidecar must be ASCII letters, digits and underscores, starting "
                f"with a letter, got {name!r}"
            )
        if name in RESERVED or name.startswith(RESERVED_PREFIXES):
            raise UsageError(
                f"the sidecar name {name!r} is reserved, because batches or filters use it; choose "
                "another"
            )
        if len(name) > MAX_NAME:
            raise UsageError(f"the sidecar name {name!r} is longer than {MAX_NAME} characters")
        if not isinstance(producer, str) or not 0 < len(producer) <= MAX_PRODUCER:
            raise UsageError(
                ("producer",),
                f" must be a text of 1 to {MAX_PRODUCER} characters that identifies what computed "
                f"the values, such as a digest of the model; got {producer!r}",
            )
        fingerprint.plain(producer, "producer")

    @property
    def document(self) -> dict[str, Any]:
        return {
            "sidecar": SIDECAR_FORMAT,
            "store": self.store,
            "name": self.name,
            "producer": self.producer,
        }

    @cached_property
    def key(self) -> str:
        return fingerprint.key(self.document)


def check_per(per: str, name: str) -> Per:
    check_one_of("per", per, PER)
    if per == "row" and name == "loss_weights":
        raise UsageError("loss_weights must have a value per token; set ", ("per", "token"))
    return "row" if per == "row" else "token"


@dataclass(frozen=True)
class SidecarDir:
    """A directory that holds sidecars of one store."""

    directory: Path
    root: Path  # the cache or self-contained store; symbolic links may not leave it
    in_cache: bool  # whether the root is a cache, with its own staging and file modes


def sidecar_dirs(store: Store) -> list[SidecarDir]:
    """Return the directories that may contain sidecars of a store, the preferred one first.

    That is the store's cache, or the directory of a self-contained store. The default cache
    directory follows, for remote and read-only stores.
    """
    layout, remote = store.layout, as_remote(store.path)
    if remote is None:
        alone = layout.is_self_contained
        root = store.path if alone else store.path.parent.parent
        first = SidecarDir(layout.sidecars, root, in_cache=not alone)
    else:
        first = _own_dir(remote.blocks.root, store)
    return list(dict.fromkeys((first, _own_dir(default_cache_dir(), store))))


def _own_dir(cache: Path, store: Store) -> SidecarDir:
    return SidecarDir(CacheLayout(cache).sidecars_of_other(store.key), cache, in_cache=True)


class RowStarts:
    """The first token of each row, counted over all rows. Stores one sum per `STEP` rows."""

    STEP = 1024  # 80 kB for ten million rows, and a microsecond per lookup

    def __init__(self, lengths: NDArray[np.int32]) -> None:
        self._lengths = lengths
        step = self.STEP << 8  # rows at a time, because summing copies them as 64 bits
        sums = [
            np.add.reduceat(chunk, np.arange(0, len(chunk), self.STEP), dtype=np.int64)
            for first in range(0, len(lengths), step)
            if len(chunk := lengths[first : first + step])
        ]
        self._marks = np.cumsum(np.concatenate([np.zeros(1, np.int64), *sums]))
        self.total = int(self._marks[-1])

    def start(self, row: int) -> int:
        mark, within = divmod(row, self.STEP)
        between = self._lengths[row - within : row].sum(dtype=np.int64)
        return int(self._marks[mark]) + int(between)

    def row_at(self, token: int) -> int:
        first = (int(np.searchsorted(self._marks, token, side="right")) - 1) * self.STEP
        ends = self.start(first) + np.cumsum(self._lengths[first : first + self.STEP])
        return first + int(np.searchsorted(ends, token, side="right"))


class RowValues:
    """Access to the values of ``of_rows`` or ``of_tokens`` by row number."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> float | Float32: ...
    @overload
    def __getitem__(self, index: slice) -> Float32 | list[Float32]: ...
    def __getitem__(self: Any, index: SupportsIndex | slice) -> Any:
        """Return the value of a row, or the values of its tokens; for a slice, see `batch`."""
        if isinstance(index, slice):
            return self.batch(range(len(self))[index])
        (found,) = self.batch([index])
        return float(found) if self.per == "row" else found

    def batch(self: Any, indices: Iterable[SupportsIndex]) -> Float32 | list[Float32]:
        """Return one array with a value for each row; per token, one array for each row."""
        read = self.of_rows if self.per == "row" else self.of_tokens
        values: Float32 | list[Float32] = read(row_numbers(indices, len(self)))
        return values


class Sidecar(RowValues):
    """Numbers attached to the rows of a store.

    Attributes:
        name: Its name in batches and filters.
        producer: What computed it.
        per: ``row``: one value per row. ``token``: one per token.
        record: Its summary.
        path: Its directory.
    """

    def __init__(self, store: Store, artifact: Artifact) -> None:
        self._store = store
        self.path = artifact.directory
        self.record = record = artifact.convert(Record)
        if record.document.get("sidecar") != SIDECAR_FORMAT:
            raise artifact.corruption_error(
                f"written in sidecar format {record.document.get('sidecar')!r}, this version reads "
                f"{SIDECAR_FORMAT}"
            )
        try:
            identity = Identity(store.key, record.document["name"], record.document["producer"])
        except (KeyError, UsageError) as error:
            raise artifact.corruption_error(f"not the record of a sidecar ({error})") from error
        artifact.require_document(identity.document)
        if identity.key != self.path.name:
            raise artifact.corruption_error("its key does not match its name and producer")
        self.name, self.producer, self.per = identity.name, identity.producer, record.per
        self.bytes = record.values * BYTES
        totals = store.manifest["totals"]
        expected = totals["rows"] if self.per == "row" else totals["tokens"]
        if (record.rows, record.values) != (totals["rows"], expected):
            raise artifact.corruption_error(
                f"{record.values} values for {record.rows} rows, the store has {expected} for "
                f"{totals['rows']}"
            )

    def __len__(self) -> int:
        return self.record.rows

    def of_tokens(self, rows: Int64) -> list[Float32]:
        lengths = self._store.lengths
        return [self.read(self._starts.start(row), int(lengths[row])) for row in rows.tolist()]

    @property
    def values(self) -> Float32:
        """All values, checked. Per token, rows are concatenated."""
        return self.read(0, self.record.values)

    def check_all(self) -> int:
        return self._file.check_all()

    def of_rows(self, rows: Int64) -> Float32:
        if self._mapped is None:
            found = [self.read(row, 1)[0] for row in rows.tolist()]
            return np.asarray(found, dtype=np.float32)
        if not self._file.verified:
            for block in np.unique(rows * BYTES // BLOCK_BYTES).tolist():
                self._file.check(block * BLOCK_BYTES, 1)
        return self._mapped[rows]

    def read(self, first: int, count: int) -> Float32:
        return np.frombuffer(self._file.view(first * BYTES, count * BYTES), "<f4")

    @cached_property
    def _file(self) -> ChecksummedFile:
        path = self.path / SIDECAR_VALUES
        record = FileRecord(self.bytes, self.record.blocks, {})
        mapped = not is_network(path)
        return ChecksummedFile(path, record, mapped=mapped, check=self._store.checks_blocks)

    @cached_property
    def _mapped(self) -> Float32 | None:
        """All values, unchecked; None on a network file system."""
        if is_network(self.path):
            return None
        return np.frombuffer(self._file.unchecked_view(0, self.bytes), "<f4")

    @cached_property
    def _starts(self) -> RowStarts:
        return RowStarts(self._store.lengths)

    def __reduce__(self) -> Any:
        return self._store.sidecar, (self.name, self.producer)

    def __repr__(self) -> str:
        return (
            f"Sidecar({self.name!r}, producer={self.producer!r}, per={self.per!r}, "
            f"{self.bytes:,} bytes)"
        )


def column_of(name: str, producer: str) -> str:
    """Return the name of a sidecar in `Store.columns`."""
    return f"{COLUMN}{name}:{producer}"


def sidecar_of(store: Store, column: str) -> Sidecar:
    name, _, producer = column.removeprefix(COLUMN).partition(":")
    return store.sidecar(name, producer)


def find(store: Store, identity: Identity) -> Sidecar | None:
    for location in sidecar_dirs(store):
        path = location.directory / identity.key
        if path.is_dir():
            return Sidecar(store, KIND.open(path, location.root))
    return None


def attached(store: Store) -> list[Sidecar]:
    """Return every sidecar of a store, sorted by name and producer."""
    paths = {path.name: (path, root) for path, root in reversed(list(_sidecar_paths(store)))}
    sidecars = [Sidecar(store, KIND.open(*path)) for path in paths.values()]
    return sorted(sidecars, key=lambda sidecar: (sidecar.name, sidecar.producer))


def sidecar_checks(store: Store) -> Iterator[Callable[[], int]]:

    def check(path: Path, root: Path) -> int:
        return Sidecar(store, KIND.open(path, root)).check_all()

    return (partial(check, *path) for path in _sidecar_paths(store))


def _sidecar_paths(store: Store) -> Iterator[tuple[Path, Path]]:
    for location in sidecar_dirs(store):
        for path in listed(location.directory):
            yield path, location.root


def listed(directory: Path, suffix: str = "") -> list[Path]:
    """List paths named by a key and a suffix; the directory may be missing."""
    try:
        paths = [path for path in directory.iterdir() if path.name.endswith(suffix)]
        return sorted(path for path in paths if is_key(path.name.removesuffix(suffix)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CacheError(f"cannot be listed: {error.strerror}", path=directory) from error


def choose(store: Store, name: str, producer: str | None) -> Sidecar:
    """Return the sidecar of a name; raise if there is none, or several."""
    if producer is not None:
        found = find(store, Identity(store.key, name, producer))
        if found is not None:
            return found
    every = attached(store)
    named = [sidecar for sidecar in every if sidecar.name == name]
    if producer is None and len(named) == 1:
        return named[0]
    choices = ", ".join(repr(sidecar.producer) for sidecar in named)
    if not named:
        names = ", ".join(sorted({sidecar.name for sidecar in every})) or "none"
        message = f"no sidecar {name!r}; attached sidecars: {names}"
    elif producer is None:
        message = f"sidecar {name!r} has several producers; choose producer from {choices}"
    else:
        message = f"no sidecar {name!r} by producer {producer!r}; it has {choices}"
    raise UsageError(message, path=store.path)
