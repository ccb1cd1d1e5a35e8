"""A large JSONL over HTTP, prepared without a local copy; a store read from a server.

The file is served by ranges on loopback, from this process; `tokenmill prepare` runs in another,
with two workers. *Temporary disk* is everything the preparation writes that is not the published
store: its temporary directory and, of the cache, all but ``slices``, ``stores`` and ``tokenizers``
(so staging, row indexes and kept blocks count). It is summed over allocated blocks twenty times a
second, and the peak is the figure. ``TOKENMILL_BENCH_REMOTE_BYTES`` makes the file smaller.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.data import shared
from benchmarks.measure import tokenmill, watched
from benchmarks.report import Report, seconds
from benchmarks.text import write_rows

SIZE = int(os.environ.get("TOKENMILL_BENCH_REMOTE_BYTES", 1_000_000_000))  # bytes of the file
MAX_TEMPORARY = 100  # MB
STORE = ("slices", "stores", "tokenizers")
SAMPLE_S = 0.05
ROWS = 2_000  # random rows read from the served store


class _Server(ThreadingHTTPServer):
    """Serves a directory by ranges and counts what it sent."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.sent = 0
        self.answers = 0


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing: a benchmark's output is its figures."""

    def do_GET(self) -> None:
        path = self.server.root / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        status = path.stat()
        match = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        start, stop = 0, status.st_size
        if match:
            start, stop = int(match[1]), min(int(match[2]) + 1, status.st_size)
        self.send_response(206 if match else 200)
        if match:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{status.st_size}")
        self.send_header("ETag", f'"{status.st_mtime_ns}-{status.st_size}"')
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        with open(path, "rb") as file:
            file.seek(start)
            self.wfile.write(file.read(stop - start))
        self.server.sent += stop - start
        self.server.answers += 1


@contextmanager
def _serving(root: Path) -> Iterator[_Server]:
    server = _Server(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _DiskWatch:
    """The peak of what some directories hold, in bytes allocated."""

    def __init__(self, cache: Path, temporary: Path) -> None:
        self.peak = 0
        self._cache, self._temporary = cache, temporary
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _DiskWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        roots = [self._temporary]
        if self._cache.is_dir():
            roots += [path for path in self._cache.iterdir() if path.name not in STORE]
        return sum(map(_allocated, roots))


def _allocated(root: Path) -> int:
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_blocks * 512
            except OSError:
                continue  # gone meanwhile
    return total


def run(report: Report) -> None:
    """Measure the preparation of a served file, and rows of a served store."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        home = Path(directory)
        web, temporary = home / "web", home / "tmp"
        web.mkdir()
        temporary.mkdir()
        write_rows(web / "rows.jsonl", SIZE)
        with _serving(web) as server:
            store = _prepare(report, server, home, temporary)
            _read(report, server, store, home)


def _prepare(report: Report, server: _Server, home: Path, temporary: Path) -> Path:
    source, cache = server.root / "rows.jsonl", home / "cache"
    megabytes = source.stat().st_size / 1e6
    flags = ("--tokenizer", str(shared() / "tokenizers" / "qwen3"), "--num-workers", "2", "--json")
    environment = {**os.environ, "TMPDIR": str(temporary)}

    def prepare(place: str, where: Path) -> tuple[float, dict[str, Any]]:
        command = tokenmill("prepare", place, "--cache-dir", str(where), *flags)
        done = watched(command, environment)
        return done.seconds, json.loads(done.stdout)

    with _DiskWatch(cache, temporary) as watch:
        spent, made = prepare(f"http://127.0.0.1:{server.server_port}/rows.jsonl", cache)
    local, same = prepare(str(source), home / "local")
    assert same["key"] == made["key"], "the same bytes must have the same key"
    report.figure("file served over HTTP", megabytes, "MB", note=f"{made['rows_out']:,} rows")
    report.figure("prepare over HTTP, peak of temporary disk", watch.peak / 1e6, "MB",
                  at_most=MAX_TEMPORARY, note="all but slices, stores and tokenizers")  # fmt: skip
    report.figure("prepare over HTTP, 2 workers", megabytes / spent, "MB/s")
    report.figure("prepare of the same file here, 2 workers", megabytes / local, "MB/s")
    report.figure("bytes served per byte of the file", server.sent / 1e6 / megabytes, "x",
                  note=f"{server.answers:,} requests: once to index, once to build")  # fmt: skip
    return Path(made["path"])


def _read(report: Report, server: _Server, store: Path, home: Path) -> None:
    """Random rows of a store on the server, first and from the block cache."""
    import random

    import tokenmill as tm

    tm.push(tm.open_store(store), str(server.root / "store"))
    url = f"http://127.0.0.1:{server.server_port}/store"
    remote = tm.open_store(url, cache_dir=home / "blocks")
    chosen = [random.Random(5).randrange(len(remote)) for _ in range(ROWS)]

    def read() -> None:
        for index in chosen:
            _ = remote[index].input_ids

    before = server.sent, server.answers
    first = seconds(read)
    sent, answers = server.sent - before[0], server.answers - before[1]
    report.figure("random rows of a served store, first", 1e6 * first / ROWS, "µs/row",
                  note=f"{answers:,} requests, {sent / 1e6:,.0f} MB")  # fmt: skip
    report.figure("random rows of a served store, again", 1e6 * seconds(read) / ROWS, "µs/row",
                  note="from the block cache")  # fmt: skip
    start = time.perf_counter()
    tm.open_store(url, cache_dir=home / "blocks")
    report.figure("open a served store, again", 1e3 * (time.perf_counter() - start), "ms")
