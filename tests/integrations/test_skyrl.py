"""SkyRL: stores as pretokenized data, windows of loss masks, the sampler, datasets by config."""

from __future__ import annotations

import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import SourceError, StateError, UsageError
from tokenmill.sampling import FeistelOrder
from tokenmill.store import Store

torch = pytest.importorskip("torch")
pytest.importorskip("torchdata.stateful_dataloader")

from tests.integrations import host_skyrl as host  # noqa: E402
from tests.integrations.conftest import stand_in  # noqa: E402
from tokenmill.integrations import skyrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

EXAMPLES = Path(tm.__file__).parent / "examples"
DATE = "2026-11-15"


def numbers_of(store: Store) -> dict[tuple[int, ...], int]:
    return {tuple(row.input_ids.tolist()): number for number, row in enumerate(store)}


# Rows


def test_store_path_is_a_pretokenized_dataset_as_it_is(chat: Store) -> None:
    pytest.importorskip("datasets")
    dataset = host.checked_pretokenized(str(chat.path))
    assert len(dataset) == len(chat)
    for theirs, ours in zip(dataset, skyrl.SFTDataset(chat), strict=True):
        assert ours == host.normalised(theirs["input_ids"], theirs["loss_mask"], None)


@pytest.mark.parametrize("limit", [None, 1000, 20, 12])
def test_dataset_rows_are_windows_by_skyrls_definition(store: Store, limit: int | None) -> None:
    rows = [host.normalised(r.input_ids.tolist(), r.loss_mask.tolist(), limit) for r in store]
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


def test_dataset_of_several_sources_counts_each_and_pickles_small(
    store: Store, chat: Store
) -> None:
    dataset = skyrl.SFTDataset(store, chat.path, max_length=20)
    one, two = skyrl.SFTDataset(store, max_length=20), skyrl.SFTDataset(chat, max_length=20)
    assert dataset.dataset_lengths == [len(one), len(two)]
    assert list(dataset) == [*one, *two]
    data = pickle.dumps(dataset)
    assert len(data) < 16 << 10
    assert list(pickle.loads(data)) == list(dataset)


def test_dataset_is_recognised_where_skyrl_is_loaded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    import abc

    base = abc.ABCMeta("SFTDataset", (), {})
    concat = abc.ABCMeta("ConcatSFTDataset", (base,), {})
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


def test_sampler_own_state_resumes_at_every_row(store: Store) -> None:
    expected = list(islice(endless(skyrl.Sampler(store)), 120))
    for stop in range(110):
        sampler = skyrl.Sampler(store)
        served = list(islice(endless(sampler), stop))
        state = json.loads(json.dumps(sampler.state_dict()))
        resumed = skyrl.Sampler(store)
        resumed.load_state_dict(state)
        served += islice(endless(resumed), 120 - stop)
        assert served == expected, f"stopped after {stop}"


def endless(sampler: Any) -> Any:
    while True:
        yield from sampler


def test_sampler_weights_hold_and_equal_a_mixture(store: Store, chat: Store) -> None:
    dataset = skyrl.SFTDataset(store, chat)
    sampler = skyrl.Sampler(dataset, lengths=dataset.dataset_lengths, weights=[0.7, 0.3])
    found = list(islice(endless(sampler), 300))
    for ten in range(0, 300, 10):
        assert sum(number < 43 for number in found[ten : ten + 10]) == 7
    both = tm.mix({"a": store, "b": chat}, {"a": 0.7, "b": 0.3})
    mixed = tm.Loader(both, 50, indices=True, pad_id=0)
    expected = [n for batch in islice(mixed.repeat(), 6) for n in batch["indices"].tolist()]
    assert found == expected
    assert len(sampler) == len(dataset)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"order": "random"}, "order"),
        ({"seed": -1}, "seed"),
        ({"num_samples": 0}, "num_samples"),
        ({"lengths": [1, 2]}, "together 3"),
        ({"lengths": [20, 23], "weights": [1]}, "1 weights for 2"),
    ],
)
def test_sampler_wrong_arguments_are_refused(
    store: Store, more: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        skyrl.Sampler(store, **more)


def test_sampler_state_of_other_data_seed_or_kind_is_refused(store: Store, chat: Store) -> None:
    state = skyrl.Sampler(store).state_dict()
    with pytest.raises(StateError, match="dataset"):
        skyrl.Sampler(chat).load_state_dict(state)
    with pytest.raises(StateError, match="seed"):
        skyrl.Sampler(store, seed=1).load_state_dict(state)
    with pytest.raises(StateError, match="order"):
        skyrl.Sampler(store, order="sequential").load_state_dict(state)
    with pytest.raises(StateError, match="where it began"):
        skyrl.Sampler(store).load_state_dict(tm.Loader(store).state_dict())
    with pytest.raises(StateError, match="its position is"):
        skyrl.Sampler(store).load_state_dict({**state, "position": 44})


# A StatefulDataLoader as SkyRL drives it


def rows_of(batch: dict[str, Any], numbers: dict[tuple[int, ...], int]) -> list[int]:
    return [
        numbers[tuple(row[mask.bool()].tolist())]
        for row, mask in zip(batch["sequences"], batch["attention_mask"], strict=True)
    ]


def walk(
    store: Store,
    steps: int,
    *,
    batch_size: int,
    workers: int = 0,
    start: str = "fork",
    ahead: bool,
    state: Any = None,
) -> tuple[list[list[int]], Any]:
    """Rows of every step and the state behind the last."""
    dataset = skyrl.SFTDataset(store)
    sampler = skyrl.Sampler(dataset, seed=9)
    loader = host.dataloader(dataset, sampler, batch_size, workers, start)
    if state is not None:
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
    numbers, found = numbers_of(store), []
    for batch, behind in islice(host.train(loader, ahead=ahead), steps):
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


def test_stateful_dataloader_chained_resumes_with_two_workers_are_exact(store: Store) -> None:
    expected = reference(store, 11, 10)  # five steps are an epoch, the last of three rows
    options: dict[str, Any] = {"batch_size": 10, "workers": 2, "ahead": True}
    found, state = [], None
    for steps in (2, 3, 6):  # inside, exactly at the end of an epoch, over the next end
        part, state = walk(store, steps, state=state, **options)
        found += part
    assert found == expected


def test_stateful_dataloader_resumes_with_spawned_workers(store: Store) -> None:
    options: dict[str, Any] = {"batch_size": 10, "workers": 1, "ahead": False}
    found, state = walk(store, 2, start="fork", **options)
    found += walk(store, 3, state=state, start="spawn", **options)[0]
    assert found == reference(store, 5, 10)


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_dataloader_state_after_the_loop_has_ended_loses_nothing(
    store: Store, workers: int
) -> None:
    """Torchdata drops the finished iterator it restores, with what that has prefetched."""
    dataset = skyrl.SFTDataset(store)
    loader = host.dataloader(dataset, skyrl.Sampler(dataset, seed=9), 10, workers, "fork")
    numbers = numbers_of(store)
    found = [rows_of(batch, numbers) for batch in loader]
    resumed = host.dataloader(dataset, skyrl.Sampler(dataset, seed=9), 10, workers, "fork")
    resumed.load_state_dict(loader.state_dict())
    found += [rows_of(batch, numbers) for batch in resumed]
    assert found == reference(store, 10, 10)
