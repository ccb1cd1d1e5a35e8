"""`python -m benchmarks [section …]`: run benchmarks and their peers, and print the figures.

A run of all sections also writes ``benchmarks/results.json`` (figures, machine, versions), the
charts of ``docs/images`` and the table of ``docs/internals/benchmarks.md``. A run of some sections
only prints, unless ``--update`` replaces the figures of these sections or ``--out`` names a file.
``--draw`` draws the existing results again.
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
    """Run the named sections, or all; return 1 if a bound was missed."""
    sections = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__))
    sections = [name for name in sections if name not in HELPERS]
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("section", nargs="*", choices=[*sections, []], help="default: all")
    parser.add_argument("--out", type=Path, help="write the results to this file")
    parser.add_argument("--update", action="store_true", help="replace the sections' old results")
    parser.add_argument("--draw", action="store_true", help="draw charts without measuring")
    arguments = parser.parse_args()
    if arguments.draw:
        _publish(json.loads(RESULTS.read_text())["figures"])
        return 0
    report = Report()
    for section in arguments.section or sections:
        report.section = section
        importlib.import_module(f"benchmarks.{section}").run(report)
    missed = [figure["name"] for figure in report.figures if not figure["kept"]]
    if arguments.out:
        report.write(arguments.out)
    elif arguments.update or not arguments.section:
        old = json.loads(RESULTS.read_text())["figures"] if arguments.section else []
        others = set(sections).difference(arguments.section)
        report.figures += [one for one in old if one["section"] in others]
        report.figures.sort(key=lambda one: sections.index(one["section"]))
        report.write(RESULTS)
        _publish(report.figures)
    if missed:
        print("missed: " + "; ".join(missed), file=sys.stderr)
    return 1 if missed else 0


def _publish(figures: list[dict[str, Any]]) -> None:
    for path in draw(figures, DOCS / "images"):
        print(f"drew {path.relative_to(DOCS.parent)}", file=sys.stderr)
    write_page(figures, DOCS / "internals" / "benchmarks.md")


if __name__ == "__main__":
    sys.exit(main())
