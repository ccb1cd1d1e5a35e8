"""Files on their way to a place elsewhere: put, checked, never over something else.

An `Upload` is a name and the bytes for it. The `Uploader` of a place knows what is there (one
listing for all) and sends what is not: a file that is there already is compared by size and by
checksum (the place's own MD5 where it tells one, else by reading it back), what an interrupted
upload left of it is replaced, and anything else is a `CacheError`. What was sent is compared in the
same way.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tokenmill.errors import CacheError, SourceError, UsageError
from tokenmill.files.remote import RemoteObject, filesystem, shown

_STEP = 8 << 20  # bytes read at once


@dataclass(frozen=True)
class Upload:
    """One file to be sent.

    Attributes:
        name: Its path below the target.
        content: Its bytes, or the file that holds them.
        any_content: Whether a file of this name with other bytes will do as well.
    """

    name: str
    content: bytes | Path
    any_content: bool = False

    @property
    def size(self) -> int:
        content = self.content
        return len(content) if isinstance(content, bytes) else content.stat().st_size

    def pieces(self) -> Iterator[bytes]:
        """Its bytes, a few megabytes at a time."""
        if isinstance(self.content, bytes):
            yield self.content
            return
        with open(self.content, "rb") as file:
            yield from iter(lambda: file.read(_STEP), b"")

    def digests(self) -> tuple[str, str]:
        """MD5, which places tell, and the checksum that is compared where they do not."""
        md5, own = hashlib.md5(usedforsecurity=False), xxhash.xxh3_128()
        for piece in self.pieces():
            md5.update(piece)
            own.update(piece)
        return md5.hexdigest(), own.hexdigest()


class Uploader:
    """Sends files to the directory at a URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, self._root = filesystem(url)
        self._there = RemoteObject(url).retrying(self._list, None)

    def _list(self) -> dict[str, dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return {name.lstrip("/"): info for name, info in found.items()}

    def send(self, upload: Upload) -> bool:
        """Have a file there; True when it was there already.

        Raises:
            CacheError: Something else is there, or it could not be written.
        """
        path = f"{self._root}/{upload.name}"
        there = RemoteObject(f"{self._url}/{upload.name}")
        info = self._there.get(path.lstrip("/"))
        digests = upload.digests()
        if info is not None:
            if upload.any_content or self._equals(there, info, upload, digests):
                return True
            if not self._is_leftover(there, int(info["size"]), upload):
                raise CacheError(
                    "other bytes are there under this name; name another target, or remove it",
                    path=shown(there.url),
                )
        try:
            there.retrying(lambda: self._put(path, upload), None)
            info = there.retrying(lambda: self._look(path), None)
        except SourceError as error:
            cause = error.__cause__
            if isinstance(cause, NotImplementedError):
                raise UsageError("this place cannot be written", path=there.path) from error
            raise CacheError(
                error.message.replace("be read", "be written", 1), path=error.path
            ) from error
        if not self._equals(there, info, upload, digests):
            raise CacheError(
                "what is there after writing is not what was written; push again",
                path=shown(there.url),
            )
        return False

    def _put(self, path: str, upload: Upload) -> None:
        if isinstance(upload.content, bytes):
            self._fs.pipe_file(path, upload.content)
        else:
            self._fs.put_file(str(upload.content), path)

    def _look(self, path: str) -> dict[str, Any]:
        self._fs.invalidate_cache(self._fs._parent(path))
        info: dict[str, Any] = self._fs.info(path)
        return info

    def _equals(
        self, there: RemoteObject, info: dict[str, Any], upload: Upload, digests: tuple[str, str]
    ) -> bool:
        if int(info["size"]) != upload.size:
            return False
        if digests[0] in _stated_md5(info):
            return True
        hasher = xxhash.xxh3_128()
        for start in range(0, upload.size, _STEP):
            hasher.update(there.fetch(start, min(start + _STEP, upload.size)))
        return bool(hasher.hexdigest() == digests[1])

    def _is_leftover(self, there: RemoteObject, size: int, upload: Upload) -> bool:
        """Whether what is there is the beginning of the file: an upload that was cut short."""
        if size >= upload.size:
            return False
        start = 0
        for piece in upload.pieces():
            stop = min(start + len(piece), size)
            if start >= stop:
                break
            if there.fetch(start, stop) != piece[: stop - start]:
                return False
            start = stop
        return True


def _stated_md5(info: dict[str, Any]) -> list[str]:
    """The MD5 that a place tells of an object, under whichever name; an ETag may be one."""
    found = [str(info.get(name, "")).strip('"') for name in ("ETag", "etag", "content_md5")]
    with contextlib.suppress(ValueError):
        found.append(base64.b64decode(str(info.get("md5Hash", ""))).hex())
    return found
