"""Lint: what is wrong with this data, with file and line, before anything is trained on it.

A `Rule` names one thing that can be wrong; a `Finding` is a rule, how many rows it concerns, where
the first ones stand, and one example. `run_lint` hands blocks of rows to an executor, where a
linter renders and encodes them exactly as a build would and looks at rows, texts and tokens;
duplicates are found here, from digests. The answer is a `LintReport`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.report.lint.findings import Finding, LintReport
    from tokenmill.report.lint.rules import RULES, Rule
    from tokenmill.report.lint.run import run_lint

_HOMES = {
    "RULES": "rules",
    "Finding": "findings",
    "LintReport": "findings",
    "Rule": "rules",
    "run_lint": "run",
}

__all__ = ["RULES", "Finding", "LintReport", "Rule", "run_lint"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
