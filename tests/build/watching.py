"""Looking at processes: what the tests of workers share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No test leaves a child."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
