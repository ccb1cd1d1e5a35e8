"""Values kept by their bytes: the bound, what goes first, threads that fork."""

from __future__ import annotations

import os
import signal
import threading

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.files.process import RecentValues

steps = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 40)), max_size=60)


@given(steps)
def test_what_was_used_last_is_kept_within_the_bound(made: list[tuple[bool, int, int]]) -> None:
    values = RecentValues(100)
    model: dict[int, int] = {}  # key → size, the longest unused first
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


def test_newest_value_stays_though_it_is_larger_than_the_bound() -> None:
    values = RecentValues(10)
    values.put("a", bytes(8))
    values.put("b", bytes(50))
    assert values.get("a") is None
    assert values.get("b") == bytes(50)


def test_forked_child_goes_on_while_a_thread_of_the_parent_holds_the_lock() -> None:
    values = RecentValues(100)
    values.put("a", b"held")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with values._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if values.get("a") == b"held" else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
