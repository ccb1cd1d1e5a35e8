"""Lint: what is wrong with this data, with file and line, before anything is trained on it.

A `Rule` names one thing that can be wrong; a `Finding` is a rule, how many rows it concerns, where
the first ones stand, and one example. `run_lint` hands blocks of rows to an executor, where a
linter renders and encodes them exactly as a build would and looks at rows, texts and tokens;
duplicates are found here, from digests. The answer is a `LintReport`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.report.lint.findings import Finding, LintReport
    from tokenmill.report.lint.rules import RULES, Rule
    from tokenmill.report.lint.run import run_lint

__all__ = ["RULES", "Finding", "LintReport", "Rule", "run_lint"]

__getattr__ = first_use(__name__, findings="Finding LintReport", rules="RULES Rule", run="run_lint")
