"""Builds on a Ray cluster: ``executor="ray"``.

`RayExecutor` runs the steps of a build as plain Ray tasks and keeps the contract of
`tokenmill.work`: the bytes are those of any other executor. It joins the cluster that
is there (the one this process belongs to, ``RAY_ADDRESS``, one that ``ray start`` left running on
this machine) and starts a local one only where there is none. `describe` says which one that would
be, without joining or starting anything.

    tm.prepare("data/*.jsonl", tokenizer=..., cache_dir="/shared/cache", executor="ray")

Only Ray's public core API is used, of 2.41 and later: tasks, wait, cancel, nodes, scheduling.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("ray", "executor='ray'"):
    from tokenmill.integrations.ray.cluster import describe
    from tokenmill.integrations.ray.executor import RayExecutor

    __all__ = ["RayExecutor", "describe"]
