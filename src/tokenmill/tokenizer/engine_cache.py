"""What this process has loaded: engines and piece tables, by the tokenizer.json they are made of.

`Tokenizer` and the engines ask it before they load anything. Loading an engine takes longer than
encoding a few thousand rows with it, so what was loaded once stays for the next call: `once` gives
the object of a name for a tokenizer, and makes it where it is not there. Threads that ask for the
same one at the same time wait for the first instead of loading it twice. The last `MOST_TOKENIZERS`
that were used stay. Where there is little to encode, the fast engine is not loaded at all:
`engine_for` says which one to ask for.

A forked child starts with nothing. Another thread of its parent may have held a lock or been inside
an engine, and that thread does not exist in the child; so the child neither uses what was loaded
nor takes it apart.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

MOST_TOKENIZERS = 4  # each takes up to half a GB; a program that switches between more loads again

LITTLE_WORK = 4 << 20
"""Bytes of rows that the reference has encoded before a worker would have loaded fastokens."""

Made = TypeVar("Made")


class _Slot:
    """What is loaded of one tokenizer."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # making one object may ask for another
        self.made: dict[str, Any] = {}


_lock = threading.Lock()
_slots: OrderedDict[str, _Slot] = OrderedDict()
_of_parents: list[object] = []


def once(checksum: str, name: str, make: Callable[[], Made]) -> Made:
    """The object of this name for a tokenizer, made at most once while it stays.

    Args:
        checksum: Of the tokenizer.json.
        name: What it is.
        make: Makes it; what it raises is raised, and the next call tries again.
    """
    with _lock:
        slot = _slots.setdefault(checksum, _Slot())
        _slots.move_to_end(checksum)
        while len(_slots) > MOST_TOKENIZERS:
            _slots.popitem(last=False)
    with slot.lock:
        if name not in slot.made:
            slot.made[name] = make()
        made: Made = slot.made[name]
        return made


def engine_for(name: str, work: int) -> str:
    """The engine to ask for where somebody asked for ``name``.

    Args:
        name: One of `tokenmill.tokenizer.ENGINES`; only ``auto`` leaves a choice.
        work: Bytes of rows that are to be encoded.
    """
    return "hf" if name == "auto" and work <= LITTLE_WORK else name


def forget() -> None:
    """Let go of everything: for tests that put something else in an engine's place."""
    with _lock:
        _slots.clear()


def _start_anew() -> None:
    global _lock, _slots
    _of_parents.append(_slots)
    _lock, _slots = threading.Lock(), OrderedDict()


os.register_at_fork(after_in_child=_start_anew)
