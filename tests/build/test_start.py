"""Start-up: a small job starts no workers and no fast engine, and nothing is computed twice.

A slow package replaces transformers and records the processes that call AutoTokenizer.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import tokenmill as tm
from tests.build.making import TOKENIZER, conversations, small_cuts, write_rows
from tests.programs import PROJECT, environment
from tokenmill.build import blocks, executors
from tokenmill.build.calls import explain_recipe, run_recipe
from tokenmill.build.tasks import Done, InlineExecutor, Setup, Task
from tokenmill.data.prompts import PromptSettings, open_prompts
from tokenmill.errors import TokenizerError, TokenmillError
from tokenmill.tokenizers import engines
from tokenmill.tokenizers.tokenizer import Tokenizer

NAMED: dict[str, Any] = {"tokenizer": TOKENIZER, "tokenizer_backend": "file"}

TRANSFORMERS = """
import json, os, time
from pathlib import Path

import tokenizers


class AutoTokenizer:
    def __init__(self, directory):
        config = json.loads((directory / "tokenizer_config.json").read_text())
        self.special_tokens_map = {
            name: value for name, value in config.items()
            if name.endswith("_token") and isinstance(value, str)
        }
        self.chat_template = None
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        if os.environ.get("DIFFERS"):
            self.backend_tokenizer.normalizer = tokenizers.normalizers.Lowercase()

    def encode(self, text, add_special_tokens):
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    @classmethod
    def from_pretrained(cls, directory, **_):
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(float(os.environ.get("SLOWLY", "0")))
        return cls(Path(directory))
"""


class Calls:
    """Counts the calls of AutoTokenizer in the package that replaces transformers."""

    def __init__(self, directory: Path) -> None:
        self.package, self.path = directory / "packages", directory / "calls"
        write_rows(self.package / "transformers" / "__init__.py", [TRANSFORMERS])
        self.path.touch()

    def __len__(self) -> int:
        return len(self.path.read_text().splitlines())


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls(tmp_path)
    monkeypatch.syspath_prepend(str(calls.package))
    monkeypatch.setenv("CALLS", str(calls.path))
    return calls


@pytest.fixture
def one_row(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "one.jsonl", conversations(1))


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a worker process is an error."""
    forbidden = mock.Mock(side_effect=AssertionError("a worker was started"))
    monkeypatch.setattr(executors, "WorkerProcess", forbidden)


class Recording:
    """An inline executor that keeps the setups it was given."""

    def __init__(self) -> None:
        self.setups: list[Setup] = []

    def run(self, setup: Setup, tasks: Iterable[Task]) -> Iterator[Done]:
        listed = list(tasks)
        if listed:
            self.setups.append(setup)
        return InlineExecutor().run(setup, listed)


def test_little_work_starts_no_worker_and_no_fast_engine(
    one_row: Path, own_cache: Path, no_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tm.prepare(one_row, **NAMED, executor="inline")
    forbidden = mock.Mock(side_effect=AssertionError("the fast engine was loaded"))
    monkeypatch.setattr(engines, "FastokensEngine", forbidden)
    other = write_rows(one_row.parent / "two.jsonl", conversations(2))
    store = tm.prepare(other, **NAMED)
    assert (len(store), store.proof["engine"]) == (2, "hf")
    with pytest.raises(AssertionError, match="worker"):
        tm.prepare(other, **NAMED, num_workers=1, max_length=64)


def test_more_than_a_little_starts_workers_and_the_fast_engine(
    tmp_path: Path, no_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", conversations(20))
    little = Recording()
    tm.prepare(rows, executor=little, **NAMED)
    monkeypatch.setattr(blocks, "SMALL_JOB_BYTES", 100)
    monkeypatch.setattr("tokenmill.tokenizers.cache.SMALL_JOB_BYTES", 100)
    much = Recording()
    tm.prepare(rows, executor=much, force_recache=True, **NAMED)
    built = [setups[-1] for setups in (little.setups, much.setups)]
    assert [setup.small_job for setup in built] == [True, False]
    assert [setup.options["engine"] for setup in built] == ["hf", "auto"]
    with pytest.raises(AssertionError, match="worker"):
        tm.prepare(rows, force_recache=True, **NAMED)


def test_work_ahead_is_what_is_missing_and_not_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    monkeypatch.setattr(blocks, "SMALL_JOB_BYTES", 30_000)
    rows = write_rows(tmp_path / "rows.jsonl", conversations(400))
    first, second = Recording(), Recording()
    tm.prepare(rows, executor=first, **NAMED)
    with open(rows, "a") as file:
        file.write(json.dumps(conversations(1, first=900)[0]) + "\n")
    store = tm.prepare(rows, executor=second, **NAMED)
    assert len(store) == 401
    assert (first.setups[-1].small_job, second.setups[-1].small_job) == (False, True)


def test_warm_process_loads_nothing_again(
    tmp_path: Path, no_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    for name in ("_load_reference", "make_table"):
        loads.append(mock.Mock(side_effect=getattr(Tokenizer, name)))
        monkeypatch.setattr(Tokenizer, name, lambda self, load=loads[-1]: load(self))
    for number in range(3):
        rows = write_rows(tmp_path / f"{number}.jsonl", conversations(1, first=number))
        executor = "inline" if number == 0 else "local"
        tm.prepare(rows, **NAMED, executor=executor)
        assert [load.call_count for load in loads] == [1, 1]


NEW_PROCESS = """
import json, sys
import tokenmill
store = tokenmill.prepare(sys.argv[1], tokenizer=sys.argv[2], cache_dir=sys.argv[3])
print(json.dumps([len(store), [m for m in ("transformers", "fastokens", "torch", "datasets")
                               if m in sys.modules]]))
"""


def new_process(rows: Path, cache: Path, calls: Calls) -> subprocess.Popen[str]:
    paths = [str(calls.package), environment().get("PYTHONPATH", str(PROJECT / "src"))]
    return subprocess.Popen(
        [sys.executable, "-c", NEW_PROCESS, str(rows), str(TOKENIZER), str(cache)],
        env={**environment(), "PYTHONPATH": ":".join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_autotokenizer_is_asked_once_by_processes_that_meet_at_once(
    tmp_path: Path, own_cache: Path, calls: Calls
) -> None:
    files = [write_rows(tmp_path / f"{n}.jsonl", conversations(1, first=n)) for n in range(3)]
    children = [new_process(rows, own_cache, calls) for rows in files]
    said = [json.loads(child.communicate(timeout=240)[0]) for child in children]
    assert said == [[1, []]] * 3
    assert len(calls) == 1
    again = new_process(files[0], own_cache, calls)
    assert json.loads(again.communicate(timeout=240)[0]) == [1, []]
    assert len(calls) == 1


def test_stopped_or_impossible_lock_only_costs_time(
    one_row: Path, own_cache: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.build.identity.MAX_WAIT_S", 0.2)
    place = own_cache / "tokenizers" / "memo"
    place.mkdir(parents=True)
    held = os.open(place, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        tm.prepare(one_row, tokenizer=TOKENIZER)
    finally:
        os.close(held)
    assert len(calls) == 1
    refused = mock.Mock(side_effect=OSError(errno.ENOLCK, "no locks available"))
    monkeypatch.setattr(fcntl, "flock", refused)
    tm.prepare(one_row, **NAMED)
    assert refused.called


def test_autotokenizers_answer_serves_every_template_and_is_asked_again_when_damaged(
    one_row: Path, own_cache: Path, calls: Calls
) -> None:
    source = (TOKENIZER / "chat_template.jinja").read_text()

    def prepare_with(another: int) -> int:
        template = f"{source}{{# {another} #}}"
        tm.prepare(one_row, tokenizer=TOKENIZER, chat_template=template)
        return len(calls)

    assert [prepare_with(0), prepare_with(1)] == [1, 1]
    for path in (own_cache / "tokenizers" / "memo").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert prepare_with(2) == 2
    assert prepare_with(3) == 2  # the damaged memo was replaced


def test_difference_is_cached_and_raised_again_without_a_comparison(
    one_row: Path, own_cache: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFERS", "1")
    for _ in range(2):
        with pytest.raises(TokenizerError, match="tokenizer_backend='file'") as caught:
            tm.prepare(one_row, tokenizer=TOKENIZER)
        assert caught.value.path == str(TOKENIZER)
    assert len(calls) == 1
    assert not list((own_cache / "stores").glob("*"))


class Watched(InlineExecutor):
    """In place of Ray's; works here."""

    made: list[Watched]

    def __init__(self, num_workers: int | None = None) -> None:
        super().__init__()
        self.closed = False
        self.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    module = ModuleType("tokenmill.integrations.ray")
    module.RayExecutor = Watched  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenmill.integrations.ray", module)
    Watched.made = []
    return Watched.made


VERBS: dict[str, Callable[..., Any]] = {
    "prepare": tm.prepare,
    "part": partial(run_recipe, part="1/2"),
    "why": explain_recipe,
    "lint": tm.lint,
    "prompts": lambda path, executor, **options: open_prompts(
        PromptSettings(executor=executor), path, prompt_key="messages", **options
    ),
}


@pytest.mark.parametrize("verb", VERBS)
def test_executor_made_from_a_name_is_closed_even_where_the_call_fails(
    verb: str, made: list[Watched], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "chat.jsonl", conversations(5))

    def call(tokenizer: Path, executor: Any, cache: str) -> None:
        given = NAMED | {"tokenizer": tokenizer, "executor": executor}
        VERBS[verb](source, cache_dir=tmp_path / cache, **given)

    call(TOKENIZER, "ray", "cache")
    with pytest.raises(TokenmillError):
        call(tmp_path / "none.json", "ray", "cache")
    assert [one.closed for one in made] == [True, True]
    mine = Watched()
    call(TOKENIZER, mine, "more")
    assert not mine.closed
