"""Python's cycle collector, paused where much is parsed and nothing of it has a cycle.

`without_collector` stands around calls that parse rows (build, prompts, lint) or vocabularies
(tokenizer). In goes nothing, out comes the collector in the state that it had.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Pause it: parsed JSON has no cycles, and looking for them costs a tenth of reading rows.

    Of reading a vocabulary, which lives longer than a row, it costs a third. Where the pause ends,
    what was parsed must be dead: the collector's first look is at all that was made meanwhile. So
    it belongs around a call, or on a function, whose locals they are.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
