"""Stores and slices of an earlier version, which stored no runs of masks: read, reused, mended."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.build.making import files_of
from tests.store.making import make_columns, make_earlier_store, make_store
from tokenmill.errors import CorruptionError
from tokenmill.store import Store
from tokenmill.store.copies import copy_store
from tokenmill.store.layout import MASK_FILES
from tokenmill.store.manifest import encode_manifest, make_manifest
from tokenmill.store.slices import read_counts

SLICES = [make_columns([5, 0, 9, 14], seed=1), make_columns([], seed=2), make_columns([3, 30])]


@pytest.fixture
def earlier(tmp_path: Path) -> Store:
    return make_earlier_store(tmp_path / "cache", SLICES)


def root_of(store: Store) -> Path:
    return store.path.parent.parent


def test_earlier_store_stays_as_it_is_when_it_is_built_again(earlier: Store) -> None:
    before = files_of(root_of(earlier), ".")
    again = make_store(root_of(earlier), SLICES)
    assert files_of(root_of(earlier), ".") == before
    assert again.verify() > 0
    assert again.trained_within(*(np.asarray([n]) for n in (5, 19, 25))).tolist() == [5]


def test_earlier_slices_make_the_columns_of_a_new_store(earlier: Store, tmp_path: Path) -> None:
    shutil.rmtree(root_of(earlier) / "stores")
    reused = make_store(root_of(earlier), SLICES)
    fresh = make_store(tmp_path / "fresh", SLICES)
    for name in MASK_FILES:
        assert (reused.path / name).read_bytes() == (fresh.path / name).read_bytes()


def test_earlier_store_with_a_lost_slice_is_mended(earlier: Store) -> None:
    for path in earlier.slice_at(2).files.directory.glob(f"{earlier.slice_at(2).files.key}*"):
        path.unlink()
    mended = make_store(root_of(earlier), SLICES)
    assert mended.verify() > 0
    assert [len(row) for row in mended] == [5, 0, 9, 14, 3, 30]


def test_copies_take_the_files_that_a_store_has(earlier: Store, tmp_path: Path) -> None:
    fresh = make_store(tmp_path / "fresh", SLICES)
    for store, name in ((earlier, "one"), (fresh, "two")):
        copy = Store(copy_store(store, tmp_path / name))
        assert set(copy.manifest["files"]) == set(store.manifest["files"])
        assert copy.verify() > 0


@pytest.mark.parametrize("name", MASK_FILES)
def test_manifest_names_all_columns_or_none(tmp_path: Path, name: str) -> None:
    store = make_store(tmp_path, SLICES)
    old = store.manifest
    files = {key: stated for key, stated in old["files"].items() if key != name}
    manifest = make_manifest(old["document"], old["totals"], old["tokenizer"], files)
    path = store.path / "manifest.json"
    path.chmod(0o644)
    path.write_bytes(encode_manifest(manifest))
    with pytest.raises(CorruptionError, match="or none"):
        Store(store.path)


def test_runs_that_are_not_the_masks_are_refused_at_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = make_columns([9, 14])
    runs, starts = columns.mask_runs
    columns.__dict__["mask_runs"] = (runs + 1, starts)
    with pytest.raises(CorruptionError, match="runs of its masks"):
        make_store(tmp_path, [columns])


def test_counts_of_a_slice_come_without_its_tokens(tmp_path: Path) -> None:
    store = make_store(tmp_path, SLICES)
    files = store.slice_at(2).files
    files.tokens.chmod(0o644)
    files.tokens.write_bytes(bytes(files.tokens.stat().st_size))  # only its size is looked at
    assert read_counts([files]).runs.tolist() == [2, 20]
