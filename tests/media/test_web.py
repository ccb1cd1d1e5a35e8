"""Addresses: bounded, judged after every redirect, and never inside the network unless allowed."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tokenmill.errors import RowError, SourceError
from tokenmill.media import Limits, Pictures, reference_of, web

BODY = b"\x89PNG" + bytes(5000)


class Handler(http.server.BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.asked.append(self.path)
        name = self.path.strip("/")
        if name.startswith("to/") or name == "loop":
            self.send_response(302)
            target = name.removeprefix("to/")
            self.send_header("Location", target if "://" in target else f"/{target}")
            self.end_headers()
        elif name.isdecimal():
            self.send_response(int(name))
            self.end_headers()
        elif name == "later" and self.asked.count(self.path) < 3:
            self.send_response(503)
            self.end_headers()
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
    monkeypatch.setattr(web, "PAUSE", 0.0)
    Handler.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.daemon_threads = True
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{made.server_address[1]}"
        made.shutdown()
        thread.join()


def fetch(url: str, **more: Any) -> bytes:
    limits = Limits(size=100_000, seconds=more.pop("seconds", 20.0), redirects=3)
    pictures = Pictures(urls=True, private=more.pop("private", True), limits=limits)
    return pictures.read(reference_of(url))


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
        ("to/file:///etc/hostname", "no address"),
        ("to/ftp://127.0.0.1/a", "no address"),
    ],
)
def test_refused_for_good(server: str, path: str, words: str) -> None:
    with pytest.raises(RowError, match=words) as caught:
        fetch(f"{server}/{path}")
    assert caught.value.reason == "bad_media"


@pytest.mark.parametrize("path", ["500", "503", "429", "short", "slow"])
def test_no_row_is_rejected_for_the_weather(server: str, path: str) -> None:
    with pytest.raises(SourceError, match="3 attempts") as caught:
        fetch(f"{server}/{path}", seconds=0.3)
    assert not isinstance(caught.value, RowError)
    assert len(Handler.asked) == web.ATTEMPTS


def test_no_server(server: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/a.png"
    with pytest.raises(SourceError, match="3 attempts"):
        fetch(address)


INSIDE = [
    "127.0.0.1", "10.1.2.3", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "[::1]",
    "[fe80::1]", "[fd00::1]", "[::ffff:10.0.0.1]", "[64:ff9b::a00:1]", "[2002:a00:1::]",
    "224.0.0.1", "100.64.0.1", "2130706433", "0x7f.1", "localhost",
]  # fmt: skip


@pytest.mark.parametrize("host", INSIDE)
def test_inside_the_network(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("connected")

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(web, "PAUSE", 0.0)
    with pytest.raises(RowError, match="public internet"):
        fetch(f"http://{host}:8080/a.png", private=False)


def test_a_name_is_looked_up_once_and_every_address_judged(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a public and a private address, and one that changes its mind."""
    port = int(server.rpartition(":")[2])
    answers = {"mixed.test": [["8.8.8.8", "127.0.0.1"]], "flips.test": [["8.8.8.8"], ["127.0.0.1"]]}
    connected = []

    def look_up(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        found = answers[host]
        now = found.pop(0) if len(found) > 1 else found[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in now]

    def connect(address: Any, *args: Any, **kwargs: Any) -> Any:
        connected.append(address[0])
        raise ConnectionRefusedError("nobody there")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(RowError, match="public internet"):
        fetch("http://mixed.test/a.png", private=False)
    assert connected == []
    monkeypatch.setattr(web, "ATTEMPTS", 1)
    with pytest.raises(SourceError):
        fetch("http://flips.test/a.png", private=False)
    assert connected == ["8.8.8.8"]


def test_a_redirect_into_the_network(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address is allowed, the one it leads to is judged again."""
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
