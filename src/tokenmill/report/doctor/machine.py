"""The machine and what is installed on it: cores, open files, libraries, settings, Ray.

Each function answers one or a few `Check` values and imports nothing heavy: versions come from the
packages' metadata, and only the Ray check, where Ray is installed, asks its integration, which the
caller hands in, which cluster a build would use.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
from collections.abc import Callable, Iterator
from typing import Any

from tokenmill.build.proof import LIBRARIES, installed_versions
from tokenmill.report.doctor.checks import Check, note, ok, warning
from tokenmill.work.cores import allowed_cores, cpu_quota, usable_cores

EXTRAS = {
    "hf": ("transformers", "datasets", "huggingface_hub"),
    "torch": ("torch", "torchdata"),
    "ray": ("ray",),
    "serve": ("starlette", "uvicorn"),
    "remote": ("s3fs", "gcsfs", "aiohttp"),
}
FEW_FILES = 1024  # descriptors: a loader over many slices and its workers need a few hundred
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
TRUE = ("1", "on", "yes", "true")  # as huggingface_hub reads its variables


def libraries() -> Iterator[Check]:
    """Tokenmill itself, the engines, and the extras."""
    core = installed_versions(LIBRARIES)
    own = core.pop("tokenmill", "run from its source")
    shown = ", ".join(f"{name} {version}" for name, version in core.items())
    yield ok("tokenmill", f"{own}, Python {platform.python_version()}; {shown}")
    for extra, names in EXTRAS.items():
        found = installed_versions(names)
        missing = [name for name in names if name not in found]
        shown = ", ".join(f"{name} {version}" for name, version in found.items()) or "not installed"
        if missing:
            lacks = f"{shown}; without {', '.join(missing)}" if found else shown
            remedy = f"where you need it: pip install 'tokenmill[{extra}]'"
            yield note(f"extra {extra}", lacks, remedy)
        else:
            yield ok(f"extra {extra}", shown)


def cores() -> Check:
    """How many cores a build may use, and what bounds them."""
    machine, allowed, quota = os.cpu_count() or 1, len(allowed_cores()), cpu_quota()
    usable = usable_cores()
    bounds = f"{usable} of {machine} cores (affinity {allowed}, quota {_quota(quota)})"
    if usable < machine:
        remedy = "more workers than that gain nothing; raise taskset, Slurm or --cpus if you can"
        return note("cores", bounds, remedy)
    return ok("cores", bounds)


def _quota(quota: float | None) -> str:
    return "none" if quota is None else f"{quota:g}"


def open_files() -> Check:
    """How many files a process may hold open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shown = f"{'no limit' if soft == resource.RLIM_INFINITY else f'{soft:,}'} at once"
    if soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        most = "" if hard == resource.RLIM_INFINITY else f" (up to {hard:,} without root)"
        return warning("open files", shown, f"ulimit -n 65536{most}")
    return ok("open files", shown)


def settings() -> Iterator[Check]:
    """Variables of the environment that change what happens."""
    on = [name for name in OFFLINE if os.environ.get(name, "").lower() in TRUE]
    if on:
        remedy = "hub ids must be in the local cache already; unset it to download"
        yield ok("offline", f"{', '.join(on)} set: nothing is downloaded", remedy)
    else:
        remedy = "HF_HUB_OFFLINE=1 for machines without network: it fails at once instead of trying"
        yield ok("offline", "not set: hub ids may be downloaded", remedy)
    parallel = os.environ.get("TOKENIZERS_PARALLELISM")
    yield ok(
        "TOKENIZERS_PARALLELISM",
        "not set" if parallel is None else f"{parallel!r}",
        "nothing to do: workers are processes of their own, pinned to a core each, never forks",
    )


def ray(describe: Callable[[], dict[str, Any]] | None) -> Check:
    """Whether ``executor="ray"`` would find a cluster; describe: what Ray's integration says."""
    if importlib.util.find_spec("ray") is None:
        return note("Ray", "not installed", "for executor='ray': pip install 'tokenmill[ray]'")
    if describe is None:
        version = installed_versions(["ray"]).get("ray", "of unknown version")
        return ok("Ray", version, "`tokenmill doctor` says which cluster executor='ray' would use")
    try:
        found = describe()
    except Exception as error:  # a broken installation must not end the examination
        return note("Ray", f"cannot be asked: {error}", "reinstall: pip install 'tokenmill[ray]'")
    version, address = found["version"], found["address"]
    if address is None:
        remedy = "executor='ray' starts a local one; for a cluster: RAY_ADDRESS=host:6379"
        return ok("Ray", f"{version}; no cluster is running here", remedy)
    if not found["reachable"]:
        remedy = "start the cluster, or correct or unset RAY_ADDRESS"
        return warning("Ray", f"{version}; {address} ({found['from']}) does not answer", remedy)
    return ok("Ray", f"{version}; {address} ({found['from']}) answers")
