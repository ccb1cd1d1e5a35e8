"""A builder that waits for others looks again only at what it has not seen published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.simulated import arguments_of, make_slices, make_sources, planned

from tokenmill.api import resolve_call
from tokenmill.build.builder import Builder
from tokenmill.build.proof import Account
from tokenmill.store.layout import SliceFiles
from tokenmill.work import resolve_executor
from tokenmill.work.inputs import cache_of
from tokenmill.work.progress import open_progress


def test_published_slices_are_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources, cache = make_sources(tmp_path / "sources", tmp_path / "cache", 20), tmp_path / "cache"
    plan = planned(sources, cache)
    make_slices(plan, cache)
    keys = [key for key, _ in plan.walk()]
    layout = cache_of(cache)
    held_back = layout.slice(keys[7]).record.rename(tmp_path / "record")
    given: dict[str, Any] = arguments_of(sources, cache)
    _, options = resolve_call(given.pop("sources"), given.pop("tokenizer"), given)
    with open_progress(False, total_rows=1, total_size=1) as shown:
        builder = Builder(
            plan, layout, resolve_executor(options.executor, None), options, Account(), shown
        )
        missing = builder.missing()
    asked: list[str] = []
    real = SliceFiles.record.fget
    assert real is not None

    def record(files: SliceFiles) -> Path:
        asked.append(files.key)
        return real(files)

    monkeypatch.setattr(SliceFiles, "record", property(record))
    assert [task.number for task in missing] == [7]
    assert sorted(asked) == sorted(keys)
    asked.clear()
    assert [task.number for task in missing] == [7]
    assert asked == [keys[7]]
    held_back.rename(layout.slices / keys[7][:2] / f"{keys[7]}.json")
    assert list(missing) == []
