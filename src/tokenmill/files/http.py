"""Ranges over HTTP, each answer held against the version that was opened.

A `HttpTransport` uses the session of fsspec's HTTP file system (its proxies and headers), but asks
and reads by itself: every answer to a range says ETag, time and total size, so a change is seen in
the very request that met it; a server that ignores ranges is refused before its body is read, not
after a terabyte; and looking is a request for one byte, which signed URLs allow where HEAD is
forbidden.
"""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from typing import Any

from tokenmill.errors import SourceChanged, SourceError
from tokenmill.files.remote import SETTLED_S, Version, shown, version_of

CONNECT_S = 30.0  # seconds until a connection counts as failed
SILENCE_S = 60.0  # seconds without a byte until an answer counts as failed
_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d+)-(\d+)|\*)/(\d+|\*)")


class HttpTransport:
    """One object on an HTTP server.

    Args:
        fs: fsspec's HTTP file system.
        url: The object.
    """

    def __init__(self, fs: Any, url: str) -> None:
        self._fs = fs
        self._url = url

    def look(self) -> Version:
        """Ask for the first byte: the answer says everything."""
        version, _ = self._ask(0, 1)
        return version

    def fetch(self, start: int, stop: int, expected: Version | None) -> bytes:
        """One range."""
        now, data = self._ask(start, stop)
        if expected is not None and now[:2] != expected[:2]:
            raise SourceChanged(
                f"the object changed since it was opened ({expected.size} bytes, "
                f"{expected.token or 'no ETag'}; now {now.size} bytes, {now.token or 'no ETag'})",
                path=shown(self._url),
                offset=start,
            )
        return data

    def read(self) -> bytes:
        """All of it, without a range."""
        from fsspec.asyn import sync

        data: bytes = sync(self._fs.loop, self._get_all)
        return data

    async def _get_all(self) -> bytes:
        async with await self._request({}) as answer:
            answer.raise_for_status()
            data: bytes = await answer.read()
            return data

    async def _request(self, headers: dict[str, str]) -> Any:
        """An answer, its body not yet read."""
        import aiohttp

        session = await self._fs.set_session()
        options = dict(self._fs.kwargs)
        options.setdefault(
            "timeout",
            aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S),
        )
        # Ranges of a compressed transfer would be ranges of other bytes.
        headers = {**options.pop("headers", {}), **headers, "Accept-Encoding": "identity"}
        return await session.get(self._fs.encode_url(self._url), headers=headers, **options)

    def _ask(self, start: int, stop: int) -> tuple[Version, bytes]:
        from fsspec.asyn import sync

        answer: tuple[Version, bytes] = sync(self._fs.loop, self._get, start, stop)
        return answer

    async def _get(self, start: int, stop: int) -> tuple[Version, bytes]:
        async with await self._request({"Range": f"bytes={start}-{stop - 1}"}) as answer:
            if answer.status == 416:
                return _version(answer.headers, self._total(answer)), b""
            answer.raise_for_status()
            coding = answer.headers.get("Content-Encoding", "identity")
            if coding != "identity":
                raise self._refused(f"the server sends it compressed ({coding}), not as it stands")
            if answer.status != 206:
                if answer.headers.get("Content-Length") == "0":
                    return _version(answer.headers, 0), b""
                raise self._refused("the server does not support range requests; download it first")
            total = self._total(answer)
            return _version(answer.headers, total), await answer.read()

    def _total(self, answer: Any) -> int:
        match = _CONTENT_RANGE.match(answer.headers.get("Content-Range", ""))
        if match is None or match[3] == "*":
            raise self._refused("the server does not say how large it is; download it first")
        return int(match[3])

    def _refused(self, message: str) -> SourceError:
        return SourceError(message, path=shown(self._url))


def _version(headers: Any, size: int) -> Version:
    etag, modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if etag and not etag.startswith("W/"):
        return version_of({"size": size, "ETag": etag})
    return Version(size, f"{etag} {modified}".strip(), _is_settled(modified, headers.get("Date")))


def _is_settled(modified: str, now: str | None) -> bool:
    """Whether a time in whole seconds lies far enough back, by the server's own clock."""
    try:
        age = parsedate_to_datetime(now or "") - parsedate_to_datetime(modified)
    except (TypeError, ValueError):
        return False
    return age.total_seconds() > SETTLED_S
