"""The main function of a server and its workers: set up once, then run one task after another.

A server sets up with the messages of its first worker, and forks that worker and those of later
requests if it has one thread then. docs/internals/build-workers.md describes the sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import json
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from tokenmill._core.process import count_threads
from tokenmill.build import wire
from tokenmill.build.process import ARROW_VARIABLE, EXIT_OUT_OF_MEMORY
from tokenmill.build.tasks import Completion, Task, Work, close_work, foreign_error, open_work
from tokenmill.errors import TokenmillError

READ_BYTES = 1 << 16  # of the channel at once; frames are small
END_S = 1.0  # seconds in which a thread that was joined must have left the process


class Sender:
    """Sends messages from several threads."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, message: wire.Up) -> None:
        data = memoryview(wire.frame(message))
        with self._lock:
            while data:
                data = data[os.write(self._channel, data) :]


def die_with_parent(lifeline: int) -> None:
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        # Not the default SIGIO, which a library may catch or block.
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLHUP)
    if poll.poll(0):  # it was closed before the signal was set
        os._exit(1)


def collect_memory() -> None:
    """Collect garbage, and return free memory, of which each worker would keep up to 100 MB."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # only in glibc
        ctypes.CDLL(None).malloc_trim(0)


def exit_if_orphaned(parent: int) -> None:
    """Exit if the parent is gone: a forked child of it may keep the lifeline open."""
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def heartbeat(sender: Sender, seconds: float) -> Iterator[None]:
    stopped = threading.Event()
    arguments = sender, seconds, os.getppid(), stopped
    thread = threading.Thread(target=beat, args=arguments, name="tokenmill-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def beat(sender: Sender, seconds: float, parent: int, stopped: threading.Event) -> None:
    """Send heartbeats; exit when the parent is gone."""
    while not stopped.wait(seconds):
        exit_if_orphaned(parent)
        try:
            sender.send(wire.Beat())
        except OSError:
            os._exit(1)


def messages(channel: int) -> Iterator[wire.Down]:
    frames = wire.Frames()
    while True:
        try:
            data = os.read(channel, READ_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        frames.feed(data)
        yield from frames.downs()


@contextlib.contextmanager
def report_errors(sender: Sender, number: int | None, label: str = "") -> Iterator[None]:
    """Send exceptions to the parent; ``number`` is None while the worker sets up."""
    try:
        yield
    except TokenmillError as error:
        sender.send(wire.Failed(number, wire.pack_error(error)))
    except MemoryError:
        traceback.print_exc()
        os._exit(EXIT_OUT_OF_MEMORY)
    except Exception as error:
        wrapped = foreign_error(Task(number or 0, {}, label), error)
        wrapped.__cause__ = error
        sender.send(wire.Failed(number, wire.pack_error(wrapped)))


class Worker:
    """Runs the tasks of a channel; the completion of a task runs in a thread beside the next."""

    def __init__(self, channel: int, beat_s: float) -> None:
        self._sender = Sender(channel)
        self._messages = messages(channel)
        self._beat_s = beat_s
        self._thread: threading.Thread | None = None

    def set_up(self) -> Work | None:
        """Load what the tasks need; return None if the parent ended or was sent an error."""
        with heartbeat(self._sender, self._beat_s), report_errors(self._sender, None):
            begin = next(self._messages, None)
            return open_work(begin.entry, begin.options) if isinstance(begin, wire.Begin) else None
        return None

    def serve(self, work: Work) -> None:
        with heartbeat(self._sender, self._beat_s):
            for message in self._messages:
                if isinstance(message, wire.Assign):  # not `Begin`, with which the server set up
                    self._run(work, message)
                    collect_memory()
            self._wait()
            close_work(work)

    def _run(self, work: Work, message: wire.Assign) -> None:
        started = time.perf_counter()
        with report_errors(self._sender, message.number, message.label):
            outcome = work(message.payload)
            if not callable(outcome):
                self._send_result(message, outcome, started)
                return
            self._wait()  # one completion at a time: unwritten data is in memory
            self._thread = threading.Thread(
                target=self._finish, args=(message, outcome, started), name="tokenmill-completion"
            )
            self._thread.start()
            self._sender.send(wire.Finishing(message.number))

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _finish(self, message: wire.Assign, completion: Completion, started: float) -> None:
        with exit_on_error(), report_errors(self._sender, message.number, message.label):
            self._send_result(message, completion(), started)

    def _send_result(self, message: wire.Assign, result: dict[str, Any], started: float) -> None:
        # A result that cannot be encoded must fail here, where the traceback is.
        result = wire.deserialize(result)
        seconds = time.perf_counter() - started
        self._sender.send(wire.Finished(message.number, result, seconds))


class Server:
    """Starts a worker for each request of the parent, and reports those that exit."""

    def __init__(self, channel: int, lifeline: int, beat_s: float) -> None:
        self._channel = socket.socket(fileno=channel)
        self._lifeline = lifeline
        self._sender = Sender(channel)
        self._beat_s = beat_s
        self._parent = os.getppid()
        self._children: dict[int, int] = {}  # process ids by pidfd

    def run(self) -> None:
        """Return when there is no more work for this process, a server or a worker."""
        work: Work | None = None
        while (request := self._next()) is not None:
            core, (channel, lifeline, output) = request
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            worker = Worker(channel, self._beat_s)
            if work is None:
                if (work := worker.set_up()) is None:
                    return
                os.environ.pop(ARROW_VARIABLE, None)  # not for children of a task
                collect_memory()
                gc.freeze()  # loaded objects stay; the collector need not visit them
                can_fork = _can_fork()
            pid = os.fork() if can_fork else os.getpid()
            if pid == 0:
                self._channel.close()
                os.close(self._lifeline)
                if core is not None:
                    os.sched_setaffinity(0, [core])
            else:
                self._sender.send(wire.Started(pid))
            if pid == 0 or not can_fork:
                die_with_parent(lifeline)
                worker.serve(work)
                return
            self._children[os.pidfd_open(pid)] = pid
            os.close(channel)
            os.close(lifeline)

    def _next(self) -> tuple[int | None, list[int]] | None:
        """Return the next request and its descriptors; None when the parent needs no more."""
        while True:
            poll = select.poll()
            for fd in (self._channel.fileno(), *self._children):
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(self._beat_s * 1000)}
            exit_if_orphaned(self._parent)
            for pidfd in ready & self._children.keys():
                pid = self._children.pop(pidfd)
                os.close(pidfd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                self._sender.send(wire.Exited(pid, code))
            if self._channel.fileno() not in ready:
                continue
            data, descriptors, _, _ = socket.recv_fds(self._channel, READ_BYTES, 3)
            if not data:
                for pid in self._children.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return None
            for fd in descriptors:
                os.set_inheritable(fd, False)  # not for children of a task
            return json.loads(data), descriptors


def _can_fork() -> bool:
    """Whether this process has one thread; one that was joined may need a moment to end."""
    deadline = time.monotonic() + END_S
    while count_threads() > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, or an old one
        return False
    return count_threads() == 1


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit the process on any exception, including SystemExit."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(arguments: dict[str, Any]) -> None:
    die_with_parent(arguments["lifeline"])
    # Reset the inherited signal state. Ctrl-C is handled by the parent.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, workers could not be waited for
    faulthandler.enable()  # a crash in an engine prints its Python frames
    for fd in (arguments["channel"], arguments["lifeline"]):
        os.set_inheritable(fd, False)  # a child of a task must not keep the channel open
    # Garbage is collected between tasks, when few objects are alive. Collections while a tokenizer
    # is loaded or a task runs find nothing and are slow.
    gc.disable()
    with exit_on_error():
        Server(arguments["channel"], arguments["lifeline"], arguments["beat_s"]).run()
    # Skip the interpreter's tear-down, which takes seconds with some engines.
    os._exit(0)
