"""Damaged, truncated, swapped and missing files: no wrong row is served."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.making import commit, flip, make_columns, make_store, publish
from tokenmill._core import fingerprint
from tokenmill.errors import CacheError, CorruptionError, TokenmillError
from tokenmill.store import CacheLayout, Store, open_store
from tokenmill.store.commit import Placement
from tokenmill.store.layout import PROOF
from tokenmill.store.manifest import encode_manifest, with_digest
from tokenmill.store.record import RejectedRow
from tokenmill.store.transfer import copy_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    extra = {"lang": ['"en"'] * 5}
    slices = [make_columns([30, 40, 50, 1, 900], seed=n, extra=extra) for n in range(3)]
    return make_store(tmp_path / "cache", slices)


def rows_of(store: Store) -> list[tuple[list[int], list[int], object]]:
    return [
        (r.input_ids.tolist(), r.loss_mask.tolist(), (r.origin, tuple(r.turns), r.extra))
        for r in store
    ]


def files_of(store: Store) -> Iterator[Path]:
    root = store.path.parent.parent
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.name != PROOF:
            yield path


def refused_or_right(store: Store, expected: list[object]) -> str | None:
    """Read everything; None when it was right, else the refusal."""
    try:
        again = open_store(store.path)
        assert rows_of(again) == expected
        assert again.lengths.tolist() == [len(row[0]) for row in expected]  # type: ignore[index]
        assert again.trained.tolist() == [sum(row[1]) for row in expected]  # type: ignore[index]
        list(again.rejected_rows())
    except CorruptionError as error:
        return str(error) if error.path else None
    return None


def test_verify_intact_store_checks_every_byte_of_slices(store: Store) -> None:
    slices = sum(p.stat().st_size for p in files_of(store) if p.suffix == ".arrow")
    assert store.verify() > slices


def test_bit_flips_anywhere_are_refused_by_verify_and_never_served(store: Store) -> None:
    expected = rows_of(store)
    rng = random.Random(7)
    paths = list(files_of(store))
    unnoticed = 0
    for _ in range(500):
        path = rng.choice(paths)
        whole = flip(path, rng.randrange(8 * path.stat().st_size))
        if refused_or_right(store, expected) is None:
            # A flip in bytes that no row needs (Arrow's own header) is still found by verify.
            unnoticed += 1
            with pytest.raises(CorruptionError):
                open_store(store.path).verify()
        path.write_bytes(whole)
    assert unnoticed < 250
    assert rows_of(open_store(store.path)) == expected


def test_error_names_the_damaged_file_and_the_offset_of_the_block(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([200_000, 400_000])])
    [path] = store.path.parent.parent.glob("slices/*/*[!a].arrow")
    flip(path, 8 * 1_500_000)  # in the second block, with ids of the second row only
    assert len(store[0].input_ids)
    with pytest.raises(CorruptionError) as raised:
        store[1]
    assert (raised.value.path, raised.value.offset) == (str(path), 1 << 20)


def test_truncation_extension_and_loss_of_every_file_is_refused(store: Store) -> None:
    expected = rows_of(store)
    for path in files_of(store):
        data = path.read_bytes()
        cuts = {0, 1, len(data) // 2, len(data) - 1, len(data) - 8}
        for changed in [*(data[:cut] for cut in cuts if cut >= 0), data + b"\0", data + data]:
            path.write_bytes(changed)
            assert refused_or_right(store, expected) is not None, (path.name, len(changed))
        path.unlink()
        try:
            refusal = refused_or_right(store, expected)
        except TokenmillError as error:  # without its manifest a directory is no store at all
            refusal = str(error)
        assert refusal is not None
        assert path.name in refusal
        path.write_bytes(data)


def test_swapped_slices_are_refused(store: Store) -> None:
    expected = rows_of(store)
    for suffix in (".arrow", ".meta.arrow", ".json"):
        one, other = sorted(p for p in files_of(store) if p.name[40:] == suffix)[:2]
        kept = one.read_bytes(), other.read_bytes()
        one.write_bytes(kept[1])
        other.write_bytes(kept[0])
        assert refused_or_right(store, expected) is not None
        one.write_bytes(kept[0])
        other.write_bytes(kept[1])


def test_other_format_is_refused_with_both_versions(store: Store) -> None:
    manifest = store.path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"format":1', b'"format":2'))
    with pytest.raises(CorruptionError, match="format 2, this version reads format 1"):
        open_store(store.path)


def test_link_out_of_the_cache_is_followed_nowhere(store: Store, tmp_path: Path) -> None:
    outside, root = tmp_path / "outside", store.path.parent.parent
    paths = [path for path in sorted(root.rglob("*")) if "staging" not in path.parts]
    assert len(paths) > 12
    for path in paths:
        shutil.move(path, outside)
        path.symlink_to(outside)
        with pytest.raises((CacheError, CorruptionError), match="symbolic link"):
            read_all(store.path)
        path.unlink()
        shutil.move(outside, path)
    read_all(store.path)


def test_link_out_of_a_copy_is_followed_nowhere(store: Store, tmp_path: Path) -> None:
    copy = copy_store(store, tmp_path / "copy")
    (copy / "tokenizer" / "x").write_text("x")
    for name in ("slices", "tokenizer", "manifest.json", "lengths.bin", PROOF):
        shutil.move(copy / name, tmp_path / "outside")
        (copy / name).symlink_to(tmp_path / "outside")
        with pytest.raises((CacheError, CorruptionError), match="symbolic link"):
            read_all(copy)
        (copy / name).unlink()
        shutil.move(tmp_path / "outside", copy / name)
    (tmp_path / "linked").symlink_to(copy)
    read_all(tmp_path / "linked")  # how a store is reached is its reader's choice


def read_all(path: Path) -> None:
    again = open_store(path)
    again.verify()
    assert again.proof
    assert len(again.lengths) == len(rows_of(again)) == len(again.trained)
    assert again.tokenizer_path


def test_link_within_the_cache_is_followed(store: Store) -> None:
    root = store.path.parent.parent
    shutil.move(root / "slices", root / "moved")
    (root / "slices").symlink_to(root / "moved")
    read_all(store.path)


def test_damaged_proof_is_a_warning_and_rows_are_served(store: Store) -> None:
    expected = [row[:2] for row in rows_of(store)]
    (store.path / PROOF).write_bytes(b"{")
    again = open_store(store.path)
    with pytest.warns(UserWarning, match="not affected"):
        assert again.proof == {}
    assert [row[:2] for row in rows_of(again)] == expected
    assert again[0].origin.path is None


def test_verify_off_still_compares_sizes(store: Store) -> None:
    path = next(p for p in files_of(store) if p.name.endswith(".meta.arrow"))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptionError, match="expected"):
        rows_of(open_store(store.path, verify="off"))


def test_runs_that_are_not_the_masks_are_refused_at_commit(tmp_path: Path) -> None:
    columns = make_columns([9, 14])
    runs, starts = columns.mask_runs
    columns.__dict__["mask_runs"] = (runs + 1, starts)
    with pytest.raises(CorruptionError, match="runs of its masks"):
        make_store(tmp_path, [columns])


def test_commit_refuses_a_record_with_any_changed_character(tmp_path: Path) -> None:
    rejected = [RejectedRow(2, 0, 2, 200, 99, "bad_json", "not JSON")]
    columns = make_columns([9, 14], rejected=rejected, extra={"lang": ['"en"', '"de"']})
    key = publish(tmp_path, columns, "changed")
    path = CacheLayout(tmp_path).slice(key).record
    data = path.read_bytes()
    for place in range(len(data)):
        flip(path, 8 * place)  # turns 0 into 1, a into `, b into c
        with pytest.raises(CorruptionError):
            commit(tmp_path, [Placement(key, 0, 0, 1, 0)])
        path.write_bytes(data)
    assert len(commit(tmp_path, [Placement(key, 0, 0, 1, 0)])) == 2


@pytest.mark.parametrize("name", ["mask_runs.bin", "first_trained.bin", "mask_run_ends.bin"])
def test_verify_compares_the_columns_of_the_store_with_its_slices(store: Store, name: str) -> None:
    path = store.path / name
    flip(path, 0)
    files = store.manifest["files"]
    files[name]["checksum"] = fingerprint.checksum(path.read_bytes())
    manifest = encode_manifest(with_digest(store.manifest, files=files))
    (store.path / "manifest.json").write_bytes(manifest)
    with pytest.raises(CorruptionError, match="differs from the store's"):
        open_store(store.path).verify()
