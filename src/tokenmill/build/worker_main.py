"""The main function of a worker process: get ready once, then do one task after another.

Messages come and go over the *channel*, a socket; a thread sends the heartbeat. The *lifeline* is a
pipe on which nothing is ever sent: when its other end closes, the kernel itself kills this process,
even while a C extension holds the interpreter lock for minutes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

from tokenmill.build import wire
from tokenmill.build.tasks import Rest, Task, Work, close_work, foreign_error, open_work
from tokenmill.errors import TokenmillError

READ_BYTES = 1 << 16  # of the channel at once; frames are small

EXIT_OUT_OF_MEMORY = 12  # ENOMEM: the worker ends itself after a MemoryError, to start clean


class Sender:
    """Sends messages of several threads."""

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
        # Not the default SIGIO: a library may catch or block that one.
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLHUP)
    if poll.poll(0):  # it closed before the kernel was asked to tell
        os._exit(1)


def beat(sender: Sender, seconds: float, parent: int) -> None:
    """Send heartbeats; end this process when its parent is gone.

    A process that the parent forked may hold the lifeline open beyond the parent's death.
    """
    while True:
        time.sleep(seconds)
        if os.getppid() != parent:
            os._exit(1)
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
def reporting(sender: Sender, number: int | None, label: str = "") -> Iterator[None]:
    """Send the parent what a task raises; number None: while the worker gets ready."""
    try:
        yield
    except TokenmillError as error:
        sender.send(wire.Failed(number, wire.pack_error(error)))
    except MemoryError:
        traceback.print_exc()
        sender.send(wire.OutOfMemory())
        os._exit(EXIT_OUT_OF_MEMORY)
    except Exception as error:
        wrapped = foreign_error(Task(number or 0, {}, label), error)
        wrapped.__cause__ = error
        sender.send(wire.Failed(number, wire.pack_error(wrapped)))


class Doing:
    """One task after another; the rest of one is left to a thread while the next is done."""

    def __init__(self, work: Work, sender: Sender) -> None:
        self._work = work
        self._sender = sender
        self._rest: threading.Thread | None = None

    def do(self, message: wire.Assign) -> None:
        started = time.perf_counter()
        with reporting(self._sender, message.number, message.label):
            outcome = self._work(message.payload)
            if not callable(outcome):
                self._give(message, outcome, started)
                return
            self._wait()  # one rest at a time: what waits to be written is held in memory
            self._rest = threading.Thread(
                target=self._finish, args=(message, outcome, started), name="tokenmill-rest"
            )
            self._rest.start()
            self._sender.send(wire.Finishing(message.number))

    def close(self) -> None:
        self._wait()
        close_work(self._work)

    def _wait(self) -> None:
        if self._rest is not None:
            self._rest.join()

    def _finish(self, message: wire.Assign, rest: Rest, started: float) -> None:
        with ending_all(), reporting(self._sender, message.number, message.label):
            self._give(message, rest(), started)

    def _give(self, message: wire.Assign, result: dict[str, Any], started: float) -> None:
        # A result that has no encoding fails here, where the traceback is.
        result = wire.as_travelled(result)
        seconds = time.perf_counter() - started
        self._sender.send(wire.Finished(message.number, result, seconds))


def serve(channel: int, sender: Sender) -> None:
    doing: Doing | None = None
    for message in messages(channel):
        if isinstance(message, wire.Begin):
            with reporting(sender, None):
                doing = Doing(open_work(message.entry, message.options), sender)
            if doing is None:
                return
            gc.freeze()  # what was loaded stays, and is not looked at again
            sender.send(wire.Ready())
        elif doing is not None:
            doing.do(message)
            gc.collect()
    if doing is not None:
        doing.close()


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """End the process on any exception, SystemExit too."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(arguments: dict[str, Any]) -> None:
    die_with_parent(arguments["lifeline"])
    # A signal state inherited from the parent is the parent's business; Ctrl-C reaches only it.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # a crash in an engine leaves its Python frames in the parent's tail
    for fd in (arguments["channel"], arguments["lifeline"]):
        os.set_inheritable(fd, False)  # a child of a task must not hold the channel open
    # Collected by hand between two tasks, when little is alive: looks at a tokenizer that is being
    # loaded, or at a task's rows, find nothing and cost more than either.
    gc.disable()
    sender = Sender(arguments["channel"])
    threading.Thread(
        target=beat,
        args=(sender, arguments["beat_s"], arguments["parent"]),
        name="tokenmill-heartbeat",
        daemon=True,
    ).start()
    with ending_all():
        serve(arguments["channel"], sender)
    # Without the interpreter's tear-down, which some engines take seconds for.
    os._exit(0)
