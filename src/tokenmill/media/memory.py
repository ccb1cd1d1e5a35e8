"""What was learned from a processor, kept in the cache for the next process.

``<cache_dir>/processors/answers/<question>/``: *question* names a processor by everything that is
known without asking it (class, code, configuration, options). There is one file for the battery,
and one for each row of sizes that had to be asked with blank pictures; what hollow ones answer
costs less to ask again than to read. Published like every memo: once, whole, with a checksum. A
cache that cannot be written, or a damaged file, only costs the time.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tokenmill import fingerprint
from tokenmill.errors import CacheError
from tokenmill.files.sealed import SealedKind
from tokenmill.media.asking import Answers, Row

Kept = TypeVar("Kept", "Battery", Answers)

DIRECTORY = "processors"
_MEMO = SealedKind("memo", "", raw=True)
_MOST = 1 << 28  # characters of an answer, whatever a damaged file says


class Battery(msgspec.Struct, frozen=True):
    """What a processor answered to `BATTERY`, and whether hollow pictures had the same answers."""

    answers: tuple[Answers, ...]
    hollow: bool


class Memory:
    """The answers of one processor in a cache directory.

    Args:
        cache_dir: The cache; None: nothing is remembered.
        question: Names the processor.
    """

    def __init__(self, cache_dir: str | os.PathLike[str] | None, question: str) -> None:
        self._root = None if cache_dir is None else Path(cache_dir)
        self._question = question

    def battery(self) -> Battery | None:
        return self._recall("battery", Battery)

    def remember_battery(self, battery: Battery) -> None:
        self._remember("battery", battery)

    def answers(self, row: Row) -> Answers | None:
        return self._recall(self._name(row), Answers)

    def remember(self, row: Row, answers: Answers) -> None:
        self._remember(self._name(row), answers)

    def _name(self, row: Row) -> str:
        return fingerprint.key({"sizes": [list(size) for size in row]})

    def _recall(self, name: str, kind: type[Kept]) -> Kept | None:
        if self._root is None:
            return None
        place = self._root / DIRECTORY / "answers" / self._question / name
        with contextlib.suppress(CacheError, zlib.error, msgspec.DecodeError):
            data = _MEMO.admit_or_none(place, self._root)
            if data is not None:
                return msgspec.json.decode(zlib.decompressobj().decompress(data, _MOST), type=kind)
        return None

    def _remember(self, name: str, value: Any) -> None:
        if self._root is not None:
            place = self._root / DIRECTORY / "answers" / self._question / name
            with contextlib.suppress(CacheError):
                _MEMO.write(self._root, place, zlib.compress(msgspec.json.encode(value), 1))
