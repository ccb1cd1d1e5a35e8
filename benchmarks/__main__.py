"""`python -m benchmarks [room …]`: run the rooms beside their peers, print, write, draw.

A run of all rooms writes ``benchmarks/results.json`` (figures, machine, versions), the charts of
``docs/images`` and the table of ``docs/benchmarks.md``: the README's figures are that run's. A run
of some rooms only prints, unless ``--out`` names a file. ``--draw`` makes charts and table from
the results that are there, without measuring.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.plots import draw, write_page
from benchmarks.report import Report

HELPERS = {
    "report", "peers", "data", "text", "recombined", "measure", "plots", "simulated", "balancing",
    "__main__",
}  # fmt: skip
HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
DOCS = HERE.parent / "docs"


def main() -> int:
    """Run the named rooms, or all; exit 1 when a stated bound was missed."""
    rooms = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__))
    rooms = [name for name in rooms if name not in HELPERS]
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("room", nargs="*", choices=[*rooms, []], help="default: all")
    parser.add_argument("--out", type=Path, help="where the results of some rooms go")
    parser.add_argument("--draw", action="store_true", help="charts and table only, no measuring")
    arguments = parser.parse_args()
    if arguments.draw:
        _publish(json.loads(RESULTS.read_text())["figures"])
        return 0
    report = Report()
    for room in arguments.room or rooms:
        report.room = room
        importlib.import_module(f"benchmarks.{room}").run(report)
    if arguments.out:
        report.write(arguments.out)
    elif not arguments.room:
        report.write(RESULTS)
        _publish(report.figures)
    missed = [figure["name"] for figure in report.figures if not figure["kept"]]
    if missed:
        print("missed: " + "; ".join(missed), file=sys.stderr)
    return 1 if missed else 0


def _publish(figures: list[dict[str, Any]]) -> None:
    for path in draw(figures, DOCS / "images"):
        print(f"drew {path.relative_to(DOCS.parent)}", file=sys.stderr)
    write_page(figures, DOCS / "benchmarks.md")


if __name__ == "__main__":
    sys.exit(main())
