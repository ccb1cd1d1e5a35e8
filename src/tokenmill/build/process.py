"""A worker process as its parent sees it.

The interpreter is started with ``-c`` and not with ``-m``: the parent's own ``sys.path`` is put in
place after a clean start-up. So the worker imports exactly the parent's tokenmill, runs nothing of
the working directory or the user's script, and is pinned before any library is loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenmill.build import wire
from tokenmill.errors import WorkerError

BOOT = (
    "import json, os, sys; given = json.loads(sys.argv[1]); "
    "given['core'] is None or os.sched_setaffinity(0, [given['core']]); "
    "sys.path[:] = given['path']; "
    "from tokenmill.build.worker_main import main; main(given)"
)

TAIL_BYTES = 1 << 14  # of a worker's output are kept: the end of a traceback, not a flood
SHOWN_LINES = 8  # of them are shown in an error's message
READ_BYTES = 1 << 18  # at once, so that a flood of output costs few calls
END_S = 5.0  # seconds a killed process may take to be gone before it is left to the system

_TOKENMILL_ROOT = str(Path(__file__).resolve().parents[2])


def import_path() -> list[str]:
    """Return the parent's ``sys.path`` for a worker, absolute and without the working directory.

    Where tokenmill itself was imported from the working directory, that directory is added.
    """
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    if _TOKENMILL_ROOT not in map(os.path.realpath, path):
        path.insert(0, _TOKENMILL_ROOT)
    return path


class WorkerProcess:
    def __init__(self, number: int, core: int | None, beat_s: float) -> None:
        if not sys.executable:
            raise WorkerError(
                "no Python interpreter to start workers with (sys.executable is empty); "
                "use executor='inline'"
            )
        self.number = number
        self.is_ready = False
        self.silent_s = 0.0  # since its last frame, counted only while the parent listened
        self.idle_s = 0.0  # of these, since its CPU time last moved
        self.cpu_ticks: int | None = None
        self.ending = ""  # why it ends, where its exit code alone would not say
        self._frames = wire.Frames()
        self.outgoing = bytearray()  # frames, or the rest of one, that are not sent yet
        self._tail = bytearray()
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            self.channel, channel = socket.socketpair()
            ours.callback(self.channel.close)
            theirs.callback(channel.close)
            lifeline, self._lifeline = os.pipe()
            ours.callback(os.close, self._lifeline)
            theirs.callback(os.close, lifeline)
            self.output, output = os.pipe()
            ours.callback(os.close, self.output)
            theirs.callback(os.close, output)
            self.channel.setblocking(False)
            os.set_blocking(self.output, False)
            given = {
                "channel": channel.fileno(),
                "lifeline": lifeline,
                "core": core,
                "beat_s": beat_s,
                "parent": os.getpid(),
                "path": import_path(),
            }
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", BOOT, json.dumps(given)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(channel.fileno(), lifeline),
                    start_new_session=True,  # Ctrl-C on a terminal reaches the parent alone
                )
            except OSError as error:
                raise WorkerError(f"a worker process cannot be started: {error}") from error
            self._release = ours.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: wire.Down) -> None:
        self.outgoing += wire.frame(message)
        self.flush()

    def flush(self) -> None:
        while self.outgoing:
            try:
                # Never SIGPIPE: command-line hosts reset its handler, and it would kill them.
                sent = self.channel.send(self.outgoing, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:  # it died; reading the channel will tell
                self.outgoing.clear()
                return
            del self.outgoing[:sent]

    def receive(self) -> tuple[bool, Iterator[wire.Up]]:
        """Return whether the channel is still open, and the messages received."""
        is_open = True
        while True:
            try:
                data = self.channel.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                is_open = False
                break
            self._frames.feed(data)
        return is_open, self._frames.ups()

    def drain_output(self) -> bool:
        """Read what it printed and keep the end of it; False when nothing more can come."""
        while True:
            try:
                data = os.read(self.output, READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._tail += data
            if len(self._tail) > TAIL_BYTES:
                del self._tail[:-TAIL_BYTES]
            if len(data) < READ_BYTES:
                return True

    def last_output(self) -> str:
        """Return the last lines it printed, for the end of an error message."""
        text = bytes(self._tail).decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
        return "".join(f"\n    | {line}" for line in ["its last output:", *lines]) if lines else ""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def read_cpu(self) -> tuple[str, int]:
        """Return its state letter and CPU time in ticks; ("?", -1) where /proc is missing."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return "?", -1
        return fields[0].decode(), int(fields[11]) + int(fields[12])

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, grace_s: float) -> int | None:
        """Return its exit code; it is killed if it takes longer than `grace_s`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(grace_s)
        self._process.kill()
        # One that hangs in the kernel (a dead network mount) is not worth hanging for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_S)
        return None

    def release(self) -> None:
        """Close the descriptors of this process, and nothing else."""
        self._release.close()


def describe_exit(code: int | None) -> str:
    if code is None:
        return "did not end even when killed"
    if code == -signal.SIGKILL:
        return (
            "killed by SIGKILL, which tokenmill did not send: probably out of memory "
            "(hint: fewer num_workers)"
        )
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}"
    return f"exited with code {code}"
