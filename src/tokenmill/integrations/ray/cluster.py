"""The cluster: joining the one that is there, what it has, and CPUs for our tasks in it.

`join` belongs to a cluster already (inside a task, an actor or a program that called ``ray.init``),
or lets Ray find one: the given address, ``RAY_ADDRESS``, or one that ``ray start`` left running on
this machine; where there is none, Ray starts a local one. What `join` opened, it closes again: that
stops a local cluster of its own and merely leaves any other. `Scheduling` says where tasks run:
normally they reserve a CPU each, outside of any placement group that the caller sits in. A caller
that is an actor may hold all CPUs itself while it waits for its own tasks, so they would wait for
each other for ever; then tasks run in the caller's own share, on its node.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tokenmill.errors import WorkerError
from tokenmill.integrations.ray import worker

OWN_SHARE_S = 10.0  # seconds without a free CPU after which a caller's own CPUs are used
GIVE_UP_S = 60.0  # seconds after which a caller inside the cluster is told that there is no CPU
REMIND_S = 30.0  # seconds between two words about waiting for a CPU
CONNECT_S = 2.0  # seconds that `describe` waits for a cluster's port

log = logging.getLogger("tokenmill.ray")


def join(address: str | None) -> Callable[[], None]:
    """Belong to a cluster; returns what leaves it again, if this call joined it.

    Raises:
        WorkerError: The cluster that was named does not answer.
    """
    if ray.is_initialized():
        return lambda: None
    named = address or os.environ.get("RAY_ADDRESS") or None
    left = _left_running() if named is None else None
    if left is not None and not _answers(left):
        address = "local"  # it was stopped without a word
    if named is not None and not _answers(named):
        # Ray itself would try for many minutes.
        raise WorkerError(
            f"no Ray cluster answers at {named}; start it, or correct or unset RAY_ADDRESS"
        )
    try:
        # Workers' output is not for the caller's standard output, which may be a program's.
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
    """What a traceback of a task comes down to."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)


def cpus() -> int:
    """CPUs of all nodes, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def nodes_with_cpus() -> dict[str, str]:
    """Nodes that can be given tasks: id to address; a head without CPUs does no work."""
    return {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU", 0) > 0
    }


def on_node(node: str, *, soft: bool) -> NodeAffinitySchedulingStrategy:
    """A task on one node; soft: elsewhere where that one cannot."""
    return NodeAffinitySchedulingStrategy(node, soft=soft)


@dataclass(frozen=True)
class Scheduling:
    """How tasks are placed.

    Attributes:
        num_cpus: CPUs that a task reserves.
        most: Most tasks at a time, where the CPUs that the caller holds bound them.
        node: The only node they may run on, or None.
    """

    num_cpus: float
    most: int | None = None
    node: str | None = None

    def options(self, near: str | None = None) -> dict[str, Any]:
        """Options of a Ray task; ``near``: a node that is preferred."""
        if self.node is not None:
            strategy: Any = on_node(self.node, soft=False)
        elif near is not None:
            strategy = on_node(near, soft=True)
        else:
            # Stated, because otherwise a placement group of the caller would capture its tasks.
            strategy = "DEFAULT"
        return {"num_cpus": self.num_cpus, "scheduling_strategy": strategy}


def find_cpu(num_cpus: float, wait_s: float | None) -> Scheduling:
    """Wait until a task of this size found a CPU, and say how to place the others.

    Args:
        num_cpus: CPUs that a task reserves.
        wait_s: Seconds to wait; None: for ever outside of the cluster (it may be busy, or growing),
            `GIVE_UP_S` inside, where the CPUs may be held by whoever waits here.

    Raises:
        WorkerError: There was none.
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
    """Drop a task that waits, interrupt one that runs.

    Never one that may just be finishing: Ray ends the calling process where a cancellation and
    the last word of a task cross (a failed check in its task manager, seen with 2.60).
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
    """CPUs that this task or actor reserves; None in a process that is neither."""
    try:
        resources = ray.get_runtime_context().get_assigned_resources()
    except AssertionError:  # how Ray says that this process is a driver
        return None
    return float(sum(amount for name, amount in resources.items() if _is_cpu(name)))


def _is_cpu(resource: str) -> bool:
    """``CPU``, or a placement group's share of it: ``CPU_group_0_<id>``, counted once."""
    return resource == "CPU" or resource.startswith("CPU_group_0_")


def describe() -> dict[str, Any]:
    """Which cluster ``executor="ray"`` would use, for a person; joins and starts nothing.

    Returns:
        ``version``; ``address`` and ``from`` (how it was found; None: a local one would be
        started); ``reachable`` (None where there is nothing to reach); and, where this process
        belongs to a cluster, its ``nodes`` and ``cpus``.
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
    """The address that ``ray start`` noted on this machine."""
    directory = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()) / "ray"
    try:
        return (directory / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def _answers(address: str) -> bool:
    """Whether somebody listens there; ``auto`` names no port, so nothing can be said against it."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return True
    try:
        socket.create_connection((host or "127.0.0.1", int(port)), CONNECT_S).close()
    except OSError:
        return False
    return True
