"""From a URL to files: an object, a glob, or a directory of another place.

The same rules as for paths (`discover`): names decide formats, a directory means its data files or what
its state.json lists, a glob what it matches, sorted. A listing that tells sizes and ETags is kept
with the files, so that a thousand objects are not asked one by one. HTTP servers cannot list in a
way that one may rely on: there a URL is one file; people and proofs see it without its query, which
may be signed.

A URL of the hub is pinned first: whatever revision it names becomes the commit behind it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from tokenmill.errors import SourceMissing, UsageError
from tokenmill.files.remote import (
    RemoteObject,
    Version,
    filesystem,
    protocol_of,
    shown,
    version_of,
)
from tokenmill.source.address import Address
from tokenmill.source.discover import KNOWN, Found, directory, form_of, named, one_format

_MAGIC = "*?["


def find_elsewhere(address: Address) -> list[Found]:
    """The files of an address that is a URL."""
    url = address.path
    protocol = protocol_of(url)
    if protocol in ("http", "https"):
        return [_web_file(address)]
    if protocol == "hf":
        from tokenmill.source.hub import pinned

        url = pinned(url)
    if any(mark in url for mark in _MAGIC):
        _refuse_split(address)
        listed = _versions(url, _glob(url))
        if not listed:
            raise SourceMissing("no object matches", path=url)
        found = [_with(form_of(path), version) for path, version in sorted(listed.items())]
        some = [one for one in found if one is not None]
        return one_format(url, some, f"none of the {len(listed)} matching objects is {KNOWN}")
    if form_of(url) is not None and not url.endswith("/"):
        _refuse_split(address)
        return [named(url)]
    return _directory(url.rstrip("/"), address.split)


def _refuse_split(address: Address) -> None:
    if address.split is not None:
        raise UsageError(
            f"split {address.split!r} was asked for, but only directories made by save_to_disk "
            "have splits",
            path=address.path,
        )


def _web_file(address: Address) -> Found:
    _refuse_split(address)
    url = address.path
    if any(mark in shown(url) for mark in "*["):
        raise UsageError("HTTP servers cannot be searched: name each file", path=shown(url))
    return named(shown(url))._replace(location=url)


def _glob(url: str) -> Iterable[dict[str, Any]]:
    fs, path = filesystem(url)

    def work() -> list[dict[str, Any]]:
        fs.invalidate_cache()
        return list(fs.glob(path, detail=True).values())

    return RemoteObject(url).persist(work, None)


def _versions(url: str, infos: Iterable[dict[str, Any]]) -> dict[str, Version]:
    """URL → version of every file among some listed things."""
    fs, path = filesystem(url)
    before = url[: len(url) - len(path)]  # protocol and host, which a listing's names lack
    files = (info for info in infos if info.get("type") != "directory")
    return {before + fs._strip_protocol(info["name"]): version_of(info, url) for info in files}


def _with(found: Found | None, version: Version) -> Found | None:
    return None if found is None else found._replace(version=version)


def _directory(url: str, split: str | None) -> list[Found]:
    fs, path = filesystem(url)

    def work() -> list[dict[str, Any]]:
        fs.invalidate_cache(path)
        return list(fs.ls(path, detail=True))

    infos = RemoteObject(url).persist(work, None)
    listed = {os.path.basename(name): version for name, version in _versions(url, infos).items()}
    if len(listed) == 1 and url.endswith("/" + next(iter(listed))):
        return [named(url)]  # an object of that very name: its format is unknown
    return directory(url, split, listed)
