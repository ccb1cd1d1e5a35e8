"""The Ray cluster: joining one, checking its nodes, and finding CPUs for our tasks.

`join` uses the cluster that this process belongs to (inside a task, an actor or a program that
called ``ray.init``), or lets Ray find one: the given address, ``RAY_ADDRESS``, or one that ``ray
start`` left running on this machine; otherwise Ray starts a local one.

`find_cpu` decides where tasks run. Normally each reserves a CPU, outside of any placement group of
the caller. A caller that is an actor may hold all CPUs itself while it waits for its own tasks,
which would be a deadlock; then tasks run in the caller's own share, on its node.

`probe` runs a small task on every node before the first task. Workers publish slices into the cache
directory and the caller commits them from there, so a cache on each node's own disk would end in a
store without slices, after hours. A *sentinel* is a file with random content that the caller writes
below the cache; every node must find it and be able to write next to it. Later each worker process
checks once, too, for nodes that join in the middle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokenmill.errors import CacheError, WorkerError
from tokenmill.files import Staging
from tokenmill.integrations.ray import worker
from tokenmill.integrations.ray.worker import Sentinel

OWN_SHARE_S = 10.0  # seconds without a free CPU after which a caller's own CPUs are used
GIVE_UP_S = 60.0  # seconds after which a caller inside the cluster gets an error
REMIND_S = 30.0  # seconds between two warnings about waiting for a CPU
CONNECT_S = 2.0  # seconds that `describe` waits for a cluster's port
PROBE_S = 60.0  # seconds a node may take to start a worker process and look

log = logging.getLogger("tokenmill.ray")


def join(address: str | None) -> Callable[[], None]:
    """Join a cluster and return a function that leaves it; a cluster that we started then stops."""
    if ray.is_initialized():
        return lambda: None
    named = address or os.environ.get("RAY_ADDRESS") or None
    left = _left_running() if named is None else None
    if left is not None and not _answers(left):
        address = "local"  # its address file is stale
    if named is not None and not _answers(named):
        # Ray itself would try for many minutes.
        raise WorkerError(
            f"no Ray cluster answers at {named}; start it, or correct or unset RAY_ADDRESS"
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
        raise WorkerError(f"{where}: {_first_line(error)}") from error
    leave: Callable[[], None] = ray.shutdown
    return leave


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def last_line(error: BaseException) -> str:
    """The last line of a task's traceback."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)


def cpus() -> int:
    """Number of CPUs of all nodes, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def nodes_with_cpus() -> dict[str, str]:
    """Addresses of the nodes that can run tasks, by node id."""
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    }


def on_node(node: str, *, soft: bool) -> NodeAffinitySchedulingStrategy:
    """Schedule on one node; soft: on another one if that is impossible."""
    return NodeAffinitySchedulingStrategy(node, soft=soft)


@dataclass(frozen=True)
class Scheduling:
    """How tasks are placed."""

    num_cpus: float  # reserved per task
    most: int | None = None  # tasks at a time, if they run in the CPUs that the caller holds
    node: str | None = None  # the only node they may run on

    def options(self, near: str | None = None) -> dict[str, Any]:
        """Options of a Ray task that prefers the node ``near``."""
        if self.node is not None:
            strategy: Any = on_node(self.node, soft=False)
        elif near is not None:
            strategy = on_node(near, soft=True)
        else:
            # Without it a placement group of the caller would capture its tasks.
            strategy = "DEFAULT"
        return {"num_cpus": self.num_cpus, "scheduling_strategy": strategy}


def find_cpu(num_cpus: float, wait_s: float | None) -> Scheduling:
    """Wait until a task of this size found a CPU, and return how to place the others.

    Args:
        num_cpus: CPUs that a task reserves.
        wait_s: Seconds to wait; None: no limit outside of the cluster (it may be busy, or growing),
            `GIVE_UP_S` inside, where the caller may hold the CPUs itself.
    """
    scheduling = Scheduling(num_cpus)
    if not num_cpus:
        return scheduling
    held = held_cpus()
    most_s = GIVE_UP_S if wait_s is None and held is not None else wait_s
    own_s = min(OWN_SHARE_S, most_s) if most_s is not None and (held or 0) >= 1 else None
    tried = ray.remote(worker.ping).options(**scheduling.options(), max_retries=-1).remote()
    started = time.monotonic()
    try:
        while True:
            waited = time.monotonic() - started
            limits = [REMIND_S, *(s - waited for s in (most_s, own_s) if s is not None)]
            if ray.wait([tried], timeout=max(0.05, min(limits)))[0]:
                ray.get(tried)
                return scheduling
            waited = time.monotonic() - started
            if own_s is not None and waited >= own_s:
                log.info("no CPU is free: tasks run in the %g that this process holds", held)
                cancel(tried)
                return Scheduling(
                    0, most=int(held or 1), node=ray.get_runtime_context().get_node_id()
                )
            if most_s is not None and waited >= most_s:
                cancel(tried)
                raise WorkerError(f"{_no_cpu(num_cpus)} for {waited:.0f} s; {_REMEDY}")
            log.warning("%s yet; still waiting (%s)", _no_cpu(num_cpus), _REMEDY)
    except ray.exceptions.RayError as error:
        raise WorkerError(
            f"no task runs on this Ray cluster: {_first_line(error)}; is tokenmill "
            "installed on its nodes?"
        ) from error


def cancel(ref: Any) -> None:
    """Drop a waiting task, or interrupt a running one.

    Never one that may be finishing: Ray ends the calling process if a cancellation and the result
    of a task cross (a failed check in its task manager, seen with 2.60).
    """
    with contextlib.suppress(Exception):  # the cluster may be gone
        ray.cancel(ref)


_REMEDY = (
    "give the actor or placement group that holds them fewer CPUs, or build with "
    "executor=RayExecutor(num_cpus=0)"
)


def _no_cpu(num_cpus: float) -> str:
    free = ray.available_resources().get("CPU", 0)
    return (
        f"no node of the Ray cluster has had {num_cpus:g} CPU free for a task ({free:g} of "
        f"{cpus()} are)"
    )


def held_cpus() -> float | None:
    """Number of CPUs that this task or actor reserves; None in a process that is neither."""
    try:
        resources = ray.get_runtime_context().get_assigned_resources()
    except AssertionError:  # Ray's error in a driver process
        return None
    return float(sum(amount for name, amount in resources.items() if _is_cpu(name)))


def _is_cpu(resource: str) -> bool:
    """``CPU``, or a placement group's share of it: ``CPU_group_0_<id>``, counted once."""
    return resource == "CPU" or resource.startswith("CPU_group_0_")


def describe() -> dict[str, Any]:
    """Describe the cluster that ``executor="ray"`` would use; joins and starts nothing.

    Returns:
        ``version``; ``address`` and ``from`` (how it was found; None: a local one would be
        started); ``reachable`` (None without an address); and, if this process belongs to a
        cluster, its ``nodes`` and ``cpus``.
    """
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
    """Write a sentinel below a directory; the exit stack removes it."""
    staging = until.enter_context(Staging(Path(directory)))
    nonce = secrets.token_hex(16)
    path = staging.write("sentinel", nonce.encode())
    return str(path), nonce


def probe(sentinels: list[Sentinel]) -> None:
    """Check every node that can run tasks.

    Raises:
        CacheError: A node does not share one of the directories, or cannot write there.
        WorkerError: A node does not answer, or has another tokenmill.
    """
    pending = {}
    for node, address in nodes_with_cpus().items():
        strategy = on_node(node, soft=False)
        # Without a CPU, so that a busy node runs it, too.
        task = ray.remote(worker.look).options(num_cpus=0, scheduling_strategy=strategy)
        pending[task.remote(sentinels)] = node, address
    ready, late = ray.wait(list(pending), num_returns=len(pending), timeout=PROBE_S)
    alive = nodes_with_cpus()
    for answer in (*ready, *late):
        node, address = pending[answer]
        if node not in alive:
            continue  # it left; its tasks will run on other nodes
        if answer in late:
            raise WorkerError(f"node {address} of the Ray cluster did not answer in {PROBE_S:g} s")
        try:
            report = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"node {address} of the Ray cluster cannot run tokenmill: "
                f"{last_line(error)}; install the same tokenmill on every node"
            ) from error
        _check_report(report, sentinels)


def _check_report(report: dict[str, str], sentinels: list[Sentinel]) -> None:
    if report["code"] != worker.code_digest():
        raise WorkerError(
            f"{report['place']} has another tokenmill than the caller, which could make other "
            "bytes; install the same one on every node"
        )
    if report["trouble"]:
        raise CacheError(report["trouble"], path=Path(sentinels[0][0]).parents[2])
