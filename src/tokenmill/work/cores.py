"""How many cores this process may use, and which one a worker gets.

Three things bound the cores: the machine, the affinity mask this process inherited (taskset, Slurm,
Kubernetes' static policy) and the CPU quota of its control group (``docker --cpus``), which the
mask does not show. Workers are pinned to one core each before the engine loads, because fastokens
starts a thread per core it sees and can be told otherwise in no other way.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def allowed_cores() -> list[int]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """How many workers are worth starting: allowed cores, bounded by the quota; at least 1."""
    quota = cpu_quota()
    cores = len(allowed_cores())
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def default_workers() -> int:
    """Return how many workers this process starts by default: its part of the usable cores.

    A launcher that starts several ranks on one machine says how many in ``LOCAL_WORLD_SIZE``.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    shared_by = int(ranks) if ranks.isascii() and ranks.isdigit() else 1
    return max(1, usable_cores() // max(1, shared_by))


def core_of_worker(worker: int, workers: int, cores: list[int]) -> int:
    """The core that worker number `worker` of `workers` is pinned to.

    Round robin over the allowed cores. The first one is not always the first core: ranks of one
    machine that each start two workers would otherwise all sit on the same two. Ranks that a
    launcher numbered start side by side; others at a place that their process id picks.
    """
    rank = os.environ.get("LOCAL_RANK", "")
    start = int(rank) * workers if rank.isascii() and rank.isdigit() else os.getpid()
    return cores[(start + worker) % len(cores)]


def cpu_quota(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> float | None:
    """Cores' worth of time that the control groups above this process allow, or None.

    Args:
        membership: Which group this process is in (replaced in tests).
        mount: Where the control groups' files are.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [mount, mount / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [mount / controllers, mount / "cpu"]
        else:
            continue
        for root in roots:
            # The group's own path is not visible in every container; the root then is the group.
            group = Path(path.lstrip("/"))
            for directory in (group, *group.parents):
                quota = _quota_of(root / directory)
                if quota is not None:
                    quotas.append(quota)
    return min(quotas, default=None)


def _quota_of(directory: Path) -> float | None:
    try:
        if (directory / "cpu.max").is_file():  # version 2: "max 100000" or "150000 100000"
            quota, period = (directory / "cpu.max").read_text().split()
        else:
            quota = (directory / "cpu.cfs_quota_us").read_text().strip()
            period = (directory / "cpu.cfs_period_us").read_text().strip()
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return cores if cores > 0 else None
