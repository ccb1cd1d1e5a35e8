"""The main function of a worker process: set up once, then run one task after another.

Messages use the *channel*, a socket; a thread sends the heartbeat. Nothing is sent on the
*lifeline*, a pipe: when its other end closes, the kernel kills this process, even while a C
extension holds the interpreter lock.
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
from tokenmill.build.tasks import Completion, Task, Work, close_work, foreign_error, open_work
from tokenmill.errors import TokenmillError

READ_BYTES = 1 << 16  # of the channel at once; frames are small

EXIT_OUT_OF_MEMORY = 12  # ENOMEM: the worker exits after a MemoryError; another one replaces it


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


def beat(sender: Sender, seconds: float, parent: int) -> None:
    """Send heartbeats; exit when the parent is gone.

    A forked child of the parent may keep the lifeline open after the parent's death.
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
def report_errors(sender: Sender, number: int | None, label: str = "") -> Iterator[None]:
    """Send exceptions to the parent; ``number`` is None while the worker sets up."""
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


class TaskRunner:
    """Runs tasks; the completion of a task runs in a thread beside the next task."""

    def __init__(self, work: Work, sender: Sender) -> None:
        self._work = work
        self._sender = sender
        self._thread: threading.Thread | None = None

    def run(self, message: wire.Assign) -> None:
        started = time.perf_counter()
        with report_errors(self._sender, message.number, message.label):
            outcome = self._work(message.payload)
            if not callable(outcome):
                self._send_result(message, outcome, started)
                return
            self._wait()  # one completion at a time: unwritten data is in memory
            self._thread = threading.Thread(
                target=self._finish, args=(message, outcome, started), name="tokenmill-completion"
            )
            self._thread.start()
            self._sender.send(wire.Finishing(message.number))

    def close(self) -> None:
        self._wait()
        close_work(self._work)

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


def serve(channel: int, sender: Sender) -> None:
    runner: TaskRunner | None = None
    for message in messages(channel):
        if isinstance(message, wire.Begin):
            with report_errors(sender, None):
                runner = TaskRunner(open_work(message.entry, message.options), sender)
            if runner is None:
                return
            gc.freeze()  # loaded objects stay; the collector need not visit them
            sender.send(wire.Ready())
        elif runner is not None:
            runner.run(message)
            gc.collect()
    if runner is not None:
        runner.close()


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
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # a crash in an engine prints its Python frames
    for fd in (arguments["channel"], arguments["lifeline"]):
        os.set_inheritable(fd, False)  # a child of a task must not keep the channel open
    # Garbage is collected between tasks, when few objects are alive. Collections while a tokenizer
    # is loaded or a task runs find nothing and are slow.
    gc.disable()
    sender = Sender(arguments["channel"])
    threading.Thread(
        target=beat,
        args=(sender, arguments["beat_s"], arguments["parent"]),
        name="tokenmill-heartbeat",
        daemon=True,
    ).start()
    with exit_on_error():
        serve(arguments["channel"], sender)
    # Skip the interpreter's tear-down, which takes seconds with some engines.
    os._exit(0)
