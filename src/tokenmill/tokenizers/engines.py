"""Engines that encode batches: `tokenizers` (the reference) and fastokens (faster).

fastokens uses every core that the process may use, so workers are pinned before they load it.
The thread pools of both libraries do not survive a fork. So a forked child uses `tokenizers` text
by text, which needs no pool, and fastokens only if its parent had no other thread at the fork: then
there was no pool. A small job does the same, because the user's process may fork later.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tokenmill._core.optional import optional
from tokenmill._core.process import parent_had_threads
from tokenmill.errors import TokenizerError, check_one_of
from tokenmill.tokenizers.cache import SMALL_JOB_BYTES, once
from tokenmill.tokenizers.encoded import starts_of
from tokenmill.tokenizers.identity import reraise_interrupts
from tokenmill.tokenizers.parity_texts import parity_texts
from tokenmill.tokenizers.tokenizer import Tokenizer

ENGINES = ("auto", "fastokens", "hf")

_import_pid = os.getpid()  # another process is a forked child
_is_loaded = False  # fastokens, perhaps with threads
_is_lost = False  # a fork left them behind


def _after_fork() -> None:
    global _is_lost
    _is_lost |= _is_loaded and parent_had_threads()


os.register_at_fork(after_in_child=_after_fork)


class Engine(Protocol):
    name: str

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return flat int32 ids without special tokens, and int64 row starts."""
        ...


def _may_use_threads() -> bool:
    """Return whether a thread pool that was started before is still alive in this process."""
    if os.getpid() != _import_pid:
        return False
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.get_start_method(allow_none=True) in (None, "fork"):
        return False  # the child may have been forked before this module was imported
    return not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) > 1


class HfEngine:
    """The reference: `tokenizers`, with offsets on request."""

    name = "hf"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.reference

    def _encodings(self, texts: Sequence[str], *, offsets: bool) -> list[Any]:
        backend = self._backend
        if len(texts) > 1 and sum(map(len, texts)) > SMALL_JOB_BYTES and _may_use_threads():
            fast = getattr(backend, "encode_batch_fast", None)
            call = backend.encode_batch if offsets or fast is None else fast
            return list(call(list(texts), add_special_tokens=False))
        return [backend.encode(text, add_special_tokens=False) for text in texts]

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _flat([encoding.ids for encoding in self._encodings(texts, offsets=False)])

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Also return the (start, end) of each token in characters, shape (n, 2)."""
        encodings = self._encodings(texts, offsets=True)
        ids, row_starts = _flat([encoding.ids for encoding in encodings])
        pairs = [np.array(e.offsets, dtype=np.int64).reshape(-1, 2) for e in encodings]
        offsets = np.concatenate(pairs) if pairs else np.zeros((0, 2), dtype=np.int64)
        return ids, row_starts, offsets


class FastokensEngine:
    """fastokens; raises `TokenizerError` if it is missing or does not support the tokenizer."""

    name = "fastokens"

    def __init__(self, tokenizer: Tokenizer) -> None:
        global _is_loaded
        with optional("fastokens", "engine='fastokens'", raises=TokenizerError):
            import fastokens
        if _is_lost:
            raise TokenizerError("fastokens cannot run in a process forked after it was loaded")

        def load() -> Any:
            backend = fastokens.Tokenizer.from_json_str(tokenizer.data.decode("utf-8"))
            backend.no_truncation()
            backend.no_padding()
            return backend

        try:
            self._backend = once(tokenizer.checksum, self.name, load)
        except BaseException as error:
            reraise_interrupts(error)
            raise TokenizerError(f"fastokens cannot load this tokenizer: {error}") from error
        _is_loaded = True

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if _is_lost:
            raise TokenizerError("fastokens cannot run in a process forked after it was loaded")
        ids, starts = self._backend.encode_batch_flat(list(texts))
        # Ids are far below 2**31, so reading unsigned numbers as signed is safe and copies nothing.
        return np.frombuffer(ids, dtype="<i4"), np.frombuffer(starts, dtype="<i8")


def choose_engine(tokenizer: Tokenizer, name: str = "auto") -> tuple[Engine, str]:
    """Return the engine for a tokenizer and the reason for the choice.

    fastokens is used only if it gives the ids of the reference on the parity texts. The name
    ``fastokens`` raises an error otherwise, ``auto`` returns the reference.
    """
    check_one_of("engine", name, ENGINES)
    reference = HfEngine(tokenizer)
    if name == "hf":
        return reference, "requested"
    try:
        candidate = FastokensEngine(tokenizer)
        difference = once(
            tokenizer.checksum,
            "difference",
            lambda: first_difference(candidate, reference, parity_texts(tokenizer.added_contents)),
        )
        if difference is not None:
            raise TokenizerError(
                f"fastokens and tokenizers give different ids for {difference[:60]!r}"
            )
    except TokenizerError as error:
        if name == "fastokens":
            raise
        return reference, error.message
    return candidate, "equal to the reference on the parity texts"


def first_difference(one: Engine, other: Engine, texts: Sequence[str]) -> str | None:
    try:
        ids, starts = one.encode(texts)
    except BaseException as error:
        reraise_interrupts(error)
        return f"(error on the parity texts: {error})"
    expected, expected_starts = other.encode(texts)
    if np.array_equal(ids, expected) and np.array_equal(starts, expected_starts):
        return None
    for row, text in enumerate(texts):
        row_ids = ids[starts[row] : starts[row + 1]]
        if not np.array_equal(row_ids, expected[expected_starts[row] : expected_starts[row + 1]]):
            return text
    return ""


def _flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    row_starts = starts_of([len(row) for row in rows])
    ids = np.empty(int(row_starts[-1]), dtype=np.int32)
    for row, start, end in zip(rows, row_starts[:-1], row_starts[1:], strict=True):
        ids[start:end] = row
    return ids, row_starts
