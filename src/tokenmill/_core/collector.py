"""Pause Python's cycle collector where much is parsed and nothing of it has a cycle."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Pause it: looking for cycles costs a tenth of reading rows, a third of reading a vocabulary.

    When the pause ends, what was parsed must be dead, because the collector then looks at all of
    it. So use it around a call, or on a function, whose locals they are.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
