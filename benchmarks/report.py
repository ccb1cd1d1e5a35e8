"""Collects figures, prints them as they come and writes results.json.

A *figure* is a measured number with a unit and an optional bound, ``at_least`` or ``at_most``. A
*ratio* is the figure "peer's seconds / our seconds".
"""

from __future__ import annotations

import gc
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.build.outcome import installed_versions

LIBRARIES = (
    "tokenmill", "numpy", "pyarrow", "msgspec", "tokenizers", "fastokens", "jinja2",
    "transformers", "datasets", "torch", "trl",
)  # fmt: skip


class Report:
    """The figures of one run."""

    def __init__(self) -> None:
        self.figures: list[dict[str, Any]] = []
        self.section = ""

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        note: str = "",
    ) -> None:
        """Record and print one figure; mark a missed bound."""
        kept = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        bound = ""
        if at_least is not None:
            bound = f"  (at least {at_least:g}{'' if kept else ': MISSED'})"
        elif at_most is not None:
            bound = f"  (at most {at_most:g}{'' if kept else ': MISSED'})"
        print(f"{self.section:>8}  {name:<58} {value:>12,.3f} {unit}{bound}  {note}", flush=True)
        self.figures.append(
            {"section": self.section, "name": name, "value": value, "unit": unit,
             "at_least": at_least, "at_most": at_most, "kept": kept, "note": note}
        )  # fmt: skip

    def ratio(
        self, name: str, *, ours: float, peer: float, at_least: float | None = None, note: str = ""
    ) -> None:
        """Record how many times faster than the peer, from seconds per unit of the same work."""
        self.figure(name, peer / ours, "x", at_least=at_least, note=note)

    def write(self, path: Path) -> None:
        """Write results.json with machine and versions."""
        document = {
            "machine": {"cpus": os.cpu_count(), "arch": platform.machine(),
                        "memory_gib": round(_memory_bytes() / 2**30, 1),
                        "system": platform.system(), "python": platform.python_version()},
            "versions": installed_versions(LIBRARIES),
            "figures": self.figures,
        }  # fmt: skip
        path.write_text(json.dumps(document, indent=1) + "\n")


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def seconds(work: Callable[[], Any], repeat: int = 1) -> float:
    """Return the wall time of the fastest of ``repeat`` calls."""
    best = float("inf")
    for _ in range(repeat):
        gc.collect()
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
