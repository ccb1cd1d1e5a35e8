"""URLs: limits, checks after every redirect, and private addresses only if allowed."""

from __future__ import annotations

import contextlib
import http.server
import ipaddress
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tokenmill.errors import RowError, SourceError
from tokenmill.media import Images, Limits, reference_of, web

BODY = b"\x89PNG" + bytes(5000)
LONG = b"b" * 70_000
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = "raw/HTTP/1.1%20200%20OK%0D%0ATransfer-Encoding:chunked%0D%0A%0D%0A"
DRIPS = {
    "status": b"HTTP/1.1 200 " + b"O" * 40 + b"\r\n\r\nx",
    "header": OK + b"A: " + b"b" * 40 + b"\r\n\r\nx",
    "headers": OK + b"A: b\r\n" * 10 + b"\r\nx",
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" * 4 + OK + b"\r\nx",
    "chunk_size": OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 40 + b"1\r\nx\r\n0\r\n\r\n",
    "trailer": OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"A: b\r\n" * 9,
    "body": OK + b"Content-Length: 40\r\n\r\n" + b"x" * 40,
}


class Handler(http.server.BaseHTTPRequestHandler):
    requests: ClassVar[list[str]] = []

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.requests.append(self.path)
        name = self.path.strip("/")
        if name.startswith("to/") or name == "loop":
            self.send_response(302)
            target = name.removeprefix("to/")
            self.send_header("Location", target if "://" in target else f"/{target}")
            self.end_headers()
        elif name.isdecimal():
            self.send_response(int(name))
            self.end_headers()
        elif name == "later" and self.requests.count(self.path) < 3:
            self.send_response(503)
            self.end_headers()
        elif name.startswith("raw/"):
            self.wfile.write(urllib.parse.unquote_to_bytes(name[4:]).replace(b"b" * 60_000, LONG))
        elif name.startswith("drip/"):
            with contextlib.suppress(OSError):
                for byte in DRIPS[name[5:]]:
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.05)
        elif name in ("endless", "slow"):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(10_000 if name == "endless" else 100):
                    self.wfile.write(bytes(1 << 16) if name == "endless" else b"x")
                    time.sleep(0.05 if name == "slow" else 0)
        else:
            body = b"x" if name == "short" else BODY
            self.send_response(200)
            self.send_header("Content-Length", "100" if name == "short" else str(len(body)))
            self.end_headers()
            self.wfile.write(body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(web, "RETRY_DELAY_S", 0.0)
    Handler.requests = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.daemon_threads = True
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()
        thread.join()


def fetch(url: str, **more: Any) -> bytes:
    limits = Limits(size=100_000, seconds=more.pop("seconds", 20.0), redirects=3)
    images = Images(urls=True, private=more.pop("private", True), limits=limits)
    return images.read(reference_of(url))


def test_fetched(server: str) -> None:
    assert fetch(f"{server}/a.png") == BODY
    assert fetch(f"{server}/ä b.png?q=ü#part") == BODY
    assert fetch(f"{server}/to/a.png") == BODY
    assert fetch(f"{server}/to/to/to/a.png") == BODY
    assert fetch(f"{server}/later") == BODY


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("404", "404"),
        ("403", "403"),
        ("410", "410"),
        ("loop", "redirects"),
        ("endless", "100000 are allowed"),
        ("to/file:///etc/hostname", "not an http or https URL"),
        ("to/ftp://127.0.0.1/a", "not an http or https URL"),
        ("to/http://a..b/", "not a URL"),
        ("to/http://[/", "not a URL"),
        ("to/http://127.0.0.1:99999/", "not a URL"),
        ("302", "without Location"),
        ("raw/HTTP/1.1%20abc%20OK%0D%0A%0D%0A", "malformed"),
        ("raw/nonsense%0D%0A%0D%0A", "malformed"),
        *((f"{CHUNKED}{size}%0D%0Ax", "malformed") for size in ("zz", "-5", "", "0x5", "1_0")),
        ("raw/HTTP/1.1%20200%20OK%0D%0A" + "a:%20b%0D%0A" * 101 + "%0D%0A", "malformed"),
        ("raw/HTTP/1.1%20200%20OK%0D%0Aa:%20" + "b" * 60_000 + "%0D%0A%0D%0A", "malformed"),
    ],
)
def test_permanent_errors_reject_the_row(server: str, path: str, words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        fetch(f"{server}/{path}")
    assert caught.value.reason == "bad_media"


@pytest.mark.parametrize("path", ["500", "503", "429", "short", "slow", CHUNKED, f"{CHUNKED}2"])
def test_transient_errors_never_reject_a_row(server: str, path: str) -> None:
    with pytest.raises(SourceError, match="3 attempts") as caught:
        fetch(f"{server}/{path}", seconds=0.3)
    assert not isinstance(caught.value, RowError)
    assert len(Handler.requests) == web.MAX_ATTEMPTS


@pytest.mark.parametrize("name", DRIPS)
def test_the_time_limit_covers_the_whole_download(
    server: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The server sends one byte at a time, so no single read reaches the limit."""
    monkeypatch.setattr(web, "MAX_ATTEMPTS", 1)
    start = time.monotonic()
    with pytest.raises(SourceError, match=r"time|too long"):
        fetch(f"{server}/drip/{name}", seconds=0.5)
    assert time.monotonic() - start < 1.5


@pytest.mark.parametrize(
    "url",
    [
        "http://a..b/", "http://.a/", f"http://{'a' * 64}.test/", "http://a b/", "http://a\x7fb/",
        "http://[/", "http://[::g]/", "http://a:b/", "http://a:99999/", "http://a:-1/", "http:///x",
        "http://?", "http://\udcff/", "http://127.0.0.1/\udcff", "http://127.0.0.1/?\udcff",
        "http://[v1.x]/", "http://[a.test]/", "http://[8.8.8.8]/", "http://a:0/", "http://-/",
        "http://a-.test/", "http://a.-b/", "http://256.256.256.256/", "http://a.1/",
        "http://\u2100/", "http://a<b/", "http://xn--\u00fc/", "http://@/", "http://%00/",
    ],
)  # fmt: skip
def test_malformed_urls_reject_the_row(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "RETRY_DELAY_S", 0.0)
    with pytest.raises(RowError) as caught:
        fetch(url)
    assert caught.value.reason == "bad_media"


def test_no_server(server: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/a.png"
    with pytest.raises(SourceError, match="3 attempts"):
        fetch(address)


INSIDE = [
    "127.0.0.1", "10.1.2.3", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "[::1]",
    "[fe80::1]", "[fd00::1]", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::]",
    "224.0.0.1", "100.64.0.1", "2130706433", "0x7f.1", "localhost", "[::]", "[ff0e::1]",
    "[64:ff9b:1::a00:1]", "[64:ff9b:1:808:8:800::]", "[::127.0.0.1]", "[::ffff:0:127.0.0.1]",
    "[::ffff:0:8.8.8.8]", "[fec0::1]", "[2001:0:a00:1::]", "[2001:0:808:808:0:0:80ff:fffe]",
    "168.63.129.16", "192.88.99.1", "[3fff::1]", "[2002:a83f:8110::]", "[::ffff:168.63.129.16]",
    "[2600::5efe:10.0.0.1]", "[2600::200:5efe:127.0.0.1]", "[4000::1]", "[::ffff:224.0.0.1]",
]  # fmt: skip


@pytest.mark.parametrize("host", INSIDE)
def test_private_addresses_are_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(web, "RETRY_DELAY_S", 0.0)
    with pytest.raises(RowError, match="public internet"):
        fetch(f"http://{host}:8080/a.png", private=False)


@pytest.mark.parametrize("text", ["8.8.8.8", "2600::1", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_allowed(text: str) -> None:
    assert web._is_public(ipaddress.ip_address(text))


def test_a_name_is_resolved_once_and_every_address_checked(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host with a public and a private address, and one whose address changes."""
    port = int(server.rpartition(":")[2])
    hosts = {"mixed.test": [["8.8.8.8", "127.0.0.1"]], "flips.test": [["8.8.8.8"], ["127.0.0.1"]]}
    connected = []

    def look_up(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        answers = hosts[host]
        now = answers.pop(0) if len(answers) > 1 else answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in now]

    def connect(address: Any, *args: Any, **kwargs: Any) -> Any:
        connected.append(address[0])
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RowError, match="public internet"):
        fetch("http://mixed.test/a.png", private=False)
    assert connected == []
    monkeypatch.setattr(web, "MAX_ATTEMPTS", 1)
    with pytest.raises(SourceError):
        fetch("http://flips.test/a.png", private=False)
    assert connected == ["8.8.8.8"]


def test_a_redirect_to_a_private_address(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = server.rpartition(":")[2]
    real = socket.getaddrinfo

    def look_up(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "public.test":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", int(port)))]
        return real(host, *args, **kwargs)

    connect = socket.create_connection
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(
        socket, "create_connection", lambda to, **more: connect(("127.0.0.1", int(port)), **more)
    )
    assert fetch(f"http://public.test:{port}/a.png", private=False) == BODY
    with pytest.raises(RowError, match="which is not an address of the public internet"):
        fetch(f"http://public.test:{port}/to/http://127.0.0.1:{port}/a.png", private=False)
