"""`python -m benchmarks [room …] [--out results.json]`: run, print, write."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

import benchmarks
from benchmarks.report import Report

HELPERS = {"report", "peers", "data", "text", "measure", "simulated", "__main__"}


def main() -> int:
    """Run the named rooms, or all; exit 1 when a stated bound was missed."""
    rooms = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__))
    rooms = [name for name in rooms if name not in HELPERS]
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("room", nargs="*", choices=[*rooms, []], help="default: all")
    parser.add_argument("--out", type=Path, help="where results.json goes (default: nowhere)")
    arguments = parser.parse_args()
    report = Report()
    for room in arguments.room or rooms:
        report.room = room
        importlib.import_module(f"benchmarks.{room}").run(report)
    if arguments.out:
        report.write(arguments.out)
    missed = [figure["name"] for figure in report.figures if not figure["kept"]]
    if missed:
        print("missed: " + "; ".join(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
