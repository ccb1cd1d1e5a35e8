"""Remote objects of any fsspec protocol: read their version and fetch ranges.

Transient errors are retried up to `ATTEMPTS` times. Then every error of a driver is raised as a
`SourceError` with URL and byte.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from tokenmill._core.paths import MAX_METADATA_BYTES, require_bounded
from tokenmill._core.process import ProcessLock
from tokenmill.errors import (
    SourceChanged,
    SourceError,
    SourceMissing,
    TokenmillError,
    UsageError,
    hide_secrets,
    shown,
)

ATTEMPTS = 6  # per request: with the pauses between them about 15 s
FIRST_PAUSE_S = 0.4  # before the second attempt; then it doubles
MAX_PAUSE_S = 8.0
STABLE_AFTER_S = 60.0  # age from which the time of an object without ETag proves its content
CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 60.0  # without a byte
_LOCAL = ("file", "local")

_URL = re.compile(r"^([a-zA-Z][a-zA-Z0-9+.\-]+)://", re.S)
_STRONG = ("ETag", "etag", "generation", "md5Hash", "blob_id", "oid", "sha256")
_TIMES = ("LastModified", "last_modified", "Last-Modified", "updated", "mtime", "modified",
          "created")  # fmt: skip
_TRANSIENT = (408, 425, 429)  # client errors (4xx) that are retried
_FINAL = (
    FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError,
    NotImplementedError, ValueError, TypeError, AttributeError, ImportError,
)  # fmt: skip
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound",
                "OfflineModeIsEnabled", "GatedRepoError", "DefaultCredentialsError")  # fmt: skip
_CHANGED_NAMES = ("FileExpired",)
_PIP = {
    **dict.fromkeys(("s3", "s3a", "gs", "gcs", "http", "https"), 'pip install "tokenmill[remote]"'),
    "hf": 'pip install "tokenmill[hf]"',
}
_CONTENT_RANGE = re.compile(r"bytes\s+(?:(\d+)-(\d+)|\*)/(\d+|\*)")
_T = TypeVar("_T")


class Version(NamedTuple):
    """Version of an object."""

    size: int  # bytes
    token: str  # ETag, generation, commit or time; empty if the server returns none
    is_stable: bool  # whether an equal token proves equal bytes


def protocol_of(path: str) -> str:
    match = _URL.match(path)
    name = match[1].lower() if match else ""
    return "" if name in _LOCAL else name


def is_remote(path: str | os.PathLike[str]) -> bool:
    return isinstance(path, str) and bool(protocol_of(path))


def local_path(path: str) -> str:
    """Return ``file:///x`` as a path, and anything else unchanged."""
    match = _URL.match(path)
    if match and match[1].lower() in _LOCAL:
        return path[match.end() :]
    return path


_filesystems: dict[tuple[int, str], Any] = {}  # by process, because event loops die in a fork
_making = ProcessLock()


def filesystem(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL (one per process and host) and the path in it."""
    import fsspec

    match = _URL.match(url)
    host = url[: match.end()] + url[match.end() :].split("/", 1)[0] if match else url
    with _making:
        fs = _filesystems.get((os.getpid(), host))
        if fs is None:
            try:
                fs = fsspec.core.url_to_fs(url)[0]
            except ImportError as error:
                protocol = protocol_of(url)
                message = f"{protocol}:// needs a driver: {_PIP.get(protocol) or error}"
                raise UsageError(message, path=shown(url)) from error
            except ValueError as error:
                reason = hide_secrets(str(error), url)
                cause = error if reason == str(error) else None
                raise UsageError(f"unknown protocol: {reason}", path=shown(url)) from cause
            _filesystems[os.getpid(), host] = fs
    return fs, str(fs._strip_protocol(url))


def version_of(info: Mapping[str, Any], url: str = "") -> Version:
    size = info.get("size")
    if size is None:
        raise ValueError("the size of the object is unknown")
    if protocol_of(url) == "hf":  # the URL names a commit, and a commit does not change
        return Version(int(size), "commit", True)
    for name in _STRONG:
        if info.get(name):
            return Version(int(size), f"{name.lower()}={info[name]}", True)
    moment = next((info[name] for name in _TIMES if info.get(name)), None)
    if moment is None:
        return Version(int(size), "", False)
    # A listing and a request for one object may return the same time in different types.
    try:
        stamp = moment.timestamp() if hasattr(moment, "timestamp") else float(moment)
    except (TypeError, ValueError):
        return Version(int(size), f"time={moment}", False)
    return Version(int(size), f"time={stamp:.6f}", time.time() - stamp > STABLE_AFTER_S)


class RemoteObject:
    """One object by URL; ``path`` is the URL without secrets, for errors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.path = shown(url)
        self._transport: tuple[int, HttpTransport | FileSystemTransport] | None = None

    def look(self) -> Version:
        return self.retrying(lambda: self._connected().look(), None)

    def fetch(self, start: int, stop: int, expected: Version | None = None) -> bytes:
        """Return the bytes ``start:stop``; `SourceChanged` if the version is not ``expected``."""

        def once() -> bytes:
            data = self._connected().fetch(start, stop, expected)
            if len(data) != stop - start:
                raise ConnectionError(f"got {len(data)} of {stop - start} bytes")
            return data

        return self.retrying(once, start)

    def read(self) -> bytes:
        """Return all bytes of a metadata file, or raise `CorruptionError` if it is too long."""
        return self.retrying(lambda: self._connected().read(), None)

    def _connected(self) -> HttpTransport | FileSystemTransport:
        if self._transport is None or self._transport[0] != os.getpid():
            self._transport = os.getpid(), _transport_of(self.url)
        return self._transport[1]

    def retrying(self, work: Callable[[], _T], offset: int | None) -> _T:
        """Call ``work``; retry transient errors."""
        pause = FIRST_PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return work()
            except TokenmillError:
                raise
            except Exception as error:  # drivers raise the exceptions of their libraries
                if type(error).__name__ in _CHANGED_NAMES:
                    raise SourceChanged(CHANGED, path=self.path, offset=offset) from error
                if _is_final(error) or attempt == ATTEMPTS:
                    self._refuse(error, offset, attempt)
            # A random pause keeps many workers that failed together from retrying together.
            time.sleep(pause * random.SystemRandom().uniform(0.5, 1.0))
            pause = min(2 * pause, MAX_PAUSE_S)
        raise AssertionError("unreachable")

    def _refuse(self, error: Exception, offset: int | None, attempts: int) -> NoReturn:
        full = str(error)
        # The traceback shows the cause, so an error with a secret is not the cause.
        cause = error if self.path == self.url and hide_secrets(full) == full else None
        if isinstance(error, FileNotFoundError) or status_of(error) in (404, 410):
            hint: tuple[Any, ...] = ()
            if protocol_of(self.url) == "memory":
                hint = (
                    "; memory:// exists only in the process that wrote it: use ",
                    ("executor", "inline"),
                )
            raise SourceMissing("no such object", *hint, path=self.path) from cause
        if isinstance(error, IsADirectoryError):
            raise SourceMissing("a directory, not an object", path=self.path) from cause
        text = (hide_secrets(full, self.url).strip() or type(error).__name__).splitlines()[0]
        tries = f" after {attempts} attempts" if attempts > 1 else ""
        raise SourceError(
            f"cannot be read{tries}: {type(error).__name__}: {text}", path=self.path, offset=offset
        ) from cause


CHANGED = "the object changed since it was opened; open it again"


def require_version(
    actual: Version, expected: Version | None, path: str, offset: int | None
) -> None:
    if expected is not None and actual[:2] != expected[:2]:
        raise SourceChanged(
            f"{CHANGED} ({expected.size} bytes, {expected.token or 'no ETag'}; now {actual.size} "
            f"bytes, {actual.token or 'no ETag'})",
            path=path,
            offset=offset,
        )


def status_of(error: Exception) -> int | None:
    status = getattr(error, "status", None)
    if status is None:
        status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_final(error: Exception) -> bool:
    status = status_of(error)
    if status is not None:
        return 400 <= status < 500 and status not in _TRANSIENT
    return isinstance(error, _FINAL) or type(error).__name__ in _FINAL_NAMES


def _transport_of(url: str) -> HttpTransport | FileSystemTransport:
    fs, path = filesystem(url)
    if protocol_of(url) in ("http", "https"):
        return HttpTransport(fs, url)
    return FileSystemTransport(fs, path, url)


class FileSystemTransport:
    """Any fsspec file system. Except on S3 and the hub, the version is read after each range."""

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs = fs
        self._path = path
        self._url = url
        self._handle: Any = None
        self._conditional = protocol_of(url) in ("s3", "s3a", "hf")

    def look(self) -> Version:
        if protocol_of(self._url) != "hf":  # a pinned commit does not change
            self._fs.invalidate_cache(self._fs._parent(self._path))
            self._fs.invalidate_cache(self._path)
        info = self._fs.info(self._path)
        if info.get("type") == "directory":
            raise IsADirectoryError(self._path)
        return version_of(info, self._url)

    def read(self) -> bytes:
        data: bytes = self._fs.cat_file(self._path, start=0, end=MAX_METADATA_BYTES + 1)
        require_bounded(shown(self._url), len(data))
        return data

    def fetch(self, start: int, stop: int, expected: Version | None) -> bytes:
        if self._conditional:
            if self._handle is None:
                handle = self._fs.open(self._path, "rb", cache_type="none")
                now = version_of(handle.details, self._url)
                require_version(now, expected, self._url, start)
                self._handle = handle
            data: bytes = self._handle._fetch_range(start, stop)
            return data
        data = self._fs.cat_file(self._path, start=start, end=stop)
        if expected is not None:
            require_version(self.look(), expected, self._url, start)
        return data


class HttpTransport:
    """One object on an HTTP server.

    It sends its own requests instead of fsspec's. Every response to a range has the ETag, time and
    total size, so a change is detected in the same request. A server that ignores ranges is refused
    before its body is read. `look` requests one byte, because signed URLs do not allow HEAD.
    """

    def __init__(self, fs: Any, url: str) -> None:
        self._fs = fs
        self._url = url

    def _run(self, method: Callable[..., Any], *arguments: int) -> Any:
        from fsspec.asyn import sync

        return sync(self._fs.loop, method, *arguments)

    def look(self) -> Version:
        version: Version = self._run(self._get, 0, 1)[0]
        return version

    def fetch(self, start: int, stop: int, expected: Version | None) -> bytes:
        now, data = self._run(self._get, start, stop)
        require_version(now, expected, shown(self._url), start)
        return bytes(data)

    def read(self) -> bytes:
        return bytes(self._run(self._get_all))

    async def _get_all(self) -> Any:
        async with await self._request({}) as response:
            response.raise_for_status()
            data = bytearray()
            async for piece in response.content.iter_any():
                data += piece
                require_bounded(shown(self._url), len(data))
            return data

    async def _request(self, headers: dict[str, str]) -> Any:
        """Return a response before its body is read."""
        import aiohttp

        session = await self._fs.set_session()
        options = dict(self._fs.kwargs)
        options.setdefault(
            "timeout",
            aiohttp.ClientTimeout(
                total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S
            ),
        )
        # A range of a compressed transfer is a range of the compressed bytes.
        headers = {**options.pop("headers", {}), **headers, "Accept-Encoding": "identity"}
        return await session.get(self._fs.encode_url(self._url), headers=headers, **options)

    async def _get(self, start: int, stop: int) -> tuple[Version, bytes]:
        async with await self._request({"Range": f"bytes={start}-{stop - 1}"}) as response:
            if response.status == 416:
                return _version(response.headers, self._range(response)[1]), b""
            response.raise_for_status()
            coding = response.headers.get("Content-Encoding", "identity")
            if coding != "identity":
                raise self._refused(f"the server sends it compressed ({coding}); download it first")
            if response.status != 206:
                if response.headers.get("Content-Length") == "0":
                    return _version(response.headers, 0), b""
                raise self._refused("the server does not support range requests; download it first")
            returned, size = self._range(response)
            if returned != (start, min(stop, size) - 1):
                raise self._refused(
                    f"the server returned another range ({response.headers['Content-Range']}) than "
                    f"the requested bytes {start}-{stop - 1}; download it first"
                )
            data = bytearray()
            async for piece in response.content.iter_any():
                data += piece
                if len(data) > stop - start:
                    raise self._refused(
                        f"the server sent more than the requested bytes {start}-{stop - 1}; "
                        "download it first"
                    )
            return _version(response.headers, size), bytes(data)

    def _range(self, response: Any) -> tuple[tuple[int, int] | None, int]:
        """Return the first and last byte of a response, and the size of the object."""
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if match is None or match[3] == "*":
            raise self._refused("the server does not return its size; download it first")
        return (int(match[1]), int(match[2])) if match[1] else None, int(match[3])

    def _refused(self, message: str) -> SourceError:
        return SourceError(message, path=shown(self._url))


def _version(headers: Any, size: int) -> Version:
    etag, modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if etag and not etag.startswith("W/"):
        return version_of({"size": size, "ETag": etag})
    return Version(size, f"{etag} {modified}".strip(), _is_stable(modified, headers.get("Date")))


def _is_stable(modified: str, now: str | None) -> bool:
    """Whether a time in whole seconds is old enough by the clock of the server."""
    from email.utils import parsedate_to_datetime

    try:
        age = parsedate_to_datetime(now or "") - parsedate_to_datetime(modified)
    except (TypeError, ValueError):
        return False
    return age.total_seconds() > STABLE_AFTER_S
