"""Which blocks a process takes while another one builds the same store."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tokenmill.build.blocks import MissingBlocks

COUNT = 5


@pytest.mark.parametrize("published", [0, 3, COUNT])
def test_a_waiting_process_takes_what_is_missing_when_nothing_new_appears(published: int) -> None:
    begin, wait_s = time.monotonic(), 0.5

    def is_published(task: Any) -> bool:
        """The other process publishes a block every 0.3 s, then hangs."""
        return task.number < min(published, (time.monotonic() - begin) / 0.3)

    blocks: Any = lambda: iter(range(COUNT))  # noqa: E731
    tasks = MissingBlocks(blocks, COUNT, str, is_published, wait_s=wait_s)
    assert sorted(task.number for task in tasks) == list(range(published, COUNT))
    waited = time.monotonic() - begin
    assert waited >= 0.3 * published + (0 if published == COUNT else wait_s) - 0.3
    assert sorted(task.number for task in tasks) == list(range(published, COUNT))
    assert time.monotonic() - begin < waited + wait_s  # the second iteration does not wait
