"""The probe: does every node see what the caller writes, and is it the same tokenmill?

A build's workers publish slices into the cache directory and the caller commits them from there, so
a cache that lies on each node's own disk would end in a store without slices, after hours. A
*sentinel* is a file with a random content that the caller stages below the cache. Before the first
task a small task on every node must find it and be able to write beside it; later each worker
process looks once, so that a node that joins in the middle is caught as well.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

import ray

from tokenmill.errors import CacheError, WorkerError
from tokenmill.files import Staging
from tokenmill.integrations.ray import cluster, worker
from tokenmill.integrations.ray.worker import Sentinel

PROBE_S = 60.0  # seconds a node may take to start a worker process and look


def plant(directory: str, until: contextlib.ExitStack) -> Sentinel:
    """Write a sentinel below a directory; the stack removes it."""
    staging = until.enter_context(Staging(Path(directory)))
    nonce = secrets.token_hex(16)
    path = staging.write("sentinel", nonce.encode())
    return str(path), nonce


def probe(sentinels: list[Sentinel]) -> None:
    """Ask every node that can be given tasks.

    Raises:
        CacheError: A node does not share one of the directories, or cannot write there.
        WorkerError: A node does not answer, or has another tokenmill.
    """
    asked = {}
    for node, address in cluster.nodes_with_cpus().items():
        strategy = cluster.on_node(node, soft=False)
        # No CPU: a busy node can look, too.
        task = ray.remote(worker.look).options(num_cpus=0, scheduling_strategy=strategy)
        asked[task.remote(sentinels)] = node, address
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_S)
    alive = cluster.nodes_with_cpus()
    for answer in (*ready, *late):
        node, address = asked[answer]
        if node not in alive:
            continue  # it went meanwhile; its tasks will go elsewhere
        if answer in late:
            raise WorkerError(f"node {address} of the Ray cluster did not answer in {PROBE_S:g} s")
        try:
            said = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"node {address} of the Ray cluster cannot run tokenmill: "
                f"{cluster.last_line(error)}; install the same tokenmill on every node"
            ) from error
        _judge(said, sentinels)


def _judge(said: dict[str, str], sentinels: list[Sentinel]) -> None:
    if said["code"] != worker.code_digest():
        raise WorkerError(
            f"{said['place']} has another tokenmill than the caller, which could make other bytes; "
            "install the same one on every node"
        )
    if said["trouble"]:
        raise CacheError(said["trouble"], path=Path(sentinels[0][0]).parents[2])
