"""Exports: a store's rows as files of other libraries.

An `ExportPlan` names rows, format and target; `export` streams the files block by block and
publishes them in one step.
"""

from __future__ import annotations

from tokenmill.formats.export_files import (
    FORMATS,
    LAYOUTS,
    MASKS,
    Exported,
    ExportPlan,
    SplitPlan,
    export,
)

__all__ = ["FORMATS", "LAYOUTS", "MASKS", "ExportPlan", "Exported", "SplitPlan", "export"]
