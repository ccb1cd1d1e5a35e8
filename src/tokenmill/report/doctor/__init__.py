"""Doctor: is this machine fit for a preparation, and if not, what is to be done?

A `Check` is one question with its answer: a status (``ok``, ``note``, ``warning``, ``fail``), what
was seen, and what to do. `examine` asks them all; each is a function of its own and none can bring
another down. Nothing is built; a probe file in the cache's staging directory is all that is
written, beside what indexing rows leaves there anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.report.doctor.checks import Check
    from tokenmill.report.doctor.examination import examine

_HOMES = {"Check": "checks", "examine": "examination"}

__all__ = ["Check", "examine"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
