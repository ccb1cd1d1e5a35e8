"""A source that is edited while it is read raises an error, or gives another key."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.world import TOKENIZER, write_sources
from tokenmill.build.calls import run_recipe
from tokenmill.build.run import BUILD
from tokenmill.build.tasks import Done, InlineExecutor, Setup, Task
from tokenmill.errors import SourceChanged


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": "late"}]}\n')


def rewrite(path: Path) -> None:
    path.write_text(path.read_text().replace("noon", "midnight").replace("cat", "horse"))


def replace(path: Path) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(path.read_text().replace("the", "thy").replace("cat", "dog"))
    aside.rename(path)


def same_size_same_mtime(path: Path) -> None:
    status = path.stat()
    path.write_text(path.read_text().replace("the", "thy").replace("cat", "dog"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


EDITS = [append, rewrite, replace, same_size_same_mtime]


class Editing(InlineExecutor):
    def __init__(self, path: Path, edit: Callable[[Path], None], nth: int) -> None:
        self._path, self._edit, self._nth = path, edit, nth

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        return super().run(setup, self._edited(tasks) if setup.entry == BUILD else tasks)

    def _edited(self, tasks: Iterable[Task]) -> Iterator[Task]:
        for number, task in enumerate(tasks):
            if number == self._nth:
                self._edit(self._path)
            yield task


def prepare(sources: Path, cache: Path, executor: Any = "inline") -> Any:
    return run_recipe(
        [sources], TOKENIZER, tokenizer_backend="file", executor=executor, cache_dir=cache
    )


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("nth", [0, 3], ids=["first", "in the middle"])
def test_edit_during_the_build_is_noticed_or_changes_nothing(
    tmp_path: Path, edit: Callable[[Path], None], nth: int
) -> None:
    sources, cache = write_sources(tmp_path / "sources"), tmp_path / "cache"
    untouched = write_sources(tmp_path / "untouched")
    path = sources / "part-004.jsonl"
    undisturbed = prepare(untouched, tmp_path / "other").store
    key = undisturbed.key
    try:
        prepared = prepare(sources, cache, Editing(path, edit, nth))
        # Only where it was read before the edit, or its rows stayed what they were.
        assert nth > 0 or edit is append
        assert prepared.store.key == key
        rows = [row.input_ids.tolist() for row in prepared.store]
        assert rows == [row.input_ids.tolist() for row in undisturbed]
    except SourceChanged as error:
        assert error.path == str(path)
    again = prepare(sources, cache)
    assert not again.hit
    assert again.store.key != key
    again.store.verify()


@pytest.mark.parametrize("edit", EDITS)
def test_edit_right_after_a_build_is_another_key(
    tmp_path: Path, edit: Callable[[Path], None]
) -> None:
    sources, cache = write_sources(tmp_path / "sources", files=2), tmp_path / "cache"
    first = prepare(sources, cache)
    edit(sources / "part-001.jsonl")  # most likely within the same tick of the file's clock
    second = prepare(sources, cache)
    assert not second.hit
    assert second.store.key != first.store.key
    assert second.build_stats.slices_built == 1
