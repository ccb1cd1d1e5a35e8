"""Whole preparations on Ray: the bytes of any other executor, inside actors, typed errors."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tests.build import faulty_engines
from tests.data.making import PROMPTS
from tests.faults.world import TOKENIZER, Image, image
from tests.integrations.ray.conftest import build
from tests.sampling import sampled
from tokenmill.build.blocks import BlockJob
from tokenmill.build.calls import run_recipe
from tokenmill.build.executors import resolve_executor
from tokenmill.build.tasks import Setup
from tokenmill.data.prompts import PromptSettings, open_prompts
from tokenmill.errors import CacheError, SourceMissing, UsageError, WorkerError
from tokenmill.integrations.ray import RayExecutor, describe, executor, worker

pytestmark = pytest.mark.usefixtures("joined")


@pytest.mark.parametrize(("workers", "reference"), sampled([(2, False), (4, True)], 2))
def test_bytes_on_ray_are_those_of_an_inline_build(
    sources: Path, expected: Image, tmp_path: Path, workers: int, reference: bool
) -> None:
    prepared = build(sources, tmp_path, num_workers=workers, reference=reference)
    assert prepared.build_stats.slices_built == prepared.build_stats.slices == 10
    assert image(tmp_path) == expected
    assert ray.is_initialized()  # it was there before, so it is there after
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("stage", ["render", "encode"])
def test_mismatch_in_one_task_starts_the_build_again(
    sources: Path, expected: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    honest = BlockJob.setup

    def setup(self: BlockJob, entry: str, size: int, **options: Any) -> Setup:
        fault = faulty_engines.Fault(stage, about="cat", audited="cat", after=2).to_environment()
        return honest(self, faulty_engines.ENTRY, size, fault=fault, **options)

    monkeypatch.setattr(BlockJob, "setup", setup)
    monkeypatch.setattr("tokenmill.tokenizers.cache.SMALL_JOB_BYTES", 0)
    proof = build(sources, tmp_path, num_workers=2).store.proof
    assert image(tmp_path) == expected
    assert proof["slices_built"] >= proof["slices_replaced"] >= 2
    assert len(proof["notices"]) == 1


def test_progress_equals_that_of_local_workers_and_a_hit_needs_no_ray(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    prepared = build(sources, tmp_path, progress=seen.append)
    assert seen[-1].slices == prepared.build_stats.slices
    assert seen[-1].fraction == 1.0
    monkeypatch.setattr(executor, "join", None)
    assert build(sources, tmp_path).hit


def test_relative_tokenizer_is_found_by_workers(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(TOKENIZER, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    prepared = run_recipe(
        [sources], "mine", tokenizer_backend="file", executor="ray", cache_dir="cache",
        progress=False,
    )  # fmt: skip
    assert len(prepared.store)


@ray.remote
class Trainer:
    def __init__(self, wait_s: float | None = None) -> None:
        self.wait_s = wait_s

    def prepare(self, sources: str, cache: str) -> tuple[int, bool]:
        executor = RayExecutor(2, wait_s=self.wait_s)
        prepared = build(Path(sources), Path(cache), executor=executor)
        return prepared.build_stats.slices_built, ray.is_initialized()


@pytest.mark.parametrize("grouped", [True, False])
def test_actor_in_a_placement_group_or_with_every_cpu_builds(
    sources: Path, expected: Image, tmp_path: Path, grouped: bool
) -> None:
    """In a group, its tasks run outside of it; an actor with every CPU builds in its own."""
    group = placement_group([{"CPU": 1}]) if grouped else None
    options: dict[str, Any] = {"num_cpus": 4}
    if group is not None:
        ray.get(group.ready())
        inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
        options = {"num_cpus": 1, "scheduling_strategy": inside}
    actor = Trainer.options(**options).remote(None if grouped else 1)  # type: ignore[attr-defined]
    try:
        assert ray.get(actor.prepare.remote(str(sources), str(tmp_path))) == (10, True)
    finally:
        ray.kill(actor)
        if group is not None:
            remove_placement_group(group)
    assert image(tmp_path) == expected


def test_no_free_cpu_is_a_typed_error_that_names_the_remedy(sources: Path, tmp_path: Path) -> None:
    holder = Trainer.options(num_cpus=4).remote()  # type: ignore[attr-defined]
    ray.get(holder.__ray_ready__.remote())
    try:
        with pytest.raises(WorkerError, match=r"0 of 4 are\) for 1 s; .*num_cpus=0"):
            build(sources, tmp_path, executor=RayExecutor(wait_s=1))
        assert build(
            sources, tmp_path, executor=RayExecutor(2, num_cpus=0)
        ).build_stats.slices_built
    finally:
        ray.kill(holder)


def test_source_that_a_node_does_not_see_names_the_node(sources: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(sources, tmp_path / "sources")

    class Unseen(RayExecutor):
        """Another node: the files are gone when tasks run."""

        def run(self, setup: Any, tasks: Any) -> Any:
            if setup.entry.endswith("open_builder"):
                shutil.move(moved, tmp_path / "moved")
            return super().run(setup, tasks)

    message = r"part-\d+\.jsonl: no such file on node \S+ \(\S+\): every node must see the sources"
    with pytest.raises(SourceMissing, match=message):
        build(moved, tmp_path / "cache", executor=Unseen(2))


def test_node_with_another_tokenmill_is_refused(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "code_digest", lambda: "another")
    with pytest.raises(WorkerError, match=r"node \S+ \(\S+\) has another tokenmill"):
        build(sources, tmp_path)


def test_directory_that_a_late_node_does_not_share_is_refused_by_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "probe", lambda sentinels: None)  # as before that node joined
    monkeypatch.setattr(executor, "plant", lambda directory, until: (f"{directory}/a/b/c", "nonce"))
    with pytest.raises(CacheError, match=r"not shared: node \S+ .* does not see"):
        build(tmp_path, tmp_path)


def test_address_that_does_not_answer_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", None)  # which would try for many minutes
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(WorkerError, match=r"No Ray cluster answers at 127\.0\.0\.1:1\. Start it"):
        executor.join(None)


def test_description_of_the_cluster_starts_nothing(
    joined: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = describe()
    assert (said["address"], said["from"], said["reachable"]) == (joined, "this process", True)
    assert (said["nodes"], said["cpus"], said["version"]) == (1, 4, ray.__version__)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address, answers in ((joined, True), ("127.0.0.1:1", False)):
        monkeypatch.setenv("RAY_ADDRESS", address)
        said = describe()
        assert (said["address"], said["from"]) == (address, "RAY_ADDRESS")
        assert said["reachable"] is answers
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setenv("RAY_TMPDIR", "/nonexistent")
    assert (describe()["address"], describe()["reachable"]) == (None, None)


def test_prompt_lengths_measured_on_ray_are_those_of_an_inline_index(tmp_path: Path) -> None:
    def lengths(executor: Any) -> list[int]:
        opened = open_prompts(
            PromptSettings(executor=executor), PROMPTS, TOKENIZER, 4096, tokenizer_backend="file",
            cache_dir=tmp_path / type(executor).__name__,
        )  # fmt: skip
        return list(opened.lengths)

    expected = lengths("inline")
    assert len(expected) > 1
    with RayExecutor(2) as executor:
        assert lengths(executor) == expected


def test_without_ray_the_error_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("tokenmill.integrations.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'tokenmill\[ray\]'"):
        resolve_executor("ray", None)
