"""Tests of `_core` use the real `fsync`."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def real_fsync(sync_to_disk: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", sync_to_disk)
