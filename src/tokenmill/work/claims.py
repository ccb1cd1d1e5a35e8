"""Claims: how builders that run at the same time share the work instead of repeating it.

Before a builder hands a slice to a worker it leaves a *claim*: a symbolic link named after the
slice whose text says which process is at it (a link, because it appears whole in one step; it is
never followed). Others pass over slices with a live claim and come back to them later. A claim
saves work and is no lock: correctness does not depend on it (promise P3). Where claims cannot be
written, are lost, or a clock is wrong, the price is a slice built twice, and the second builder
finds the same bytes published. Blocks of prompts that are measured and questions about a tokenizer
are claimed the same way.

A claim is *live* while its owner shows it: a process of this machine must exist and not be a
zombie; and wherever it runs it touches its claims every `REFRESH_S`. A watcher that sees a claim
untouched for `PATIENCE_S` by its own clock takes it over, so a builder that was stopped, hangs or
sits on a machine that was unplugged holds nobody up for longer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import msgspec

from tokenmill.errors import CacheError
from tokenmill.files import make_directory

REFRESH_S = 5.0  # seconds between touches of one's own claims
PATIENCE_S = 30.0  # seconds without a touch after which a claim is taken over: several touches


class _Owner(msgspec.Struct, frozen=True):
    """Who is at a slice."""

    host: str
    pid: int
    started: int


class Claims:
    """The claims of one builder in a cache; leaving gives them all up."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directory = root / "staging" / "claims"
        self._mine: set[str] = set()
        self._watched: dict[str, tuple[object, float]] = {}  # another's claim, and since when
        pid = os.getpid()
        self._me = _Owner(socket.gethostname(), pid, _start_time(pid) or 0)
        self._text = msgspec.json.encode(self._me).decode()
        self._over = threading.Event()
        self._toucher = threading.Thread(
            target=self._touch_for_ever, name="tokenmill-claims", daemon=True
        )

    def __enter__(self) -> Claims:
        self._toucher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._toucher.join()
        for key in list(self._mine):
            self.release(key)

    def take(self, key: str) -> bool:
        """Claim a slice; False when a live builder has it."""
        path = self._directory / key
        for _ in range(2):
            try:
                make_directory(self._directory, self._root)
                os.symlink(self._text, path)
            except FileExistsError:
                if key in self._mine:
                    return True
                if self._is_live(key, path):
                    return False
                with contextlib.suppress(OSError):  # nobody is at it any more
                    path.unlink()
                continue
            except (OSError, CacheError):
                return True  # no claims here; the worst is a slice built twice
            self._mine.add(key)
            return True
        return True

    def release(self, key: str) -> None:
        """Give a claim up; the slice is published, or somebody else may try."""
        if key not in self._mine:
            return
        self._mine.discard(key)
        if os.getpid() != self._me.pid:
            return  # a forked child has none
        path = self._directory / key
        with contextlib.suppress(OSError):
            # Whoever took it over while we were stopped keeps it.
            if os.readlink(path) == self._text:
                path.unlink()

    def _touch_for_ever(self) -> None:
        while not self._over.wait(REFRESH_S):
            for key in list(self._mine):
                with contextlib.suppress(OSError):
                    os.utime(self._directory / key, follow_symlinks=False)

    def _is_live(self, key: str, path: Path) -> bool:
        try:
            text, touched = os.readlink(path), path.lstat().st_mtime_ns
        except OSError:
            return False  # given up a moment ago, or nothing that one of us made
        with contextlib.suppress(msgspec.MsgspecError, UnicodeError):
            owner = msgspec.json.decode(text, type=_Owner)
            if owner.host == self._me.host and _start_time(owner.pid) != owner.started:
                self._watched.pop(key, None)
                return False
        # Only differences of our own clock count: the other machine's may be wrong.
        now, sign = time.monotonic(), (text, touched)
        known, since = self._watched.get(key, (None, now))
        if known != sign:
            self._watched[key] = sign, now
            return True
        if now - since < PATIENCE_S:
            return True
        del self._watched[key]
        return False


def _start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is not there or dead.

    Without it a process id that was given to another process would keep a claim alive. A zombie
    is dead, however long its parent takes to notice.
    """
    try:
        data = Path(f"/proc/{pid}/stat").read_bytes()
        # The command's name is in parentheses and may hold anything; fields count after it.
        fields = data.rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
