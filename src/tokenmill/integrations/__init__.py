"""tokenmill's objects in the shapes of host frameworks, nothing else.

Each package here adapts to one host and imports it; they do not know each other (`hosts` is what
they share), and nothing below this layer knows any of them. They are reached by name: ``from
tokenmill.integrations import torch``. What a host brings to the layers below is registered here,
and loaded when it is asked for: the executor that ``executor="ray"`` means.
"""

from __future__ import annotations

from tokenmill.work import Executor, register_executor


def _on_ray(num_workers: int | None) -> Executor:
    from tokenmill.integrations.ray import RayExecutor

    return RayExecutor(num_workers)


register_executor("ray", _on_ray)
