"""Rows written to slices are read from the store, by tokenmill and by `datasets`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenmill
from tests.programs import python
from tests.store.making import make_columns, make_store
from tokenmill._core import publish
from tokenmill._core.origin import Origin
from tokenmill.errors import SourceMissing, UsageError
from tokenmill.store import CacheLayout, Store, open_store
from tokenmill.store.record import RejectedRow
from tokenmill.store.slice_writer import encode_slice, publish_slice

REJECTED = (RejectedRow(3, 0, 3, 300, 20, "bad_json", "ends early"),)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    slices=st.lists(st.lists(st.integers(1, 400), max_size=30), min_size=1, max_size=4).filter(
        lambda lists: any(lists)
    )
)
def test_store_any_slices_serves_every_row_as_written(
    tmp_path_factory: pytest.TempPathFactory, slices: list[list[int]]
) -> None:
    columns = [make_columns(lengths, seed=n) for n, lengths in enumerate(slices)]
    store = make_store(tmp_path_factory.mktemp("cache"), columns)
    at = 0
    for part in columns:
        for row in range(len(part.row)):
            ids = part.ids[part.starts[row] : part.starts[row + 1]]
            mask = part.mask[part.starts[row] : part.starts[row + 1]]
            served = store[at]
            assert served.input_ids.dtype == np.int32
            assert served.loss_mask.dtype == np.uint8
            np.testing.assert_array_equal(served.input_ids, ids)
            np.testing.assert_array_equal(served.loss_mask, mask)
            assert store.lengths[at] == len(ids)
            assert store.trained[at] == mask.sum()
            assert served.turns[-1] == ("assistant", 2 * (len(ids) // 3), len(ids))
            at += 1
    assert len(store) == at
    assert [len(row) for row in store] == store.lengths.tolist()


def test_store_negative_and_out_of_range_indexes_follow_lists(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([5, 6]), make_columns([7])])
    assert len(store[-1]) == 7
    assert len(store[np.int64(1)]) == 6
    assert [len(row) for row in store[::-1]] == [7, 6, 5]
    assert [len(row) for row in store.batch([2, 0])] == [7, 5]
    for wrong in (3, -4):
        with pytest.raises(IndexError, match="out of range: there are 3"):
            store[wrong]


def test_store_rejected_rows_keep_their_origin(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([5, 6, 7]), make_columns([4], rejected=REJECTED)])
    assert store.rejected == {"bad_json": 1}
    assert list(store.rejected_rows()) == [
        (Origin("fake.jsonl", 6, 7, 600, 20), "bad_json", "ends early")
    ]
    assert store[3].origin == Origin("fake.jsonl", 3, 4, 300, 99)


def test_store_extra_columns_are_decoded(tmp_path: Path) -> None:
    texts = ['"en"', '{"a":[1,null]}', "null"]
    store = make_store(tmp_path, [make_columns([3, 4, 5], extra={"lang": texts})])
    assert [row.extra["lang"] for row in store] == ["en", {"a": [1, None]}, None]
    ((first, columns),) = list(store.columns(["digest", "extra.lang", "source"]))
    assert first == 0
    assert columns["extra.lang"] == texts
    assert columns["source"].tolist() == [0, 0, 0]


def test_store_pickled_is_small_and_reopens(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([5] * 2000)])
    data = pickle.dumps(store)
    assert len(data) < 16 << 10
    again: Store = pickle.loads(data)
    np.testing.assert_array_equal(again[1999].input_ids, store[1999].input_ids)


def test_store_opened_by_datasets_has_exactly_our_columns(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    empty = make_columns([], rejected=REJECTED)
    store = make_store(tmp_path, [make_columns([5, 60]), empty, make_columns([7, 1], seed=1)])
    seen = datasets.load_from_disk(str(store.path))
    assert seen.column_names == ["input_ids", "loss_mask"]
    assert len(seen) == len(store)
    for ours, theirs in zip(store, seen, strict=True):
        assert ours.input_ids.tolist() == theirs["input_ids"]
        assert ours.loss_mask.tolist() == theirs["loss_mask"]


def test_store_without_mapping_reads_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = make_store(tmp_path, [make_columns([500, 6]), make_columns([7])])
    monkeypatch.setattr("tokenmill.store.store.is_network", lambda _: True)
    read = open_store(mapped.path)
    for one, other in zip(mapped, read, strict=True):
        np.testing.assert_array_equal(one.input_ids, other.input_ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        assert one.origin == other.origin
    np.testing.assert_array_equal(mapped.lengths, read.lengths)


def test_store_more_slices_than_may_be_open_keeps_descriptors_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.store.store._max_open_slices", lambda: 3)
    store = make_store(tmp_path, [make_columns([4], seed=n) for n in range(12)])
    kept = [store[i].input_ids for i in range(12)]
    assert len(store._open) == 3
    for i in reversed(range(12)):  # views outlive the slice that was closed behind them
        np.testing.assert_array_equal(store[i].input_ids, kept[i])


def test_open_store_of_another_directory_explains_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SourceMissing, match="prepare"):
        open_store(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"manifest\.json"):
        open_store(tmp_path)
    store = make_store(tmp_path, [make_columns([4])])
    with pytest.raises(UsageError, match="lazy, open, off"):
        open_store(store.path, verify="maybe")


def test_reading_a_store_loads_no_heavy_library(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([4, 5])])
    heavy = ["pyarrow", "jinja2", "tokenizers", "transformers", "datasets", "torch", "ray"]
    code = (
        "import sys; from tokenmill import open_store\n"
        f"row = open_store({str(store.path)!r})[1]; row.origin, row.turns, row.extra\n"
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_names_of_a_slice_are_durable_before_its_record_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    link, sync = os.link, publish.sync_directory

    def linked(staged: Path, target: Path) -> None:
        steps.append(target.name.partition(".")[2])
        link(staged, target)

    def synced(path: Path) -> None:
        steps.append("sync")
        sync(path)

    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(publish, "sync_directory", synced)
    cache, encoded = CacheLayout(tmp_path), encode_slice("0" * 40, make_columns([5, 6]))
    publish_slice(cache, encoded)
    cache.slice("0" * 40).record.unlink()
    publish_slice(cache, encoded)  # also names that another gave, who died perhaps before it synced
    assert steps == ["arrow", "meta.arrow", "sync", "json", "sync"] * 2


def test_row_decodes_its_text_and_shows_trained_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = Path(tokenmill.__file__).parent / "examples"
    row = tokenmill.prepare(
        examples / "conversations.jsonl", examples / "tokenizer", cache_dir=tmp_path, num_workers=0
    )[0]
    assert np.array_equal(row.labels == -100, row.loss_mask == 0)
    assert np.array_equal(row.labels[row.loss_mask > 0], row.input_ids[row.loss_mask > 0])
    row.show()
    head, _, text = capsys.readouterr().out.partition("\n")
    assert head == repr(row)
    assert text.replace("⟦", "").replace("⟧", "") == row.text + "\n"
    runs = np.count_nonzero(np.diff(row.loss_mask, prepend=0) == 1)
    assert text.count("⟦") == text.count("⟧") == runs > 0
