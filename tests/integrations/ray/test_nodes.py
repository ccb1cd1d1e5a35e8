"""Two nodes of which one dies, a driver that dies, a node that does not share the cache.

Drivers are processes of their own; workers note in a directory what they began and finished.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.faults.tools import environment, require_mounts
from tests.faults.world import Picture, committed, picture, prepare_arguments
from tests.integrations.ray.conftest import FILES, node_arguments
from tests.integrations.ray.entries import LOG

DRIVER = """
from tokenmill.build import run
from tokenmill.cli import main
run.BUILD = "tests.integrations.ray.entries:open_builder"
raise SystemExit(main())
"""


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log")


@pytest.fixture(scope="module")
def nodes(ray_environment: Path, log: Path) -> Iterator[Cluster]:
    """A head with one CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(LOG, str(log))
        made = Cluster(initialize_head=True, head_node_args=node_arguments(ray_environment, 1))
        yield made
        made.shutdown()


@pytest.fixture
def notes(log: Path) -> Path:
    for path in log.iterdir():
        path.unlink()
    return log


def start_driver(nodes: Cluster, sources: Path, cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *prepare_arguments(sources, cache, "--executor", "ray")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(RAY_ADDRESS=nodes.address),
    )


def finish(driver: subprocess.Popen[str]) -> dict[str, Any]:
    said, told = driver.communicate(timeout=100)
    assert driver.returncode == 0, told
    document: dict[str, Any] = json.loads(said)  # Ray's own words are not on stdout
    return document


def noted(notes: Path, what: str) -> list[tuple[str, str]]:
    """(slice, node) of everything that was begun or done."""
    names = [path.name.split("-") for path in notes.glob(f"{what}-*")]
    return [(name[1], name[2]) for name in names]


def wait_until(condition: Any, driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_killed_node_costs_a_retry_of_what_it_had_in_flight(
    nodes: Cluster, ray_environment: Path, notes: Path, sources: Path, expected: Picture,
    tmp_path: Path,
) -> None:  # fmt: skip
    doomed = nodes.add_node(**node_arguments(ray_environment, 2))
    nodes.wait_for_nodes()
    driver = start_driver(nodes, sources, tmp_path)

    def has_worked() -> bool:
        there = [key for key, node in noted(notes, "done") if node == doomed.node_id]
        under_way = [key for key, node in noted(notes, "began") if node == doomed.node_id]
        return bool(there) and len(under_way) > len(there)

    wait_until(has_worked, driver)
    nodes.remove_node(doomed, allow_graceful=False)
    summary = finish(driver)
    assert picture(tmp_path) == expected
    began, done = Counter(noted(notes, "began")), Counter(noted(notes, "done"))
    times = Counter(key for key, _ in began.elements())
    retried = {key for key, count in times.items() if count > 1}
    unfinished = {key for key, node in began - done if node == doomed.node_id}
    # Two CPUs, so at most two; one may have been finished without Ray having heard of it.
    assert unfinished <= retried <= {key for key, node in began if node == doomed.node_id}
    assert 1 <= len(retried) <= 2
    assert set(times.values()) == {1, 2}
    # What it had published before its last word was lost is not built again.
    assert FILES - len(retried) <= summary["slices_built"] <= summary["slices"] == FILES


def stopped(nodes: Cluster, sources: Path, cache: Path, by: signal.Signals) -> tuple[int, str]:
    """Exit code and output of a driver that got a signal when two slices were there."""
    driver = start_driver(nodes, sources, cache)
    wait_until(lambda: len(committed(cache)) >= 2, driver)
    driver.send_signal(by)
    said, _ = driver.communicate(timeout=60)
    return driver.returncode, said


def test_killed_driver_is_restarted_and_builds_only_what_is_missing(
    nodes: Cluster, notes: Path, sources: Path, expected: Picture, tmp_path: Path
) -> None:
    stopped(nodes, sources, tmp_path, signal.SIGKILL)
    time.sleep(1)  # Ray ends what the dead one had under way
    there = committed(tmp_path)
    assert 2 <= len(there) < FILES
    before = {key for key, _ in noted(notes, "done")}
    for path in notes.iterdir():
        path.unlink()
    summary = finish(start_driver(nodes, sources, tmp_path))
    rebuilt = {key for key, _ in noted(notes, "done")}
    assert summary["slices_built"] == len(rebuilt) == FILES - len(there)
    assert not rebuilt & before
    assert picture(tmp_path) == expected


def test_interrupted_driver_leaves_what_is_finished(
    nodes: Cluster, notes: Path, sources: Path, expected: Picture, tmp_path: Path
) -> None:
    code, said = stopped(nodes, sources, tmp_path, signal.SIGINT)
    assert (code, json.loads(said)["error"]["message"]) == (130, "interrupted")
    there = picture(tmp_path)
    assert 2 <= len(committed(tmp_path)) < FILES
    assert there.items() <= expected.items()
    staged = tmp_path / "staging"
    # Interrupted tasks clean up behind themselves, on a busy machine after the driver has ended.
    deadline = time.monotonic() + 30
    while list(staged.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(staged.iterdir())


def test_cache_that_a_node_does_not_share_is_refused_in_one_sentence(
    nodes: Cluster, sources: Path, tmp_path: Path
) -> None:
    """The second node is started where something else is mounted over the cache."""
    require_mounts()
    cache = tmp_path / "cache"
    cache.mkdir()
    ray_command = Path(sys.executable).parent / "ray"
    joins = (
        f"mount -t tmpfs none {cache} && exec {ray_command} start --address={nodes.address} "
        f"--num-cpus=1 --object-store-memory={80 << 20} --block"
    )
    other = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", joins],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while alive(nodes) < 2:
            assert time.monotonic() < deadline
            assert other.poll() is None
            time.sleep(0.2)
        driver = start_driver(nodes, sources, cache)
        said, told = driver.communicate(timeout=100)
        assert driver.returncode == 1, told
        error = json.loads(said)["error"]
        assert (error["type"], error["path"]) == ("CacheError", str(cache))
        assert error["message"].startswith("this directory is not shared: node ")
        assert error["message"].endswith("on a file system that every node mounts")
        assert not (cache / "slices").exists()
        assert not list((cache / "staging").glob("*/sentinel"))
    finally:
        os.killpg(other.pid, signal.SIGTERM)
        other.wait(20)


def alive(nodes: Cluster) -> int:
    return sum(bool(node["Alive"]) for node in nodes.global_state.node_table())
