"""Start-up: a little work starts no workers and no fast engine, and nothing is found out twice.

AutoTokenizer's place is taken by a package of the same name that is slow and writes down who asks.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import tokenmill as tm
from tests.build.making import TOKENIZER, conversations, small_cuts, write_rows
from tests.programs import PROJECT, environment
from tokenmill.build import blocks, executors
from tokenmill.build.tasks import Done, InlineExecutor, Setup, Task
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers import engines
from tokenmill.tokenizers.tokenizer import Tokenizer

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
        with open(os.environ["ASKED"], "a") as file:
            file.write(f"{os.getpid()}\\n")
        time.sleep(float(os.environ.get("SLOWLY", "0")))
        return cls(Path(directory))
"""


class Asked:
    """What the package in AutoTokenizer's place wrote down."""

    def __init__(self, path: Path, package: Path) -> None:
        self.path, self.package = path, package

    def __len__(self) -> int:
        return len(self.path.read_text().splitlines()) if self.path.exists() else 0


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    package = tmp_path / "packages"
    (package / "transformers").mkdir(parents=True)
    (package / "transformers" / "__init__.py").write_text(TRANSFORMERS)
    monkeypatch.syspath_prepend(str(package))
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    return Asked(tmp_path / "asked", package)


@pytest.fixture
def one_row(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "one.jsonl", conversations(1))


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting a worker process is an error."""

    def forbidden(*_: object) -> None:
        raise AssertionError("a worker was started")

    monkeypatch.setattr(executors, "WorkerProcess", forbidden)


class Recording:
    """An executor that notes what it was given, and works here."""

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
    def forbidden(*_: object) -> None:
        raise AssertionError("the fast engine was loaded")

    tm.prepare(one_row, tokenizer=TOKENIZER, tokenizer_backend="file", executor="inline")
    monkeypatch.setattr(engines, "FastokensEngine", forbidden)
    other = write_rows(one_row.parent / "two.jsonl", conversations(2))
    store = tm.prepare(other, tokenizer=TOKENIZER, tokenizer_backend="file")
    proof = json.loads((store.path / "proof.json").read_text())
    assert (len(store), proof["engine"]) == (2, "hf")
    with pytest.raises(AssertionError, match="worker"):
        tm.prepare(
            other, tokenizer=TOKENIZER, tokenizer_backend="file", num_workers=1, max_length=64
        )


def test_more_than_a_little_starts_workers_and_the_fast_engine(
    tmp_path: Path, no_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"tokenizer": TOKENIZER, "tokenizer_backend": "file"}
    rows = write_rows(tmp_path / "rows.jsonl", conversations(20))
    little = Recording()
    tm.prepare(rows, executor=little, **arguments)  # type: ignore[arg-type]
    monkeypatch.setattr(blocks, "LITTLE_WORK", 100)
    monkeypatch.setattr("tokenmill.tokenizers.cache.LITTLE_WORK", 100)
    much = Recording()
    tm.prepare(rows, executor=much, force_recache=True, **arguments)  # type: ignore[arg-type]
    built = [setups[-1] for setups in (little.setups, much.setups)]
    assert [setup.little for setup in built] == [True, False]
    assert [setup.options["engine"] for setup in built] == ["hf", "auto"]
    with pytest.raises(AssertionError, match="worker"):
        tm.prepare(rows, force_recache=True, **arguments)  # type: ignore[arg-type]


def test_work_ahead_is_what_is_missing_and_not_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    monkeypatch.setattr(blocks, "LITTLE_WORK", 30_000)
    arguments = {"tokenizer": TOKENIZER, "tokenizer_backend": "file"}
    rows = write_rows(tmp_path / "rows.jsonl", conversations(400))
    first, second = Recording(), Recording()
    tm.prepare(rows, executor=first, **arguments)  # type: ignore[arg-type]
    with open(rows, "a") as file:
        file.write(json.dumps(conversations(1, first=900)[0]) + "\n")
    store = tm.prepare(rows, executor=second, **arguments)  # type: ignore[arg-type]
    assert len(store) == 401
    assert (first.setups[-1].little, second.setups[-1].little) == (False, True)


def test_warm_process_loads_nothing_again(
    tmp_path: Path, no_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    for name in ("_load_reference", "make_table"):
        real = getattr(Tokenizer, name)
        monkeypatch.setattr(
            Tokenizer,
            name,
            lambda self, name=name, real=real: (loads.append(name), real(self))[1],
        )
    for number in range(3):
        rows = write_rows(tmp_path / f"{number}.jsonl", conversations(1, first=number))
        executor = "inline" if number == 0 else "local"
        tm.prepare(rows, tokenizer=TOKENIZER, tokenizer_backend="file", executor=executor)
        assert sorted(loads) == ["_load_reference", "make_table"]


NEW_PROCESS = """
import json, sys
import tokenmill
store = tokenmill.prepare(sys.argv[1], tokenizer=sys.argv[2], cache_dir=sys.argv[3])
print(json.dumps([len(store), [m for m in ("transformers", "fastokens", "torch", "datasets")
                               if m in sys.modules]]))
"""


def new_process(rows: Path, cache: Path, asked: Asked) -> subprocess.Popen[str]:
    paths = [str(asked.package), environment().get("PYTHONPATH", str(PROJECT / "src"))]
    return subprocess.Popen(
        [sys.executable, "-c", NEW_PROCESS, str(rows), str(TOKENIZER), str(cache)],
        env={**environment(), "PYTHONPATH": ":".join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_autotokenizer_is_asked_once_by_processes_that_meet_at_once(
    tmp_path: Path, own_cache: Path, asked: Asked
) -> None:
    files = [
        write_rows(tmp_path / f"{number}.jsonl", conversations(1, first=number))
        for number in range(4)
    ]
    children = [new_process(rows, own_cache, asked) for rows in files]
    said = [json.loads(child.communicate(timeout=240)[0]) for child in children]
    assert said == [[1, []]] * 4
    assert len(asked) == 1
    again = new_process(files[0], own_cache, asked)
    assert json.loads(again.communicate(timeout=240)[0]) == [1, []]
    assert len(asked) == 1


def test_stopped_or_impossible_lock_only_costs_time(
    one_row: Path, own_cache: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
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
    assert len(asked) == 1

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    tm.prepare(one_row, tokenizer=TOKENIZER, tokenizer_backend="file")


def test_autotokenizers_answer_serves_every_template_and_is_asked_again_when_damaged(
    one_row: Path, own_cache: Path, asked: Asked
) -> None:
    source = (TOKENIZER / "chat_template.jinja").read_text()

    def prepare_with(another: int) -> int:
        template = f"{source}{{# {another} #}}"
        tm.prepare(one_row, tokenizer=TOKENIZER, chat_template=template)
        return len(asked)

    assert [prepare_with(0), prepare_with(1)] == [1, 1]
    for path in (own_cache / "tokenizers" / "memo").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert prepare_with(2) == 2
    assert prepare_with(3) == 2  # the damaged memo was replaced


def test_difference_is_remembered_and_refused_again_without_asking(
    one_row: Path, own_cache: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIFFERS", "1")
    for _ in range(2):
        with pytest.raises(TokenizerError, match="tokenizer_backend='file'") as caught:
            tm.prepare(one_row, tokenizer=TOKENIZER)
        assert caught.value.path == str(TOKENIZER)
    assert len(asked) == 1
    assert not list((own_cache / "stores").glob("*"))
