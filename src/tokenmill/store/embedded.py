"""Pictures that a store brings along: each once, named by the digest of its bytes.

A store refers to pictures and does not hold them. A copy that is to stand alone may: then they lie
in ``media/<two digits>/<digest>`` beneath it, the manifest counts them (``"media"``), and whoever
asks the store for a picture gets the copy. A store in a cache finds them in the cache's
``pictures``, where `pull` puts those of the stores that it brings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tokenmill.errors import CorruptionError
from tokenmill.files.remote_path import as_remote
from tokenmill.fingerprint import checksum
from tokenmill.store.access import reading_errors
from tokenmill.store.record import Media
from tokenmill.store.store import Store

_DIGEST = re.compile(r"[0-9a-f]{32}")


def distinct_pictures(store: Store) -> Iterator[Media]:
    """Every picture that rows of a store refer to, once for each digest."""
    seen: set[bytes] = set()
    for row in store:
        for media in row.media:
            name = bytes.fromhex(media.digest)
            if name not in seen:
                seen.add(name)
                yield media


def place_of(digest: str) -> str:
    """The name of a picture's copy beneath a store that stands alone."""
    return f"media/{digest[:2]}/{digest}"


def counted(sizes: list[int]) -> dict[str, Any]:
    """What a manifest says of embedded pictures."""
    return {"pictures": len(sizes), "bytes": sum(sizes)}


def read_embedded(store: Store, digest: str) -> bytes | None:
    """The store's own copy of a picture; None where it has none.

    Raises:
        CorruptionError: It is not what was written, or missing though the manifest counts it.
    """
    if not _DIGEST.fullmatch(digest):
        raise CorruptionError(f"{digest!r} is not the digest of a picture", path=store.path)
    embedded = "media" in store.manifest
    remote = as_remote(store.path)
    if remote is not None:
        if not embedded:
            return None
        place = remote / place_of(digest)
        with reading_errors(place):
            data = place.read_kept(f"{digest}.picture", lambda found: checksum(found) == digest)
        return _require(data, digest, place)
    path = store.layout.picture(digest)
    if not embedded and not path.exists():
        return None
    store.layout.require_inside(path)
    with reading_errors(path):
        data = path.read_bytes()
    return _require(data, digest, path)


def _require(data: bytes, digest: str, path: Any) -> bytes:
    found = checksum(data)
    if found != digest:
        raise CorruptionError(f"checksum is {found}, expected {digest}", path=path)
    return data
