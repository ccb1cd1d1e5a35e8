"""Fixtures of fault tests: sources, and what a clean build of them shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.tools import Zygote
from tests.faults.world import FILES, Image, image, prepare_arguments, write_sources


class Clean(NamedTuple):
    sources: Path
    cache: Path
    image: Image
    result: dict[str, object]


def build_cleanly(zygote: Zygote, directory: Path, files: int = FILES, rows: int = 4) -> Clean:
    sources, cache = write_sources(directory / "sources", files, rows), directory / "cache"
    outcome = zygote.one(prepare_arguments(sources, cache))
    assert outcome.exit == 0, outcome.stderr
    return Clean(sources, cache, image(cache), outcome.result)


@pytest.fixture(scope="session")
def clean(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    return build_cleanly(zygote, tmp_path_factory.mktemp("clean"))


@pytest.fixture
def cache(clean: Clean, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean.cache, tmp_path / "cache"))


@pytest.fixture(scope="session")
def smallest(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The same with two slices, one of them with a rejected row: every kind of step, few steps."""
    return build_cleanly(zygote, tmp_path_factory.mktemp("smallest"), 2)
