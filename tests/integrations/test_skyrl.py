"""SkyRL: stores as pretokenized data, windows of loss masks, the sampler, datasets by config."""

from __future__ import annotations

import json
import pickle
from abc import ABCMeta
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.data.order import FeistelOrder
from tokenmill.errors import SourceError, StateError, UsageError
from tokenmill.store import Store

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.stateful_dataloader")

from tests.data.making import write_rows  # noqa: E402
from tests.integrations import stand_in_skyrl  # noqa: E402
from tests.integrations.conftest import EXAMPLES, stand_in  # noqa: E402
from tokenmill.integrations import skyrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


def numbers_of(store: Store) -> dict[tuple[int, ...], int]:
    return {tuple(row.input_ids.tolist()): number for number, row in enumerate(store)}


# Rows


def test_store_path_is_a_pretokenized_dataset_as_it_is(chat: Store) -> None:
    pytest.importorskip("datasets")
    dataset = stand_in_skyrl.checked_pretokenized(str(chat.path))
    assert len(dataset) == len(chat)
    for theirs, ours in zip(dataset, skyrl.SFTDataset(chat), strict=True):
        assert ours == stand_in_skyrl.normalised(theirs["input_ids"], theirs["loss_mask"], None)


@pytest.mark.parametrize("limit", [None, 1000, 20, 12])
def test_dataset_rows_are_windows_by_skyrls_definition(store: Store, limit: int | None) -> None:
    rows = [
        stand_in_skyrl.normalised(r.input_ids.tolist(), r.loss_mask.tolist(), limit) for r in store
    ]
    expected = [row for row in rows if row is not None]
    dataset = skyrl.SFTDataset(store, max_length=limit)
    assert limit != 12 or len(expected) < len(rows)
    assert list(dataset) == expected
    assert dataset.sequence_lengths.tolist() == [len(row["input_ids"]) for row in expected]


def test_dataset_without_a_trained_token_within_the_limit_is_refused(store: Store) -> None:
    with pytest.raises(SourceError, match="max_length=1"):
        skyrl.SFTDataset(store, max_length=1)
    with pytest.raises(UsageError, match="max_length"):
        skyrl.SFTDataset(store, max_length=0)


def test_dataset_of_several_sources_counts_each(store: Store, other: Store) -> None:
    dataset = skyrl.SFTDataset(store, other.path, max_length=20)
    one, two = skyrl.SFTDataset(store, max_length=20), skyrl.SFTDataset(other, max_length=20)
    assert dataset.dataset_lengths == [len(one), len(two)]
    assert list(dataset) == [*one, *two]
    assert list(pickle.loads(pickle.dumps(dataset))) == list(dataset)


def test_dataset_is_recognised_where_skyrl_is_loaded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ABCMeta("SFTDataset", (), {})
    concat = ABCMeta("ConcatSFTDataset", (base,), {})
    home = "skyrl.train.dataset.sft_dataset"
    theirs = stand_in(monkeypatch, home, SFTDataset=base, ConcatSFTDataset=concat)
    dataset = skyrl.SFTDataset(store, store)
    assert isinstance(dataset, theirs.SFTDataset)
    assert isinstance(dataset, theirs.ConcatSFTDataset)
    assert dataset.dataset_lengths == [43, 43]


# Sampler


def test_sampler_passes_are_epochs_of_our_order(store: Store) -> None:
    sampler = skyrl.Sampler(skyrl.SFTDataset(store), seed=5)
    order = FeistelOrder(43, 5)
    for epoch in range(3):
        assert list(sampler) == order.indices(epoch, np.arange(43)).tolist()
    assert len(sampler) == 43
    sampler.set_epoch(1)
    assert list(sampler) == order.indices(1, np.arange(43)).tolist()


def test_sampler_long_pass_runs_through_epochs(store: Store) -> None:
    expected = [n for sampler in [skyrl.Sampler(store)] for _ in range(4) for n in sampler]
    assert list(skyrl.Sampler(store, num_samples=150)) == expected[:150]
    sampler = skyrl.Sampler(list(range(5000)), num_samples=7000)  # more than one block
    order = FeistelOrder(5000, 42)
    found = list(sampler)
    assert sorted(found[:5000]) == list(range(5000))
    assert found[5000:] == order.indices(1, np.arange(2000)).tolist()


def endless(sampler: Any) -> Any:
    while True:
        yield from sampler


def test_sampler_own_state_resumes_at_every_row(store: Store) -> None:
    expected = list(islice(endless(skyrl.Sampler(store)), 120))
    for stop in range(110):
        sampler, resumed = skyrl.Sampler(store), skyrl.Sampler(store)
        served = list(islice(endless(sampler), stop))
        resumed.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
        served += islice(endless(resumed), 120 - stop)
        assert served == expected, f"stopped after {stop}"


def test_sampler_weights_hold_and_equal_a_mixture(store: Store, other: Store) -> None:
    dataset = skyrl.SFTDataset(store, other)
    sampler = skyrl.Sampler(dataset, lengths=dataset.dataset_lengths, weights=[0.7, 0.3])
    found = list(islice(endless(sampler), 300))
    for ten in range(0, 300, 10):
        assert sum(number < 43 for number in found[ten : ten + 10]) == 7
    both = tm.mix({"a": store, "b": other}, {"a": 0.7, "b": 0.3})
    mixed = tm.Loader(both, 50, indices=True, pad_token_id=0)
    expected = [n for batch in islice(mixed.repeat(), 6) for n in batch["indices"].tolist()]
    assert found == expected
    assert len(sampler) == len(dataset)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"order": "random"}, "order"),
        ({"seed": -1}, "seed"),
        ({"num_samples": 0}, "num_samples"),
        ({"lengths": [1, 2]}, "add up to 3"),
        ({"lengths": [20, 23], "weights": [1]}, "1 values for 2"),
    ],
)
def test_sampler_wrong_arguments_are_refused(
    store: Store, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        skyrl.Sampler(store, **more)


@pytest.mark.parametrize(
    ("sampled", "changed", "match"),
    [
        ({"data_source": range(44)}, {}, "dataset"),
        ({"seed": 1}, {}, "seed"),
        ({"order": "sequential"}, {}, "order"),
        ({}, {"begun": None}, "None is no position"),
        ({}, {"position": 44}, "its position is"),
    ],
)
def test_sampler_state_of_another_stream_is_refused(
    sampled: dict[str, Any], changed: dict[str, Any], match: str
) -> None:
    state = skyrl.Sampler(range(43)).state_dict()
    with pytest.raises(StateError, match=match):
        skyrl.Sampler(**{"data_source": range(43), **sampled}).load_state_dict({**state, **changed})


# A StatefulDataLoader as SkyRL drives it


def rows_of(batch: dict[str, Any], numbers: dict[tuple[int, ...], int]) -> list[int]:
    return [
        numbers[tuple(row[mask.bool()].tolist())]
        for row, mask in zip(batch["sequences"], batch["attention_mask"], strict=True)
    ]


def walk(
    store: Store, steps: int, *, batch_size: int, workers: int = 0, start: str = "fork",
    ahead: bool, state: Any = None,
) -> tuple[list[list[int]], Any]:  # fmt: skip
    dataset = skyrl.SFTDataset(store)
    sampler = skyrl.Sampler(dataset, seed=9)
    loader = stand_in_skyrl.dataloader(dataset, sampler, batch_size, workers, start)
    if state is not None:
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    numbers, found = numbers_of(store), []
    for batch, behind in islice(stand_in_skyrl.train(loader, ahead=ahead), steps):
        found.append(rows_of(batch, numbers))
        state = behind
    return found, state


def reference(store: Store, steps: int, batch_size: int) -> list[list[int]]:
    loader = tm.Loader(store, batch_size, seed=9, indices=True)
    batches = (batch for _ in range(steps) for batch in loader)  # epoch after epoch
    return [batch["indices"].tolist() for batch in islice(batches, steps)]


@pytest.mark.parametrize("ahead", [False, True], ids=["serial", "ahead"])
@pytest.mark.parametrize("batch_size", [43, 10, 8], ids=["whole", "partial", "partial8"])
def test_stateful_dataloader_resumed_at_every_step_equals_the_uninterrupted_run(
    store: Store, batch_size: int, ahead: bool
) -> None:
    steps = 3 * -(-43 // batch_size) + 2
    expected = reference(store, steps, batch_size)
    options: dict[str, Any] = {"batch_size": batch_size, "ahead": ahead}
    assert walk(store, steps, **options)[0] == expected
    for stop in range(1, steps):
        first, state = walk(store, stop, **options)
        rest, _ = walk(store, steps - stop, state=state, **options)
        assert first + rest == expected, f"stopped after step {stop}"


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_stateful_dataloader_chained_resumes_with_workers_are_exact(
    store: Store, start: str
) -> None:
    workers = 2 if start == "fork" else 1  # which import torch again
    options: dict[str, Any] = {"batch_size": 10, "workers": workers, "ahead": True, "start": start}
    found, state = [], None
    # Five steps are an epoch: inside, exactly at its end, over the next end.
    for steps in (2, 3, 6) if start == "fork" else (2, 3):
        part, state = walk(store, steps, state=state, **options)
        found += part
    assert found == reference(store, len(found), 10)


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_state_after_the_loop_has_ended_loses_nothing(
    store: Store, workers: int
) -> None:
    """Torchdata drops the finished iterator it restores, with what that has prefetched."""
    dataset = skyrl.SFTDataset(store)
    loader = stand_in_skyrl.dataloader(dataset, skyrl.Sampler(dataset, seed=9), 10, workers, "fork")
    numbers = numbers_of(store)
    found = [rows_of(batch, numbers) for batch in loader]
    resumed = stand_in_skyrl.dataloader(
        dataset, skyrl.Sampler(dataset, seed=9), 10, workers, "fork"
    )
    resumed.load_state_dict(loader.state_dict())
    found += [rows_of(batch, numbers) for batch in resumed]
    assert found == reference(store, 10, 10)


# Datasets by config


def raw(path: Path, rows: int = 6, word: str = "word") -> Path:
    said = [(f"say {word} {number}", f"{word} {number}") for number in range(rows)]
    return write_rows(
        path,
        [
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                    {"role": "user", "content": "again"},
                    {"role": "assistant", "content": f"{answer}, {answer}"},
                ]
            }
            for question, answer in said
        ],
    )


def opened(tmp_path: Path, source: Path, **fields: Any) -> Any:
    stated = {"train_datasets": [str(source)], "cache_dir": str(tmp_path / "cache"), **fields}
    return skyrl.from_config(stand_in_skyrl.config(**stated), tokenizer=EXAMPLES / "tokenizer")


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
    dataset = opened(
        tmp_path, source, train_dataset_splits=["train[1:5]"], max_length=limit, train_on_what=what
    )
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


SAID = {"instruction": "say one", "input": "", "output": "one"}


@pytest.mark.parametrize("disabled", [False, True])
def test_from_config_instructions_are_trained_to_the_end_of_the_turn_as_skyrl_does(
    tmp_path: Path, own_cache: Path, disabled: bool
) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [SAID, {**SAID, "output": "two"}])
    last, every = (
        list(opened(tmp_path, source, train_on_what=what, disable_cache=disabled))
        for what in ("last_assistant_message", "all_assistant_messages")
    )
    assert last == every
    assert not own_cache.exists()
    assert disabled != (tmp_path / "cache").exists()


@pytest.mark.parametrize("instructions", [True, False])
def test_from_config_columns_are_those_of_all_rows_not_of_the_first(
    tmp_path: Path, instructions: bool
) -> None:
    turns = [{"role": role, "content": "Hi"} for role in ("user", "assistant") * 2]
    rows = [{"note": "neither"}, SAID, SAID] if instructions else [SAID, {"messages": turns}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    for _ in range(2):  # the second time from the cached scan
        (made,) = opened(tmp_path, source, train_on_what="all_assistant_messages").view.stores
        trained = "last_assistant_message" if instructions else "all_assistant_messages"
        assert made.manifest["document"]["recipe"]["train_on"] == trained


def test_from_config_several_datasets_are_concatenated_in_order(tmp_path: Path) -> None:
    first, second = raw(tmp_path / "a.jsonl", 6, "x"), raw(tmp_path / "b.jsonl", 9, "y")
    stated = stand_in_skyrl.config(
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
    stated = stand_in_skyrl.config(
        train_datasets=[str(place)], train_dataset_splits=["train[2:5]"],
        eval_datasets=[str(place)], eval_dataset_splits=["test"], eval_dataset_names=["mine"],
        cache_dir=str(tmp_path / "cache"),
    )  # fmt: skip
    dataset = skyrl.from_config(stated, tokenizer=EXAMPLES / "tokenizer")
    assert [row.origin.row for row in dataset.view] == [2, 0, 1]
    ((name, evaluated),) = skyrl.eval_from_config(stated, tokenizer=EXAMPLES / "tokenizer") or []
    assert (name, len(evaluated)) == ("mine", 5)
    stated.train_dataset_splits = ["validation"]
    with pytest.raises(UsageError, match="Splits: train, test"):
        skyrl.from_config(stated, tokenizer=EXAMPLES / "tokenizer")


def test_from_config_pretokenized_stores_are_opened_and_truncated(
    other: Store, store: Store
) -> None:
    stated = stand_in_skyrl.config(
        pretokenized_dataset_paths=[str(other.path), str(store.path)],
        eval_pretokenized_dataset_paths=[str(store.path)],
        max_length=20,
    )
    expected = list(skyrl.SFTDataset(store, max_length=20))
    dataset = skyrl.from_config(stated)
    assert list(dataset)[dataset.dataset_lengths[0] :] == expected
    ((name, evaluated),) = skyrl.eval_from_config(stated) or []
    assert (name, len(evaluated)) == (store.path.name, len(expected))
    assert skyrl.eval_from_config(stand_in_skyrl.config()) is None


def test_from_config_without_cache_lives_as_long_as_the_dataset(
    tmp_path: Path, own_cache: Path
) -> None:
    source = raw(tmp_path / "rows.jsonl")
    dataset = opened(tmp_path, source, disable_cache=True, force_recache=True)
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
def test_from_config_refuses_invalid_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], match: str
) -> None:
    monkeypatch.chdir(tmp_path)
    raw(tmp_path / "rows.jsonl")
    with pytest.raises((UsageError, SourceError), match=match):
        skyrl.from_config(stand_in_skyrl.config(**fields), tokenizer=EXAMPLES / "tokenizer")
