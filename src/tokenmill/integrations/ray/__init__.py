"""Builds on a Ray cluster, ``executor="ray"``, with Ray's public core API of 2.41 and later."""

from __future__ import annotations

from tokenmill._core.optional import optional

with optional("ray", ("executor", "ray")):
    from tokenmill.integrations.ray.executor import RayExecutor, describe

    __all__ = ["RayExecutor", "describe"]
