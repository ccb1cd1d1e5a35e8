"""Shares: which slices of a plan one of many processes builds.

A `Share` is written ``i/n`` and means every n-th slice from the i-th on, counted from 1: neighbours
in a file are about equally costly, so shares are too. ``0/n`` is another name of ``n/n``, so job
arrays that count from 0 to n-1 cover all slices as well.

A share is a function of the slice's number alone; processes that are given shares need not know of
each other, may be given the same one twice, may come in any number and any order, and may die. What
is built is the same whoever builds it, and whoever finds that no slice is missing commits the
store: usually the last one, sometimes two.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from tokenmill.build.plan import Plan
from tokenmill.errors import UsageError
from tokenmill.store import CacheLayout


@dataclass(frozen=True, slots=True)
class Share:
    """Every ``count``-th slice from the ``number``-th on.

    Args:
        number: Which share, from 1 to ``count``; 0 is the last.
        count: How many shares there are.
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        for value in (self.number, self.count):
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"part is {self}; it is two whole numbers i/n")
        if not 0 <= self.number <= self.count or self.count < 1:
            raise UsageError(
                f"part is {self}; parts count from 1 to n, or from 0 to n-1 "
                "(with Slurm: sbatch --array=1-n)"
            )

    @classmethod
    def of(cls, value: Any) -> Share:
        """A share from ``"3/8"``, ``(3, 8)`` or a share."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value.strip(), re.ASCII)
            value = tuple(map(int, found.groups())) if found else value
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UsageError(f"part is {value!r}; it is i/n, for example 3/8")
        return cls(*value)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_whole(self) -> bool:
        """Whether every slice is in it."""
        return self.count == 1

    def has(self, slice_number: int) -> bool:
        """Whether the slice with this number, from 0, is in it."""
        return (slice_number + 1 - self.number) % self.count == 0

    def size_of(self, plan: Plan) -> tuple[int, int]:
        """Rows and bytes of its slices."""
        if self.is_whole:
            return plan.rows, plan.bytes
        rows = size = 0
        for number, (_, block) in enumerate(plan.walk()):
            if self.has(number):
                rows, size = rows + block.rows, size + block.length
        return rows, size


WHOLE = Share()


def count_missing(plan: Plan, cache: CacheLayout) -> int:
    """Slices of a plan that nobody has published yet.

    Opening a directory makes a network file system ask its server again. Otherwise two processes
    that finish at the same time might each believe an old answer that the other's slice is missing.
    """
    directory = ""
    missing = 0
    for key, _ in plan.walk():
        record = cache.slice(key).record
        if record.exists():
            continue
        if str(record.parent) != directory:
            directory = str(record.parent)
            try:
                os.scandir(directory).close()
            except FileNotFoundError:
                missing += 1
                continue
        missing += not record.exists()
    return missing
