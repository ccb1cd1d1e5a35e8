"""Tests of temporary directories, locks and caches across fork."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill
from tests.build.making import TOKENIZER, conversations, write_rows
from tests.programs import python
from tests.store.making import make_columns, make_store
from tokenmill._core.process import (
    PrivateDirectory,
    RecentValues,
    at_end,
    has_process_directory,
    process_directory,
)
from tokenmill._core.publish import Staging
from tokenmill.data.loader import Loader

PACKAGE = Path(tokenmill.__file__).parent

PROGRAM = """
import os, sys, tempfile
from pathlib import Path
import tokenmill as tm

source, tokenizer, scratch = sys.argv[1:]
tempfile.tempdir = scratch
{make}
before = sorted(str(p) for p in Path(scratch).rglob("*"))
assert before, "nothing private was made"
child = os.fork()
if child == 0:
    sys.exit(0)  # runs finalizers and atexit handlers
assert os.waitpid(child, 0)[1] == 0
assert sorted(str(p) for p in Path(scratch).rglob("*")) == before
{use}
"""
PREPARED = (
    "held = tm.prepare(source, tokenizer, tokenizer_backend='file', executor='inline',"
    " progress=False, {})"
)
UNWRITABLE = "import tokenmill.data.index as index; index._caches = lambda index: []; "
CASES = {
    "disable_cache": (
        PREPARED.format("disable_cache=True"),
        "assert len(held[0]) and held.verify()",
    ),
    "filter": (
        UNWRITABLE
        + PREPARED.format("cache_dir=scratch + '-cache'")
        + "; held = held.filter('length > 1')",
        "assert len(held[0])",
    ),
    "rows": (
        "from tokenmill.sources.index import private_index_cache; held = private_index_cache();"
        " (held.root / 'x').write_text('x')",
        "assert private_index_cache().root == held.root",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parent_removes_its_directory_and_a_child_does_not(case: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "chat.jsonl", conversations(20))
    (tmp_path / "scratch").mkdir()
    make, use = CASES[case]
    program = PROGRAM.format(make=make, use=use)
    answer = python(program, source, TOKENIZER, tmp_path / "scratch")
    assert answer.returncode == 0, answer.stderr
    assert list((tmp_path / "scratch").iterdir()) == []


def in_child(work: Callable[[], None], seconds: int = 20) -> int:
    """Run work in a forked child and return its exit status; kill it if it hangs."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(seconds)
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def test_private_directory_is_removed_with_its_owner_in_its_process_only() -> None:
    held = [PrivateDirectory()]
    path = held[0].path
    assert in_child(lambda: (held.clear(), gc.collect())[0]) == 0
    assert path.exists()
    held.clear()
    gc.collect()
    assert not path.exists()


def test_process_directory_is_one_per_process(tmp_path: Path) -> None:
    path = process_directory()
    assert process_directory() == path

    def in_a_child() -> None:
        assert not has_process_directory()
        assert process_directory() != path
        (tmp_path / "its").write_text(str(process_directory()))

    assert in_child(in_a_child) == 0
    assert path.is_dir()
    Path((tmp_path / "its").read_text()).rmdir()  # this child ended without its finalizers


def test_staging_directory_survives_a_child_that_leaves_it(tmp_path: Path) -> None:
    def leave() -> None:
        staging.__exit__(None, None, None)

    with Staging(tmp_path) as staging:
        path = staging.write("x", b"x")
        assert in_child(leave) == 0
        assert path.read_bytes() == b"x"
    assert not staging.path.exists()


def test_at_end_calls_once_in_its_own_process(tmp_path: Path) -> None:
    class Owner:
        pass

    owner: list[object] = [Owner()]
    at_end(owner[0], (tmp_path / "called").touch)
    assert in_child(owner.clear) == 0
    assert not (tmp_path / "called").exists()
    owner.clear()
    assert (tmp_path / "called").exists()


def held_by_a_thread(lock: Any) -> tuple[threading.Event, threading.Thread]:
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    return over, thread


def test_locks_that_a_thread_holds_are_free_in_a_child(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([3, 4])])
    values = RecentValues(100)
    values.put("a", b"held")
    uses: list[tuple[Any, Callable[[], Any]]] = [
        (store._lock, lambda: len(store[1])),
        (values._lock, lambda: values.get("a")[0]),
    ]
    for lock, use in uses:
        over, thread = held_by_a_thread(lock)
        try:
            assert in_child(lambda use=use: print(use()), seconds=5) == 0
        finally:
            over.set()
            thread.join()
        with lock:
            pass


steps = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 140)), max_size=60)


@given(steps)
def test_recent_values_evict_the_least_recently_used(made: list[tuple[bool, int, int]]) -> None:
    values = RecentValues(100)
    model: dict[int, int] = {}  # key → size, least recently used first
    for is_put, key, size in made:
        if is_put:
            model.pop(key, None)
            model[key] = size
            values.put(key, (key, size), size)
            while sum(model.values()) > 100 and len(model) > 1:
                del model[next(iter(model))]
        elif key in model:
            model[key] = model.pop(key)
            assert values.get(key) == (key, model[key])
        else:
            assert values.get(key) is None
        assert values.bytes == sum(model.values())


def test_prefetching_iterator_continues_in_a_child(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([3] * 40)])
    batches = iter(Loader(store, batch_size=2, prefetch=2))
    next(batches)

    def rest() -> None:
        assert sum(1 for _ in batches) == 19

    assert in_child(rest, seconds=5) == 0
    assert sum(1 for _ in batches) == 19


def test_finalizers_and_locks_are_used_only_through_this_module() -> None:
    """Other finalizers and locks would not be safe across fork."""
    pattern = re.compile(r"weakref\.finalize|\batexit\b|mkdtemp|mkstemp|TemporaryDirectory")
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"_core/process.py"}
