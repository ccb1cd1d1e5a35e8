"""One small Ray cluster for all tests; session directories are short, as sockets need."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from tests import programs
from tests.faults.world import TOKENIZER, Image, image, write_sources
from tests.integrations.ray.entries import LOG
from tokenmill.build.calls import run_recipe

STORE_BYTES = 80 << 20  # the least that Ray takes for its object store
FILES = 10


def build(sources: Path, cache: Path, **more: Any) -> Any:
    given = {"executor": "ray", "tokenizer_backend": "file", "progress": False, **more}
    return run_recipe([sources], TOKENIZER, cache_dir=cache, **given)


@pytest.fixture(scope="session")
def ray_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    sessions = Path(tempfile.mkdtemp(prefix="tm-ray-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", programs.environment()["PYTHONPATH"])
        patch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the user's home
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # A worker is started when a task needs it, not one per CPU and job beforehand.
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("RAY_TMPDIR", str(sessions))
        patch.setenv(LOG, str(tmp_path_factory.mktemp("log")))
        patch.delenv("RAY_ADDRESS", raising=False)
        (sessions / "ray").mkdir()  # which is where it then looks by itself
        yield sessions / "ray"
    shutil.rmtree(sessions, ignore_errors=True)


def node_arguments(sessions: Path, cpus: int) -> dict[str, Any]:
    """Of a node without those of Ray's own processes that no test has a use for."""
    return {
        "num_cpus": cpus,
        "object_store_memory": STORE_BYTES,
        "temp_dir": str(sessions),
        "include_dashboard": False,
        "include_log_monitor": False,
        "no_monitor": True,
    }


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sources(tmp_path_factory.mktemp("ray-sources"), files=FILES, rows=4)


@pytest.fixture(scope="session")
def expected(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    cache = tmp_path_factory.mktemp("ray-expected")
    build(sources, cache, executor="inline")
    return image(cache)


@pytest.fixture(scope="package")
def cluster(ray_environment: Path) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=node_arguments(ray_environment, 4))
    ray.init(address=made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(scope="package")
def joined(cluster: Any) -> str:
    return str(cluster.address)
