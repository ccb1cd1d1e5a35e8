"""Fetch images at URLs, within limits, and from private networks only if allowed.

Rows contain the URLs, and this machine may reach hosts that the author of a row cannot. So a host
name is resolved once, all its addresses must be public, and the connection goes to a checked
address. Redirects are checked in the same way. Proxies and credentials of the environment are
ignored.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

from tokenmill.errors import SourceError, shown
from tokenmill.media.reference import bad_media

MAX_ATTEMPTS = 3
RETRY_DELAY_S = 0.5  # seconds before the second attempt, doubled before the next
_CHUNK = 1 << 16
_MOVED = (301, 302, 303, 307, 308)
_LABEL = r"\w(?:[\w-]*\w)?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?", re.ASCII)
_CHUNK_SIZE = re.compile(rb"\s*([\da-fA-F]+)\s*(;.*)?", re.S)
_MAX_CHUNK_LINE = 1 << 16
_UNICAST = ipaddress.ip_network("2000::/3")  # all public addresses of IPv6
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses behind a translator
_SPECIAL = [  # public by their registration, but only local machines serve them, or none
    *map(ipaddress.ip_network, ("168.63.129.16/32", "192.88.99.0/24", "3fff::/20")),
]
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)  # bits 64 to 96 of an address that ends with an IPv4 address
_PERMANENT = (400, 401, 403, 404, 405, 406, 410, 414, 451)


def fetch(url: str, *, size: int, seconds: float, redirects: int, private: bool = False) -> bytes:
    """Fetch a URL of at most ``size`` bytes; an attempt takes at most ``seconds``.

    Raises:
        RowError: The address is not allowed, the server has no such file, it is too large, or the
            URL, a redirect or a header is malformed.
        SourceError: The server failed `MAX_ATTEMPTS` times. This ends the run.
    """
    for attempt in range(MAX_ATTEMPTS):
        try:
            return _follow(url, size, seconds, redirects, private)
        except SourceError:  # raised by a check of this module
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:
            if attempt == MAX_ATTEMPTS - 1:
                if not isinstance(error, OSError | http.client.IncompleteRead):
                    reason = f"{type(error).__name__}: {error}"
                    raise bad_media(f"{shown(url)} has a malformed part ({reason})") from error
                raise SourceError(
                    f"cannot fetch after {MAX_ATTEMPTS} attempts: {error or type(error).__name__}",
                    path=url,
                ) from error
            time.sleep(RETRY_DELAY_S * 2**attempt)
    raise AssertionError("unreachable")


def _follow(url: str, size: int, seconds: float, redirects: int, private: bool) -> bytes:
    end = time.monotonic() + seconds
    for _ in range(redirects + 1):
        connection, target = _connection(url, end, private)
        with contextlib.closing(connection):
            connection.request("GET", target, headers={"User-Agent": "tokenmill"})
            with connection.getresponse() as response:  # the response may hold the socket
                if response.status not in _MOVED:
                    return _read_body(response, url, size)
                location = response.getheader("Location")
                if not location:
                    raise bad_media(
                        f"{shown(url)}: the server returned a redirect without Location"
                    )
                try:
                    url = urllib.parse.urljoin(url, location)
                except ValueError as error:
                    message = f"{shown(url)} redirects to {shown(location)}, not a URL: {error}"
                    raise bad_media(message) from error
    raise bad_media(f"{shown(url)} needs more than {redirects} redirects")


def _read_body(response: http.client.HTTPResponse, url: str, size: int) -> bytes:
    if response.status in _PERMANENT:
        raise bad_media(f"{shown(url)}: the server returned {response.status} {response.reason}")
    if response.status != 200:
        raise ConnectionError(f"the server returned {response.status} {response.reason}")
    expected = response.length
    if expected is not None and expected > size:
        raise bad_media(f"{shown(url)} has {expected} bytes; {size} are allowed")
    pieces: list[bytes] = []
    received = 0
    while piece := response.read1(_CHUNK):
        pieces.append(piece)
        received += len(piece)
        if received > size:
            raise bad_media(f"{shown(url)} has {received} bytes or more; {size} are allowed")
    if expected is not None and received != expected:
        raise ConnectionError(f"received {received} of {expected} bytes")
    if not received:
        raise bad_media(f"{shown(url)} is empty")
    return b"".join(pieces)


def _connection(url: str, end: float, private: bool) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    except ValueError as error:
        raise bad_media(f"{shown(url)} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise bad_media(f"{shown(url)} is not an http or https URL")
    if not _is_host(host, is_bracketed="[" in parts.netloc):
        raise bad_media(f"{shown(url)} is not a URL: {host!r} is not a host name or address")
    if port == 0:
        raise bad_media(f"{shown(url)} is not a URL: its port is 0")
    secure = parts.scheme == "https"
    port = port or (443 if secure else 80)
    address = _public_address(url, host, port, private)

    def connect() -> socket.socket:
        return socket.create_connection((address, port), timeout=_seconds_left(end))

    kind = _HTTPSConnection if secure else _HTTPConnection
    connection = kind(host, port, end, connect)
    return connection, f"{path}?{query}" if query else path


def _is_host(host: str, *, is_bracketed: bool) -> bool:
    try:
        if is_bracketed:
            ipaddress.IPv6Address(host.partition("%")[0])
        elif host.rstrip(".").rpartition(".")[2].isdigit():
            socket.inet_aton(host)
        else:
            return _NAME.fullmatch(host) is not None
    except (OSError, ValueError):
        return False
    return True


def _public_address(url: str, host: str, port: int, private: bool) -> str:
    """Return the address to connect to; all addresses of the host must be allowed."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    resolved = [str(entry[4][0]) for entry in entries]
    for text in resolved:
        if not private and not _is_public(ipaddress.ip_address(text.partition("%")[0])):
            raise bad_media(
                f"{shown(url)} resolves to {text}, which is not an address of the public internet"
            )
    return resolved[0]


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Return whether an address and every IPv4 address that it embeds are public."""
    if any(address in network for network in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    last = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address.ipv4_mapped is not None or address in _TRANSLATED:
        return _is_public(last)
    inner = [address.sixtofour, *(address.teredo or ())]
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        inner.append(last)
    embedded = [one for one in inner if one is not None]
    return address in _UNICAST and address.is_global and all(map(_is_public, embedded))


def _seconds_left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the download took too long")
    return left


class _TimedReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, end: float) -> None:
        super().__init__()
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._end = end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_seconds_left(self._end))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedSocket:
    """The part of a socket that http.client uses. Every call ends before one deadline."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock = sock
        self._end = end

    def sendall(self, data: bytes) -> None:
        self._sock.settimeout(_seconds_left(self._end))
        self._sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_TimedReader(self._sock, self._end))

    def close(self) -> None:
        self._sock.close()


class _Response(http.client.HTTPResponse):
    def _read_next_chunk_size(self) -> int:
        """Read a chunk size; http.client accepts negative ones and hides which are malformed."""
        line = self.fp.readline(_MAX_CHUNK_LINE)
        if not line.endswith(b"\n") and len(line) < _MAX_CHUNK_LINE:
            raise ConnectionError("the connection was closed within the size of a chunk")
        match = _CHUNK_SIZE.fullmatch(line)
        if match is None:
            raise http.client.HTTPException(f"the size of a chunk is {line[:40]!r}")
        return int(match[1], 16)


class _HTTPConnection(http.client.HTTPConnection):
    """A connection to a checked address that sends the host name."""

    response_class = _Response

    def __init__(
        self, host: str, port: int, end: float, connect: Callable[[], socket.socket]
    ) -> None:
        super().__init__(host, port)
        self._end = end
        self._connect = connect

    def connect(self) -> None:
        self.sock: Any = _TimedSocket(self._connect(), self._end)


class _HTTPSConnection(_HTTPConnection):
    default_port = 443

    def connect(self) -> None:
        context = ssl.create_default_context()
        sock = context.wrap_socket(self._connect(), server_hostname=self.host)
        self.sock = _TimedSocket(sock, self._end)
