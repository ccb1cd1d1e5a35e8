"""Stores too long for the ways of short ones: searched in place, not listed, looked at ahead."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import msgspec
import pytest

from tests.store.making import make_columns, make_store
from tokenmill.errors import CorruptionError, SourceMissing
from tokenmill.sources.rows import open_rows
from tokenmill.store import CacheLayout, Store, commit, prefetch
from tokenmill.store import store as store_module
from tokenmill.store.prefetch import prefetch_map
from tokenmill.store.slices import read_counts

LENGTHS = [[3, 5], [4], [], [6, 7, 9], [8]]


def make(root: Path) -> Store:
    return make_store(root, [make_columns(lengths, seed=n) for n, lengths in enumerate(LENGTHS)])


@pytest.mark.parametrize("mapped", [True, False])
def test_first_rows_searched_in_place_find_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    copied = make(tmp_path)
    monkeypatch.setattr(store_module, "MAX_LISTED_SLICES", 2)
    monkeypatch.setattr(store_module, "is_network", lambda path: not mapped)
    long = Store(copied.path)
    # In place means: another place for each 96 bytes, and nothing copied out of the map.
    assert isinstance(long._first_rows, memoryview)
    assert long._first_rows.strides == ((96,) if mapped else (8,))
    assert len(long) == sum(map(len, LENGTHS))
    for number, row in enumerate(copied):
        assert long[number].input_ids.tolist() == row.input_ids.tolist()
        assert long[number].origin == row.origin
    found = [first for first, _ in long.columns(["length"])]
    assert found == [first for first, _ in copied.columns(["length"])]


def test_state_of_too_many_slices_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "MAX_SHARDS", 4)
    store = make(tmp_path)
    state = json.loads((store.path / "state.json").read_bytes())
    assert len(state["_data_files"]) == 1
    assert store.verify() > 0
    with pytest.raises(SourceMissing, match=r"5 slices are too many .* tokenmill export"):
        open_rows(store.path, cache_dir=tmp_path / "other")
    datasets = pytest.importorskip("datasets")
    with pytest.raises(FileNotFoundError, match="use tokenmill export"):
        datasets.load_from_disk(str(store.path))


def test_counts_that_disagree_with_their_record_are_corrupt(tmp_path: Path) -> None:
    store = make(tmp_path)
    files = CacheLayout(tmp_path).slice(next(store.slice_keys()))
    assert read_counts(files).columns["lengths.bin"].tolist() == LENGTHS[0]
    record = read_counts(files).record
    longer = msgspec.structs.replace(record, tokens=record.tokens + 1)
    files.record.write_bytes(longer.encode())
    with pytest.raises(CorruptionError, match=r"'input_ids.values' has 32 bytes, expected 36"):
        read_counts(files)
    other = msgspec.structs.replace(record, trained=record.trained + 1)
    files.record.write_bytes(other.encode())
    with pytest.raises(CorruptionError, match=f"{record.trained} of them trained"):
        read_counts(files)


def test_ahead_keeps_the_order_and_takes_only_a_window() -> None:
    for count in (0, 1, prefetch.BATCH - 1, prefetch.BATCH, 700):
        assert list(prefetch_map(str, range(count))) == [str(number) for number in range(count)]
    taken = itertools.count()
    results = prefetch_map(lambda number: number * number, taken)  # endless
    assert list(itertools.islice(results, 1000)) == [number * number for number in range(1000)]
    limit = prefetch.BATCH * (prefetch.WINDOW + 1)
    assert next(taken) <= 1000 + prefetch.BATCH + limit
    results.close()
    assert not [t for t in threading.enumerate() if "tokenmill-ahead" in t.name]


def test_ahead_raises_an_error_in_its_turn() -> None:
    def work(number: int) -> int:
        if number == 300:
            raise CorruptionError("this one")
        return number

    found = []
    with pytest.raises(CorruptionError, match="this one"):
        found.extend(prefetch_map(work, range(1000)))
    # Results come in batches; everything before the failing one's batch was given out.
    assert found == list(range(300 // prefetch.BATCH * prefetch.BATCH))


def test_walking_blocks_of_many_files_holds_no_descriptor(tmp_path: Path) -> None:
    for number in range(30):  # more rows than fit a page of starts, so that they would be mapped
        rows = "".join(f'{{"n":{number * 10_000 + row}}}\n' for row in range(9000))
        (tmp_path / f"{number:02}.jsonl").write_text(rows)
    rows = open_rows(tmp_path / "*.jsonl", cache_dir=tmp_path / "cache")
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert sum(block.rows for block in rows.blocks()) == 30 * 9000
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 1
