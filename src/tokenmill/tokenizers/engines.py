"""Engines that encode batches: `tokenizers`, the reference, and fastokens, which is faster.

fastokens uses every core that the process may use, so workers are pinned before they load it.
Neither library's thread pool survives a fork, so a forked child uses `tokenizers` text by text,
which needs no pool. So does a small job: it may run in the user's own process, which may fork.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tokenmill._core.optional import optional
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.tokenizers.cache import LITTLE_WORK, once
from tokenmill.tokenizers.encoded import starts_of
from tokenmill.tokenizers.parity_texts import parity_texts
from tokenmill.tokenizers.tokenizer import Tokenizer

ENGINES = ("auto", "fastokens", "hf")

_imported_in = os.getpid()  # another process is a forked child
_fastokens_home: int | None = None  # the process in which fastokens started threads, if any


class Engine(Protocol):
    name: str

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return flat int32 ids without special tokens, and int64 row starts."""
        ...


def _may_use_threads() -> bool:
    """Return whether a thread pool that this process started earlier can still be alive."""
    if os.getpid() != _imported_in:
        return False
    parent = multiprocessing.parent_process()
    if parent is not None and multiprocessing.get_start_method(allow_none=True) in (None, "fork"):
        return False  # a child of multiprocessing that may have been forked before we were imported
    return not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) > 1


class HfEngine:
    """The reference: `tokenizers`, with offsets on request."""

    name = "hf"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.reference

    def _encodings(self, texts: Sequence[str], *, offsets: bool) -> list[Any]:
        backend = self._backend
        if len(texts) > 1 and sum(map(len, texts)) > LITTLE_WORK and _may_use_threads():
            fast = getattr(backend, "encode_batch_fast", None)
            call = backend.encode_batch if offsets or fast is None else fast
            return list(call(list(texts), add_special_tokens=False))
        return [backend.encode(text, add_special_tokens=False) for text in texts]

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return _flat([encoding.ids for encoding in self._encodings(texts, offsets=False)])

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return also the (start, end) of each token in characters, shape (n, 2)."""
        encodings = self._encodings(texts, offsets=True)
        ids, row_starts = _flat([encoding.ids for encoding in encodings])
        pairs = [np.array(e.offsets, dtype=np.int64).reshape(-1, 2) for e in encodings]
        places = np.concatenate(pairs) if pairs else np.zeros((0, 2), dtype=np.int64)
        return ids, row_starts, places


class FastokensEngine:
    """fastokens; raises `TokenizerError` if it is missing or does not support the tokenizer."""

    name = "fastokens"

    def __init__(self, tokenizer: Tokenizer) -> None:
        global _fastokens_home
        with optional("fastokens", "engine='fastokens'", raises=TokenizerError):
            import fastokens
        if _fastokens_home not in (None, os.getpid()):
            raise TokenizerError("fastokens was already running when this process was forked")

        def load() -> Any:
            backend = fastokens.Tokenizer.from_json_str(tokenizer.data.decode("utf-8"))
            backend.no_truncation()
            backend.no_padding()
            return backend

        try:
            self._backend = once(tokenizer.checksum, self.name, load)
        except BaseException as error:
            refuse_interrupts(error)
            raise TokenizerError(f"fastokens does not load this tokenizer: {error}") from error
        _fastokens_home = os.getpid()

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if _fastokens_home != os.getpid():
            raise TokenizerError("fastokens' threads did not survive the fork of this process")
        ids, starts = self._backend.encode_batch_flat(list(texts))
        # Ids are far below 2**31, so unsigned and signed read alike; nothing is copied.
        return np.frombuffer(ids, dtype="<i4"), np.frombuffer(starts, dtype="<i8")


def refuse_interrupts(error: BaseException) -> None:
    """Raise what is meant for the process; a Rust panic is a BaseException, too."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        raise error


def choose_engine(tokenizer: Tokenizer, name: str = "auto") -> tuple[Engine, str]:
    """Return the engine for a tokenizer and the reason; ``fastokens`` raises if it cannot be used.

    fastokens is used only if it gives the reference's ids on the parity texts.
    """
    if name not in ENGINES:
        raise UsageError(f"engine={name!r}: choose one of {', '.join(ENGINES)}")
    reference = HfEngine(tokenizer)
    if name == "hf":
        return reference, "asked for"
    try:
        candidate = FastokensEngine(tokenizer)
        difference = first_difference(candidate, reference, parity_texts(tokenizer.added_contents))
        if difference is not None:
            raise TokenizerError(
                f"fastokens gives other ids than tokenizers for {difference[:60]!r}"
            )
    except TokenizerError as error:
        if name == "fastokens":
            raise
        return reference, error.message
    return candidate, "equal to the reference on the parity texts"


def first_difference(one: Engine, other: Engine, texts: Sequence[str]) -> str | None:
    """Return the first text for which two engines give different ids, or None."""
    try:
        ids, starts = one.encode(texts)
    except BaseException as error:
        refuse_interrupts(error)
        return f"(the parity texts themselves: {error})"
    wanted, wanted_starts = other.encode(texts)
    if np.array_equal(ids, wanted) and np.array_equal(starts, wanted_starts):
        return None
    for row, text in enumerate(texts):
        mine = ids[starts[row] : starts[row + 1]]
        theirs = wanted[wanted_starts[row] : wanted_starts[row + 1]]
        if not np.array_equal(mine, theirs):
            return text
    return ""


def _flat(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    row_starts = starts_of([len(row) for row in rows])
    ids = np.empty(int(row_starts[-1]), dtype=np.int32)
    for row, start, end in zip(rows, row_starts[:-1], row_starts[1:], strict=True):
        ids[start:end] = row
    return ids, row_starts
