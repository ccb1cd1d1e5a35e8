"""Fetch images at URLs, within limits, and not from the private network unless allowed.

The author of a row chooses the URL, and this machine may reach hosts that the author cannot. So a
host name is resolved once, all its addresses must be public, and the connection goes to the address
that was checked; a redirect is checked likewise. Proxies and credentials of the environment are not
used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable

from tokenmill.errors import SourceError
from tokenmill.media.reference import bad_media

ATTEMPTS = 3
PAUSE = 0.5  # seconds before the second attempt, doubled before the next
_CHUNK = 1 << 16
_MOVED = (301, 302, 303, 307, 308)
_TRANSLATED = ipaddress.ip_network("64:ff9b::/96")  # IPv4 addresses behind a translator
_REFUSED = (400, 401, 403, 404, 405, 406, 410, 414, 451)


def fetch(url: str, *, size: int, seconds: float, redirects: int, private: bool = False) -> bytes:
    """Fetch a URL of at most ``size`` bytes; an attempt takes at most ``seconds``.

    Raises:
        RowError: The address is not allowed, nothing is there, or it is too large.
        SourceError: No answer, or a failing server, after some attempts. It ends the run.
    """
    for attempt in range(ATTEMPTS):
        try:
            return _follow(url, size, seconds, redirects, private)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, SourceError):  # a refusal of ours
                raise
            if attempt == ATTEMPTS - 1:
                raise SourceError(
                    f"no answer after {ATTEMPTS} attempts: {error or type(error).__name__}",
                    path=url,
                ) from error
            time.sleep(PAUSE * 2**attempt)
    raise AssertionError("unreachable")


def _follow(url: str, size: int, seconds: float, redirects: int, private: bool) -> bytes:
    end = time.monotonic() + seconds
    for _ in range(redirects + 1):
        connection, target = _connection(url, seconds, private)
        with contextlib.closing(connection):
            connection.request("GET", target, headers={"User-Agent": "tokenmill"})
            with connection.getresponse() as response:  # which may own the socket by now
                location = response.getheader("Location")
                if response.status not in _MOVED or not location:
                    return _answer(response, url, size, end)
                url = urllib.parse.urljoin(url, location)
    raise bad_media(f"{url} is reached by more than {redirects} redirects")


def _answer(response: http.client.HTTPResponse, url: str, size: int, end: float) -> bytes:
    if response.status in _REFUSED:
        raise bad_media(f"{url} answers {response.status} {response.reason}")
    if response.status != 200:
        raise ConnectionError(f"the server answers {response.status} {response.reason}")
    stated = response.length
    if stated is not None and stated > size:
        raise bad_media(f"{url} has {stated} bytes; {size} are allowed")
    pieces: list[bytes] = []
    found = 0
    while piece := response.read1(_CHUNK):
        pieces.append(piece)
        found += len(piece)
        if found > size:
            raise bad_media(f"{url} has {found} bytes or more; {size} are allowed")
        if time.monotonic() > end:
            raise TimeoutError("the picture did not arrive in time")
    if stated is not None and found != stated:
        raise ConnectionError(f"{found} bytes came of {stated}")
    if not found:
        raise bad_media(f"{url} is empty")
    return b"".join(pieces)


def _connection(url: str, seconds: float, private: bool) -> tuple[http.client.HTTPConnection, str]:
    """A connection to a checked address, and the request target."""
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise bad_media(f"{url} is no address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise bad_media(f"{url} is no address of http or https")
    secure = parts.scheme == "https"
    port = port or (443 if secure else 80)
    address = _public_address(url, host, port, private)

    def connect() -> socket.socket:
        return socket.create_connection((address, port), timeout=seconds)

    made = _Secure(host, port, seconds, connect) if secure else _Plain(host, port, seconds, connect)
    path = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
    query = urllib.parse.quote(parts.query, safe="/%:@!$&'()*+,;=~-._?")
    return made, f"{path}?{query}" if query else path


def _public_address(url: str, host: str, port: int, private: bool) -> str:
    """The address to connect to; all addresses of the name must be allowed."""
    found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for text in found:
        for address in _meant(text.partition("%")[0]):
            if not private and (not address.is_global or address.is_multicast):
                raise bad_media(
                    f"{url} leads to {address}, which is not an address of the public internet"
                )
    return found[0]


def _meant(text: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """An address, and the IPv4 address that it embeds."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    inner = [address.sixtofour, *(address.teredo or ())]
    if address in _TRANSLATED:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *(one for one in inner if one is not None)]


class _Plain(http.client.HTTPConnection):
    """A connection to a checked address, under the name of the host."""

    def __init__(
        self, host: str, port: int, seconds: float, connect: Callable[[], socket.socket]
    ) -> None:
        super().__init__(host, port, timeout=seconds)
        self._connect = connect

    def connect(self) -> None:
        self.sock = self._connect()


class _Secure(_Plain):
    """The same with TLS, verified for the name of the host."""

    default_port = 443

    def connect(self) -> None:
        context = ssl.create_default_context()
        self.sock = context.wrap_socket(self._connect(), server_hostname=self.host)
