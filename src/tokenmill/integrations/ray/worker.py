"""Run one task, or check a directory, in a Ray worker process.

The setup's work is opened once per process. A typed error is returned, so that Ray does not wrap
it; only transient errors are raised, as `Transient`, which Ray retries. A worker belongs to the
user's job: a task's core is released after it, and work unused for `IDLE_S` is closed.
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

from tokenmill._core.fingerprint import checksum
from tokenmill._core.process import ProcessLock
from tokenmill._core.publish import write_file
from tokenmill.build import wire
from tokenmill.build.executors import allowed_cores
from tokenmill.build.tasks import Setup, Task, Work, close_work, finish, foreign_error, open_work
from tokenmill.errors import CacheError, SourceMissing, TokenmillError, WorkerError

IDLE_S = 60.0  # seconds without a task after which loaded work is closed
MAX_HELD = 2  # works kept at once: one that derives and one that builds
SEEN_S = 5.0  # seconds a network file system may take to show a new file to another machine

# A network file system is temporarily unreachable.
UNREACHABLE = {
    errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN,
    errno.ENETUNREACH, errno.ECONNRESET, errno.ENOTCONN,
}  # fmt: skip
Sentinel = tuple[str, str]  # a file that the caller wrote below a shared directory, its content

_held: dict[str, Work] = {}
_seen: set[Sentinel] = set()
_lock = ProcessLock()
_timer: threading.Timer | None = None
_core: tuple[int, socket.socket | None] | None = None


class Transient(Exception):
    """An error worth a retry, with the answer for the caller after the last one."""

    def __init__(self, message: str, answer: wire.Failed) -> None:
        super().__init__(message, answer)  # both, for pickling
        self.answer = answer

    def __str__(self) -> str:
        return str(self.args[0])


def place() -> str:
    return f"node {ray.util.get_node_ip_address()} ({socket.gethostname()})"


class Job(NamedTuple):
    setup: Setup
    key: str  # of the setup
    sentinels: list[Sentinel]  # must be visible here
    stop: str  # if this file exists, the result is not needed; empty: no such file


def do_tasks(job: Job, tasks: list[Task]) -> tuple[str, int, list[wire.Finished | wire.Failed]]:
    """Run tasks until one fails."""
    answers: list[wire.Finished | wire.Failed] = []
    with _pinned():
        for task in tasks:
            answers.append(_answer(job, task))
            if isinstance(answers[-1], wire.Failed):
                break
    return ray.get_runtime_context().get_node_id(), os.getpid(), answers


def _answer(job: Job, task: Task) -> wire.Finished | wire.Failed:
    try:
        if job.stop and os.path.exists(job.stop):
            raise WorkerError(f"{task} was not begun: the caller stopped")
        for sentinel in job.sentinels:
            _require_shared(sentinel)
        with _opened(job) as work:
            started = time.perf_counter()
            # Serialization errors are raised here, where the traceback is.
            result = wire.deserialize(finish(work(task.payload)))
            seconds = time.perf_counter() - started
        return wire.Finished(task.number, result, seconds)
    except TokenmillError as error:
        return _failed(task, error)
    except MemoryError:
        _forget()
        gc.collect()
        message = f"{task}: out of memory on {place()} (hint: fewer num_workers)"
        failure = wire.pack_error(WorkerError(message))
        raise Transient(message, wire.Failed(task.number, failure)) from None
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
    if _is_transient(error):
        raise Transient(str(error), answer) from error
    return answer


def _is_transient(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in UNREACHABLE:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _opened(job: Job) -> Iterator[Work]:
    """The setup's work, opened once per process; after an unexpected error it is not reused."""
    global _timer
    with _lock:
        if _timer is not None:
            _timer.cancel()
        work = _held.pop(job.key, None)
    keep = False
    try:
        if work is None:
            work = open_work(job.setup.entry, job.setup.options)
        yield work
        keep = True
    except TokenmillError:
        keep = True
        raise
    finally:
        with _lock:
            if keep and work is not None:
                _held[job.key] = work
            while len(_held) > MAX_HELD:
                close_work(_held.pop(next(iter(_held))))
            _timer = threading.Timer(IDLE_S, _forget)
            _timer.daemon = True
            _timer.start()


def _forget() -> None:
    with _lock:
        while _held:
            close_work(_held.popitem()[1])


def _require_shared(sentinel: Sentinel) -> None:
    """Check once per process, for nodes that joined after the probe."""
    if sentinel in _seen:
        return
    why = unshared(sentinel)
    if why:
        raise CacheError(why, path=Path(sentinel[0]).parents[2])
    _seen.add(sentinel)


def unshared(sentinel: Sentinel) -> str:
    """Why this node does not share the sentinel's directory with the caller; empty if it does."""
    path, nonce = Path(sentinel[0]), sentinel[1]
    until = time.monotonic() + SEEN_S
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == nonce:
                return ""
        # A network client that cached the parent as empty shows new names only after a listing.
        with contextlib.suppress(OSError):
            os.listdir(path.parent.parent)
        if time.monotonic() > until:
            return (
                f"this directory is not shared: {place()} does not see what the caller writes "
                "there; choose a cache_dir on a file system that every node mounts"
            )
        time.sleep(0.1)


def check_node(sentinels: list[Sentinel]) -> dict[str, str]:
    """Report this node, the digest of its tokenmill, and what is wrong with the directories."""
    problem = ""
    for sentinel in sentinels:
        problem = problem or unshared(sentinel) or _cannot_write(Path(sentinel[0]).parent)
    return {"place": place(), "code": code_digest(), "problem": problem}


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
    """Do nothing: that it ran shows that a task of its size finds a CPU."""


@contextlib.contextmanager
def _pinned() -> Iterator[None]:
    """Stay on one core: the engine starts a thread per core that it may use."""
    if not hasattr(os, "sched_setaffinity"):
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
    """Choose a core for this process, once: an engine's threads stay where they were started.

    Ray counts cores but does not assign them. Processes of one machine agree by an abstract
    socket's name, which only one process can bind and which the kernel frees with that process.
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
