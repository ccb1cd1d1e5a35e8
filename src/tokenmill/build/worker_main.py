"""The main function of a worker process: get ready once, then do one task after another.

A task can leave a *rest* that waits for a disk. A thread does it while the next task is done, one
rest at a time; the task's result is what comes after it.

Over the *channel* (a socket) come `Begin` and `Assign` frames, and go results and a `Beat` every
second, sent by a thread so that a slow row does not look like a dead worker. The *lifeline* is a
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
    """The channel's upward half, shared by the main thread and the heartbeat."""

    def __init__(self, channel: int) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, message: wire.Up) -> None:
        data = memoryview(wire.frame(message))
        with self._lock:
            while data:
                data = data[os.write(self._channel, data) :]


def die_with_parent(lifeline: int) -> None:
    """Arrange to die when the lifeline's other end closes, without any help of this process."""
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
    """Say that this process is alive, for ever; end it when the parent is another one.

    The second is the net under the lifeline: a process that the parent forked holds a copy of
    the lifeline's other end, and could keep it open beyond the parent's death.
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
    """Messages of the parent, until it closes the channel."""
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


def get_ready(begin: wire.Begin, sender: Sender) -> Work | None:
    """Call the entry; on an error report it and give None."""
    try:
        return open_work(begin.entry, begin.options)
    except TokenmillError as error:
        sender.send(wire.Failed(None, wire.pack_error(error)))
        return None
    except MemoryError:
        sender.send(wire.OutOfMemory())
        os._exit(EXIT_OUT_OF_MEMORY)


class Doing:
    """One task after another; the rest of one is left to a thread while the next is done."""

    def __init__(self, work: Work, sender: Sender) -> None:
        self._work = work
        self._sender = sender
        self._rest: threading.Thread | None = None

    def do(self, message: wire.Assign) -> None:
        """Do one task and say how it went, or that only its rest is left."""
        started = time.perf_counter()
        with self._telling(message):
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
        with ending_all(), self._telling(message):
            self._give(message, rest(), started)

    def _give(self, message: wire.Assign, result: dict[str, Any], started: float) -> None:
        # The trip shows here, where the traceback is, that the result can travel.
        result = wire.as_travelled(result)
        seconds = time.perf_counter() - started
        self._sender.send(wire.Finished(message.number, result, seconds))

    @contextlib.contextmanager
    def _telling(self, message: wire.Assign) -> Iterator[None]:
        """Tell the parent of what a task raises."""
        try:
            yield
        except TokenmillError as error:
            self._sender.send(wire.Failed(message.number, wire.pack_error(error)))
        except MemoryError:
            traceback.print_exc()
            self._sender.send(wire.OutOfMemory())
            os._exit(EXIT_OUT_OF_MEMORY)
        except Exception as error:
            wrapped = foreign_error(Task(message.number, {}, message.label), error)
            wrapped.__cause__ = error
            self._sender.send(wire.Failed(message.number, wire.pack_error(wrapped)))


def serve(channel: int, sender: Sender) -> None:
    """Answer the parent's messages until it closes the channel."""
    doing: Doing | None = None
    for message in messages(channel):
        if isinstance(message, wire.Begin):
            work = get_ready(message, sender)
            if work is None:
                return
            doing = Doing(work, sender)
            gc.freeze()  # what was loaded stays, and is not looked at again
            sender.send(wire.Ready())
        elif doing is not None:
            doing.do(message)
            gc.collect()
    if doing is not None:
        doing.close()


@contextlib.contextmanager
def ending_all() -> Iterator[None]:
    """End the process of whatever gets this far: SystemExit too, leaving unasked is a failure."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(arguments: dict[str, Any]) -> None:
    """Run a worker; `WorkerProcess` gives the arguments."""
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
