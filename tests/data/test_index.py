"""The length index: what makes another one, what a crash leaves, what damage does."""

from __future__ import annotations

import gc
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.making import PROMPTS, TOKENIZER, open_prompts, write_rows
from tests.programs import python
from tokenmill.data.prompt_lengths import (
    NO_LENGTH,
    PAGE,
    REJECTED,
    Kept,
    LengthIndex,
    Measurer,
    publish_lengths,
)
from tokenmill.errors import CacheError, CorruptionError, NonDeterminismError
from tokenmill.integrations.miles import MilesOrder
from tokenmill.integrations.trainers import VERBATIM


def many_files(directory: Path, files: int = 5, rows: int = 40) -> str:
    """A source of several blocks: each file is one."""
    directory.mkdir()
    for number in range(files):
        texts = ({"text": f"file {number} row {n} " + "word " * n} for n in range(rows))
        write_rows(directory / f"{number}.jsonl", texts)
    return str(directory / "*.jsonl")


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call of the measurer was given."""
    calls: list[int] = []
    measure = Measurer.measure

    def spy(self: Any, values: Any) -> Any:
        calls.append(len(values))
        return measure(self, values)

    monkeypatch.setattr(Measurer, "measure", spy)
    return calls


def test_several_limits_measure_once(tmp_path: Path, counted: list[int]) -> None:
    rows = many_files(tmp_path / "files", files=1, rows=200)
    everything = open_prompts(rows)
    assert sum(counted) == 200
    counted.clear()
    lengths = everything.lengths
    for limit in (1, 5, 20, 50, 100, 1000):
        prompts = open_prompts(rows, max_length=limit)
        assert prompts.hit
        assert len(prompts) == int((lengths <= limit).sum())
        assert prompts.lengths.tolist() == lengths[lengths <= limit].tolist()
        assert prompts.rejected.get("overlong", 0) == int((lengths > limit).sum())
    assert counted == []


def test_new_rows_measure_only_their_block(tmp_path: Path, counted: list[int]) -> None:
    source = many_files(tmp_path / "files")
    open_prompts(source)
    assert counted == [40] * 5
    counted.clear()
    with (tmp_path / "files" / "4.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    write_rows(tmp_path / "files" / "5.jsonl", [{"text": "new"}])
    prompts = open_prompts(source)
    assert len(prompts) == 202
    assert prompts.measured == 42
    assert sorted(counted) == [1, 41]
    assert [prompt.prompt for prompt in prompts[-2:]] == ["one more", "new"]


CHANGES: dict[str, dict[str, Any]] = {
    "prompt_key": {"prompt_key": "label"},
    "label_key": {"label_key": "label"},
    "tool_key": {"tool_key": "tools"},
    "metadata_key": {"metadata_key": "meta"},
    "media": {"multimodal_keys": {"image": "images"}},
    "no template": {"apply_chat_template": False},
    "kwargs": {"apply_chat_template_kwargs": {"enable_thinking": False}},
    "template": {"chat_template": "{{ messages[0].content }}"},
    "date": {"date": "2026-11-15"},
    "convention": {"convention": VERBATIM},
    "slice": {"path": f"{PROMPTS}@[1:]"},
}
SAME: dict[str, dict[str, Any]] = {
    "limit": {"max_length": 7},
    "seed": {"seed": 7},
    "order": {"order": MilesOrder},
    "workers": {"num_workers": 1},
}


def test_key_changes_with_whatever_changes_a_length_and_with_nothing_else(tmp_path: Path) -> None:
    base: dict[str, Any] = {"path": PROMPTS, "apply_chat_template": True}
    key = open_prompts(**base).key
    keys = {name: open_prompts(**{**base, **change}).key for name, change in CHANGES.items()}
    assert key not in keys.values()
    assert len(set(keys.values())) == len(keys)
    copied = tmp_path / "other.jsonl"
    copied.write_bytes(PROMPTS.read_bytes())
    for name, change in {**SAME, "path": {"path": copied}}.items():
        assert open_prompts(**{**base, **change}).key == key, name
    copied.write_bytes(PROMPTS.read_bytes().replace(b"apples", b"plums_", 1))
    assert open_prompts(**{**base, "path": copied}).key != key


def test_template_is_no_part_of_a_key_without_one_being_applied() -> None:
    key = open_prompts(PROMPTS).key
    assert open_prompts(PROMPTS, chat_template="{{ messages }}").key == key
    assert open_prompts(PROMPTS, date="2026-11-15").key == key


def test_workers_and_inline_publish_the_same_bytes(tmp_path: Path) -> None:
    rows = many_files(tmp_path / "files")
    seen = set()
    for workers in (0, 2):
        cache = tmp_path / f"cache-{workers}"
        prompts = open_prompts(rows, num_workers=workers, cache_dir=cache)
        files = sorted(path for path in prompts.path.iterdir())
        seen.add((prompts.key, *(path.read_bytes() for path in files)))
    assert len(seen) == 1


def test_index_of_other_rows_under_a_key_is_refused(tmp_path: Path) -> None:
    one, other = open_prompts(f"{PROMPTS}@[:5]").path, open_prompts(f"{PROMPTS}@[5:10]").path
    for path in one.iterdir():
        path.write_bytes((other / path.name).read_bytes())
    with pytest.raises(CorruptionError, match="another key than its directory"):
        open_prompts(f"{PROMPTS}@[:5]")


def test_damaged_part_is_measured_again(tmp_path: Path, counted: list[int]) -> None:
    rows = many_files(tmp_path / "files", files=1)
    wanted = open_prompts(rows)
    lengths, index = wanted.lengths.tolist(), wanted.path
    shutil.rmtree(index)
    (part,) = index.parent.glob("*/lengths.bin")
    part.write_bytes(part.read_bytes()[:-1])
    counted.clear()
    assert open_prompts(rows).lengths.tolist() == lengths
    assert sum(counted) == 40


def test_builders_with_different_bytes_get_an_error(tmp_path: Path) -> None:
    def publish(*lengths: int) -> Path:
        return publish_lengths(tmp_path, {"a": 1}, [(np.array(lengths, np.int32), [])])

    place = publish(1, 2)
    assert publish(1, 2) == place
    with pytest.raises(NonDeterminismError):
        publish(1, 3)
    assert LengthIndex(place).lengths.tolist() == [1, 2]


PROGRAM = """
import os, signal, sys
from tokenmill import PromptDataset
from tokenmill._core.publish import Staging
left = int(sys.argv[3])
publish = Staging.publish
def dying(self, staged, target):
    global left
    if (staged / "prompts.json").exists():
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
    return publish(self, staged, target)
Staging.publish = dying
PromptDataset(sys.argv[1], sys.argv[2], tokenizer_backend="file", num_workers=0)
"""


@pytest.mark.parametrize("blocks", [2, 5])
def test_killed_builder_leaves_nothing_to_clean_and_its_parts_are_used(
    tmp_path: Path, own_cache: Path, counted: list[int], blocks: int
) -> None:
    """There are five blocks; the sixth publication is the whole."""
    rows = many_files(tmp_path / "files")
    died = python(PROGRAM, rows, TOKENIZER, blocks)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert len(list(own_cache.glob("rows/*/prompts.json"))) == blocks
    prompts = open_prompts(rows)
    assert len(prompts) == 200
    assert not prompts.hit
    assert len(counted) == 5 - blocks


def test_cache_that_cannot_be_written_is_worked_around(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    lengths = open_prompts(PROMPTS, cache_dir=cache).lengths.tolist()
    for place in cache.glob("rows/*/prompts.json"):
        shutil.rmtree(place.parent)
    shutil.rmtree(cache / "staging")
    (cache / "staging").write_text("not a directory")  # root ignores modes
    private = open_prompts(PROMPTS, cache_dir=cache)
    assert private.lengths.tolist() == lengths
    home = private.path.parent.parent
    assert home != cache
    del private
    gc.collect()  # Python 3.12 makes a cycle of the error and its frames
    assert not home.exists()


def test_selected_rows_equal_a_plain_comparison() -> None:
    random = np.random.default_rng(1)
    for size in (0, 1, PAGE - 1, PAGE, 3 * PAGE + 5):
        lengths = random.integers(REJECTED, 50, size).astype(np.int32)
        lengths[:1] = 3
        for limit in (None, 1, 25, 100):
            kept = Kept(lengths, limit)
            wanted = np.flatnonzero(
                (lengths != REJECTED) & ((lengths <= limit) if limit is not None else True)
            )
            assert len(kept) == len(wanted)
            assert kept.rows(np.arange(len(kept))).tolist() == wanted.tolist()
            for row in {0, 1, PAGE - 1, PAGE, size // 2, size, size + 9}:
                assert kept.count_before(row) == int((wanted < row).sum())
            assert kept.overlong == int((lengths != REJECTED).sum()) - len(wanted)
            assert len(kept.overlong_rows()) == kept.overlong
    assert len(Kept(np.array([REJECTED, NO_LENGTH, 9], np.int32), 5)) == 2


def test_index_that_is_gone_is_a_cache_error(tmp_path: Path) -> None:
    prompts = open_prompts(PROMPTS)
    pickled = pickle.dumps(prompts)
    shutil.rmtree(prompts.path)
    with pytest.raises(CacheError, match="gone"):
        pickle.loads(pickled)
