"""NeMo RL: message logs, the class for its ``dataset_name``, and NeMo RL itself if installed."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.integrations.conftest import EXAMPLES
from tests.store.making import make_columns, make_store
from tokenmill.data.order import FeistelOrder
from tokenmill.data.view import as_view
from tokenmill.errors import UsageError
from tokenmill.store import Store

torch = pytest.importorskip("torch")

from tokenmill.integrations import nemo_rl  # noqa: E402
from tokenmill.integrations.nemo_rl import as_datum  # noqa: E402

CHAT = str(EXAMPLES / "conversations.jsonl")
NAME = "tokenmill.integrations.nemo_rl.SFTDataset"


def trained_by_host(log: list[dict[str, Any]], *, only_final: bool) -> list[int]:
    mask = []
    for number, piece in enumerate(log):
        by_role = piece["role"] == "assistant"
        chosen = number == len(log) - 1 if only_final else by_role
        mask += [int(chosen)] * len(piece["token_ids"])
    return mask


@pytest.fixture(scope="module", params=["stop", "turn"])
def conversations(request: pytest.FixtureRequest, cache: str) -> Store:
    return tm.prepare(
        CHAT, tokenizer=EXAMPLES / "tokenizer", turn_end=request.param, executor="inline",
        cache_dir=cache,
    )  # fmt: skip


def test_logs_are_the_rows_up_to_their_last_trained_token(conversations: Store) -> None:
    several = 0
    for row in conversations:
        log = nemo_rl.message_log(row)
        ids = [token for piece in log for token in piece["token_ids"].tolist()]
        mask = row.loss_mask.tolist()
        assert ids == row.input_ids[: len(ids)].tolist()
        assert trained_by_host(log, only_final=False) == mask[: len(ids)]
        assert not any(mask[len(ids) :])
        # The last answer, whole, and nothing else.
        last = int(np.flatnonzero(np.diff(mask, prepend=0) == 1)[-1])
        final = [0] * last + mask[last : len(ids)]
        assert trained_by_host(log, only_final=True) == final
        assert {piece["token_ids"].dtype for piece in log} == {torch.int64}
        several += mask[: len(ids)] != final
    assert several > 5


def test_dataset_of_raw_rows_is_that_of_their_store(cache: str) -> None:
    where = {"cache_dir": cache, "num_workers": 0}
    raw = nemo_rl.SFTDataset(CHAT, str(EXAMPLES / "tokenizer"), **where)
    store = tm.prepare(
        CHAT, tokenizer=EXAMPLES / "tokenizer", turn_end="turn", executor="inline", cache_dir=cache
    )
    made = nemo_rl.SFTDataset(
        data_path=store.path, dataset_name=NAME, processor="sft_processor", split="train",
        prompt_file=None, system_prompt_file=None,
    )  # fmt: skip
    assert raw.dataset.view.key == made.dataset.view.key == store.key
    assert raw.val_dataset is None


def test_validation_rows_are_held_out_by_content(conversations: Store) -> None:
    made = nemo_rl.SFTDataset(conversations.path, split_validation_size=0.3, seed=7)
    views = conversations.split({"train": 0.7, "validation": 0.3}, seed=7)
    assert [made.dataset.view.key, made.val_dataset.view.key] == [
        view.key for view in views.values()
    ]
    [first] = made.val_dataset.view[:1]
    assert made.val_dataset[0]["message_log"][0]["token_ids"][0] == first.input_ids[0]


@pytest.mark.parametrize(
    ("path", "fields", "match"),
    [
        (CHAT, {}, r"\+data\.train\.tokenizer"),
        (
            CHAT,
            {"tokenizer": "t", "max_lenght": 9},
            "of a dataset: max_lenght .did you",
        ),
        (CHAT, {"tokenizer": "t", "prompt_file": "p.txt"}, "prompt_file is not supported"),
        (CHAT, {"tokenizer": "t", "system_prompt_file": "p.txt"}, "system_prompt_file is not"),
        (None, {"tokenizer": "t", "turn_end": "stop"}, "Remove tokenizer, turn_end"),
        (None, {"epochs": 0}, "epochs must be a positive integer, got 0"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(
    store: Store, path: str | None, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        nemo_rl.SFTDataset(path or store.path, **fields)


def test_rows_that_train_nothing_have_no_weight(tmp_path: Path) -> None:
    columns = make_columns([8, 6])
    columns.mask[:8] = 0
    columns.mask[8:] = [0, 0, 1, 1, 1, 0]
    logs = nemo_rl.MessageLogs(as_view(make_store(tmp_path, [columns])), None)
    nothing = as_datum(logs[0], None, None, 100, 0, add_bos=True)
    assert nothing["loss_multiplier"] == 0.0
    assert nothing["length"] == 8
    whole = as_datum(logs[1], None, None, 6, 1)
    assert whole["loss_multiplier"] == 1.0
    assert [len(piece["token_ids"]) for piece in whole["message_log"]] == [2, 3]
    with pytest.warns(UserWarning, match="max_length"):
        overlong = as_datum(logs[1], None, None, 5, 1)
    assert overlong["loss_multiplier"] == 0.0
    assert overlong["length"] == 5
    assert sum(len(piece["token_ids"]) for piece in overlong["message_log"]) < 5


def test_pairs_are_two_logs_in_the_order_of_a_run(pairs: Store, store: Store) -> None:
    dataset = nemo_rl.PreferenceLogs(pairs, seed=3, epochs=2)
    loader = tm.Loader(pairs, batch_size=20, seed=3, indices=True)
    numbers = [int(first) for batch in loader.repeat(2) for first in batch["indices"][::2]]
    assert len(dataset) == len(numbers) == 40
    for place, first in enumerate(numbers):
        item = dataset[place]
        for side, row in zip(("chosen", "rejected"), (pairs[first], pairs[first + 1]), strict=True):
            log = item[f"message_log_{side}"]
            ids = [token for piece in log for token in piece["token_ids"].tolist()]
            assert ids == row.input_ids[: len(ids)].tolist()
            assert item[f"length_{side}"] == len(ids)
            assert trained_by_host(log, only_final=True) == row.loss_mask[: len(ids)].tolist()
            assert not row.loss_mask[len(ids) :].any()
        assert (item["idx"], item["loss_multiplier"]) == (place, 1.0)
    for number, item in enumerate(nemo_rl.PreferenceLogs(pairs, None)):
        log = nemo_rl.message_log(pairs[2 * number + 1])
        found = item["message_log_rejected"]
        assert [p["token_ids"].tolist() for p in found] == [p["token_ids"].tolist() for p in log]
    with pytest.raises(UsageError, match="need pairs"):
        nemo_rl.PreferenceLogs(store)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("only_final", [False, True])
def test_nemo_rl_itself_makes_the_dataset_and_its_masks(
    conversations: Store, tokenizer: Any, only_final: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(
            "nemo_rl", reason="NeMo RL is not installed: only its stand-in is tried"
        )
        from nemo_rl.data.collate_fn import rl_collate_fn
        from nemo_rl.data.datasets import AllTaskProcessedDataset, load_response_dataset
        from nemo_rl.data.llm_message_utils import (
            add_loss_mask_to_message_log,
            batched_message_log_to_flat_message,
        )
    data = load_response_dataset(
        {"dataset_name": NAME, "data_path": str(conversations.path), "processor": "sft_processor"}
    )
    tasks = {data.task_name: (data.task_spec, functools.partial(data.processor, add_bos=True))}
    dataset = AllTaskProcessedDataset(data.dataset, tokenizer, None, tasks, max_seq_length=4096)
    order = FeistelOrder(len(conversations), 42).indices(0, np.arange(len(conversations)))
    for number, row in enumerate(conversations.batch(order)):
        batch = rl_collate_fn([dataset[number]])
        add_loss_mask_to_message_log(batch["message_log"], ["assistant"], only_final)
        flat, [length] = batched_message_log_to_flat_message(
            batch["message_log"], pad_value_dict={"token_ids": 0}
        )
        log = nemo_rl.message_log(row)
        assert flat["token_ids"][0].tolist() == row.input_ids[: int(length)].tolist()
        assert flat["token_loss_mask"][0].tolist() == trained_by_host(log, only_final=only_final)
