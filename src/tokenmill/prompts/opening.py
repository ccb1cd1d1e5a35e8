"""What a prompt dataset is opened with: its source's rows, and who measures them.

`open_source` opens the rows and mends what can be mended without asking: a damaged row index is
only a copy of what the source says. `resolve_executor` turns a name into an executor: ``local`` and
``inline`` are known here; ``ray`` and whatever else an integration brings is asked of the layer
above, by name and at run time, so that this room stays light.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path

from tokenmill.errors import CorruptionError, UsageError
from tokenmill.source import Rows, open_rows
from tokenmill.work import Executor, executor_here

Source = str | os.PathLike[str]


def open_source(source: Source | Sequence[Source], root: Path) -> Rows:
    """Open the rows of a prompt dataset; a damaged index of rows is made again."""
    try:
        return open_rows(source, cache_dir=root)
    except CorruptionError as error:
        if root / "rows" not in Path(error.path or "").parents:
            raise
        # A damaged row index is made again from its source.
        return open_rows(source, cache_dir=root, rehash=True)


def resolve_executor(executor: str | Executor, num_workers: int | None) -> Executor:
    """Where prompts are measured: an executor by name, or the object that was given."""
    if not isinstance(executor, str):
        return executor
    if num_workers is not None and (
        isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 0
    ):
        raise UsageError(f"num_workers is {num_workers!r}; it is 0 (inline), a count, or None")
    here = executor_here(executor, num_workers)
    if here is not None:
        return here
    # Other names belong to integrations, which only the layer above knows: asked at run time.
    resolved: Executor = importlib.import_module("tokenmill.api").resolve_executor(
        executor, num_workers
    )
    return resolved
