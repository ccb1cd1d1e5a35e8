"""Builds on a Ray cluster: ``executor="ray"``.

    tm.prepare("data/*.jsonl", tokenizer=..., cache_dir="/shared/cache", executor="ray")

`RayExecutor` runs the tasks of a build as plain Ray tasks; the store is the same as with any other
executor. It joins an existing cluster, or starts a local one. Only Ray's public core API of 2.41
and later is used: tasks, wait, cancel, nodes, scheduling.
"""

from __future__ import annotations

from tokenmill._core.optional import optional

with optional("ray", "executor='ray'"):
    from tokenmill.integrations.ray.executor import RayExecutor, describe

    __all__ = ["RayExecutor", "describe"]
