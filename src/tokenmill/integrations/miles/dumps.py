"""Rollouts that miles and slime saved with torch, as rows.

``dump_details`` and ``save_debug_rollout_data`` write one file for each step: a dict of the step's
number and a list of samples, each a dict of plain values. `rows_of_dump` reads such a file without
executing anything (``weights_only=True``; a file that needs more is refused) and yields one row for
each sample; the caller writes them where rows are read from.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from typing import Any

from tokenmill.errors import SourceError, SourceMissing
from tokenmill.optional import optional

ENDINGS = (".pt", ".pth")


def rows_of_dump(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The samples of a dump, as plain values.

    Raises:
        SourceMissing: There is no such file.
        SourceError: It is no dump of samples, or holds objects that only code could restore.
    """
    with optional("torch", "a dump of torch", path=path):
        import torch
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise SourceMissing("no such file", path=path) from error
    except pickle.UnpicklingError as error:
        raise SourceError(
            "holds more than tensors and plain values, and restoring that would execute code;"
            " save the samples as dicts, or as JSON lines",
            path=path,
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise SourceError(f"torch cannot read it: {error}", path=path) from error
    samples = dump.get("samples") if isinstance(dump, dict) else dump
    if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
        raise SourceError("no dump of rollouts: it holds no list of samples", path=path)
    step = dump.get("rollout_id") if isinstance(dump, dict) else None
    for sample in samples:
        row = {name: _plain(value) for name, value in sample.items()}
        if step is not None:
            row.setdefault("rollout_id", _plain(step))
        yield row


def _plain(value: Any) -> Any:
    """Tensors as lists; what JSON cannot hold as its text."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
