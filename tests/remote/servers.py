"""An HTTP server with ranges on loopback, which injects faults and counts requests.

`RangeServer` serves the files of a directory with ranges, ETag and Last-Modified. It uses one of
`faults` per request: ``drop`` closes the connection in the middle of the body, an integer is sent
as the status.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

import xxhash


class RangeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.faults: list[str | int] = []
        self.requests: list[tuple[str, int]] = []  # (path, bytes of the body)
        self.without_ranges = False
        self.without_etag = False
        self.without_time = False
        self.lock = threading.Lock()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"

    @property
    def served(self) -> int:
        """Bytes of all response bodies so far."""
        return sum(size for _, size in self.requests)

    def reset(self) -> None:
        self.requests.clear()

    def next_fault(self) -> str | int | None:
        with self.lock:
            return self.faults.pop(0) if self.faults else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close the connection early."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    def answer(self, handler: Handler) -> bool:
        return False


class Handler(BaseHTTPRequestHandler):
    server: RangeServer
    fault: str | int | None = None
    protocol_version = "HTTP/1.1"
    # Without this, the body would wait 40 ms for the acknowledgement of the headers.
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        self.do_GET()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.fault = fault = self.server.next_fault()
        if isinstance(fault, int):
            self.status(fault)
        elif not self.server.answer(self):
            self.send_path(self.server.root / unquote(urlsplit(self.path).path).lstrip("/"), fault)

    def status(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_body(self, data: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def send_path(
        self,
        path: Path,
        fault: str | int | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if not path.is_file():
            self.status(404)
            return
        data = path.read_bytes()
        match = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        ranged = match is not None and not self.server.without_ranges
        start, stop = 0, len(data)
        if match is not None and ranged:
            start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
            if start >= len(data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        if not self.server.without_etag:
            self.send_header("ETag", f'"{xxhash.xxh3_64_hexdigest(data)}"')
        if not self.server.without_time:
            self.send_header("Last-Modified", formatdate(path.stat().st_mtime, usegmt=True))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(stop - start))
        body = data[start:stop] if self.command == "GET" else b""
        if fault == "drop":
            body = body[: len(body) // 2]
            self.close_connection = True
        # Counted before anything is sent, because a client may act on the headers alone.
        self.server.requests.append((self.path, len(body)))
        self.end_headers()
        with suppress(ConnectionError):  # the client may close the connection
            self.wfile.write(body)


@contextmanager
def serving(server: RangeServer) -> Iterator[RangeServer]:
    """Run a server in a thread."""
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
