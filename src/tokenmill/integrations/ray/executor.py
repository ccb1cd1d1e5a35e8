"""`RayExecutor`: the tasks of a build as plain Ray tasks; see docs/guides/ray.md.

A run keeps a bounded window of messages submitted, each with one task, later with several. Ray
runs a message again, up to `MAX_RETRIES` times, if its worker or node died, or if it raised
`worker.Transient`; every other failure arrives as its own typed error. An executor joins a cluster
for its first task, so a cache hit needs no Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokenmill._core.fingerprint import checksum
from tokenmill._core.process import at_end
from tokenmill._core.publish import Staging, write_file
from tokenmill.build import wire
from tokenmill.build.tasks import MAX_RETRIES, Done, Setup, Task
from tokenmill.errors import CacheError, TokenmillError, UsageError, WorkerError, check_positive
from tokenmill.integrations.ray import worker
from tokenmill.integrations.ray.worker import Sentinel

OWN_SHARE_S = 10.0  # seconds without a free CPU after which a caller's own CPUs are used
GIVE_UP_S = 60.0  # seconds after which a caller inside the cluster gets an error
REMIND_S = 30.0  # seconds between two warnings about waiting for a CPU
CONNECT_S = 2.0  # seconds that `describe` waits for a cluster's port
PROBE_S = 60.0  # seconds a node may take to start a worker process and check

log = logging.getLogger("tokenmill.ray")


def join(address: str | None) -> Callable[[], None]:
    """Join a cluster (see docs/guides/ray.md) and return a function that leaves it."""
    if ray.is_initialized():
        return lambda: None
    named = address or os.environ.get("RAY_ADDRESS") or None
    left = _left_running() if named is None else None
    if left is not None and not _answers(left):
        address = "local"  # its address file is stale
    if named is not None and not _answers(named):
        # Ray itself would try for many minutes.
        raise WorkerError(
            f"No Ray cluster answers at {named}. Start it, or correct or unset RAY_ADDRESS."
        )
    try:
        # Another program may read the caller's standard output.
        ray.init(
            address=address,
            log_to_driver=False,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, TimeoutError, RuntimeError, ValueError) as error:
        where = f"no Ray cluster answers at {named}" if named else "Ray does not start"
        raise WorkerError(f"{where}: {_reason(error)}") from error
    leave: Callable[[], None] = ray.shutdown
    return leave


def _reason(error: BaseException) -> str:
    """Return the first sentence of a Ray error; the rest describes log files."""
    return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__


def _last_line(error: BaseException) -> str:
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)


def cpus() -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def _nodes_with_cpus() -> dict[str, str]:
    """Addresses of the nodes that can run tasks, by node id."""
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    }


@dataclass(frozen=True)
class Scheduling:
    num_cpus: float  # reserved per task
    most: int | None = None  # tasks at a time, if they run in the CPUs that the caller holds
    node: str | None = None  # the only node they may run on

    def options(self, near: str | None = None) -> dict[str, Any]:
        if self.node is not None:
            strategy: Any = NodeAffinitySchedulingStrategy(self.node, soft=False)
        elif near is not None:
            strategy = NodeAffinitySchedulingStrategy(near, soft=True)
        else:
            # Without it a placement group of the caller would capture its tasks.
            strategy = "DEFAULT"
        return {"num_cpus": self.num_cpus, "scheduling_strategy": strategy}


def find_cpu(num_cpus: float, wait_s: float | None) -> Scheduling:
    """Wait until a task of this size found a CPU, and return how to place the others.

    A caller that is an actor may hold all CPUs itself while it waits for its own tasks, which would
    be a deadlock; then tasks run in the caller's own share, on its node.
    """
    scheduling = Scheduling(num_cpus)
    if not num_cpus:
        return scheduling
    own_cpus = held_cpus()
    most_s = GIVE_UP_S if wait_s is None and own_cpus is not None else wait_s
    own_s = min(OWN_SHARE_S, most_s) if most_s is not None and (own_cpus or 0) >= 1 else None
    tried = ray.remote(worker.ping).options(**scheduling.options(), max_retries=-1).remote()
    started = time.monotonic()
    waited = 0.0
    while True:
        limits = [REMIND_S, *(s - waited for s in (most_s, own_s) if s is not None)]
        if ray.wait([tried], timeout=max(0.05, min(limits)))[0]:
            break
        waited = time.monotonic() - started
        if own_s is not None and waited >= own_s:
            log.info("no CPU is free: tasks run in the %g that this process holds", own_cpus)
            cancel(tried)
            node = ray.get_runtime_context().get_node_id()
            return Scheduling(0, most=int(own_cpus or 1), node=node)
        if most_s is not None and waited >= most_s:
            cancel(tried)
            raise WorkerError(f"{_no_cpu(num_cpus)} for {waited:.0f} s; {_REMEDY}")
        log.warning("%s yet; still waiting (%s)", _no_cpu(num_cpus), _REMEDY)
    try:
        ray.get(tried)
    except RayError as error:
        raise WorkerError(
            f"no task runs on this Ray cluster: {_reason(error)}; is tokenmill "
            "installed on its nodes?"
        ) from error
    return scheduling


def cancel(ref: Any) -> None:
    """Drop a waiting task, or interrupt a running one.

    Do not call it for a task that may be finishing: Ray ends the calling process if a cancellation
    and the result of a task cross (a failed check in its task manager, seen with 2.60).
    """
    with contextlib.suppress(Exception):  # the cluster may be gone
        ray.cancel(ref)


_REMEDY = (
    "give the actor or placement group that holds them fewer CPUs, or build with "
    "RayExecutor(num_cpus=0)"
)


def _no_cpu(num_cpus: float) -> str:
    free = ray.available_resources().get("CPU", 0)
    return f"no Ray node has had {num_cpus:g} CPU free for a task ({free:g} of {cpus()} are)"


def held_cpus() -> float | None:
    """Number of CPUs that this task or actor reserves; None in a process that is neither."""
    try:
        resources = ray.get_runtime_context().get_assigned_resources()
    except AssertionError:  # Ray's error in a driver process
        return None
    # The share of a placement group is ``CPU_group_0_<id>``.
    ours = (name for name in resources if name == "CPU" or name.startswith("CPU_group_0_"))
    return float(sum(resources[name] for name in ours))


def describe() -> dict[str, Any]:
    """Describe the cluster that ``executor="ray"`` would use, without joining or starting one."""
    found: dict[str, Any] = {"version": ray.__version__, "nodes": None, "cpus": None}
    if ray.is_initialized():
        alive = [node for node in ray.nodes() if node["Alive"]]
        address = ray.get_runtime_context().gcs_address
        found.update(nodes=len(alive), cpus=cpus())
        return {**found, "address": address, "from": "this process", "reachable": True}
    address, source = os.environ.get("RAY_ADDRESS") or None, "RAY_ADDRESS"
    if address is None:
        address, source = _left_running(), "ray start"
    if address in (None, "local"):
        return {**found, "address": None, "from": None, "reachable": None}
    return {**found, "address": address, "from": source, "reachable": _answers(str(address))}


def _left_running() -> str | None:
    """The address that ``ray start`` wrote on this machine."""
    directory = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    try:
        return (directory / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def _answers(address: str) -> bool:
    """Whether the port accepts connections; an address without one, such as ``auto``, counts."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return True
    try:
        socket.create_connection((host or "127.0.0.1", int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True


def plant(directory: str, until: contextlib.ExitStack) -> Sentinel:
    staging = until.enter_context(Staging(Path(directory)))
    nonce = secrets.token_hex(16)
    path = staging.write("sentinel", nonce.encode())
    return str(path), nonce


def probe(sentinels: list[Sentinel]) -> None:
    """Check that every node has this tokenmill, can read the sentinels and write next to them."""
    pending = {}
    for node, address in _nodes_with_cpus().items():
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        # Without a CPU, so that a busy node runs it, too.
        task = ray.remote(worker.check_node).options(num_cpus=0, scheduling_strategy=strategy)
        pending[task.remote(sentinels)] = node, address
    ready, late = ray.wait(list(pending), num_returns=len(pending), timeout=PROBE_S)
    alive = _nodes_with_cpus()
    for answer in (*ready, *late):
        node, address = pending[answer]
        if node not in alive:
            continue  # it left; its tasks will run on other nodes
        if answer in late:
            raise WorkerError(f"node {address} of the Ray cluster did not answer in {PROBE_S:g} s")
        try:
            report = ray.get(answer)
        except RayError as error:
            raise WorkerError(
                f"node {address} of the Ray cluster cannot run tokenmill: "
                f"{_last_line(error)}; install the same tokenmill on every node"
            ) from error
        if report["code"] != worker.code_digest():
            raise WorkerError(
                f"{report['place']} has another tokenmill than the caller. Install the same "
                "version on every node."
            )
        if report["problem"]:
            raise CacheError(report["problem"], path=Path(sentinels[0][0]).parents[2])


FINISH_S = 2.0  # seconds that running tasks get to finish before they are interrupted
REFRESH_S = 10.0  # seconds between two reads of the cluster's number of CPUs
MAX_BATCH = 8  # tasks of one message
BATCH_GROWTH = 16  # finished tasks of each worker after which a message has one task more

LOST = (WorkerCrashedError, NodeDiedError, OutOfMemoryError)  # after Ray's last retry


class RayExecutor:
    """Runs tasks on a Ray cluster.

    Args:
        num_workers: Maximum number of tasks at a time; None: the cluster's CPUs, also when nodes
            join or leave.
        address: As for ``ray.init``, if this process belongs to no cluster yet; None lets Ray find
            one or start a local one.
        num_cpus: CPUs that a task reserves; 0 if waiting actors reserve all of them.
        wait_s: Seconds to wait for the first free CPU; None: no limit, but a minute inside an actor
            or a task, which may hold the CPUs itself.
    """

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        address: str | None = None,
        num_cpus: float = 1,
        wait_s: float | None = None,
    ) -> None:
        if num_workers is not None:
            check_positive("num_workers", num_workers)
        if isinstance(num_cpus, bool) or not isinstance(num_cpus, int | float) or num_cpus < 0:
            raise UsageError(("num_cpus",), f" must be a non-negative number, got {num_cpus!r}.")
        self.num_workers = num_workers
        self.address = address
        self.num_cpus = num_cpus
        self.wait_s = wait_s
        self._scheduling: Scheduling | None = None
        self._sentinels: dict[str, worker.Sentinel] = {}
        self._open = contextlib.ExitStack()
        at_end(self, self._open.close)

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        waiting = iter(tasks)
        first = next(waiting, None)
        if first is None:
            return
        scheduling, sentinels = self._get_ready(setup.shared)
        run = _RayRun(self, scheduling, setup, sentinels)
        try:
            yield from run.results(itertools.chain([first], waiting))
        finally:
            run.end()

    def close(self) -> None:
        """Leave the cluster, if this executor joined it; a later run joins again."""
        self._open.close()
        self._scheduling = None
        self._sentinels.clear()

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _get_ready(self, shared: Iterable[str]) -> tuple[Scheduling, list[worker.Sentinel]]:
        """Join, find a CPU, and check that every node shares these directories: each once."""
        if self._scheduling is None:
            self._open.callback(join(self.address))
        new = [directory for directory in shared if directory not in self._sentinels]
        planted = {directory: plant(directory, self._open) for directory in new}
        if planted or self._scheduling is None:
            probe(list(planted.values()))
        self._sentinels.update(planted)
        if self._scheduling is None:
            self._scheduling = find_cpu(self.num_cpus, self.wait_s)
        return self._scheduling, [self._sentinels[directory] for directory in shared]


class _RayRun:
    def __init__(
        self,
        executor: RayExecutor,
        scheduling: Scheduling,
        setup: Setup,
        sentinels: list[worker.Sentinel],
    ) -> None:
        self._num_workers = executor.num_workers
        self._scheduling = scheduling
        # A task that finds this file does nothing.
        self._stop = f"{sentinels[0][0]}-stop-{secrets.token_hex(8)}" if sentinels else ""
        setup = replace(setup, options=wire.deserialize(setup.options))
        key = checksum(wire.frame(wire.Begin(setup.entry, setup.options)))
        job = worker.Job(setup, key, sentinels, self._stop)
        self._job = ray.put(job)  # once for all tasks
        node = ray.get_runtime_context().get_node_id() if setup.prefer_local else None
        self._remote = ray.remote(worker.do_tasks).options(
            **scheduling.options(near=node),
            max_retries=MAX_RETRIES,
            retry_exceptions=[worker.Transient],
        )
        self._pending: dict[Any, list[Task]] = {}
        self._finished = 0  # tasks
        self._numbers: dict[tuple[str, int], int] = {}  # worker numbers by node and process id
        self._updated_at = float("-inf")
        self._window = 1

    def results(self, tasks: Iterator[Task]) -> Iterator[Done]:
        while True:
            self._fill(tasks)
            if not self._pending:
                return
            finished, failure = self._collect()
            if failure is None:
                self._fill(tasks)  # before the consumer takes its time
            yield from finished
            if failure is not None:
                raise failure

    def end(self) -> None:
        """Stop waiting tasks at once, and running ones after `FINISH_S`."""
        if not self._pending or not ray.is_initialized():
            return
        if self._stop:
            with contextlib.suppress(CacheError):
                write_file(Path(self._stop), b"")
        left = list(self._pending)
        self._pending.clear()
        # Most slices take less than this, and a finished one must not be cancelled (`cancel`).
        _, running = ray.wait(left, num_returns=len(left), timeout=FINISH_S)
        for ref in running:
            cancel(ref)
        if running:
            ray.wait(running, num_returns=len(running), timeout=FINISH_S)

    def _fill(self, waiting: Iterator[Task]) -> None:
        self._update_window()
        # A message costs the caller 1 ms. Batches grow with the run, so that the last ones are a
        # small part of it.
        size = min(MAX_BATCH, 1 + self._finished // (BATCH_GROWTH * self._window))
        while len(self._pending) < self._window:
            tasks = list(itertools.islice(waiting, size))
            if not tasks:
                return
            sent = [replace(task, payload=wire.deserialize(task.payload)) for task in tasks]
            self._pending[self._remote.remote(self._job, sent)] = tasks

    def _update_window(self) -> None:
        now = time.monotonic()
        if now - self._updated_at < REFRESH_S:
            return
        self._updated_at = now
        window = self._num_workers
        if window is None:
            window = max(1, int(cpus() / (self._scheduling.num_cpus or 1)))
        self._window = min(window, self._scheduling.most or window)

    def _collect(self) -> tuple[list[Done], TokenmillError | None]:
        refs = list(self._pending)
        ready, _ = ray.wait(refs, num_returns=1, timeout=REFRESH_S)
        if ready and len(refs) > 1:
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        finished, failure = [], None
        for ref in ready:
            answer = _answer(ref, self._pending.pop(ref)[0])
            if isinstance(answer, TokenmillError):
                failure = failure or answer
                continue
            node, pid, results = answer
            number = self._numbers.setdefault((node, pid), len(self._numbers))
            for done in results:
                if isinstance(done, wire.Failed):
                    failure = failure or wire.unpack_error(done.failure)
                else:
                    finished.append(Done(done.number, done.result, done.seconds, number))
        self._finished += len(finished)
        return finished, failure


def _answer(
    ref: Any, task: Task
) -> tuple[str, int, list[wire.Finished | wire.Failed]] | TokenmillError:
    """Return what `worker.do_tasks` returned, or an error that names the first task."""
    try:
        answer: tuple[str, int, list[wire.Finished | wire.Failed]] = ray.get(ref)
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, worker.Transient):
            return wire.unpack_error(cause.answer.failure)
        failure = WorkerError(f"{task} could not be run: {_last_line(error)}")
        failure.__cause__ = error
        return failure
    except RayError as error:
        what = "Ray failed"
        if isinstance(error, LOST):
            what = f"gave up after {MAX_RETRIES + 1} workers or nodes were lost"
        failure = WorkerError(f"{task}: {what}: {type(error).__name__}: {_reason(error)}")
        failure.__cause__ = error
        return failure
    return answer
