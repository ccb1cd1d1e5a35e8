"""`Store.attach_writer`, compared with `Store.attach`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.making import flip, make_columns, make_store
from tests.store.test_sidecars import row_values, token_values
from tokenmill.errors import CorruptionError, NonDeterminismError, UsageError
from tokenmill.store import Store, open_store, sidecar_writer
from tokenmill.store.sidecar_writer import unfinished


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "own"))
    return make_store(
        tmp_path / "cache", [make_columns([30, 4, 50, 1, 90], seed=n) for n in (0, 1)]
    )


def parts_of(store: Store) -> list[Path]:
    return sorted((store.path.parent.parent / "sidecars").glob("*/*.parts/*"))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_writes_in_any_order_equal_attaching_at_once(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sidecar_writer, "WINDOW_ROWS", data.draw(st.integers(1, 6)))
        patch.setattr(sidecar_writer, "WINDOW_VALUES", data.draw(st.integers(1, 20)))
        patch.setattr(
            sidecar_writer, "MAX_BUFFER_BYTES", data.draw(st.sampled_from([1, 200, 1 << 20]))
        )
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=14))
        store = make_store(Path(root), [make_columns(lengths)])
        per = data.draw(st.sampled_from(["row", "token"]))
        rows = token_values(store) if per == "token" else list(row_values(store).reshape(-1, 1))
        expected = store.attach("at_once", np.concatenate(rows), producer="m", per=per)
        order = data.draw(st.permutations(range(len(rows))))
        # Some rows come a second time: the same values again are no other ones.
        order += data.draw(st.lists(st.sampled_from(order), max_size=3))
        while order:
            count = data.draw(st.integers(1, len(order)))
            taken, order = order[:count], order[count:]
            with open_store(store.path).attach_writer("ref", producer="m", per=per) as writer:
                writer.write(taken, [rows[row] for row in taken])
                left = set(order) - set(range(len(rows))) | set(writer.missing.tolist())
                assert left.isdisjoint(taken)
        assert writer.sidecar is not None
        found = (writer.sidecar.path / "values.f32").read_bytes()
        assert found == (expected.path / "values.f32").read_bytes()
        assert writer.sidecar.record.blocks == expected.record.blocks


def test_missing_lists_rows_that_no_writer_has_written(store: Store) -> None:
    values = row_values(store)
    one, other = (open_store(store.path).attach_writer("reward", producer="m") for _ in "ab")
    one.write([3, 1], values[[3, 1]])
    assert one.missing.tolist() == [0, 2, 4, 5, 6, 7, 8, 9]
    assert other.missing.size == 10, "it was not flushed"
    one.flush()
    assert other.missing.tolist() == one.missing.tolist()
    with pytest.raises(UsageError, match="8 of 10 rows are missing, first row 0"):
        other.publish()
    other.write(slice(4, None), values[4:])
    other.write(0, values[0])
    other.write(-8, values[2])
    assert np.array_equal(other.publish().values, values)
    assert one.missing.size == 0
    assert one.publish().path == other.publish().path


def test_shares_computed_at_different_times_cover_every_row(store: Store) -> None:
    values = row_values(store)
    for rank in (2, 0, 1):
        with store.attach_writer("reward", producer="m") as writer:
            rows = writer.share(rank, 3)
            assert rows.tolist() == list(range(rank, 10, 3))
            writer.write(rows, values[rows])
    assert np.array_equal(store.sidecar("reward").values, values)
    with pytest.raises(UsageError, match="rank must be at most 2, got 3"):
        writer.share(3, 3)


def test_second_run_computes_nothing(store: Store) -> None:
    store.attach("reward", row_values(store), producer="m")
    with store.attach_writer("reward", producer="m") as writer:
        assert writer.missing.size == 0
        writer.write(3, row_values(store)[3])  # who does not ask is compared
        writer.flush()
        writer.write(4, 77.0)
        with pytest.raises(NonDeterminismError, match="row 4 was written before"):
            writer.flush()
    assert not parts_of(store)


def test_killed_writer_loses_what_it_had_not_flushed_and_no_more(store: Store) -> None:
    writer = store.attach_writer("reward", producer="m")
    writer.write(range(4), row_values(store)[:4])
    writer.flush()
    writer.write(4, 1.0)
    del writer
    assert store.attach_writer("reward", producer="m").missing.tolist() == [4, 5, 6, 7, 8, 9]
    (left,) = unfinished(store)
    assert (left.identity.name, left.per, left.missing.size) == ("reward", "row", 6)


def test_error_in_the_body_keeps_what_was_computed(store: Store) -> None:
    def compute() -> None:
        with store.attach_writer("reward", producer="m") as writer:
            writer.write(range(10), row_values(store))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compute()
    assert not store.sidecars, "the body did not end"
    assert store.attach_writer("reward", producer="m").publish()[9] == row_values(store)[9]


def test_elapsed_time_flushes_a_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_writer, "FLUSH_S", 0.0)
    with store.attach_writer("reward", producer="m") as writer:
        for row, value in enumerate(row_values(store)):
            writer.write(row, value)
            assert len(parts_of(store)) == row + 1
    assert len(store.sidecars) == 1


def test_row_with_other_values_is_rejected_and_the_first_stay(store: Store) -> None:
    values = token_values(store)
    with store.attach_writer("ref", producer="m", per="token") as writer:
        writer.write([2, 4], [values[2], values[4]])
    changed = values[4].copy()
    changed[7] += 1
    for wrong in ([values[1], changed], np.concatenate([values[1], changed])):
        writer = store.attach_writer("ref", producer="m", per="token")
        writer.write([1, 4], wrong)
        with pytest.raises(NonDeterminismError, match="row 4 was written before with other"):
            writer.flush()
    assert store.attach_writer("ref", producer="m", per="token").missing.tolist() == [
        0, 1, 3, 5, 6, 7, 8, 9,
    ]  # fmt: skip
    writer = store.attach_writer("ref", producer="m", per="token")
    writer.write([5, 5], [values[5], values[5] + 1])
    with pytest.raises(NonDeterminismError, match="row 5"):
        writer.flush()


def test_concurrent_parts_are_compared_when_merged(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (store.attach_writer("reward", producer="m") for _ in "ab")
    one.write(range(10), row_values(store))
    other.write(3, 77.0)
    with monkeypatch.context() as patch:
        patch.setattr(other, "_refresh", lambda: None)  # both flush at the same moment
        one.flush()
        other.flush()
    with pytest.raises(NonDeterminismError, match="row 3 was written before"):
        store.attach_writer("reward", producer="m").publish()
    assert not store.sidecars


@pytest.mark.parametrize(
    ("per", "rows", "values", "message"),
    [
        ("row", 10, 0.0, "row 10 is out of range: there are 10"),
        ("row", [1, 2], [0.0], "1 values for 2 rows"),
        ("row", [1], [np.nan], "value of row 1 is .*nan"),
        ("row", [4, 2], [0.0, np.nan], "value of row 2 is .*nan"),
        ("row", [4], ["x"], "got <U1"),
        ("token", [0, 1], [np.zeros(30), np.zeros(3)], "3 values for row 1, which has 4 tokens"),
        ("token", [0, 1], [np.zeros(30)], "1 arrays of values for 2 rows"),
        ("token", [0, 1], np.zeros(33), "33 values for 2 rows, which have 34 tokens"),
        ("token", 1, np.array([0, 0, np.nan, 0]), "value of row 1"),
    ],
)
def test_bad_values_are_refused_with_their_row(
    store: Store, per: str, rows: Any, values: Any, message: str
) -> None:
    with store.attach_writer("reward", producer="m", per=per) as writer:
        with pytest.raises(UsageError, match=message):
            writer.write(rows, values)
        assert writer.missing.size == 10


def test_another_per_is_rejected(store: Store) -> None:
    store.attach("ref", row_values(store), producer="m")
    with pytest.raises(NonDeterminismError, match="attached per row, not per token"):
        store.attach_writer("ref", producer="m", per="token")


@pytest.mark.parametrize("name", ["rows.bin", "values.f32", "part.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_damaged_part_is_refused_and_its_rows_are_computed_again(
    store: Store, name: str, how: str
) -> None:
    values = row_values(store)
    with store.attach_writer("reward", producer="m") as writer:
        writer.write(range(5), values[:5])
    path = parts_of(store)[0] / name
    whole = flip(path, 32)
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(whole[:-1])

    def finish() -> None:
        with store.attach_writer("reward", producer="m") as writer:
            writer.write(writer.missing, values[writer.missing])

    with pytest.raises(CorruptionError, match="remove its directory") as refused:
        finish()
    assert refused.value.path == str(path)
    shutil.rmtree(path.parent)
    finish()
    assert np.array_equal(store.sidecar("reward").values, values)
