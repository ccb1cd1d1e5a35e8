"""A node that dies, a driver that dies, a node that does not share the cache."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from tests.faults.tools import environment, require_mounts
from tests.faults.world import Image, committed, image, prepare_arguments
from tests.integrations.ray.conftest import FILES, build, node_arguments
from tests.integrations.ray.entries import LOG
from tokenmill.build import run
from tokenmill.errors import CacheError

BUILD = "tests.integrations.ray.entries:open_builder"
DRIVER = f"""
from tokenmill.build import run
from tokenmill.cli import main
run.BUILD = {BUILD!r}
raise SystemExit(main())
"""


@pytest.fixture
def notes(cluster: Any) -> Path:
    log = Path(os.environ[LOG])
    clear(log)
    return log


def clear(notes: Path) -> None:
    for path in notes.iterdir():
        path.unlink()


def noted(notes: Path, what: str) -> list[tuple[str, str]]:
    """(slice, node) of everything that was begun or done."""
    names = [path.name.split("-") for path in notes.glob(f"{what}-*")]
    return [(name[1], name[2]) for name in names]


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive() -> int:
    return sum(bool(node["Alive"]) for node in ray.nodes())


def test_killed_node_costs_a_retry_of_what_it_had_in_flight(
    cluster: Any, ray_environment: Path, notes: Path, sources: Path, expected: Image,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(run, "BUILD", BUILD)
    reserved = placement_group([{"CPU": 3}])  # so that most tasks run on the other node
    ray.get(reserved.ready())
    doomed = cluster.add_node(**node_arguments(ray_environment, 2))
    cluster.wait_for_nodes()
    removed = False

    def remove(_: Any) -> None:
        nonlocal removed
        there = [key for key, node in noted(notes, "done") if node == doomed.node_id]
        under_way = [key for key, node in noted(notes, "began") if node == doomed.node_id]
        if not removed and there and len(under_way) > len(there):
            cluster.remove_node(doomed, allow_graceful=False)
            removed = True

    try:
        build_stats = build(sources, tmp_path, num_workers=3, progress=remove).build_stats
    finally:
        remove_placement_group(reserved)
        if not removed:
            cluster.remove_node(doomed)
    assert removed
    assert image(tmp_path) == expected
    began, done = Counter(noted(notes, "began")), Counter(noted(notes, "done"))
    times = Counter(key for key, _ in began.elements())
    retried = {key for key, count in times.items() if count > 1}
    unfinished = {key for key, node in began - done if node == doomed.node_id}
    # Two CPUs, so at most two; one may have been finished without Ray having heard of it.
    assert unfinished <= retried <= {key for key, node in began if node == doomed.node_id}
    assert 1 <= len(retried) <= 2
    assert set(times.values()) == {1, 2}
    # What it had published before its last word was lost is not built again.
    assert FILES - len(retried) <= build_stats.slices_built <= build_stats.slices == FILES


def start_driver(address: str, sources: Path, cache: Path) -> subprocess.Popen[str]:
    arguments = prepare_arguments(sources, cache, "--executor", "ray", "--num-workers", "1")
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(RAY_ADDRESS=address),
    )


def stopped(address: str, sources: Path, cache: Path, by: signal.Signals) -> tuple[int, str]:
    """Exit code and output of a driver that got a signal when it had built two slices."""
    before = len(committed(cache))
    driver = start_driver(address, sources, cache)
    wait_until(lambda: len(committed(cache)) >= before + 2, driver)
    driver.send_signal(by)
    said, _ = driver.communicate(timeout=60)
    return driver.returncode, said


def test_stopped_driver_is_restarted_and_builds_only_what_is_missing(
    joined: str, notes: Path, sources: Path, expected: Image, tmp_path: Path
) -> None:
    code, said = stopped(joined, sources, tmp_path, signal.SIGINT)
    assert (code, json.loads(said)["error"]["message"]) == (130, "interrupted")
    assert image(tmp_path).items() <= expected.items()
    staged = tmp_path / "staging"
    # Interrupted tasks clean up behind themselves, on a busy machine after the driver has ended.
    deadline = time.monotonic() + 30
    while list(staged.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(staged.iterdir())
    stopped(joined, sources, tmp_path, signal.SIGKILL)
    time.sleep(1)  # Ray ends what the dead one had under way
    there = committed(tmp_path)
    assert 4 <= len(there) < FILES
    before = noted(notes, "done")
    clear(notes)
    driver = start_driver(joined, sources, tmp_path)
    said, detail = driver.communicate(timeout=100)
    assert driver.returncode == 0, detail
    rebuilt = {key for key, _ in noted(notes, "done")}
    built = json.loads(said)["slices_built"]  # the one object, and nothing else there
    assert built == len(rebuilt) == FILES - len(there)
    assert not rebuilt & {key for key, _ in before}
    assert image(tmp_path) == expected
    assert alive() == 1  # drivers leave the cluster running


def test_cache_that_a_node_does_not_share_is_refused_in_one_sentence(
    joined: str, sources: Path, tmp_path: Path
) -> None:
    """The second node is started where something else is mounted over the cache."""
    require_mounts()
    cache = tmp_path / "cache"
    cache.mkdir()
    ray_command = Path(sys.executable).parent / "ray"
    joins = (
        f"mount -t tmpfs none {cache} && exec {ray_command} start --address={joined} "
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
        wait_until(lambda: alive() == 2, other)
        with pytest.raises(CacheError) as caught:
            build(sources, cache)
        assert str(caught.value.path) == str(cache)
        message = caught.value.message
        assert message.startswith("this directory is not shared: node ")
        assert message.endswith("on a file system that every node mounts")
        assert not (cache / "slices").exists()
        assert not list((cache / "staging").glob("*/sentinel"))
    finally:
        os.killpg(other.pid, signal.SIGTERM)
        other.wait(20)
        deadline = time.monotonic() + 60
        while alive() > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
