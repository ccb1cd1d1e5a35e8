"""What a Ray worker process does for a build: one task, or a look at a directory.

`do_task` is the remote function. It gets a setup and a task as encoded frames, opens the setup's
work once per process and keeps it for the next task (a tokenizer takes a second to load), and
gives back the name of the worker and an encoded answer. A typed error is such an answer too, so it
arrives as itself and not wrapped by Ray. Only a *transient* trouble is raised, as `Transient`,
which is listed as retryable: too little memory, or a network file system that was away.

A Ray worker belongs to the user's job and may run other tasks next, so nothing of ours stays: the
core that a task is pinned to is given back after it, and work that nobody asked for during
`IDLE_S` is closed and forgotten.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import ray

from tokenmill.errors import CacheError, SourceMissing, TokenmillError, WorkerError
from tokenmill.files import ProcessLock, write_file
from tokenmill.fingerprint import checksum
from tokenmill.work import Task, wire
from tokenmill.work.cores import allowed_cores
from tokenmill.work.tasks import (
    Work,
    close_work,
    finish,
    foreign_error,
    open_work,
    private_bytes,
)

IDLE_S = 60.0  # seconds without a task after which loaded work is forgotten: memory is the job's
MOST_HELD = 2  # works kept at once: one that derives and one that builds
SEEN_S = 5.0  # seconds a network file system may take to show a new file to another machine

AWAY = {
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ECONNRESET,
    errno.ENOTCONN,
}
"""What a network file system says while it is away, and what passes."""

Sentinel = tuple[str, str]
"""A file that the caller wrote below a shared directory, and what it holds."""

_held: dict[str, Work] = {}
_seen: set[Sentinel] = set()
_lock = ProcessLock()
_timer: threading.Timer | None = None
_core: tuple[int, socket.socket | None] | None = None


class Transient(Exception):
    """Trouble that may be over at the next attempt.

    Args:
        message: For Ray's log.
        answer: Encoded: what the caller is told after the last attempt.
    """

    def __init__(self, message: str, answer: bytes) -> None:
        super().__init__(message, answer)  # both, so that it can be pickled
        self.answer = answer

    def __str__(self) -> str:
        return str(self.args[0])


def place() -> str:
    """This node as a person would find it."""
    return f"node {ray.util.get_node_ip_address()} ({socket.gethostname()})"


class Call(NamedTuple):
    """How a task is to be done.

    Attributes:
        sentinels: Must be seen here.
        stop: Once this file is there, nobody wants the result; empty: there is no such file.
        pin: Stay on one core meanwhile.
    """

    sentinels: list[Sentinel]
    stop: str
    pin: bool


def do_task(begin: bytes, work: bytes, call: Call) -> tuple[str, int, bytes]:
    """Do one task: (node, process id, the encoded answer)."""
    setup = next(_downs(begin))
    asked = next(_downs(work))
    assert isinstance(setup, wire.Begin)
    assert isinstance(asked, wire.Assign)
    with _pinned(call.pin):
        answer = _answer(setup, checksum(begin), asked, call)
    return ray.get_runtime_context().get_node_id(), os.getpid(), wire.frame(answer)


def _downs(data: bytes) -> Iterator[wire.Down]:
    frames = wire.Frames()
    frames.feed(data)
    return frames.downs()


def _answer(
    setup: wire.Begin, key: str, asked: wire.Assign, call: Call
) -> wire.Finished | wire.Failed:
    task = Task(asked.number, asked.payload, asked.label)
    try:
        if call.stop and os.path.exists(call.stop):
            raise WorkerError(f"{task} was not begun: the caller stopped")
        for sentinel in call.sentinels:
            _require_shared(sentinel)
        with _opened(setup, key) as work:
            started = time.perf_counter()
            # The trip shows here, where the traceback is, that the result can travel.
            result = wire.as_travelled(finish(work(asked.payload)))
            seconds = time.perf_counter() - started
        return wire.Finished(asked.number, result, seconds, private_bytes())
    except TokenmillError as error:
        return _failed(task, error)
    except MemoryError:
        _forget()
        gc.collect()
        message = f"{task}: out of memory on {place()} (hint: fewer num_workers)"
        failure = wire.pack_error(WorkerError(message))
        raise Transient(message, wire.frame(wire.Failed(asked.number, failure))) from None
    except Exception as error:
        wrapped = foreign_error(task, error)
        wrapped.__cause__ = error
        return _failed(task, wrapped)


def _failed(task: Task, error: TokenmillError) -> wire.Failed:
    if isinstance(error, SourceMissing):
        error.message += (
            f" on {place()}: every node must see the sources under the same path, so keep them on "
            "a shared file system or fetch them to every node"
        )
    error.add_note(f"on {place()}, at {task}")
    answer = wire.Failed(task.number, wire.pack_error(error))
    if _is_away(error):
        raise Transient(str(error), wire.frame(answer)) from error
    return answer


def _is_away(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in AWAY:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _opened(setup: wire.Begin, key: str) -> Iterator[Work]:
    """The setup's work, opened once per process; whatever interrupts it makes it suspect."""
    global _timer
    with _lock:
        if _timer is not None:
            _timer.cancel()
        work = _held.pop(key, None)
    keep = False
    try:
        if work is None:
            work = open_work(setup.entry, setup.options)
        yield work
        keep = True
    except TokenmillError:
        keep = True
        raise
    finally:
        with _lock:
            if keep and work is not None:
                _held[key] = work
            while len(_held) > MOST_HELD:
                close_work(_held.pop(next(iter(_held))))
            _timer = threading.Timer(IDLE_S, _forget)
            _timer.daemon = True
            _timer.start()


def _forget() -> None:
    """Close and drop all work that is loaded and not in use."""
    with _lock:
        while _held:
            close_work(_held.popitem()[1])


def _require_shared(sentinel: Sentinel) -> None:
    """Once per process and caller: also a node that joined after the probe is looked at."""
    if sentinel in _seen:
        return
    why = sees(sentinel)
    if why:
        raise CacheError(why, path=Path(sentinel[0]).parents[2])
    _seen.add(sentinel)


def sees(sentinel: Sentinel) -> str:
    """Why this node does not share the sentinel's directory with the caller; empty if it does."""
    path, nonce = Path(sentinel[0]), sentinel[1]
    until = time.monotonic() + SEEN_S
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == nonce:
                return ""
        # A parent that another look had cached as empty shows new names only after a listing.
        with contextlib.suppress(OSError):
            os.listdir(path.parent.parent)
        if time.monotonic() > until:
            return (
                f"this directory is not shared: {place()} does not see what the caller writes "
                "there; choose a cache_dir on a file system that every node mounts"
            )
        time.sleep(0.1)


def look(sentinels: list[Sentinel]) -> dict[str, str]:
    """What the probe wants to know of a node: where, which tokenmill, what is wrong."""
    trouble = ""
    for sentinel in sentinels:
        trouble = trouble or sees(sentinel) or _cannot_write(Path(sentinel[0]).parent)
    return {"place": place(), "code": code_digest(), "trouble": trouble}


def code_digest() -> str:
    """Digest of this tokenmill's own modules: equal code makes equal bytes."""
    package = Path(__file__).parents[2]
    modules = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    return checksum(b"".join(name.encode() + (package / name).read_bytes() for name in modules))


def _cannot_write(directory: Path) -> str:
    name = f"{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
    try:
        write_file(directory / name, b"")
    except CacheError as error:
        return f"{place()}: {error.message}"
    return ""


def ping() -> None:
    """Nothing: that it ran shows that a task of its size finds a CPU."""


@contextlib.contextmanager
def _pinned(pin: bool) -> Iterator[None]:
    """Stay on one core meanwhile: the engine starts a thread per core that it sees."""
    if not pin or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # a core that was taken from this container since
        os.sched_setaffinity(0, {own_core()})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, before)


def own_core() -> int:
    """A core for this process, for good: engines' threads stay where they were started.

    Ray counts cores but does not hand them out. So processes of one machine agree by a name that
    only one of them can hold and that the kernel frees with its holder: an abstract socket.
    """
    global _core
    if _core is None:
        cores = allowed_cores()
        start = os.getpid() % len(cores)
        for core in cores[start:] + cores[:start]:
            mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                mark.bind(f"\0tokenmill-ray-core-{core}")
            except OSError:
                mark.close()
                continue
            _core = core, mark
            break
        else:
            _core = cores[start], None
    return _core[0]
