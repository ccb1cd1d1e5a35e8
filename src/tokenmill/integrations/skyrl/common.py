"""What SkyRL's SFT and RL integrations share: dataset names with splits, and its Ray task."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from typing import Any

from tokenmill.errors import SourceMissing, UsageError

NO_COLUMN = "\x00"  # a column that no row has, for a column that SkyRL sets to None

_PART = re.compile(r"^(?P<name>\w[\w.\-]*)(?P<slice>\[[^\[\]]*\])?$")
_HUB_NAME = re.compile(r"^[\w.\-]+(/[\w.\-]+)?$")


def sources_of(dataset: str, split: str) -> list[str]:
    """Return the addresses of a dataset's split.

    Args:
        dataset: A file, a glob, a directory, or a name on the Hugging Face hub.
        split: As in `datasets`: ``train``, ``train[:1000]``, ``test[10%:]``, ``train+validation``.
    """
    return [_address(dataset, part.strip(), split) for part in split.split("+")]


def _address(dataset: str, part: str, split: str) -> str:
    match = _PART.match(part)
    if match is None:
        raise UsageError(
            f"split {split!r} of {dataset!r}: write it like train, train[:1000] or train[10%:]"
        )
    if os.path.isdir(dataset):
        return f"{dataset}@{part}"
    if os.path.lexists(dataset) or glob.has_magic(dataset):
        _check_split_of_a_file(dataset, match["name"])
        return f"{dataset}@{match['slice']}" if match["slice"] else dataset
    if not _HUB_NAME.match(dataset):
        raise SourceMissing("no such file or directory, and no name on the hub", path=dataset)
    return f"hf://datasets/{dataset}:{part}"


def _check_split_of_a_file(dataset: str, name: str) -> None:
    """Raise unless the split is ``train`` or in the name of the file."""
    words = re.split(r"[^A-Za-z]+", os.path.basename(dataset).lower())
    if name != "train" and name.lower() not in words:
        raise UsageError(
            f"split {name!r} was asked for, but a file is the split 'train' unless its name says "
            f"another: write train, or name the file after the split",
            path=dataset,
        )


def as_task(function: Callable[..., None]) -> Any:
    """Return a Ray task of one CPU, as SkyRL's own are, that gets our environment variables.

    SkyRL parses its arguments on the head node and trains in a Ray task, which may run on a node
    without the environment of the command line.
    """
    import ray

    ours = {name: value for name, value in os.environ.items() if name.startswith("TOKENMILL_")}
    return ray.remote(num_cpus=1, runtime_env={"env_vars": ours})(function)
