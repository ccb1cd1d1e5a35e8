"""What SkyRL's SFT and RL integrations share: dataset names with splits, and its Ray task.

A *dataset* is a file, a glob, a directory, a directory made by ``save_to_disk``, or a name on the
Hugging Face hub. A *split* is as `datasets` writes it: ``train``, ``train[:1000]``, ``test[10%:]``,
``train+validation``. `sources_of` returns the addresses that `tokenmill.source` opens. `datasets`
itself decides which files of a directory or a hub dataset make up a split, as in SkyRL; tokenmill
reads the rows from those files.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable
from typing import Any

from tokenmill.errors import SourceError, SourceMissing, UsageError
from tokenmill.optional import optional
from tokenmill.source import open_rows
from tokenmill.source.address import parse_selection
from tokenmill.source.discover import form_of

NO_COLUMN = "\x00"  # a column that no row has, for a column that SkyRL sets to None

_PART = re.compile(r"^(?P<name>\w[\w.\-]*)(?P<slice>\[[^\[\]]*\])?$")
_HUB_NAME = re.compile(r"^[\w.\-]+(/[\w.\-]+)?$")
_HUB_FILE = re.compile(r"^hf://datasets/(?P<repo>[^@]+)@(?P<revision>[^/]+)/(?P<file>.+)$")


def as_task(function: Callable[..., None]) -> Any:
    """Return a Ray task of one CPU, as SkyRL's own are, that gets our environment variables.

    SkyRL parses its arguments on the head node and trains in a Ray task, which may run on a node
    without the environment of the command line.
    """
    import ray

    ours = {name: value for name, value in os.environ.items() if name.startswith("TOKENMILL_")}
    return ray.remote(num_cpus=1, runtime_env={"env_vars": ours})(function)


def sources_of(
    dataset: str, split: str, cache_dir: str | os.PathLike[str] | None = None
) -> list[str]:
    """Return the addresses of a dataset's split; a slice over several files reads row indexes."""
    sources: list[str] = []
    for part in split.split("+"):
        match = _PART.match(part.strip())
        if match is None:
            raise UsageError(
                f"split {split!r} of {dataset!r}: write it like train, train[:1000] or train[10%:]"
            )
        sources += _addresses(dataset, match["name"], match["slice"] or "", cache_dir)
    return sources


def _addresses(
    dataset: str, name: str, cut: str, cache_dir: str | os.PathLike[str] | None
) -> list[str]:
    if os.path.isdir(dataset):
        if any(
            os.path.isfile(os.path.join(dataset, f)) for f in ("dataset_dict.json", "state.json")
        ):
            return [f"{dataset}@{name}{cut}"]
        return _cut(_files_by_datasets(dataset, name), cut, cache_dir)
    if os.path.lexists(dataset) or glob.has_magic(dataset):
        _check_split_of_a_file(dataset, name)
        return [f"{dataset}@{cut}" if cut else dataset]
    if not _HUB_NAME.match(dataset):
        raise SourceMissing("no such file or directory, and no name on the hub", path=dataset)
    return _cut(_files_by_datasets(dataset, name), cut, cache_dir)


def _check_split_of_a_file(dataset: str, name: str) -> None:
    """Raise unless the split is ``train`` or in the name of the file."""
    words = re.split(r"[^A-Za-z]+", os.path.basename(dataset).lower())
    if name != "train" and name.lower() not in words:
        raise UsageError(
            f"split {name!r} was asked for, but a file is the split 'train' unless its name says "
            f"another: write train, or name the file after the split",
            path=dataset,
        )


def _files_by_datasets(dataset: str, name: str) -> list[str]:
    found = {str(n): files for n, files in (_builder(dataset).config.data_files or {}).items()}
    if name not in found:
        known = ", ".join(sorted(found)) or "none that consist of files"
        raise UsageError(f"there is no split {name!r}; splits are: {known}", path=dataset)
    files = [_local(str(file)) for file in found[name]]
    unknown = [file for file in files if form_of(file) is None]
    if unknown:
        raise UsageError("its name says no format that tokenmill reads", path=unknown[0])
    return files


def _builder(dataset: str) -> Any:
    with optional("datasets", "a split of a directory or hub dataset", path=dataset):
        import datasets
    try:
        return datasets.load_dataset_builder(dataset)
    except Exception as error:  # it raises whatever its file systems and loaders do
        raise SourceError(f"datasets cannot open it: {error}", path=dataset) from error


def _local(file: str) -> str:
    """Download a file of the hub, or return the path of a local one."""
    match = _HUB_FILE.match(file)
    if match is None:
        return file
    from huggingface_hub import hf_hub_download

    try:
        return str(
            hf_hub_download(
                match["repo"], match["file"], revision=match["revision"], repo_type="dataset"
            )
        )
    except Exception as error:  # network, permissions, missing files: all mean the same here
        raise SourceError(f"cannot be downloaded: {error}", path=file) from error


def _cut(files: list[str], cut: str, cache_dir: str | os.PathLike[str] | None) -> list[str]:
    """Turn a slice of the concatenation of files into slices of the files."""
    if not cut:
        return files
    if len(files) == 1:
        return [f"{files[0]}@{cut}"]
    sizes = [len(open_rows(file, cache_dir=cache_dir)) for file in files]
    start, stop = parse_selection(cut, cut).resolve(sum(sizes))
    found, before = [], 0
    for file, size in zip(files, sizes, strict=True):
        first, last = max(start - before, 0), min(stop - before, size)
        if first < last:
            found.append(f"{file}@[{first}:{last}]")
        before += size
    if not found:
        raise SourceMissing(f"the slice {cut} of {sum(sizes):,} rows is empty", path=files[0])
    return found
