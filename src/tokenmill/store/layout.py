"""All paths of a cache and of a store.

The slices of a store are in the same cache (``../../slices``) or, if the store is self-contained
(``--out``), below its own directory.
"""

from __future__ import annotations

import os
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
IMAGES = "images.bin"
PATCHES = "patches.bin"
STATE = "state.json"
DATASET_INFO = "dataset_info.json"
PROOF = "proof.json"
SIDECARS = "sidecars"
SIDECAR_VALUES = "values.f32"
OTHER_STORES = "other"  # below `SIDECARS` of a cache: for stores outside of it

# Files that contain one array over rows, groups or runs. All stores have `ROW_FILES`.
ROW_FILES = {
    LENGTHS: "<i4", TRAINED: "<i4", FIRST_TRAINED: "<u1", MASK_RUNS: "<i4", MASK_RUN_ENDS: "<i8",
}  # fmt: skip
GROUP_FILES = {GROUP_ENDS: "<i8"}
WEIGHT_FILES = {WEIGHT_RUNS: "<i4", RUN_WEIGHTS: "<f4", WEIGHT_RUN_ENDS: "<i8"}
MEDIA_FILES = {IMAGES: "<i4", PATCHES: "<i4"}
ARRAYS = {**ROW_FILES, **GROUP_FILES, **WEIGHT_FILES, **MEDIA_FILES}

CHECKED_FILES = (TABLE, *ROW_FILES, STATE, DATASET_INFO)  # in every manifest

_KEY = re.compile(rf"[0-9a-f]{{{KEY_HEX}}}")


def is_key(name: str) -> bool:
    return _KEY.fullmatch(name) is not None


def check_key(key: str, path: Path) -> None:
    """Raise if a key from a file is malformed, since as a path it could leave the cache."""
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
        """Raise if the directory is a symbolic link out of the cache or store."""
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
        """The commit record, published last; a slice without a record does not exist."""
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
        self.names = root / "names"

    def image(self, digest: str) -> Path:
        """An image of a store that `pull` copied."""
        return self.root / "images" / digest[:2] / digest

    def processor(self, identity: str) -> Path:
        return self.root / "processors" / identity

    def sidecars_of_other(self, store: str) -> Path:
        """Directory of the sidecars of a store outside of this cache."""
        return self.sidecars / OTHER_STORES / store

    def slice(self, key: str) -> SliceFiles:
        return SliceFiles(self.slices / key[:2], key)

    def has_slice(self, key: str) -> bool:
        """Return whether a slice is published; a build calls this several times per slice."""
        return os.path.exists(f"{self.slices}/{key[:2]}/{key}.json")

    def notes(self, key: str) -> Path:
        """What the pipeline counted while it built a slice; part of no digest."""
        return self.root / "notes" / key[:2] / f"{key}.json"

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
        """The cache that contains this store or its blocks; None if there is none."""
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
            self_contained = (self.directory / "slices").is_dir()
        else:
            # Only a cache that was copied completely has stores in "stores". Its state.json
            # contains the paths of slices, because not every server can list files.
            self_contained = remote.parent.name != "stores" or b"../" not in (remote / STATE).fetch(
                0, 64
            )
        return None if self_contained else CacheLayout(self.directory.parent.parent)

    def require_inside(self, path: Path) -> None:
        """Raise if a local path of this store leaves its cache through a symbolic link."""
        if as_remote(self.directory) is None:
            cache = self._cache
            require_inside(path, self.directory if cache is None else cache.root)

    def slice(self, key: str) -> SliceFiles:
        return (self._cache or CacheLayout(self.directory)).slice(key)

    @property
    def sidecars(self) -> Path:
        """Directory of the sidecars: in the cache, or below a self-contained store."""
        own, cache = self.directory, self._cache
        return own / SIDECARS if cache is None else cache.sidecars / own.name

    def image(self, digest: str) -> Path:
        cache = self._cache
        return self.directory / image_name(digest) if cache is None else cache.image(digest)

    def processor(self, identity: str) -> Path:
        cache = self._cache
        return self.directory / "processor" if cache is None else cache.processor(identity)

    def tokenizer(self, identity: str) -> Path:
        cache = self._cache
        return self.directory / "tokenizer" if cache is None else cache.tokenizer(identity)
