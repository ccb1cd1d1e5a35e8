"""SkyRL: datasets by its config, and its own answers on real rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tokenmill.errors import SourceError, UsageError
from tokenmill.store import Store

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.stateful_dataloader")

from tests.integrations import host_skyrl as host  # noqa: E402
from tokenmill.integrations import skyrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

EXAMPLES = Path(tm.__file__).parent / "examples"
DATE = "2026-11-15"


# Datasets by config


def raw(path: Path, rows: int = 6, word: str = "word") -> Path:
    with open(path, "w") as file:
        for number in range(rows):
            turns = [
                {"role": "user", "content": f"say {word} {number}"},
                {"role": "assistant", "content": f"{word} {number}"},
                {"role": "user", "content": "again"},
                {"role": "assistant", "content": f"{word} {number}, {word} {number}"},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


@pytest.mark.parametrize(
    ("what", "turn_end"), [("last_assistant_message", "turn"), ("all_assistant_messages", "stop")]
)
@pytest.mark.parametrize("cut", [False, True])
def test_from_config_equals_prepare_with_skyrls_meaning(
    tmp_path: Path, what: str, turn_end: str, cut: bool
) -> None:
    source = raw(tmp_path / "rows.jsonl")
    whole = tm.prepare(source, tokenizer=EXAMPLES / "tokenizer", executor="inline")
    limit = int(whole.lengths.max()) - 3 if cut else None
    dataset = skyrl.from_config(
        host.config(
            train_datasets=[str(source)], train_dataset_splits=["train[1:5]"], max_length=limit,
            train_on_what=what, cache_dir=str(tmp_path / "cache"),
        ),
        tokenizer=EXAMPLES / "tokenizer",
    )  # fmt: skip
    store = tm.prepare(
        f"{source}@[1:5]", tokenizer=EXAMPLES / "tokenizer", tokenizer_backend="transformers",
        train_on=what, turn_end=turn_end, max_length=limit, overlong="truncate",
        executor="inline", cache_dir=tmp_path / "other",
    )  # fmt: skip
    assert list(dataset) == list(skyrl.SFTDataset(store))
    assert len(dataset) == 4
    assert not cut or dataset.sequence_lengths.max() == limit
    (made,) = dataset.view.stores
    assert made.key == store.key
    assert made.path.parent.parent == tmp_path / "cache"


@pytest.mark.parametrize("disabled", [False, True])
def test_from_config_instructions_are_trained_to_the_end_of_the_turn_as_skyrl_does(
    tmp_path: Path, own_cache: Path, disabled: bool
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(
        "".join(
            json.dumps({"instruction": f"say {word}", "input": "", "output": word}) + "\n"
            for word in ("one", "two")
        )
    )
    answers = [
        list(
            skyrl.from_config(
                host.config(
                    train_datasets=[str(source)], train_on_what=what, disable_cache=disabled,
                    cache_dir=str(tmp_path / "cache"),
                ),
                tokenizer=EXAMPLES / "tokenizer",
            )
        )
        for what in ("last_assistant_message", "all_assistant_messages")
    ]  # fmt: skip
    assert answers[0] == answers[1]
    assert not own_cache.exists()
    assert disabled != (tmp_path / "cache").exists()


@pytest.mark.parametrize("instructions", [True, False])
def test_from_config_columns_are_those_of_all_rows_not_of_the_first(
    tmp_path: Path, instructions: bool
) -> None:
    said = {"instruction": "say one", "input": "", "output": "one"}
    turns = [{"role": role, "content": "Hi"} for role in ("user", "assistant") * 2]
    rows = [{"note": "neither"}, said, said] if instructions else [said, {"messages": turns}]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stated = {
        "train_datasets": [str(source)], "train_on_what": "all_assistant_messages",
        "cache_dir": str(tmp_path / "cache"),
    }  # fmt: skip
    for _ in range(2):  # the second time by what was noted
        dataset = skyrl.from_config(host.config(**stated), tokenizer=EXAMPLES / "tokenizer")
        (made,) = dataset.view.stores
        trained = "last_assistant_message" if instructions else "all_assistant_messages"
        assert made.manifest["document"]["recipe"]["train_on"] == trained


def test_from_config_several_datasets_are_concatenated_in_order(tmp_path: Path) -> None:
    first, second = raw(tmp_path / "a.jsonl", 6, "x"), raw(tmp_path / "b.jsonl", 9, "y")
    stated = host.config(
        train_datasets=[str(first), str(second)],
        train_dataset_splits=["train", "train[:50%]+train[-1:]"],
        cache_dir=str(tmp_path / "cache"),
        model={"path": str(EXAMPLES / "tokenizer")},
    )
    dataset = skyrl.from_config(stated)
    assert dataset.dataset_lengths == [6, 5]
    again = skyrl.from_config(vars(stated))  # a mapping will do, and this is a hit
    assert list(again) == list(dataset)


def test_from_config_directory_is_split_as_datasets_splits_it(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    place = tmp_path / "data"
    place.mkdir()
    raw(place / "train-00000.jsonl", 3, "a")
    raw(place / "train-00001.jsonl", 4, "b")
    raw(place / "test.jsonl", 5, "c")
    stated = host.config(
        train_datasets=[str(place)], train_dataset_splits=["train[2:5]"],
        eval_datasets=[str(place)], eval_dataset_splits=["test"], eval_dataset_names=["mine"],
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    dataset = skyrl.from_config(stated, tokenizer=EXAMPLES / "tokenizer")
    assert [row.origin.row for row in dataset.view] == [2, 0, 1]
    ((name, evaluated),) = skyrl.eval_from_config(stated, tokenizer=EXAMPLES / "tokenizer") or []
    assert (name, len(evaluated)) == ("mine", 5)
    stated.train_dataset_splits = ["validation"]
    with pytest.raises(UsageError, match="splits are: train, test"):
        skyrl.from_config(stated, tokenizer=EXAMPLES / "tokenizer")


def test_from_config_pretokenized_stores_are_opened_and_cut(chat: Store, store: Store) -> None:
    stated = host.config(
        pretokenized_dataset_paths=[str(chat.path), str(store.path)],
        eval_pretokenized_dataset_paths=[str(store.path)],
        max_length=20,
    )
    expected = [
        row
        for r in store
        if (row := host.normalised(r.input_ids.tolist(), r.loss_mask.tolist(), 20))
    ]
    dataset = skyrl.from_config(stated)
    assert list(dataset)[dataset.dataset_lengths[0] :] == expected
    ((name, evaluated),) = skyrl.eval_from_config(stated) or []
    assert (name, len(evaluated)) == (store.path.name, len(expected))
    assert skyrl.eval_from_config(host.config()) is None


def test_from_config_without_cache_lives_as_long_as_the_dataset(
    tmp_path: Path, own_cache: Path
) -> None:
    source = raw(tmp_path / "rows.jsonl")
    stated = host.config(
        train_datasets=[str(source)], train_dataset_splits=["train"],
        disable_cache=True, force_recache=True, cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    dataset = skyrl.from_config(stated, tokenizer=EXAMPLES / "tokenizer")
    place = dataset.view.stores[0].path
    assert len(list(dataset)) == 6
    assert not own_cache.exists()
    del dataset
    assert not place.exists()


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({}, "train_datasets"),
        ({"train_datasets": ["a"], "train_dataset_splits": ["train", "test"]}, "2 splits for 1"),
        ({"train_datasets": "a"}, "lists"),
        ({"train_datasets": ["rows.jsonl"], "train_dataset_splits": ["test"]}, "split 'test'"),
        ({"train_datasets": ["rows.jsonl"], "train_dataset_splits": ["train[1"]}, "write it like"),
        ({"train_datasets": ["rows.jsonl"], "train_on_what": "prompt"}, "train_on_what"),
        ({"train_datasets": ["./none here"]}, "no such file"),
    ],
)
def test_from_config_what_cannot_be_meant_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    raw(tmp_path / "rows.jsonl")
    with pytest.raises((UsageError, SourceError), match=match):
        skyrl.from_config(host.config(**fields), tokenizer=EXAMPLES / "tokenizer")


# golden/skyrl


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_from_config_golden_rows_equal_skyrls_answers_where_those_are_right(
    shared: Path, tmp_path: Path, own_cache: Path, name: str
) -> None:
    """tests/golden names the one row whose mask differs and why: a token across the seam."""
    lines = (shared / "golden" / "skyrl" / f"{name}.jsonl").read_text().splitlines()
    golden = [json.loads(line) for line in lines]
    source = tmp_path / "rows.jsonl"
    source.write_text(
        "".join(json.dumps({**row["row"], "number": n}) + "\n" for n, row in enumerate(golden))
    )
    for mode in ("last_assistant_message", "all_assistant_messages"):
        for limit in (None, 512):
            stated = host.config(
                train_datasets=[str(source)], train_dataset_splits=["train"], max_length=limit,
                train_on_what=mode, cache_dir=str(own_cache),
            )  # fmt: skip
            dataset = skyrl.from_config(
                stated, tokenizer=shared / "tokenizers" / name, date=DATE, carry=["number"]
            )
            compared, differing = compare_with_golden(dataset, golden, mode, limit)
            assert compared > 50
            seam = (name, mode) == ("qwen2.5", "last_assistant_message")
            assert differing == ([12] if seam else []), (mode, limit)


def compare_with_golden(
    dataset: Any, golden: list[dict[str, Any]], mode: str, limit: int | None
) -> tuple[int, list[int]]:
    differing, compared = [], 0
    for number, row in zip((r.carried["number"] for r in dataset.view), dataset, strict=True):
        answer = golden[number][f"{mode}/{limit}"]
        assert row["input_ids"] == golden[number]["full_ids"][:limit]
        if answer is None or answer["input_ids"] != row["input_ids"]:
            continue
        if mode == "last_assistant_message":
            if not golden[number]["last_turn_is_prefix_preserving"]:
                continue
            same = all(row[key] == answer[key] for key in answer)
        else:  # SkyRL's own windows may open with untrained tokens of the first turn's header
            extra = answer["num_actions"] - row["num_actions"]
            same = answer["loss_mask"] == [0] * extra + row["loss_mask"]
        compared += 1
        if not same:
            differing.append(number)
    return compared, differing
