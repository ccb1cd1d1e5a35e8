"""Tests of non-determinism: other bytes for the same key raise an error."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import Zygote, finish, start_command
from tests.faults.world import TOKENIZER, image, prepare_arguments
from tokenmill.build.calls import run_recipe
from tokenmill.build.pipeline import Pipeline
from tokenmill.errors import NonDeterminismError

WAYS = [
    *(("--executor", "inline", *flags) for flags in ((), ("--reference",))),
    *(
        ("--executor", "local", "--num-workers", str(workers), *flags)
        for workers, flags in itertools.product((1, 2, 3, 8), ((), ("--reference",)))
    ),
]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, real = itertools.count(), Pipeline.run

    def run(self: Pipeline, rows: Any) -> Any:
        columns, notes = real(self, rows)
        ids = np.array(columns.ids)
        ids[0] = next(numbers)
        return dataclasses.replace(columns, ids=ids), notes

    monkeypatch.setattr(Pipeline, "run", run)


def prepare(clean: Clean, cache: Path, **more: Any) -> Any:
    return run_recipe(
        [clean.sources], TOKENIZER, tokenizer_backend="file", executor="inline", cache_dir=cache,
        **more,
    )  # fmt: skip


@pytest.mark.usefixtures("counting")
@pytest.mark.parametrize("recorded", [True, False], ids=["committed", "without records yet"])
def test_nondeterministic_builder_fails_and_published_bytes_stay(
    clean: Clean, tmp_path: Path, recorded: bool
) -> None:
    cache = tmp_path / "cache"
    prepare(clean, cache)
    for record in () if recorded else (cache / "slices").rglob("*.json"):
        record.unlink()  # as between publishing the files and publishing the record
    before = image(cache)
    with pytest.raises(NonDeterminismError, match="the published slice is unchanged") as caught:
        prepare(clean, cache, force_recache=True)
    assert caught.value.path is not None
    assert image(cache) == before if recorded else before.items() <= image(cache).items()
    assert not (cache / "quarantine").exists()


def test_rebuilding_an_existing_store_compares_equal(
    zygote: Zygote, clean: Clean, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert zygote.one(prepare_arguments(clean.sources, cache)).exit == 0
    again = zygote.one(prepare_arguments(clean.sources, cache, "--force-recache"))
    assert again.exit == 0, again.stderr
    assert again.result["hit"] is False
    assert again.result["slices_built"] == clean.result["slices"]
    assert image(cache) == clean.image


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=" ".join(way), marks=() if number == 7 else pytest.mark.soak)
        for number, way in enumerate(WAYS)
    ],
)
def test_bytes_are_the_same_whoever_builds(
    clean: Clean, tmp_path: Path, way: tuple[str, ...]
) -> None:
    cache = tmp_path / "cache"
    surroundings = {"TZ": "Asia/Kolkata", "LC_ALL": "C", "PYTHONHASHSEED": "7"}
    command = start_command(prepare_arguments(clean.sources, cache, *way), **surroundings)
    outcome = finish(command)
    assert outcome.exit == 0, outcome.stderr
    assert outcome.result["slices_built"] == clean.result["slices"]
    assert image(cache) == clean.image
