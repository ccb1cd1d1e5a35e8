"""Servers and worker processes, as objects of their parent; see docs/internals/build-workers.md."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenmill.build import wire
from tokenmill.errors import WorkerError

EXIT_OUT_OF_MEMORY = 12  # ENOMEM: a worker exits after a MemoryError; another one replaces it
BOOT = (
    "import sys; sys.path[:1] == [''] and sys.path.pop(0); "  # the working directory, as -P does
    "import json, os; given = json.loads(sys.argv[1]); "
    "given['core'] is None or os.sched_setaffinity(0, [given['core']]); "
    "sys.path[:] = given['path']; "
    "from tokenmill.build.worker_main import main; main(given)"
)

ARROW_VARIABLE = "JE_ARROW_MALLOC_CONF"
ARROW_VALUE = "background_thread:false"  # so that importing Arrow starts no thread

TAIL_BYTES = 1 << 14  # of a worker's output that are kept: enough for the end of a traceback
SHOWN_LINES = 8  # of the output in an error message
READ_BYTES = 1 << 18  # per call
END_S = 5.0  # seconds to wait for a killed process
ZOMBIE = "Z"  # state of a process that has ended and was not waited for

_TOKENMILL_ROOT = str(Path(__file__).resolve().parents[2])


def import_path() -> list[str]:
    """Return the parent's ``sys.path`` for a worker, absolute and without the working directory.

    If tokenmill was imported from the working directory, that directory is added.
    """
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    if _TOKENMILL_ROOT not in map(os.path.realpath, path):
        path.insert(0, _TOKENMILL_ROOT)
    return path


class _Peer:
    """Another process with a channel, and a lifeline whose end kills it."""

    def __init__(self) -> None:
        self._frames = wire.Frames()
        self.channel, channel = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        self.channel.setblocking(False)
        self.their_ends: list[Any] = [channel, lifeline]

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

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # the kernel sends SIGKILL
            self._lifeline.shutdown(socket.SHUT_RDWR)

    def close_their_ends(self) -> None:
        for end in self.their_ends:
            end.close()

    def release(self) -> None:
        """Close the descriptors of this process, and nothing else."""
        self.close_their_ends()
        self.channel.close()
        self._lifeline.close()


class WorkerProcess(_Peer):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.server: WorkerServer  # set by `WorkerServer.start`
        self.pid: int | None = None  # None: its server sets up
        self.has_exited = False
        self.exit_code: int | None = None
        self.silent_s = 0.0  # since its last message; counts only while the parent reads
        self.idle_s = 0.0  # of these, without CPU time
        self.cpu_ticks: int | None = None
        self.ending = ""  # why it ended, if the exit code does not show it
        self.outgoing = bytearray()  # bytes of messages that are not sent yet
        self._tail = bytearray()
        output, their_output = os.pipe()
        os.set_blocking(output, False)
        self.output = open(output, "rb", buffering=0)  # noqa: SIM115
        self.their_ends.append(open(their_output, "wb", buffering=0))  # noqa: SIM115

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

    def drain_output(self) -> bool:
        """Read what the worker printed and keep the end; return False at the end of the output."""
        while True:
            data = self.output.read(READ_BYTES)
            if not data:
                return data is None
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

    def read_cpu(self) -> tuple[str, int]:
        """Return the process state and the CPU time in ticks; ("?", -1) without /proc."""
        try:
            with open(f"/proc/{self.pid or self.server.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return "?", -1
        return fields[0].decode(), int(fields[11]) + int(fields[12])

    def kill(self) -> None:
        super().kill()
        if self.pid is None:
            self.server.kill()

    def release(self) -> None:
        super().release()
        self.output.close()


class WorkerServer(_Peer):
    def __init__(self, first: WorkerProcess, core: int | None, beat_s: float) -> None:
        if not sys.executable:
            raise WorkerError(
                "workers cannot be started because sys.executable is empty; set ",
                ("executor", "inline"),
            )
        super().__init__()
        self.has_exited = False
        self.starting: WorkerProcess | None = None
        self._workers: dict[int, WorkerProcess] = {}  # by process id
        channel, lifeline = (end.fileno() for end in self.their_ends)
        given = {
            "channel": channel,
            "lifeline": lifeline,
            "core": core,
            "beat_s": beat_s,
            "path": import_path(),
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=first.their_ends[-1],
                stderr=first.their_ends[-1],
                env={ARROW_VARIABLE: ARROW_VALUE, **os.environ},
                pass_fds=(channel, lifeline),
                start_new_session=True,  # Ctrl-C on a terminal reaches the parent alone
            )
        except OSError:
            for process in (self, first):
                process.release()
            raise
        self.close_their_ends()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_worker(self) -> bool:
        """Whether it could not fork: it runs the tasks of its only worker."""
        return self.pid in self._workers

    def start(self, worker: WorkerProcess, core: int | None) -> None:
        """Request a worker; there may be one request at a time."""
        self.starting, worker.server = worker, self
        request, ends = json.dumps(core).encode(), [end.fileno() for end in worker.their_ends]
        with contextlib.suppress(OSError):  # a dead server is noticed later
            socket.send_fds(self.channel, [request], ends, socket.MSG_NOSIGNAL)
        worker.close_their_ends()

    def listen(self) -> None:
        """Read which workers have started and which have exited."""
        is_open, messages = self.receive()
        for message in messages:
            if isinstance(message, wire.Started) and self.starting is not None:
                self.starting.pid = message.pid
                self._workers[message.pid], self.starting = self.starting, None
            elif isinstance(message, wire.Exited):
                worker = self._workers.pop(message.pid)
                worker.has_exited, worker.exit_code = True, message.code
        if not is_open and not self.has_exited:
            self.has_exited = True
            code = self._wait()
            for worker in [*self._workers.values(), *filter(None, [self.starting])]:
                worker.kill()
                worker.has_exited, worker.exit_code = True, code

    def wait(self, worker: WorkerProcess, grace_s: float) -> int | None:
        """Return the exit code of a worker; kill it after `grace_s` seconds."""
        # A process that hangs in the kernel (a dead network mount) is not waited for.
        for seconds in (grace_s, END_S, END_S):
            deadline = time.monotonic() + seconds
            while not worker.has_exited:
                poll = select.poll()  # `select` cannot wait for a descriptor above 1024
                poll.register(self.channel, select.POLLIN)
                if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                    is_unreaped = worker.read_cpu()[0] == ZOMBIE
                    (self if is_unreaped else worker).kill()  # a server that hangs reaps none
                    break
                self.listen()
        return worker.exit_code

    def stop(self) -> None:
        """End the server and all its workers."""
        if self.starting is None and not self.is_worker:
            self.finish()
        else:
            self.kill()
        self._wait()

    def _wait(self) -> int | None:
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(END_S)
            self._process.kill()
        return None


def describe_exit(code: int | None) -> str:
    if code is None:
        return "did not exit after SIGKILL"
    if code == EXIT_OUT_OF_MEMORY:
        return "ran out of memory (hint: use fewer num_workers)"
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
