"""Parse addresses and find their files, in a stable order and with their formats.

An *address* is a file, directory, glob or URL, with an optional split and slice:
``path@[a:b]``, ``directory@split[a:b]``, ``owner/name@revision:config/split[a:b]`` (a hub dataset).
A slice selects rows of the concatenated files, like a Python slice without a step. A bound may be
a percentage, rounded as in `datasets`. The revision of a hub dataset is replaced by its commit.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from tokenmill._core.optional import optional
from tokenmill._core.ranged import RemoteFile
from tokenmill._core.remote import (
    RemoteObject,
    Version,
    filesystem,
    is_remote,
    local_path,
    protocol_of,
    version_of,
)
from tokenmill.errors import SourceError, SourceMissing, UsageError, hide_secrets, shown

KNOWN = ".jsonl, .ndjson, .json (also .gz, .zst), .parquet, .arrow"
FAMILIES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_SLICED = re.compile(
    r"^(?P<path>.*)@(?P<split>[A-Za-z0-9_][\w.\-]*)?(?P<slice>\[[^\[\]]*\])$", re.S
)
_SPLIT = re.compile(r"^(?P<path>.+)@(?P<split>[A-Za-z0-9_][\w\-]*)$", re.S)
_HUB_DATASET = re.compile(
    r"^(?P<scheme>hf://datasets/)?(?P<repo>(?(scheme)(?:\w[\w.\-]*/)?|\w[\w.\-]*/)\w[\w.\-]*)"
    r"(?:@(?P<revision>refs/[\w./\-]+|[\w.\-]+))?"
    r"(?::(?P<split>[\w.\-]+(?:/[\w.\-]+)?))?"
    r"(?:@?(?P<slice>\[[^\[\]]*\]))?$"
)
_BOUND = re.compile(r"^(?P<number>-?\d+(?:_\d+)*)(?P<percent>%?)$")


class Bound(NamedTuple):
    """One end of a slice: a row number, or a percentage of the rows."""

    number: int
    is_percent: bool

    def rows(self, total: int) -> int:
        return round(self.number * total / 100.0) if self.is_percent else self.number


class Selection(NamedTuple):
    start: Bound | None
    stop: Bound | None

    def resolve(self, total: int) -> tuple[int, int]:
        """Return the first row and the end of the selection, of ``total`` rows."""
        bounds = (None if bound is None else bound.rows(total) for bound in self)
        first, last, _ = slice(*bounds).indices(total)
        return first, max(first, last)


@dataclass(frozen=True, slots=True)
class Address:
    path: str  # for a hub dataset the address as written
    split: str | None = None
    selection: Selection | None = None
    repo: str = ""  # of a hub dataset
    revision: str | None = None


def parse_address(text: str) -> Address:
    """Parse an address; `UsageError` if it is empty or its slice is malformed."""
    if not text:
        raise UsageError("the source is an empty string; pass a path, glob or URL")
    if os.path.lexists(text):
        return Address(text)
    if hub := _hub_address(text):
        return hub
    text = local_path(text)
    sliced = _SLICED.match(text)
    if sliced:
        if not sliced["path"]:
            raise UsageError(f"{text!r} has no path before the @")
        return Address(sliced["path"], sliced["split"], parse_selection(sliced["slice"], text))
    split = _SPLIT.match(text)
    if split and (is_remote(split["path"]) or os.path.isdir(split["path"])):
        return Address(split["path"], split["split"])
    return Address(text)


def _hub_address(text: str) -> Address | None:
    match = _HUB_DATASET.match(text)
    if match is None:
        return None
    owner, _, name = match["repo"].rpartition("/")
    known = os.path.splitext(name)[1].lower() in FAMILIES | COMPRESSIONS
    if not match["scheme"] and (known or os.path.isdir(owner) or set(owner) == {"."}):
        return None  # a missing local file, not a hub dataset
    selection = parse_selection(match["slice"], text) if match["slice"] else None
    return Address(text, match["split"], selection, match["repo"], match["revision"])


def parse_selection(text: str, context: str) -> Selection:
    """Parse ``[a:b]``; errors quote ``context``."""
    parts = text[1:-1].split(":")
    if len(parts) == 3:
        raise UsageError(f"{context!r}: a slice cannot have a step; write [start:stop]")
    if len(parts) != 2:
        raise UsageError(f"{context!r}: write a slice as [start:stop]; both bounds are optional")
    return Selection(_bound(parts[0], context), _bound(parts[1], context))


def _bound(text: str, context: str) -> Bound | None:
    text = text.strip()
    if not text:
        return None
    match = _BOUND.match(text)
    if match is None:
        raise UsageError(f"{context!r}: {text!r} is not a row number or a percentage")
    number, percent = int(match["number"]), bool(match["percent"])
    if percent and abs(number) > 100:
        raise UsageError(f"{context!r}: {text} is more than 100%")
    return Bound(number, percent)


# --- files --------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A file and the format given by its name."""

    path: str
    family: str  # "jsonl", "json", "parquet", "arrow"
    compression: str  # "", "gz", "zst"
    url: str = ""  # complete URL, if the path omits a signed query
    version: Version | None = None  # of a remote object, if its listing has one

    @property
    def location(self) -> str:
        """The URL, or the absolute path."""
        return self.url or (self.path if is_remote(self.path) else os.path.abspath(self.path))


def discover(address: Address) -> list[Found]:
    """Find the files of an address; `SourceMissing` if there are none."""
    found = _discover(address)
    for one in found:
        _require_utf8(one.path)
    return [
        one if shown(one.path) == one.path else one._replace(path=shown(one.path), url=one.path)
        for one in found
    ]


def _require_utf8(path: str) -> None:
    """Raise for a name that keys and manifests, which are JSON, cannot contain."""
    real = path if is_remote(path) else os.path.realpath(path)
    try:
        real.encode()
    except UnicodeEncodeError as error:
        readable = real.encode(errors="backslashreplace").decode()
        raise SourceError("the path is not valid UTF-8; rename it", path=readable) from error


def _discover(address: Address) -> list[Found]:
    path = address.path
    if address.repo:
        return _hub_split(address)
    if is_remote(path):
        return _remote_files(address)
    if os.path.isdir(path):
        return _directory(path, address.split)
    _refuse_split(address)
    if os.path.lexists(path):
        return [_named(path)]
    if glob.has_magic(path):
        matches = sorted(p for p in glob.glob(path, recursive=True) if not os.path.isdir(p))
        if not matches:
            raise SourceMissing("no file matches this pattern", path=path)
        found = [one for one in map(form_of, matches) if one is not None]
        return _one_format(path, found, f"none of the {len(matches)} matching files is {KNOWN}")
    raise SourceMissing("no such file or directory", path=path)


def form_of(path: str) -> Found | None:
    stem, extension = os.path.splitext(path)
    compression = COMPRESSIONS.get(extension.lower(), "")
    if compression:
        extension = os.path.splitext(stem)[1]
    family = FAMILIES.get(extension.lower())
    if family is None or (compression and family not in ("jsonl", "json")):
        return None
    return Found(path, family, compression)


def _named(path: str) -> Found:
    found = form_of(path)
    if found is None:
        raise UsageError(f"unknown file format; supported are {KNOWN}", path=path)
    return found


def _one_format(path: str, found: list[Found], if_none: str) -> list[Found]:
    if not found:
        raise SourceMissing(if_none, path=path)
    examples = {one.family: one.path for one in reversed(found)}
    if len(examples) > 1:
        names = ", ".join(f"{family} ({examples[family]})" for family in sorted(examples))
        raise UsageError(f"files of several formats: {names}; select one with a glob", path=path)
    return found


def _directory(
    path: str, split: str | None, listed: Mapping[str, Version] | None = None
) -> list[Found]:
    try:
        names = sorted(os.listdir(path) if listed is None else listed)
    except OSError as error:
        raise SourceError(f"cannot be listed: {error.strerror}", path=path) from error
    if "dataset_dict.json" in names:
        return _saved(os.path.join(path, _chosen_split(path, split)))
    if "state.json" in names:
        own = None if split is None else _read_json(os.path.join(path, "state.json")).get("_split")
        if split != own:
            raise UsageError(f"no split {split!r}; this is the split {str(own)!r}", path=path)
        return _saved(path)
    if split is not None and listed is not None:
        raise UsageError(
            f"no split {split!r}: the directory was not written by save_to_disk", path=path
        )
    if split is not None:
        from tokenmill.integrations.hub import split_files

        found = [_named(file) for file in split_files(path, split)]
        return _one_format(path, found, "the split has no files")
    paths = [os.path.join(path, name) for name in names if not name.startswith(".")]
    if listed is None:
        paths = list(filter(os.path.isfile, paths))
    found = [one for one in map(form_of, paths) if one is not None]
    if listed is not None:
        found = [one._replace(version=listed[os.path.basename(one.path)]) for one in found]
    return _one_format(path, found, f"the directory has no data file ({KNOWN})")


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
        raise SourceError("dataset_dict.json has no list of splits", path=path)
    if split is None:
        raise UsageError(
            f"the dataset has the splits {', '.join(splits)}; select one: {path}@{splits[0]}",
            path=path,
        )
    if split not in splits:
        raise UsageError(f"no split {split!r}; splits are {', '.join(splits)}", path=path)
    return split


def _saved(path: str) -> list[Found]:
    """Return the Arrow files of a directory written by ``Dataset.save_to_disk``."""
    state = _read_json(os.path.join(path, "state.json"))
    if state.get("_indices_data_files"):
        raise UsageError(
            "an old version of datasets saved this with an indices mapping; save it again after "
            "flatten_indices()",
            path=path,
        )
    files = state.get("_data_files")
    listed = files if isinstance(files, list) else [None]
    names = [one.get("filename") if isinstance(one, dict) else None for one in listed]
    if not all(isinstance(name, str) for name in names):
        raise SourceError("state.json lists no data files", path=path)
    if not names:
        raise SourceMissing("the saved dataset has no rows", path=path)
    return [Found(_within(path, str(name)), "arrow", "") for name in names]


def _within(directory: str, name: str) -> str:
    """Return the path of a file that state.json names; it must be inside the directory."""
    inner = os.path.normpath(name)
    if os.path.isabs(inner) or inner.split("/")[0] in ("..", ".") or is_remote(name):
        raise SourceError(
            f"state.json names {name!r}, which is outside of the directory; open a tokenmill "
            "store with open_store",
            path=directory,
        )
    return os.path.join(directory, inner)


# --- URLs ---------------------------------------------------------------------------------------


def _remote_files(address: Address) -> list[Found]:
    url = address.path
    protocol = protocol_of(url)
    if protocol in ("http", "https"):
        _refuse_split(address)
        if any(mark in shown(url) for mark in "*["):
            raise UsageError("globs do not work over HTTP; list each file", path=shown(url))
        return [_named(shown(url))._replace(url=url)]
    if protocol == "hf":
        url = _pinned(url)
    if any(mark in url for mark in "*?["):
        _refuse_split(address)
        listed = _listed(url, is_glob=True)
        if not listed:
            raise SourceMissing("no object matches this pattern", path=url)
        found = [one for one in map(form_of, sorted(listed)) if one is not None]
        found = [one._replace(version=listed[one.path]) for one in found]
        return _one_format(url, found, f"none of the {len(listed)} matching objects is {KNOWN}")
    if form_of(url) is not None and not url.endswith("/"):
        _refuse_split(address)
        return [_named(url)]
    url = url.rstrip("/")
    versions = _listed(url, is_glob=False)
    listed = {os.path.basename(name): version for name, version in versions.items()}
    if len(listed) == 1 and url.endswith("/" + next(iter(listed))):
        return [_named(url)]  # an object of this name, of unknown format
    return _directory(url, address.split, listed)


def _refuse_split(address: Address) -> None:
    if address.split is not None:
        raise UsageError(
            f"a file has no splits, got split {address.split!r}; pass a directory or a hub dataset",
            path=address.path,
        )


def _listed(url: str, *, is_glob: bool) -> dict[str, Version]:
    """Return URL → version of every file that matches a glob or is in a directory.

    A listing includes the versions, so no further request per object is needed.
    """
    remote = RemoteObject(url)
    fs, path = remote.retrying(lambda: filesystem(url), None)  # some drivers connect here

    def request() -> list[dict[str, Any]]:
        fs.invalidate_cache(None if is_glob else path)
        return list(fs.glob(path, detail=True).values() if is_glob else fs.ls(path, detail=True))

    infos = remote.retrying(request, None)
    prefix = url[: len(url) - len(path)]  # protocol and host, which are missing in a listing
    files = (info for info in infos if info.get("type") != "directory")
    return {prefix + fs._strip_protocol(info["name"]): version_of(info, url) for info in files}


# --- the Hugging Face hub -----------------------------------------------------------------------

_HUB = "hf://datasets/"
_HUB_URL = re.compile(
    r"^hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/[^/]+/[^/]+|[^/]+))?(?P<rest>/.*)?$"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _hub_split(address: Address) -> list[Found]:
    from tokenmill.integrations.hub import split_files

    commit = hub_commit(address.repo, address.revision, address.path)
    config, _, split = (address.split or "").rpartition("/")
    files = split_files(address.repo, split, config=config, revision=commit, source=address.path)
    other = [file for file in files if form_of(file) is None]
    if other:
        raise UsageError(
            f"{other[0]} has an unknown format; supported are {KNOWN}. If the hub has converted "
            f"the dataset to Parquet, open {_HUB}{address.repo}@refs/convert/parquet/"
            f"{config or 'default'}/{split or 'train'}/*.parquet",
            path=address.path,
        )
    return _one_format(address.path, list(map(_named, files)), "the split has no files")


def _pinned(url: str) -> str:
    match = _HUB_URL.match(url)
    if match is None:
        raise UsageError(
            "write it as hf://datasets/owner/name[@revision]/path, or owner/name[:split]", path=url
        )
    commit = hub_commit(match["repo"], match["revision"], url)
    return f"{_HUB}{match['repo']}@{commit}{match['rest'] or ''}"


def hub_commit(name: str, revision: str | None, source: str) -> str:
    """Return the commit of a revision of a hub dataset; None is the main branch."""
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    with optional("huggingface_hub", "a hub dataset", path=name):
        from huggingface_hub import HfApi

    def request() -> Any:
        return HfApi().repo_info(name, revision=revision, repo_type="dataset")

    local = "" if source.startswith(_HUB) else "no such local file or directory, and "
    try:
        return str(RemoteObject(f"{_HUB}{name}").retrying(request, None).sha)
    except SourceMissing as error:
        raise SourceMissing(
            f"{local}no such dataset or revision on the hub (set HF_TOKEN for private datasets)",
            path=source,
        ) from error
    except SourceError as error:
        cause = error.__context__
        text = hide_secrets(str(cause)).strip() or "no answer"
        reason = " ".join(text.splitlines()[0].split())[:80]
        reason = f"{type(cause).__name__}: {reason}"
        if type(cause).__name__ == "OfflineModeIsEnabled":
            reason = "HF_HUB_OFFLINE is set"
        raise SourceError(
            f"{local}the lookup on the hub failed ({reason}); to work offline, pass local files "
            f"(`hf download {name} --repo-type dataset --local-dir DIR`)",
            path=source,
        ) from error
