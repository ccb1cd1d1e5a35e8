"""From an address to files, in a stable order, each with its format.

The name decides the format: ``.jsonl`` ``.ndjson`` ``.json`` (each also ``.gz`` ``.zst``),
``.parquet``, ``.arrow``. A directory means the data files directly in it, sorted by name, hidden
ones and files of other kinds skipped; one made by ``save_to_disk`` means the files that its
state.json lists. A glob means the files it matches, sorted. Directory and glob must lead to one
format; a list of sources may mix them. A split of a hub dataset, or of a directory that
``save_to_disk`` did not make, is resolved by `datasets` (`tokenmill.integrations.hub`).

URLs follow the same rules. A listing that contains sizes and ETags is kept with the files, so that
a thousand objects need no request each. HTTP servers have no reliable listing: there a URL is one
file, shown without its query, which may be signed. Every hub address is pinned first: its revision
is replaced by the commit behind it.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tokenmill.errors import SourceError, SourceMissing, UsageError
from tokenmill.files.ranged import RemoteFile
from tokenmill.files.remote import (
    RemoteObject,
    Version,
    filesystem,
    is_remote,
    protocol_of,
    shown,
    version_of,
)
from tokenmill.optional import optional
from tokenmill.source.address import COMPRESSIONS, FAMILIES, Address, HubName

KNOWN = ".jsonl, .ndjson, .json (also .gz, .zst), .parquet, .arrow"


class Found(NamedTuple):
    """A file and what its name says about it."""

    path: str
    family: str  # "jsonl", "json", "parquet", "arrow"
    compression: str  # "", "gz", "zst"
    location: str = ""  # where it is, when the path that is shown leaves something out
    version: Version | None = None  # of a remote object, when a listing told it

    @property
    def place(self) -> str:
        """Where the file is, in the caller's words where nothing is hidden."""
        return self.location or self.path


def discover(address: Address) -> list[Found]:
    """The files of an address.

    Raises:
        SourceMissing: Nothing is there.
        UsageError: Several formats, an unknown one, or a split that is not there.
    """
    path = address.path
    if address.hub is not None:
        return _hub_split(address, address.hub)
    if is_remote(path):
        return remote_files(address)
    if os.path.isdir(path):
        return directory(path, address.split)
    _refuse_split(address)
    if os.path.lexists(path):
        return [named(path)]
    if glob.has_magic(path):
        matches = sorted(p for p in glob.glob(path, recursive=True) if not os.path.isdir(p))
        if not matches:
            raise SourceMissing("no file matches", path=path)
        found = [one for one in map(form_of, matches) if one is not None]
        return one_format(path, found, f"none of the {len(matches)} matching files is {KNOWN}")
    raise SourceMissing("no such file or directory", path=path)


def form_of(path: str) -> Found | None:
    """What a file's name says; None when it is no format of ours."""
    stem, extension = os.path.splitext(path)
    compression = COMPRESSIONS.get(extension.lower(), "")
    if compression:
        extension = os.path.splitext(stem)[1]
    family = FAMILIES.get(extension.lower())
    if family is None or (compression and family not in ("jsonl", "json")):
        return None
    return Found(path, family, compression)


def named(path: str) -> Found:
    """What a file's name says; UsageError when it is no format of ours."""
    found = form_of(path)
    if found is None:
        raise UsageError(f"its name says no known format ({KNOWN})", path=path)
    return found


def one_format(path: str, found: list[Found], otherwise: str) -> list[Found]:
    """Files of one place, which must be of one format."""
    if not found:
        raise SourceMissing(otherwise, path=path)
    examples = {one.family: one.path for one in reversed(found)}
    if len(examples) > 1:
        names = ", ".join(f"{family} ({examples[family]})" for family in sorted(examples))
        raise UsageError(f"several formats in one place: {names}; name one by a glob", path=path)
    return found


def directory(
    path: str, split: str | None, listed: Mapping[str, Version] | None = None
) -> list[Found]:
    """The files that a directory means."""
    try:
        names = sorted(os.listdir(path) if listed is None else listed)
    except OSError as error:
        raise SourceError(f"cannot be listed: {error.strerror}", path=path) from error
    if "dataset_dict.json" in names:
        return _saved(os.path.join(path, _chosen_split(path, split)))
    if "state.json" in names:
        own = None if split is None else _read_json(os.path.join(path, "state.json")).get("_split")
        if split != own:
            raise UsageError(f"there is no split {split!r}, this is {str(own)!r}", path=path)
        return _saved(path)
    if split is not None and listed is not None:
        raise UsageError(
            f"no splits here (asked for {split!r}): not made by save_to_disk", path=path
        )
    if split is not None:
        from tokenmill.integrations.hub import split_files

        found = [named(file) for file in split_files(path, split)]
        return one_format(path, found, "the split has no files")
    paths = [os.path.join(path, name) for name in names if not name.startswith(".")]
    if listed is None:
        paths = list(filter(os.path.isfile, paths))
    found = [one for one in map(form_of, paths) if one is not None]
    if listed is not None:
        found = [one._replace(version=listed[os.path.basename(one.path)]) for one in found]
    return one_format(path, found, f"the directory holds no data file ({KNOWN})")


def _read_json(path: str) -> dict[str, object]:
    try:
        if is_remote(path):
            remote = RemoteFile(path)
            data = remote.pread(remote.size, 0)
        else:
            with open(path, "rb") as file:
                data = file.read()
        document = msgspec.json.decode(data, type=dict[str, object])
    except SourceError:
        raise
    except FileNotFoundError as error:
        raise SourceMissing("no such file", path=path) from error
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise SourceError(f"cannot be read: {error}", path=path) from error
    return document


def _chosen_split(path: str, split: str | None) -> str:
    splits = _read_json(os.path.join(path, "dataset_dict.json")).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise SourceError("dataset_dict.json names no splits", path=path)
    if split is None:
        raise UsageError(
            f"has the splits {', '.join(splits)}: name one, as in {path}@{splits[0]}", path=path
        )
    if split not in splits:
        raise UsageError(f"there is no split {split!r}, only {', '.join(splits)}", path=path)
    return split


def _saved(path: str) -> list[Found]:
    """The Arrow files of a directory made by ``Dataset.save_to_disk``."""
    state = _read_json(os.path.join(path, "state.json"))
    if state.get("_indices_data_files"):
        raise UsageError(
            "was saved with an indices mapping by an old version; save it again after "
            "flatten_indices()",
            path=path,
        )
    files = state.get("_data_files")
    if not isinstance(files, list):
        raise SourceError("state.json lists no data files", path=path)
    names = [one.get("filename") for one in files if isinstance(one, dict)]
    if len(names) != len(files) or not all(isinstance(name, str) for name in names):
        raise SourceError("state.json lists no data files", path=path)
    if not names:
        raise SourceMissing("the saved dataset has no rows", path=path)
    return [Found(_within(path, str(name)), "arrow", "") for name in names]


def _within(directory: str, name: str) -> str:
    """A name that stands in a file of a directory, as a path; it may lead nowhere else."""
    inner = os.path.normpath(name)
    if os.path.isabs(inner) or inner.split("/")[0] in ("..", ".") or is_remote(name):
        raise SourceError(
            f"state.json names {name!r}, which lies outside of the directory; a store of "
            "tokenmill's is opened with open_store",
            path=directory,
        )
    return os.path.join(directory, inner)


# --- URLs ---------------------------------------------------------------------------------------


def remote_files(address: Address) -> list[Found]:
    """The files of an address that is a URL."""
    url = address.path
    protocol = protocol_of(url)
    if protocol in ("http", "https"):
        return [_web_file(address)]
    if protocol == "hf":
        url = _pinned(url)
    if any(mark in url for mark in "*?["):
        _refuse_split(address)
        listed = _listed(url, _glob)
        if not listed:
            raise SourceMissing("no object matches", path=url)
        found = [one for one in map(form_of, sorted(listed)) if one is not None]
        found = [one._replace(version=listed[one.path]) for one in found]
        return one_format(url, found, f"none of the {len(listed)} matching objects is {KNOWN}")
    if form_of(url) is not None and not url.endswith("/"):
        _refuse_split(address)
        return [named(url)]
    return _remote_directory(url.rstrip("/"), address.split)


def _refuse_split(address: Address) -> None:
    if address.split is not None:
        raise UsageError(
            f"split {address.split!r} was asked for, but a file has no splits; give a directory or "
            "a hub dataset",
            path=address.path,
        )


def _web_file(address: Address) -> Found:
    _refuse_split(address)
    url = address.path
    if any(mark in shown(url) for mark in "*["):
        raise UsageError("HTTP servers cannot be searched: name each file", path=shown(url))
    return named(shown(url))._replace(location=url)


def _listed(url: str, ask: Callable[[Any, str], list[dict[str, Any]]]) -> dict[str, Version]:
    """URL → version of every file that the file system of a URL tells of."""
    fs, path = filesystem(url)
    infos = RemoteObject(url).retrying(lambda: ask(fs, path), None)
    before = url[: len(url) - len(path)]  # protocol and host, which a listing's names lack
    files = (info for info in infos if info.get("type") != "directory")
    return {before + fs._strip_protocol(info["name"]): version_of(info, url) for info in files}


def _glob(fs: Any, path: str) -> list[dict[str, Any]]:
    fs.invalidate_cache()
    return list(fs.glob(path, detail=True).values())


def _list(fs: Any, path: str) -> list[dict[str, Any]]:
    fs.invalidate_cache(path)
    return list(fs.ls(path, detail=True))


def _remote_directory(url: str, split: str | None) -> list[Found]:
    listed = {os.path.basename(name): version for name, version in _listed(url, _list).items()}
    if len(listed) == 1 and url.endswith("/" + next(iter(listed))):
        return [named(url)]  # an object of that very name: its format is unknown
    return directory(url, split, listed)


# --- the Hugging Face hub -----------------------------------------------------------------------

_HUB = "hf://datasets/"
_HUB_URL = re.compile(
    r"^hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?(?P<rest>/.*)?$"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _hub_split(address: Address, hub: HubName) -> list[Found]:
    from tokenmill.integrations.hub import split_files

    commit = hub_commit(hub.repo, hub.revision, address.path)
    config, _, split = (address.split or "").rpartition("/")
    files = split_files(hub.repo, split, config=config, revision=commit, source=address.path)
    other = [file for file in files if form_of(file) is None]
    if other:
        raise UsageError(
            f"{other[0]} is not of a known format ({KNOWN}). If the hub has converted the dataset "
            f"to Parquet, open {_HUB}{hub.repo}@refs/convert/parquet/{config or 'default'}/"
            f"{split or 'train'}/*.parquet",
            path=address.path,
        )
    return one_format(address.path, list(map(named, files)), "the split has no files")


def _pinned(url: str) -> str:
    """The same URL at a commit."""
    match = _HUB_URL.match(url)
    if match is None:
        raise UsageError(
            "write it as hf://datasets/owner/name[@revision]/path, or owner/name[:split]", path=url
        )
    commit = hub_commit(match["repo"], match["revision"], url)
    return f"{_HUB}{match['repo']}@{commit}{match['rest'] or ''}"


def hub_commit(name: str, revision: str | None, source: str) -> str:
    """Return the commit behind a revision of a hub dataset; None is the main branch."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    with optional("huggingface_hub", "a dataset of the hub", path=name):
        from huggingface_hub import HfApi

    def request() -> Any:
        return HfApi().repo_info(name, revision=revision, repo_type="dataset")

    here = "" if source.startswith(_HUB) else "no file or directory here, and "
    try:
        return str(RemoteObject(f"{_HUB}{name}").retrying(request, None).sha)
    except SourceMissing as error:
        raise SourceMissing(
            f"{here}no such dataset or revision on the hub (a private one needs HF_TOKEN)",
            path=source,
        ) from error
    except SourceError as error:
        cause = error.__cause__
        reason = " ".join((str(cause).strip() or "no answer").splitlines()[0].split())[:80]
        reason = f"{type(cause).__name__}: {reason}"
        if type(cause).__name__ == "OfflineModeIsEnabled":
            reason = "HF_HUB_OFFLINE is set"
        raise SourceError(
            f"{here}it could not be looked up on the hub ({reason}); offline, name local "
            f"files (`hf download {name} --repo-type dataset --local-dir DIR` gets them)",
            path=source,
        ) from error
