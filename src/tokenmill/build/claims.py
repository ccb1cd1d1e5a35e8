"""Claims: how builders that run at the same time share the work instead of repeating it.

Before a builder hands a slice to a worker it leaves a *claim*: a small file named after the slice,
created exclusively, that says which process is at it. Others pass over slices with a live claim and
come back to them later. A claim is a courtesy, never a lock: correctness does not depend on it
(promise P3). Where claims cannot be written, are lost, or a clock is wrong, the price is a slice
built twice, and the second builder finds the same bytes published.

A claim is *live* while its process is (same machine: the process id with its start time exists;
another machine: the claim was refreshed within `FRESH_S`). A killed builder's claims die with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from types import TracebackType

import msgspec

from tokenmill.errors import CacheError
from tokenmill.files import make_directory

FRESH_S = 60.0  # seconds since the last refresh after which another machine's claim is dead
REFRESH_S = 10.0  # seconds between refreshes of one's own claims


class _Owner(msgspec.Struct, frozen=True):
    """Who is at a slice."""

    host: str
    pid: int
    started: int


class Claims:
    """The claims of one builder; leaving gives them all up.

    Args:
        root: The cache directory.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directory = root / "staging" / "claims"
        self._mine: set[str] = set()
        self._refreshed = time.monotonic()
        pid = os.getpid()
        self._me = _Owner(socket.gethostname(), pid, _start_time(pid) or 0)

    def __enter__(self) -> Claims:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for key in list(self._mine):
            self.release(key)

    def take(self, key: str) -> bool:
        """Claim a slice; False when a live builder has it."""
        path = self._directory / key
        for _ in range(2):
            try:
                make_directory(self._directory, self._root)
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                if self._is_live(path):
                    return False
                with contextlib.suppress(OSError):  # its owner is dead, so it belongs to nobody
                    path.unlink()
                continue
            except (OSError, CacheError):
                return True  # no claims here; the worst is a slice built twice
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(self._me))
            self._mine.add(key)
            return True
        return True

    def release(self, key: str) -> None:
        """Give a claim up; the slice is published, or somebody else may try."""
        if key in self._mine:
            self._mine.discard(key)
            with contextlib.suppress(OSError):
                (self._directory / key).unlink()

    def refresh(self) -> None:
        """Show other machines that this builder is alive; cheap to call often."""
        now = time.monotonic()
        if now - self._refreshed < REFRESH_S:
            return
        self._refreshed = now
        for key in self._mine:
            with contextlib.suppress(OSError):
                os.utime(self._directory / key)

    def _is_live(self, path: Path) -> bool:
        try:
            data, age = path.read_bytes(), time.time() - path.stat().st_mtime
        except OSError:
            return False
        try:
            owner = msgspec.json.decode(data, type=_Owner)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return age < FRESH_S  # created a moment ago and not yet written, or damaged
        if owner.host == self._me.host:
            return _start_time(owner.pid) == owner.started
        return age < FRESH_S


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is not there.

    Without it a process id that was given to another process would keep a claim alive.
    """
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
        # The command's name is in parentheses and may hold anything; fields count after it.
        return int(data.rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
