"""A simulated cache at two sizes: what grows with slices, and by how much.

Counts, never times: files opened (Python's own audit events) and bytes of Python objects. Both
sizes are beyond every window and buffer, so whatever differs between them grows with slices.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from benchmarks.simulated import ROWS, TOKENS, make_slices, make_sources, planned

from tests.programs import python
from tokenmill.store import Store

Measured = dict[int, dict[str, Any]]
SIZES = (500, 1500)

PROGRAM = """
import gc, json, sys, tracemalloc
from pathlib import Path
from tokenmill._core import publish
from tokenmill.store import prefetch, commit, manifest
from tokenmill.store import store as reading

# Buffers that a store of these sizes would not fill.
publish._WRITE_BYTES = commit._PIECE = 4096
commit._SLICES_PER_TASK = 1
manifest.BATCH = reading.MAX_LISTED_SLICES = 64
prefetch.BATCH = prefetch.WINDOW = 1  # how much is read ahead at the peak depends on who is faster

# pathlib interns the parts of every path; let the interpreter's table of them grow beforehand.
grown = [sys.intern(f"part {number}") for number in range(200_000)]
del grown

opened = 0

def hook(event, arguments):
    global opened
    opened += event == "open"

def counted(work):
    global opened
    gc.collect()
    tracemalloc.start()
    opened = 0
    done = work()
    files, peak = opened, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return done, {"opened": files, "peak": peak}

sys.addaudithook(hook)
sources, cache = Path(sys.argv[1]), Path(sys.argv[2])
from benchmarks.simulated import arguments_of, planned
from tokenmill import open_store
from tokenmill.build.calls import run_recipe

planned(sources, cache)  # what is imported on first use
given = arguments_of(sources, cache)
named = given.pop("sources"), given.pop("tokenizer")
_, plan = counted(lambda: planned(sources, cache))
done, prepare = counted(lambda: run_recipe(*named, **given))
again, hit = counted(lambda: run_recipe(*named, **given))
assert (done.hit, again.hit, done.build_stats.slices_built) == (False, True, 0)
path = str(done.store.path)
del done, again
store, opening = counted(lambda: open_store(path))
row, serving = counted(lambda: store[len(store) // 3].input_ids.tolist())
print(json.dumps({"path": path, "plan": plan, "prepare": prepare, "hit": hit, "open": opening,
                  "row": serving, "tokens": len(row)}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    found = {}
    for slices in SIZES:
        home = tmp_path_factory.mktemp(str(slices))
        sources, cache = make_sources(home / "sources", home / "cache", slices), home / "cache"
        make_slices(planned(sources, cache), cache)
        done = python(PROGRAM, sources, cache)
        assert done.returncode == 0, done.stderr
        found[slices] = json.loads(done.stdout)
    return found


def growth(measured: Measured, what: str, which: str) -> float:
    few, many = SIZES
    return float(measured[many][what][which] - measured[few][what][which]) / (many - few)


def test_every_row_of_a_simulated_store_is_served(measured: Measured) -> None:
    for slices, detail in measured.items():
        store = Store(detail["path"])
        assert len(store) == slices * ROWS
        assert detail["tokens"] == TOKENS
        assert store[len(store) - 1].input_ids.tolist() == list(range(36, 48))
        origin = store[5].origin
        assert (origin.row, origin.line, origin.offset) == (5, 6, 8 * 2**20 + 2 * 2**20)


def test_commit_opens_three_files_of_a_slice(measured: Measured) -> None:
    # The record, the meta file and the notes; sources are walked five times, three files each per
    # 1,000.
    assert growth(measured, "prepare", "opened") <= 3.05


def test_plan_and_hit_and_open_open_no_slice(measured: Measured) -> None:
    for what in ("plan", "hit"):
        assert growth(measured, what, "opened") <= 0.02
    assert growth(measured, "open", "opened") == 0
    assert growth(measured, "row", "opened") == 0


@pytest.mark.parametrize("what", ["plan", "prepare", "hit", "open", "row"])
def test_objects_do_not_grow_with_slices(measured: Measured, what: str) -> None:
    if what == "prepare" and sys.version_info[:2] == (3, 12):
        pytest.skip("Python 3.12 keeps what it interns for good, and so every part of a path")
    # One byte per slice says whether it was seen; an object would take fifty or more.
    assert growth(measured, what, "peak") <= 10
