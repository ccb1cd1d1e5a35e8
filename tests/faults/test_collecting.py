"""T09: collecting while others read and build: rows stay right or an error says so (P2)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import Zygote
from tests.faults.world import picture, prepare_arguments
from tokenmill.errors import CorruptionError
from tokenmill.store import Store, open_store
from tokenmill.store.collect import GRACE_S, collect


def rows_of(store: Store) -> list[Any]:
    return [(row.input_ids.tolist(), row.loss_mask.tolist(), row.origin) for row in store]


def test_reader_finishes_within_the_grace_period_and_then_gets_a_typed_error(
    cache: Path,
) -> None:
    path = next((cache / "stores").iterdir())
    reader = open_store(path)
    expected = rows_of(open_store(path))
    now = time.time()
    marked = collect(cache, stores=[path.name], now=now)
    assert f"stores/{path.name}" in marked.marked
    assert marked.removed == []
    collect(cache, stores=[path.name], now=now + GRACE_S - 60)
    rows = [(r.input_ids.tolist(), r.loss_mask.tolist(), r.origin) for r in reader.batch(range(9))]
    removed = collect(cache, stores=[path.name], now=now + GRACE_S + 60)
    assert f"stores/{path.name}" in removed.removed
    assert not path.exists()
    # What it has open it may go on reading; the rest is refused.
    assert rows == expected[:9]
    assert [r.input_ids.tolist() for r in reader.batch(range(8))] == [r[0] for r in expected[:8]]
    with pytest.raises(CorruptionError, match="missing"):
        rows_of(reader)


def test_nothing_that_a_store_needs_is_collected(cache: Path, clean: Clean) -> None:
    (cache / "slices" / "00").mkdir(exist_ok=True)
    (cache / "slices" / "00" / ("0" * 40 + ".json")).write_text("{}")
    now = time.time()
    assert collect(cache, now=now).marked == ["slices/" + "0" * 40]
    assert collect(cache, now=now + 2 * GRACE_S).removed == ["slices/" + "0" * 40]
    assert picture(cache) == clean.picture


def test_store_that_cannot_be_read_stops_the_collection(cache: Path, clean: Clean) -> None:
    table = next((cache / "stores").iterdir()) / "slices.bin"
    data = table.read_bytes()
    table.write_bytes(data[:-1])
    with pytest.raises(CorruptionError):
        collect(cache, grace_s=0)
    table.write_bytes(data)
    assert picture(cache) == clean.picture


def collect_often(cache: str) -> int:
    """Collect without any grace, again and again: the rudest neighbour there can be."""
    removed = 0
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        removed += len(collect(Path(cache), grace_s=0).removed)
    print(json.dumps({"removed": removed}))
    return 0


def test_build_among_rude_collectors_is_whole_or_a_typed_error(
    zygote: Zygote, clean: Clean, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    arguments = prepare_arguments(clean.sources, cache)
    collector = {"call": "tests.faults.test_collecting:collect_often", "argument": str(cache)}
    builder, told = zygote.run({"arguments": arguments, "delay": 0.3}, collector)
    assert told.exit == 0, told.stderr
    assert builder.exit == 0 or builder.error in ("CorruptionError", "CacheError"), builder.stderr
    zygote.judge(cache) if builder.exit == 0 else None
    again = zygote.one(prepare_arguments(clean.sources, cache, "--force-recache"))
    assert again.exit == 0, again.stderr
    assert picture(cache) == clean.picture
