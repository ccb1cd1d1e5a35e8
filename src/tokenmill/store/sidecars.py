"""Read sidecars: one float32 per row or per token, attached to a finished store.

A sidecar is a checksummed directory: a flat file of values and a summary with the checksum of every
block. Store key, name and *made_by* (what computed the values) identify it and have one content.
"""

from __future__ import annotations

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
from tokenmill._core.paths import default_cache_dir, is_network
from tokenmill._core.remote_path import as_remote
from tokenmill._core.sealed import Sealed, SealedKind
from tokenmill.errors import CacheError, UsageError, check_one_of
from tokenmill.store.access import ATTACH_AGAIN, GuardedFile
from tokenmill.store.columns import row_numbers
from tokenmill.store.layout import SIDECAR_VALUES, CacheLayout, is_key
from tokenmill.store.record import BLOCK_BYTES, FileRecord

if TYPE_CHECKING:
    from tokenmill.store.store import Store

Per = Literal["row", "token"]
Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]

SIDECAR_FORMAT = 1
PER = ("row", "token")
BYTES = 4  # of one value
LONGEST_NAME = 100  # characters
LONGEST_MADE_BY = 1000  # characters

RESERVED = frozenset(
    {
        # Names in batches and in filters.
        "input_ids", "labels", "attention_mask", "loss_mask", "position_ids", "seq_idx",
        "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "shift_labels", "num_trained_tokens",
        "indices", "media", "mm_token_type_ids",
        "length", "trained", "pictures", "patches", "source", "file", "carried",
    }
)  # fmt: skip

COLUMN = "sidecar."  # prefix of the columns that `column_of` names

KIND = SealedKind("sidecar", "sidecar.json", (SIDECAR_VALUES,), ATTACH_AGAIN)


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The summary of a sidecar."""

    document: dict[str, Any]  # what its key is computed from: format, store, name, made_by
    per: Per
    rows: int
    values: int
    checksum: str  # of all values
    blocks: tuple[str, ...]  # checksums
    low: float | None  # of the finite values, as high and mean
    high: float | None
    mean: float | None
    infinite: int  # values that are


@dataclass(frozen=True)
class Identity:
    store: str  # its key
    name: str
    made_by: str

    def __post_init__(self) -> None:
        name, made_by = self.name, self.made_by
        # ASCII alone: an expression of a filter brings other letters into a normal form.
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
            raise UsageError(
                f"a sidecar's name is {name!r}; it is letters, digits and underscores, a letter "
                "first, so that filters can use it"
            )
        if name in RESERVED or len(name) > LONGEST_NAME:
            why = "taken" if name in RESERVED else f"over {LONGEST_NAME} characters"
            raise UsageError(f"the sidecar's name {name!r} is {why}; choose another")
        if not isinstance(made_by, str) or not 0 < len(made_by) <= LONGEST_MADE_BY:
            raise UsageError(
                ("made_by",),
                f" is {made_by!r}; say in 1 to {LONGEST_MADE_BY} characters what computed "
                "the values, such as a digest of the model",
            )
        fingerprint.plain(made_by, "made_by")

    @property
    def document(self) -> dict[str, Any]:
        return {
            "sidecar": SIDECAR_FORMAT,
            "store": self.store,
            "name": self.name,
            "made_by": self.made_by,
        }

    @cached_property
    def key(self) -> str:
        return fingerprint.key(self.document)


def check_per(per: str) -> Per:
    check_one_of("per", per, PER)
    return "row" if per == "row" else "token"


@dataclass(frozen=True)
class SidecarDir:
    """A directory that holds sidecars of one store."""

    directory: Path
    root: Path  # the cache or self-contained store that no link may lead out of
    in_cache: bool  # whether the root is a cache, with staging and modes of its own


def sidecar_dirs(store: Store) -> list[SidecarDir]:
    """Where sidecars of a store may be, the preferred directory first.

    Beside a store in a cache, beneath a self-contained one; and in the user's own cache for remote
    stores and those that this user may not write beside.
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
    """Where each row begins among the tokens of all rows; one sum per `STEP` rows is kept."""

    STEP = 1024  # rows: 80 kB for ten million of them, and a microsecond to add up

    def __init__(self, lengths: NDArray[np.int32]) -> None:
        self._lengths = lengths
        step = self.STEP << 8  # rows at a time: they are summed as a copy in 64 bits
        sums = [
            np.add.reduceat(stretch, np.arange(0, len(stretch), self.STEP), dtype=np.int64)
            for first in range(0, len(lengths), step)
            if len(stretch := lengths[first : first + step])
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


class Sidecar:
    """Numbers attached to the rows of a store.

    Attributes:
        name: The name that batches and filters know it by.
        made_by: What computed it.
        per: ``row``: one value per row. ``token``: one per token.
        record: Its summary.
        path: Its directory.
    """

    def __init__(self, store: Store, sealed: Sealed) -> None:
        self._store = store
        self.path = sealed.directory
        self.record = record = sealed.convert(Record)
        if record.document.get("sidecar") != SIDECAR_FORMAT:
            raise sealed.refusal(
                f"written as sidecar format {record.document.get('sidecar')!r}, this version reads "
                f"{SIDECAR_FORMAT}"
            )
        try:
            identity = Identity(store.key, record.document["name"], record.document["made_by"])
        except (KeyError, UsageError) as error:
            raise sealed.refusal(f"not the record of a sidecar ({error})") from error
        sealed.require_document(identity.document)
        if identity.key != self.path.name:
            raise sealed.refusal("a sidecar of another name lies under this key")
        self.name, self.made_by, self.per = identity.name, identity.made_by, record.per
        self.bytes = record.values * BYTES
        totals = store.manifest["totals"]
        expected = totals["rows"] if self.per == "row" else totals["tokens"]
        if (record.rows, record.values) != (totals["rows"], expected):
            raise sealed.refusal(
                f"{record.values} values for {record.rows} rows, the store has {expected} for "
                f"{totals['rows']}"
            )

    def __len__(self) -> int:
        return self.record.rows

    @overload
    def __getitem__(self, index: SupportsIndex) -> float | Float32: ...
    @overload
    def __getitem__(self, index: slice) -> Float32 | list[Float32]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> float | Float32 | list[Float32]:
        """The value of a row, or the values of its tokens; of a slice, as `batch`."""
        if isinstance(index, slice):
            return self.batch(range(len(self))[index])
        found = self.batch([index])[0]
        return float(found) if self.per == "row" else found

    def batch(self, indices: Iterable[SupportsIndex]) -> Float32 | list[Float32]:
        """One array of values for many rows; per token one array for each row."""
        rows = row_numbers(indices, len(self))
        if self.per == "row":
            return self._of_rows(rows)
        lengths = self._store.lengths
        return [self.stretch(self._starts.start(row), int(lengths[row])) for row in rows.tolist()]

    @property
    def values(self) -> Float32:
        """All values, mapped and checked: by row, or by token one row after another."""
        return self.stretch(0, self.record.values)

    def check_all(self) -> int:
        return self._file.check_all()

    def _of_rows(self, rows: Int64) -> Float32:
        if self._mapped is None:
            found = [self.stretch(row, 1)[0] for row in rows.tolist()]
            return np.asarray(found, dtype=np.float32)
        if not self._file.clean:
            for block in np.unique(rows * BYTES // BLOCK_BYTES).tolist():
                self._file.check(block * BLOCK_BYTES, 1)
        return self._mapped[rows]

    def stretch(self, first: int, count: int) -> Float32:
        return np.frombuffer(self._file.view(first * BYTES, count * BYTES), "<f4")

    @cached_property
    def _file(self) -> GuardedFile:
        path = self.path / SIDECAR_VALUES
        stated = FileRecord(self.bytes, self.record.blocks, {})
        mapped = not is_network(path)
        return GuardedFile(path, stated, mapped=mapped, check=self._store.checks_blocks)

    @cached_property
    def _mapped(self) -> Float32 | None:
        """All values, to be checked before use; None on a network file system."""
        if is_network(self.path):
            return None
        return np.frombuffer(self._file.unchecked_view(0, self.bytes), "<f4")

    @cached_property
    def _starts(self) -> RowStarts:
        return RowStarts(self._store.lengths)

    def __reduce__(self) -> Any:
        return self._store.sidecar, (self.name, self.made_by)

    def __repr__(self) -> str:
        return (
            f"Sidecar({self.name!r}, made_by={self.made_by!r}, per={self.per!r}, "
            f"{self.bytes:,} bytes)"
        )


def column_of(name: str, made_by: str) -> str:
    """The column name of a sidecar in `Store.columns`."""
    return f"{COLUMN}{name}:{made_by}"


def sidecar_of(store: Store, column: str) -> Sidecar:
    name, _, made_by = column.removeprefix(COLUMN).partition(":")
    return store.sidecar(name, made_by)


def find(store: Store, identity: Identity) -> Sidecar | None:
    for home in sidecar_dirs(store):
        place = home.directory / identity.key
        if place.is_dir():
            return Sidecar(store, KIND.admit(place, home.root))
    return None


def attached(store: Store) -> list[Sidecar]:
    """Every sidecar of a store, sorted by name and made_by."""
    places = {place.name: (place, root) for place, root in reversed(list(_places(store)))}
    found = [Sidecar(store, KIND.admit(*place)) for place in places.values()]
    return sorted(found, key=lambda sidecar: (sidecar.name, sidecar.made_by))


def sidecar_checks(store: Store) -> Iterator[Callable[[], int]]:

    def check(place: Path, root: Path) -> int:
        return Sidecar(store, KIND.admit(place, root)).check_all()

    return (partial(check, *place) for place in _places(store))


def _places(store: Store) -> Iterator[tuple[Path, Path]]:
    """Every sidecar's directory, and the root that no link may lead out of."""
    for home in sidecar_dirs(store):
        for place in listed(home.directory):
            yield place, home.root


def listed(directory: Path, suffix: str = "") -> list[Path]:
    """List paths named by a key and a suffix; the directory need not exist."""
    try:
        found = [path for path in directory.iterdir() if path.name.endswith(suffix)]
        return sorted(path for path in found if is_key(path.name.removesuffix(suffix)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CacheError(f"cannot be listed: {error.strerror}", path=directory) from error


def choose(store: Store, name: str, made_by: str | None) -> Sidecar:
    """Return the sidecar of a name; refuse a name that has none, or several."""
    if made_by is not None:
        found = find(store, Identity(store.key, name, made_by))
        if found is not None:
            return found
    every = attached(store)
    named = [sidecar for sidecar in every if sidecar.name == name]
    if made_by is None and len(named) == 1:
        return named[0]
    choices = ", ".join(repr(sidecar.made_by) for sidecar in named)
    if not named:
        there = ", ".join(sorted({sidecar.name for sidecar in every})) or "nothing"
        message = f"no sidecar {name!r}; attached is: {there}"
    elif made_by is None:
        message = f"sidecar {name!r} was made by several: say made_by, one of {choices}"
    else:
        message = f"no sidecar {name!r} made by {made_by!r}; it was made by {choices}"
    raise UsageError(message, path=store.path)
