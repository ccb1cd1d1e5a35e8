"""SkyRL: its programs with our data in them, RL prompts, and files that others tokenized."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tokenmill as tm
from tokenmill.errors import UsageError
from tokenmill.store import Store

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.stateful_dataloader")

from tests.data.making import EXAMPLES, write_rows  # noqa: E402
from tests.integrations import stand_in_skyrl  # noqa: E402
from tokenmill.integrations import skyrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

TOKENIZER = str(EXAMPLES / "tokenizer")
OURS = "tokenmill.integrations.skyrl"


def program(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> Any:
    """A program of ours over its stand-in, its Ray task run where it is called."""
    monkeypatch.setitem(sys.modules, f"{OURS}.{name}", None)  # to be as it was afterwards
    del sys.modules[f"{OURS}.{name}"]
    made = import_module(f"{OURS}.{name}")
    monkeypatch.setattr(made, "as_task", lambda function: SimpleNamespace(remote=function))
    monkeypatch.setattr(sys, "argv", [name, *words])
    return made


def test_main_sft_is_skyrls_program_with_data_by_from_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = stand_in_skyrl.install_main_sft(monkeypatch)
    source = str(EXAMPLES / "conversations.jsonl")
    words = {"train": source, "eval": source, "model": TOKENIZER, "cache_dir": str(tmp_path)}
    ours = program(monkeypatch, "main_sft", *(f"{key}={value}" for key, value in words.items()))
    ours.main()
    trained, ((name, evaluated),) = theirs.loaded
    config = stand_in_skyrl.config(train_datasets=[source], cache_dir=str(tmp_path))
    assert list(trained) == list(skyrl.from_config(config, tokenizer=TOKENIZER))
    assert name == source.replace("/", "_")
    assert list(evaluated) == list(trained)


@pytest.mark.parametrize("overridden", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_main_base_is_skyrls_program_with_our_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path, overridden: bool
) -> None:
    theirs = stand_in_skyrl.install_main_base(monkeypatch)
    source = str(prompts_file(tmp_path / "prompts.jsonl"))
    words = [f"train_data={source}", f"model={TOKENIZER}"]
    if overridden:
        words.append(f"trainer.override_entrypoint={OURS}.main_base")
    ours = program(monkeypatch, "main_base", *words)
    theirs.main() if overridden else ours.main()
    assert isinstance(theirs.loaded, skyrl.PromptDataset)
    assert list(theirs.loaded) == list(skyrl.PromptDataset(source, TOKENIZER, 30, num_workers=0))


def test_task_has_one_cpu_and_our_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    from tokenmill.integrations.skyrl.data import as_task

    monkeypatch.setenv("TOKENMILL_DATE", "2026-11-15")
    monkeypatch.setattr(ray, "remote", lambda **options: lambda function: (function, options))
    function, options = as_task(test_task_has_one_cpu_and_our_environment_variables)
    assert function is test_task_has_one_cpu_and_our_environment_variables
    assert options["num_cpus"] == 1
    assert options["runtime_env"]["env_vars"]["TOKENMILL_DATE"] == "2026-11-15"
    assert "PATH" in os.environ
    assert "PATH" not in options["runtime_env"]["env_vars"]


@pytest.mark.skipif(find_spec("skyrl") is not None, reason="SkyRL is installed")
@pytest.mark.parametrize("name", ["main_sft", "main_base"])
def test_program_without_skyrl_reports_what_is_missing(name: str) -> None:
    with pytest.raises(UsageError, match=r"SkyRL.*cannot be imported"):
        import_module(f"{OURS}.{name}")


def test_real_skyrl_has_what_our_programs_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = pytest.importorskip("skyrl.train.main_sft")
    ours = import_module(f"{OURS}.main_sft")
    for name in ("load_dataset", "load_eval_datasets"):
        assert hasattr(theirs.SFTTrainer, name)
    monkeypatch.setattr(theirs, "SFTTrainer", theirs.SFTTrainer)
    monkeypatch.setattr(ours._SKYRL_TASK, "_function", lambda *_: made.append(theirs.SFTTrainer))
    made: list[Any] = []
    ours.sft_entrypoint(None, None)
    assert made == [ours.Trainer]


# RL prompts


def prompts_file(path: Path, rows: int = 40) -> Path:
    made = []
    for number in range(rows):
        turns = [{"role": "user", "content": "how many? " * (number % 7 + 1)}]
        row = {"prompt": turns, "env_class": f"env{number % 2}", "metadata": "a text"}
        spec = {"reward_spec": {"ground_truth": str(number)}} if number % 3 else {}
        made.append({**row, **spec})
    return write_rows(path, made)


@pytest.mark.parametrize("less", [0, 1])
def test_prompts_are_the_items_of_skyrls_eager_dataset(
    tmp_path: Path, tokenizer: Any, less: int
) -> None:
    source = prompts_file(tmp_path / "prompts.jsonl")
    turns = json.loads(source.read_text().splitlines()[3])["prompt"]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    limit = len(tokenizer.encode(text, add_special_tokens=False)) - less  # one fits, or just not
    wanted = stand_in_skyrl.eager_prompts(str(source), tokenizer, limit)
    assert len(wanted) == 24 - 6 * less
    dataset = skyrl.PromptDataset(
        [str(source)], tokenizer, limit, num_workers=1, cache_dir=tmp_path / "cache"
    )
    assert [dataset[number] for number in range(len(dataset))] == wanted
    assert dataset.collate_fn([dataset[1]]) == [
        dict(zip(("prompt", "env_class", "env_extras", "uid"), wanted[1], strict=True))
    ]


def test_prompts_of_a_named_split_are_its_files(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    place = tmp_path / "data"
    place.mkdir()
    prompts_file(place / "train.jsonl", 5)
    prompts_file(place / "test.jsonl", 3)
    for name, rows in ((f"{place}", 5), (f"{place}:test", 3), ([f"{place}", f"{place}:test"], 8)):
        dataset = skyrl.PromptDataset(name, TOKENIZER, 100, 0, cache_dir=tmp_path / "cache")
        assert len(dataset) == rows


def test_prompts_over_the_limit_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = prompts_file(tmp_path / "prompts.jsonl")
    skyrl.PromptDataset(str(source), TOKENIZER, 14, 0, cache_dir=tmp_path / "cache")
    assert "overlong" in caplog.text
    with pytest.raises(UsageError, match=r"data\.train_data"):
        skyrl.PromptDataset([], TOKENIZER, 14)


# Pretokenized files


@pytest.mark.parametrize("limit", [None, 20])
def test_pretokenized_files_of_others_go_through_skyrls_loader(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    if find_spec("skyrl") is None:
        stand_in_skyrl.install_pretokenized(monkeypatch)
    file = tmp_path / "rows.parquet"
    tm.export(store, "parquet", file)
    wanted = list(skyrl.SFTDataset(store, max_length=limit))

    def same(found: Any) -> bool:
        return [{name: row[name] for name in wanted[0]} for row in found] == wanted

    alone = stand_in_skyrl.config(pretokenized_dataset_paths=[str(file)], max_length=limit)
    assert same(skyrl.from_config(alone))
    both = stand_in_skyrl.config(
        pretokenized_dataset_paths=[str(file), str(store.path)], max_length=limit
    )
    mixed = skyrl.from_config(both)
    assert same([mixed[number] for number in range(len(wanted))])
    assert same([mixed[number] for number in range(len(wanted), 2 * len(wanted))])
    evaluated = stand_in_skyrl.config(eval_pretokenized_dataset_paths=[str(file)], max_length=limit)
    ((name, found),) = skyrl.eval_from_config(evaluated) or []
    assert name == "rows.parquet"
    assert same(found)


@pytest.mark.skipif(find_spec("skyrl") is not None, reason="SkyRL is installed")
def test_pretokenized_files_of_others_without_skyrl_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    file.write_bytes(b"anything")
    with pytest.raises(
        UsageError, match="reading a dataset that is not a store needs SkyRL"
    ) as caught:
        skyrl.from_config(stand_in_skyrl.config(pretokenized_dataset_paths=[str(file)]))
    assert caught.value.path == str(file)
