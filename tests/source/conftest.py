"""Hypothesis opens hundreds of sources: nothing here needs to survive a power cut."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncing is tried where publishing is tested, with the room that does it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
