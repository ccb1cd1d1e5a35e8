"""A worker process, as an object of its parent.

The interpreter starts with ``-c`` instead of ``-m``, and gets the parent's ``sys.path`` after a
clean start. So the worker imports the same tokenmill as its parent, runs nothing of the working
directory or the user's script, and is pinned to a core before any library is loaded.
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
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "  # the working directory, as -P does
    "import json, os; given = json.loads(sys.argv[1]); "
    "given['core'] is None or os.sched_setaffinity(0, [given['core']]); "
    "sys.path[:] = given['path']; "
    "from tokenmill.build.worker_main import main; main(given)"
)

TAIL_BYTES = 1 << 14  # of a worker's output that are kept: enough for the end of a traceback
SHOWN_LINES = 8  # of the output in an error message
READ_BYTES = 1 << 18  # per call
END_S = 5.0  # seconds to wait for a killed process

_TOKENMILL_ROOT = str(Path(__file__).resolve().parents[2])


def import_path() -> list[str]:
    """Return the parent's ``sys.path`` for a worker, absolute and without the working directory.

    If tokenmill was imported from the working directory, that directory is added.
    """
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    if _TOKENMILL_ROOT not in map(os.path.realpath, path):
        path.insert(0, _TOKENMILL_ROOT)
    return path


class WorkerProcess:
    def __init__(self, number: int, core: int | None, beat_s: float) -> None:
        if not sys.executable:
            raise WorkerError(
                "workers cannot be started because sys.executable is empty; set ",
                ("executor", "inline"),
            )
        self.number = number
        self.is_ready = False
        self.silent_s = 0.0  # since its last message; counts only while the parent reads
        self.idle_s = 0.0  # of these, without CPU time
        self.cpu_ticks: int | None = None
        self.ending = ""  # why it ended, if the exit code does not show it
        self._frames = wire.Frames()
        self.outgoing = bytearray()  # bytes of messages that are not sent yet
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
                    [sys.executable, "-c", BOOT, json.dumps(given)],
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
                # Without SIGPIPE, which would kill programs that reset its handler.
                sent = self.channel.send(self.outgoing, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:  # the worker died; `receive` notices it
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
        """Read what the worker printed and keep the end; return False at the end of the output."""
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
        """Return the last lines of output, for an error message."""
        text = bytes(self._tail).decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
        return "".join(f"\n    | {line}" for line in ["its last output:", *lines]) if lines else ""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def read_cpu(self) -> tuple[str, int]:
        """Return the process state and the CPU time in ticks; ("?", -1) without /proc."""
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
        """Return the exit code; kill the process after `grace_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(grace_s)
        self._process.kill()
        # A process that hangs in the kernel (a dead network mount) is not waited for.
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(END_S)
        return None

    def release(self) -> None:
        """Close the descriptors of this process, and nothing else."""
        self._release.close()


def describe_exit(code: int | None) -> str:
    if code is None:
        return "did not exit after SIGKILL"
    if code == -signal.SIGKILL:
        return (
            "killed by SIGKILL, which tokenmill did not send: probably out of memory "
            "(hint: use fewer num_workers)"
        )
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"killed by {name}"
    return f"exited with code {code}"
