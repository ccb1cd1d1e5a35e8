"""Sidecars: float32 attached to rows or tokens, whole or not at all, and never a wrong value."""

from __future__ import annotations

import pickle
import random
import shutil
import tempfile
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.making import flip, make_columns, make_store, mtimes
from tokenmill._core import artifact
from tokenmill._core import publish as publishing
from tokenmill.errors import CacheError, CorruptionError, NonDeterminismError, UsageError
from tokenmill.store import Store, access, open_store, sidecar_writer, sidecars
from tokenmill.store.collect import collect, survey
from tokenmill.store.sidecars import RowStarts
from tokenmill.store.transfer import copy_store, pull

DAY = 86_400.0


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "own"))
    return tmp_path / "own"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    slices = [make_columns([30, 4, 50, 1, 90], seed=n) for n in range(3)]
    return make_store(tmp_path / "cache", slices)


def row_values(store: Store, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=len(store)).astype(np.float32)


def token_values(store: Store, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=length).astype(np.float32) for length in store.lengths]


def small_blocks(patch: pytest.MonkeyPatch, values: int) -> None:
    """Blocks of so few values that a small sidecar has several."""
    patch.setattr(sidecar_writer, "BLOCK_VALUES", values)
    patch.setattr(sidecars, "BLOCK_BYTES", 4 * values)
    patch.setattr(access, "BLOCK_BYTES", 4 * values)


# What is given comes back


@given(st.lists(st.integers(0, 5), max_size=60), st.data())
def test_row_starts_are_those_of_a_running_sum(lengths: list[int], data: st.DataObject) -> None:
    counted = np.asarray(lengths, dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowStarts, "STEP", data.draw(st.integers(1, 7)))
        starts = RowStarts(counted)
        bounds = np.concatenate(([0], np.cumsum(counted)))
        assert [starts.start(row) for row in range(len(lengths) + 1)] == bounds.tolist()
        assert starts.total == bounds[-1]
        owners = np.repeat(np.arange(len(lengths)), counted).tolist()
        assert [starts.row_at(token) for token in range(starts.total)] == owners


@settings(max_examples=30)
@given(data=st.data())
def test_any_division_of_the_values_gives_the_same_sidecar(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
        store = make_store(Path(root), [make_columns(lengths)])
        small_blocks(patch, 8)
        patch.setattr(sidecar_writer, "CHUNK_VALUES", 5)
        rows = token_values(store)
        flat = np.concatenate(rows)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(rows)))) | {0, len(rows)})
        pieces = [np.concatenate(rows[a:b]) for a, b in pairwise(cuts)]
        for values in (flat, rows, iter(pieces), flat.astype(np.float64)):
            found = store.attach("ref", values, producer="m", per="token")
            assert found.values.tobytes() == flat.tobytes()
        fresh = open_store(store.path).sidecar("ref")
        order = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1)))
        for row, value in zip(order, fresh.batch(order), strict=True):
            assert value.tobytes() == rows[row].tobytes()  # type: ignore[union-attr]
            assert np.array_equal(fresh[row], value)


def test_values_per_row_are_floats_and_batches_are_arrays(store: Store) -> None:
    values = row_values(store)
    found = store.attach("reward", values, producer="m")
    assert [found[n] for n in range(len(store))] == values.tolist()
    assert type(found[-1]) is float
    assert found.batch([3, 0, -1]).tolist() == values[[3, 0, -1]].tolist()  # type: ignore[union-attr]
    assert found[2:9:3].tolist() == values[2:9:3].tolist()  # type: ignore[union-attr]
    assert found.values.dtype == np.float32
    assert pickle.loads(pickle.dumps(found))[4] == values[4]
    assert len(pickle.dumps(found)) < 1024
    with pytest.raises(IndexError, match="row 15 is out of range: there are 15"):
        found[15]


@pytest.mark.parametrize(
    "made",
    [lambda v: v.tolist(), lambda v: tuple(v.tolist()), lambda v: (x for x in v.tolist()),
     lambda v: iter([v[:3], v[3:3], v[3:]]), lambda v: v.astype(">f8"),
     lambda v: np.load("v.npy", mmap_mode="r")],
    ids=["list", "tuple", "scalars", "chunks", "other type", "memory map"],
)  # fmt: skip
def test_values_may_be_arrays_lists_or_iterables(
    store: Store, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = row_values(store)
    monkeypatch.chdir(tmp_path)
    np.save("v.npy", values)
    assert np.array_equal(store.attach("reward", made(values), producer="m").values, values)


@pytest.mark.parametrize(
    ("values", "per", "message"),
    [
        (lambda s: np.zeros(14), "row", "14 values for a store of 15 rows"),
        (lambda s: iter([np.zeros(10), np.zeros(6)]), "row", "16 or more values .* of 15 rows"),
        (lambda s: iter([np.zeros(10)]), "row", "10 values for a store of 15 rows"),
        (lambda s: np.zeros(524), "token", "524 values for a store of 525 tokens"),
        (lambda s: token_values(s)[:-1], "token", "14 arrays of values for 15 rows"),
        (lambda s: [*token_values(s)[:14], np.zeros(89)], "token", "89 values for row 14, .* 90"),
        (lambda s: iter([np.zeros(31)]), "token", "ends at token 31, inside row 1"),
        (lambda s: [0.0] * 7 + [float("nan")] * 8, "row", "value of row 7 is .*nan"),
        (lambda s: np.full(15, 1e39), "row", "value of row 0 is .*1e\\+39"),
        (lambda s: np.zeros((15, 1)), "row", r"got shape \(15, 1\)"),
        (lambda s: np.zeros(15, complex), "row", "got complex128"),
        (lambda s: ["a"] * 15, "row", "got <U1"),
        (lambda s: "text", "row", "got str"),
        (lambda s: None, "row", "got NoneType"),
        (lambda s: np.zeros(15), "word", "per must be one of row, token, got 'word'"),
    ],
)  # fmt: skip
def test_invalid_values_are_rejected_and_not_published(
    store: Store, values: Any, per: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        store.attach("reward", values(store), producer="m", per=per)
    assert store.sidecars == []
    assert not list((store.path.parent.parent / "staging").iterdir())


def test_invalid_name_or_producer_is_rejected(store: Store) -> None:
    for name in ("", "1a", "a b", "a.b", "é", "labels", "length", "x" * 101, 7):
        with pytest.raises(UsageError, match="name"):
            store.attach(name, row_values(store), producer="m")  # type: ignore[arg-type]
    for producer in ("", None, "x" * 1001, "\ud800"):
        with pytest.raises(UsageError, match="producer"):
            store.attach("reward", row_values(store), producer=producer)  # type: ignore[arg-type]


def test_loss_weights_are_attached_per_token_only(store: Store) -> None:
    with pytest.raises(UsageError, match="must have a value per token"):
        store.attach("loss_weights", row_values(store), producer="m")
    with pytest.raises(UsageError, match="must have a value per token"):
        store.attach_writer("loss_weights", producer="m", per="row")
    values = np.ones(int(store.lengths.sum()))
    assert store.attach("loss_weights", values, producer="m", per="token").per == "token"


def test_infinities_are_values_and_do_not_spoil_the_mean(store: Store) -> None:
    values = np.zeros(len(store))
    values[3], values[4] = -np.inf, 15.0
    record = store.attach("reward", values, producer="m").record
    assert (record.infinite, record.low, record.high) == (1, 0.0, 15.0)
    assert record.mean == pytest.approx(15 / 14)


# One identity has one content


def test_same_values_again_are_a_hit_that_writes_nothing(store: Store) -> None:
    root = store.path.parent.parent
    unattached = mtimes(root / "stores", root / "slices")
    first = store.attach("reward", row_values(store), producer="m")
    assert mtimes(root / "stores", root / "slices") == unattached, "the store does not change"
    before = mtimes(root)
    again = open_store(store.path).attach("reward", row_values(store), producer="m")
    assert again.path == first.path
    assert mtimes(root) == before


def test_other_values_of_one_producer_are_rejected(store: Store) -> None:
    first = store.attach("reward", row_values(store), producer="m")
    kept = (first.path / "values.f32").read_bytes()
    for values, per in ((row_values(store, 1), "row"), (token_values(store), "token")):
        with pytest.raises(NonDeterminismError, match="which are unchanged"):
            store.attach("reward", values, producer="m", per=per)
    assert (first.path / "values.f32").read_bytes() == kept


def test_second_writer_is_compared_at_the_last_step(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = open_store(store.path)
    publish = publishing.publish_directory

    def beaten(staged: Path, target: Path) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(publishing, "publish_directory", publish)
            other.attach("reward", row_values(store), producer="m")
        return publish(staged, target)

    monkeypatch.setattr(publishing, "publish_directory", beaten)
    with pytest.raises(NonDeterminismError):
        store.attach("reward", row_values(store, 1), producer="m")
    assert store.attach("reward", row_values(store), producer="m").values is not None


def test_name_with_several_producers_is_ambiguous(store: Store) -> None:
    for seed, maker in enumerate(("one", "two")):
        store.attach("reward", row_values(store, seed), producer=maker)
    (entry,) = survey(store.path.parent.parent)["entries"]
    assert entry["sidecars"] == [
        {"name": "reward", "producer": producer, "per": "row", "bytes": 60}
        for producer in ("one", "two")
    ]
    assert store.sidecar("reward", producer="two")[0] == row_values(store, 1)[0]
    with pytest.raises(UsageError, match="choose producer from 'one', 'two'"):
        store.sidecar("reward")
    with pytest.raises(UsageError, match="'three'; it has 'one', 'two'"):
        store.sidecar("reward", "three")
    with pytest.raises(UsageError, match="no sidecar 'x'; attached sidecars: reward"):
        store.sidecar("x")


# Damage


def refused_or_right(store: Store, expected: list[Any]) -> str | None:
    try:
        found = open_store(store.path)
        for name, values in zip(("ref", "reward"), expected, strict=True):
            sidecar = found.sidecar(name)
            assert all(np.array_equal(sidecar[n], value) for n, value in enumerate(values))
            assert sidecar.values.tobytes() == b"".join(value.tobytes() for value in values)
    except CorruptionError as error:
        assert error.path is not None
        return str(error)
    return None


def test_bit_flips_cuts_and_growth_are_refused_before_a_wrong_value(store: Store) -> None:
    expected = [token_values(store), row_values(store)]
    store.attach("ref", expected[0], producer="m", per="token")
    store.attach("reward", expected[1], producer="m")
    rng = random.Random(3)
    for path in [p for s in store.sidecars for p in s.path.iterdir()]:
        data = path.read_bytes()
        flips = [rng.randrange(8 * len(data)) for _ in range(20)]
        for wrong in [*flips, data[:-1], data[:-4], b"", data + b"\0", data + data]:
            path.write_bytes(data if isinstance(wrong, int) else wrong)
            if isinstance(wrong, int):
                flip(path, wrong)
            assert refused_or_right(store, expected) is not None, path.name
            errors = open_store(store.path).check_everything()[1]
            assert [error.path for error in errors] == [str(path)]
        path.unlink()
        assert "missing" in (refused_or_right(store, expected) or "")
        path.write_bytes(data)
    assert refused_or_right(store, expected) is None


def test_block_is_checked_once_and_only_when_it_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path, [make_columns([3] * 10)])
    small_blocks(monkeypatch, 2)
    found = store.attach("reward", np.arange(10.0), producer="m")
    flip(found.path / "values.f32", 8 * 9 * 4)
    found = open_store(store.path).sidecar("reward")
    assert found.batch(range(8)).tolist() == list(range(8))  # type: ignore[union-attr]
    for read in (lambda: found[9], lambda: found.batch([0, 8]), lambda: found.values):
        with pytest.raises(CorruptionError, match=r"block 4 .* attach the same values again"):
            read()


def test_swapped_sidecars_are_refused(store: Store) -> None:
    paths = [store.attach(n, row_values(store), producer="m").path for n in ("a", "b")]
    other = make_store(store.path.parents[2] / "c2", [make_columns([2] * 15)], name="other")
    theirs = other.attach("a", row_values(store), producer="m").path
    for source in (paths[1], theirs):
        shutil.rmtree(paths[0])
        shutil.copytree(source, paths[0])
        with pytest.raises(CorruptionError, match="key"):
            open_store(store.path).sidecar("a", "m")


def test_damaged_sidecar_goes_to_quarantine_when_it_is_attached_again(store: Store) -> None:
    first = store.attach("reward", row_values(store), producer="m")
    for name in ("values.f32", "sidecar.json"):
        (first.path / name).write_bytes(b"damaged")
        again = open_store(store.path).attach("reward", row_values(store), producer="m")
        assert np.array_equal(again.values, row_values(store))
    assert len(list((store.path.parent.parent / "quarantine").iterdir())) == 2


def test_link_out_of_the_cache_is_not_followed(store: Store, tmp_path: Path) -> None:
    first = store.attach("reward", row_values(store), producer="m")
    shutil.move(first.path, tmp_path / "outside")
    first.path.symlink_to(tmp_path / "outside")
    with pytest.raises((CacheError, CorruptionError), match="symbolic link"):
        open_store(store.path).sidecar("reward")


def test_network_file_systems_are_read_not_mapped(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.attach("ref", token_values(store), producer="m", per="token")
    store.attach("reward", row_values(store), producer="m")
    found = open_store(store.path)
    assert found.lengths.size

    def refused(*_: object) -> None:
        raise AssertionError("mapped, or read as a whole")

    monkeypatch.setattr(sidecars, "is_network", lambda path: True)
    monkeypatch.setattr("mmap.mmap", refused)
    monkeypatch.setattr(access.ChecksummedFile, "unchecked_view", refused)
    assert np.array_equal(found.sidecar("ref")[4], token_values(store)[4])
    rewards = found.sidecar("reward")
    assert rewards.batch([4, 2]).tolist() == row_values(store)[[4, 2]].tolist()  # type: ignore[union-attr]
    assert rewards.values.tobytes() == row_values(store).tobytes()


# Where they lie


def test_copy_carries_what_is_attached_now_and_later(store: Store, tmp_path: Path) -> None:
    store.attach("reward", row_values(store), producer="m")
    copy = copy_store(store, tmp_path / "copy")
    store.attach("ref", token_values(store), producer="m", per="token")
    copy_store(store, copy)
    shutil.rmtree(tmp_path / "cache")
    found = open_store(shutil.move(copy, tmp_path / "moved"), verify="open")
    assert [sidecar.name for sidecar in found.sidecars] == ["ref", "reward"]
    assert found.sidecar("reward")[2] == row_values(store)[2]
    assert not [p for p in found.path.rglob("*") if p.name.startswith(".")], "staging is gone"


def test_self_contained_store_takes_sidecars_and_pull_copies_them(
    store: Store, tmp_path: Path
) -> None:
    copy = open_store(copy_store(store, tmp_path / "copy"))
    copy.attach("reward", row_values(store), producer="m")
    assert [path.name for path in (copy.path / "sidecars").iterdir()] == [
        copy.sidecar("reward").path.name
    ]
    pulled = pull(copy.path, cache_dir=tmp_path / "other")
    shutil.rmtree(copy.path)
    assert np.array_equal(pulled.sidecar("reward").values, row_values(store))


def test_read_only_store_uses_the_default_cache(
    store: Store, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = artifact.Staging.__enter__

    def read_only(self: Any) -> Any:
        if own_cache not in self.path.parents:
            raise CacheError("read-only file system", path=self.path)
        return real(self)

    monkeypatch.setattr(artifact.Staging, "__enter__", read_only)
    store.attach("reward", row_values(store), producer="m")
    found = open_store(store.path).sidecar("reward")
    assert own_cache in found.path.parents
    with store.attach_writer("ref", producer="m", per="token") as writer:
        writer.write(slice(None), token_values(store))
    assert own_cache in store.sidecar("ref").path.parents
    collect(own_cache, grace_s=0, now=0.0)
    collect(own_cache, grace_s=0, now=2 * DAY)
    assert [s.name for s in open_store(store.path).sidecars] == ["ref", "reward"]


def collected(root: Path, **more: Any) -> set[str]:
    collect(root, now=0.0, **more)
    return set(collect(root, now=2 * DAY, **more).removed)


def test_collecting_keeps_those_of_living_stores_and_takes_those_of_dead_ones(
    tmp_path: Path,
) -> None:
    stores = [make_store(tmp_path, [make_columns([3, 4])], name=name) for name in "ab"]
    for store in stores:
        store.attach("reward", np.zeros(2), producer="m")
    survivor, expired = stores
    gone = collected(tmp_path, stores=[expired.key])
    assert f"sidecars/{expired.key}" in gone
    assert open_store(survivor.path).sidecar("reward").values.tolist() == [0.0, 0.0]
    assert not (tmp_path / "sidecars" / expired.key).exists()
    shutil.rmtree(survivor.path)
    assert f"sidecars/{survivor.key}" in collected(tmp_path)


def test_collecting_takes_parts_when_the_sidecar_is_complete_and_not_before(
    store: Store,
) -> None:
    root = store.path.parent.parent
    with store.attach_writer("reward", producer="m") as writer:
        writer.write(range(14), row_values(store)[:14])
    assert not collected(root)
    with store.attach_writer("reward", producer="m") as writer:
        assert writer.missing.tolist() == [14]
        writer.write(14, row_values(store)[14:])
    (gone,) = collected(root)
    assert gone.endswith(".parts")
    assert np.array_equal(open_store(store.path).sidecar("reward").values, row_values(store))


def test_attaching_ten_million_values_in_chunks_stays_small(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([1] * 1000)])
    store.manifest["totals"]["rows"] = store._rows = 10_000_000
    store._arrays["lengths.bin"] = np.broadcast_to(np.int32(1), 10_000_000)

    def chunks() -> Iterator[np.ndarray[Any, Any]]:
        for first in range(0, 10_000_000, 250_000):
            yield np.arange(first, first + 250_000, dtype=np.float32)

    tracemalloc.start()
    found = store.attach("reward", chunks(), producer="m")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert found[9_999_999] == 9_999_999
