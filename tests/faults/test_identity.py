"""T06 and T14: one key, one content; who makes other bytes is told so (P2, P6)."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import Zygote, finish, start_command
from tests.faults.world import TOKENIZER, picture, prepare_arguments
from tokenmill.build.calls import run_recipe
from tokenmill.build.pipeline import Pipeline
from tokenmill.errors import NonDeterminismError

WAYS = [
    *(("--executor", "inline", "--engine", engine) for engine in ("auto", "hf")),
    ("--executor", "inline", "--renderer", "jinja2"),
    *(
        ("--executor", "local", "--num-workers", str(workers), "--engine", engine)
        for workers, engine in itertools.product((1, 2, 3, 8), ("auto", "hf"))
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
def test_builder_that_counts_is_refused_and_the_winner_untouched(
    clean: Clean, tmp_path: Path, recorded: bool
) -> None:
    cache = tmp_path / "cache"
    prepare(clean, cache)
    for record in () if recorded else (cache / "slices").rglob("*.json"):
        record.unlink()  # as between publishing the files and publishing the record
    before = picture(cache)
    with pytest.raises(NonDeterminismError, match="what is published stays") as caught:
        prepare(clean, cache, force_recache=True)
    assert caught.value.path is not None
    assert picture(cache) == before if recorded else before.items() <= picture(cache).items()
    assert not (cache / "quarantine").exists()


def test_rebuilding_what_is_there_compares_and_agrees(
    zygote: Zygote, clean: Clean, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    assert zygote.one(prepare_arguments(clean.sources, cache)).exit == 0
    again = zygote.one(prepare_arguments(clean.sources, cache, "--force-recache"))
    assert again.exit == 0, again.stderr
    assert again.said["hit"] is False
    assert again.said["slices_built"] == clean.said["slices"]
    assert picture(cache) == clean.picture


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=" ".join(way), marks=() if number in (1, 7) else pytest.mark.soak)
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
    assert outcome.said["slices_built"] == clean.said["slices"]
    assert picture(cache) == clean.picture
