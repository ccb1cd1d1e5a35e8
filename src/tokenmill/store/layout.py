"""All paths of a cache and of a store.

A store finds its slices beside it in the same cache (``../../slices``) or, when it is
self-contained (``--out``), beneath itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tokenmill._core.fingerprint import KEY_HEX
from tokenmill._core.paths import require_inside
from tokenmill._core.remote_path import as_remote
from tokenmill.errors import CorruptionError

FORMAT = 1

MANIFEST = "manifest.json"
TABLE = "slices.bin"
LENGTHS = "lengths.bin"
TRAINED = "trained.bin"
FIRST_TRAINED = "first_trained.bin"
MASK_RUNS = "mask_runs.bin"
MASK_RUN_ENDS = "mask_run_ends.bin"
GROUP_ENDS = "group_ends.bin"
WEIGHT_RUNS = "weight_runs.bin"
RUN_WEIGHTS = "run_weights.bin"
WEIGHT_RUN_ENDS = "weight_run_ends.bin"
PICTURES = "pictures.bin"
PATCHES = "patches.bin"
STATE = "state.json"
DATASET_INFO = "dataset_info.json"
PROOF = "proof.json"
SIDECARS = "sidecars"
SIDECAR_VALUES = "values.f32"
OTHER_STORES = "other"  # below `SIDECARS` of a cache: values attached to stores outside of it

# Files that are one array over rows, groups or runs: those of every store, and of some.
ROW_FILES = {
    LENGTHS: "<i4", TRAINED: "<i4", FIRST_TRAINED: "<u1", MASK_RUNS: "<i4", MASK_RUN_ENDS: "<i8",
}  # fmt: skip
GROUP_FILES = {GROUP_ENDS: "<i8"}
WEIGHT_FILES = {WEIGHT_RUNS: "<i4", RUN_WEIGHTS: "<f4", WEIGHT_RUN_ENDS: "<i8"}
MEDIA_FILES = {PICTURES: "<i4", PATCHES: "<i4"}
ARRAYS = {**ROW_FILES, **GROUP_FILES, **WEIGHT_FILES, **MEDIA_FILES}

CHECKED_FILES = (TABLE, *ROW_FILES, STATE, DATASET_INFO)  # in every manifest

_KEY = re.compile(rf"[0-9a-f]{{{KEY_HEX}}}")


def is_key(name: str) -> bool:
    return _KEY.fullmatch(name) is not None


def check_key(key: str, path: Path) -> None:
    """Refuse what is no key in a file: as a path it could lead out of the cache."""
    if not is_key(key):
        raise CorruptionError(f"{key!r} is not a key of {KEY_HEX} hex digits", path=path)


def image_name(digest: str) -> str:
    return f"media/{digest[:2]}/{digest}"


@dataclass(frozen=True)
class SliceFiles:
    """The three files of one slice."""

    directory: Path
    key: str

    def require_inside(self) -> None:
        """Refuse a slice whose directory is a symbolic link out of the cache or store."""
        if as_remote(self.directory) is None:
            require_inside(self.directory, self.directory.parent.parent)

    @cached_property
    def tokens(self) -> Path:
        """Token ids and loss mask, an Arrow IPC stream."""
        return self.directory / f"{self.key}.arrow"

    @cached_property
    def meta(self) -> Path:
        """Origins, turns and extra columns, an Arrow IPC stream."""
        return self.directory / f"{self.key}.meta.arrow"

    @cached_property
    def record(self) -> Path:
        """The commit record, published last: no record, no slice."""
        return self.directory / f"{self.key}.json"


class CacheLayout:
    """Every path below one cache directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.slices = root / "slices"
        self.stores = root / "stores"
        self.tokenizers = root / "tokenizers"
        self.rollouts = root / "rollouts"
        self.rows = root / "rows"
        self.quarantine = root / "quarantine"
        self.sidecars = root / SIDECARS

    def picture(self, digest: str) -> Path:
        """An image of a store that `pull` copied."""
        return self.root / "pictures" / digest[:2] / digest

    def processor(self, identity: str) -> Path:
        return self.root / "processors" / identity

    def sidecars_of_other(self, store: str) -> Path:
        """Values attached to a store outside of this cache."""
        return self.sidecars / OTHER_STORES / store

    def slice(self, key: str) -> SliceFiles:
        return SliceFiles(self.slices / key[:2], key)

    def store(self, key: str) -> StoreLayout:
        return StoreLayout(self.stores / key)

    def tokenizer(self, identity: str) -> Path:
        return self.tokenizers / identity


@dataclass(frozen=True)
class StoreLayout:
    """Every path of one store directory, in a cache or self-contained."""

    directory: Path

    @property
    def manifest(self) -> Path:
        return self.directory / MANIFEST

    def file(self, name: str) -> Path:
        return self.directory / name

    @property
    def cache_root(self) -> Path | None:
        """The cache that this store is in, or that keeps its blocks; else None."""
        remote = as_remote(self.directory)
        if remote is not None:
            return remote.blocks.root
        return self.directory.parent.parent if self.directory.parent.name == "stores" else None

    @property
    def is_self_contained(self) -> bool:
        """Whether slices and tokenizer are beneath this directory (``--out``, ``push``)."""
        return self._cache is None

    @cached_property
    def _cache(self) -> CacheLayout | None:
        """The cache around a store that is not self-contained."""
        remote = as_remote(self.directory)
        if remote is None:
            alone = (self.directory / "slices").is_dir()
        else:
            # Only a cache that was copied as a whole has its stores in "stores"; then its own
            # state.json says where slices are, because not every server can list.
            alone = remote.parent.name != "stores" or b"../" not in (remote / STATE).fetch(0, 64)
        return None if alone else CacheLayout(self.directory.parent.parent)

    def require_inside(self, path: Path) -> None:
        """Refuse a local path of this store that leads out of its cache by a symbolic link."""
        if as_remote(self.directory) is None:
            cache = self._cache
            require_inside(path, self.directory if cache is None else cache.root)

    def slice(self, key: str) -> SliceFiles:
        return (self._cache or CacheLayout(self.directory)).slice(key)

    @property
    def sidecars(self) -> Path:
        """Values attached to this store: beside it, or beneath it when it is self-contained."""
        own, cache = self.directory, self._cache
        return own / SIDECARS if cache is None else cache.sidecars / own.name

    def picture(self, digest: str) -> Path:
        cache = self._cache
        return self.directory / image_name(digest) if cache is None else cache.picture(digest)

    def processor(self, identity: str) -> Path:
        cache = self._cache
        return self.directory / "processor" if cache is None else cache.processor(identity)

    def tokenizer(self, identity: str) -> Path:
        cache = self._cache
        return self.directory / "tokenizer" if cache is None else cache.tokenizer(identity)
