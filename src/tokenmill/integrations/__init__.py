"""Adapters to training frameworks, Hugging Face `datasets` and Ray.

Each module adapts to one library and imports it; they share `trainers` and do not import each
other. Import them by name: ``from tokenmill.integrations import torch``.
"""

from __future__ import annotations

from tokenmill.work import Executor, register_executor


def _ray_executor(num_workers: int | None) -> Executor:
    from tokenmill.integrations.ray import RayExecutor

    return RayExecutor(num_workers)


register_executor("ray", _ray_executor)
