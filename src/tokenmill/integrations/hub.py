"""Resolve the split of a hub dataset or a local directory to files, through `datasets`."""

from __future__ import annotations

import os

from tokenmill._core.optional import optional
from tokenmill.errors import SourceError, SourceMissing, UsageError

_ROW_OPTIONS = ("field", "columns", "filters")  # of a dataset card; they change rows when loading


def split_files(
    dataset: str, split: str, *, config: str = "", revision: str | None = None, source: str = ""
) -> list[str]:
    """Return the files of a split, or of the only split, in the order of `datasets`."""
    where = source or dataset
    with optional("datasets", "a split of a directory or hub dataset", path=where):
        from datasets import load_dataset_builder
    try:
        builder = load_dataset_builder(dataset, config or None, revision=revision)
    except FileNotFoundError as error:
        raise SourceMissing(f"`datasets` finds no files: {_short(error)}", path=where) from error
    except ValueError as error:
        raise UsageError(
            f"`datasets` cannot resolve it: {_short(error)}; name configuration and split as "
            "owner/name:config/split, or files as hf://datasets/owner/name/path",
            path=where,
        ) from error
    except Exception as error:  # whatever its file systems and loaders raise
        raise SourceError(f"`datasets` cannot load it: {_short(error)}", path=where) from error
    changing = [name for name in _ROW_OPTIONS if getattr(builder.config, name, None) is not None]
    if changing:
        raise UsageError(
            f"the dataset card sets {changing[0]!r}, which changes rows while `datasets` loads "
            "them; tokenmill does not apply it. Name the files instead, as in "
            "hf://datasets/owner/name/path",
            path=where,
        )
    splits = {str(name): list(files) for name, files in (builder.config.data_files or {}).items()}
    if not split and len(splits) == 1:
        (split,) = splits
    if split not in splits:
        known = ", ".join(splits) or "none that consist of files"
        problem = f"There is no split {split!r}" if split else "Name a split"
        raise UsageError(f"{problem}. Splits: {known}.", path=where)
    inside = f"hf://datasets/{dataset}@{revision}/" if revision else os.path.abspath(dataset) + "/"
    outside = [
        file
        for file in splits[split]
        if not file.startswith(inside) or ".." in file[len(inside) :].split("/")
    ]
    if outside:
        raise UsageError(
            f"the dataset card names {outside[0]!r}, which is outside of the dataset; open that "
            "file by its own address",
            path=where,
        )
    return splits[split]


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] or type(error).__name__
