"""One contract for the datasets of all trainers, and what their adapters share."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.build.making import TOKENIZER
from tests.integrations.conftest import EXAMPLES
from tests.sampling import sampled
from tests.store.making import make_columns, make_store
from tokenmill.data.order import FeistelOrder
from tokenmill.data.view import as_view
from tokenmill.errors import TemplateError, UsageError
from tokenmill.integrations import trainers
from tokenmill.store import Store

pytest.importorskip("torch")
pytest.importorskip("torchdata.stateful_dataloader")

from tokenmill.integrations import nemo_rl, skyrl, torch, torchtune, verl
from tokenmill.integrations.miles.source import open_sft_store

CHAT = str(EXAMPLES / "conversations.jsonl")
TEMPLATE = (
    "{{ strftime_now('%Y') }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNPADDED = {"pad_mode": "no_padding", "max_length": 64}
PROMPTS = {"prompt_key": "prompt", "tokenmill": {"num_workers": 0, "epochs": 2}}

DATASETS: dict[str, Callable[[Store, str, Any], Any]] = {
    "torch.Dataset": lambda store, *_: torch.Dataset(store),
    "skyrl.SFTDataset": lambda store, *_: skyrl.SFTDataset(store),
    "torchtune.TokenizedRows": lambda store, *_: torchtune.TokenizedRows(
        as_view(store), shifted=True
    ),
    "nemo_rl.MessageLogs": lambda store, *_: nemo_rl.MessageLogs(as_view(store), epochs=2),
    "verl.SFTDataset": lambda store, _, tokenizer: verl.SFTDataset(
        str(store.path), tokenizer, {**UNPADDED, "tokenmill": {"epochs": 2}}
    ),
    "skyrl.PromptDataset": lambda _, prompts, tokenizer: skyrl.PromptDataset(
        prompts, tokenizer, 60, num_workers=1
    ),
    "verl.RLDataset": lambda _, prompts, tokenizer: verl.RLDataset(prompts, tokenizer, PROMPTS),
}


@pytest.fixture(autouse=True)
def own_cache(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", cache)
    monkeypatch.delenv("TOKENMILL_DATE", raising=False)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("prompts") / "train.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"What is {n}?"}]} for n in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", DATASETS)
def test_items_are_the_same_one_by_one_in_a_batch_from_the_end_and_pickled(
    name: str, store: Store, prompts: str, tokenizer: Any
) -> None:
    dataset = DATASETS[name](store, prompts, tokenizer)
    size = len(dataset)
    numbers = [size - 1, 0, 3, 3, np.int64(1)]
    batch = [repr(item) for item in dataset.__getitems__(numbers)]
    assert batch == [repr(dataset[number]) for number in numbers]
    assert batch == [repr(dataset[int(number) - size]) for number in numbers]
    assert len(set(batch)) >= 3  # the last may be in another epoch
    data = pickle.dumps(dataset)
    assert len(data) < 16 << 10
    assert [repr(item) for item in pickle.loads(data).__getitems__(numbers)] == batch
    for wrong in (size, -size - 1):
        with pytest.raises(IndexError, match=f"item {wrong} is out of range"):
            dataset[wrong]


def as_text(items: list[Any]) -> list[str]:
    return [repr(item) for item in items]


ORDERED: dict[str, Callable[[Store, str, Any, int | None, int], Any]] = {
    "nemo_rl.SFTDataset": lambda store, _, __, seed, epochs: (
        nemo_rl.MessageLogs(as_view(store), None)
        if seed is None
        else nemo_rl.SFTDataset(store.path, seed=seed, epochs=epochs).dataset
    ),
    "verl.SFTDataset": lambda store, _, tokenizer, seed, epochs: verl.SFTDataset(
        [str(store.path)], tokenizer, {**UNPADDED, "seed": 7, "tokenmill": in_verl(seed, epochs)}
    ),
    "verl.RLDataset": lambda _, prompts, tokenizer, seed, epochs: verl.RLDataset(
        [prompts], tokenizer, {**PROMPTS, "tokenmill": in_verl(seed, epochs)}
    ),
}


def in_verl(seed: int | None, epochs: int) -> dict[str, Any]:
    order = "sequential" if seed is None else "feistel"
    return {"num_workers": 0, "seed": seed, "epochs": epochs, "order": order}


@pytest.mark.parametrize("name", ORDERED)
def test_items_are_in_our_order_one_epoch_after_the_other(
    name: str, store: Store, prompts: str, tokenizer: Any
) -> None:
    rows = as_text(list(ORDERED[name](store, prompts, tokenizer, None, 1)))
    order = FeistelOrder(len(rows), 3)
    expected = [
        rows[number]
        for epoch in range(2)
        for number in order.indices(epoch, np.arange(len(rows))).tolist()
    ]
    assert as_text(list(ORDERED[name](store, prompts, tokenizer, 3, 2))) == expected


TRAINED: dict[str, Callable[[Any], int]] = {
    "torch.Dataset": lambda item: int(item["loss_mask"].sum()),
    "skyrl.SFTDataset": lambda item: sum(item["loss_mask"]),
    "torchtune.TokenizedRows": lambda item: sum(label != -100 for label in item["labels"]),
    "verl.SFTDataset": lambda item: int(item["loss_mask"].sum()),
}


@pytest.mark.parametrize("name", TRAINED)
def test_first_token_of_a_row_is_never_trained(name: str, tmp_path: Path, tokenizer: Any) -> None:
    columns = make_columns([5, 4])
    columns.mask[:] = 1
    dataset = DATASETS[name](make_store(tmp_path, [columns]), "", tokenizer)
    assert {TRAINED[name](item) for item in dataset} == {4, 3}


@pytest.mark.parametrize("name", [*TRAINED, "nemo_rl.MessageLogs"])
def test_rows_of_groups_are_refused(name: str, pairs: Store, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="contains preference groups"):
        DATASETS[name](pairs, "", tokenizer)


DATED: dict[str, Callable[[Path, str, Any], Any]] = {
    "miles.sft_rollout": lambda template, *_: open_sft_store(
        SimpleNamespace(
            prompt_data=CHAT,
            input_key="messages",
            hf_checkpoint=str(TOKENIZER),
            chat_template_path=str(template),
        )
    ),
    "nemo_rl.SFTDataset": lambda template, *_: nemo_rl.SFTDataset(
        CHAT, str(TOKENIZER), num_workers=0, chat_template=template.read_text()
    ),
    "skyrl.from_config": lambda template, *_: skyrl.from_config(
        {"train_datasets": [CHAT]},
        tokenizer=str(TOKENIZER),
        chat_template=template.read_text(),
        executor="inline",
    ),
    "skyrl.PromptDataset": lambda _, prompts, dated: skyrl.PromptDataset(prompts, dated, 100, 0),
    "verl.SFTDataset": lambda _, __, dated: verl.SFTDataset(
        CHAT, dated, {**UNPADDED, "max_length": 4096, "tokenmill": {"num_workers": 0}}
    ),
    "verl.RLDataset": lambda _, prompts, dated: verl.RLDataset(prompts, dated, PROMPTS),
}


@pytest.mark.parametrize("name", sampled(DATED, 2))
def test_template_that_prints_the_date_takes_it_from_the_environment(
    name: str, prompts: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(TEMPLATE)
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    with pytest.raises(TemplateError, match="Set TOKENMILL_DATE=2026-11-15 in the environment"):
        DATED[name](template, prompts, tokenizer)
    monkeypatch.setenv("TOKENMILL_DATE", "2026-11-15")
    DATED[name](template, prompts, tokenizer)


def test_other_template_errors_are_unchanged() -> None:
    with pytest.raises(TemplateError, match=r"^line 3$"), trainers.date_named("t"):
        raise TemplateError("line 3")
