"""verl itself, where it is installed: its own datasets, collators and templates beside ours."""

from __future__ import annotations

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm

torch = pytest.importorskip("torch")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
pytest.importorskip("verl", reason="verl is not installed: only its stand-in is tried")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what verl imports
    from omegaconf import OmegaConf
    from verl.utils.dataset.dataset_utils import SFTTensorCollator
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn, get_dataset_class

from tokenmill.integrations import verl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = Path(tm.__file__).parent / "examples"


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations of plain turns, one in three with a word on thinking, as a table."""
    rows = []
    for row in tm.open_rows(EXAMPLES / "conversations.jsonl"):
        messages = row.get("messages")
        if messages and all(set(turn) == {"role", "content"} for turn in messages):
            rows.append({"messages": messages, "enable_thinking": len(rows) % 3 == 0})
    path = tmp_path_factory.mktemp("source") / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def stated(cache: str, thinking_opener: str = "prompt", **fields: Any) -> Any:
    ours = {"cache_dir": cache, "num_workers": 0, "order": "sequential"}
    ours = {**ours, "thinking_opener": thinking_opener}
    return OmegaConf.create({"max_length": 4096, "tokenmill": ours, **fields})


def compared(path: str, tokenizer: Any, config: Any) -> int:
    """Rows that verl serves, too; they must be equal."""
    theirs = MultiTurnSFTDataset([path], tokenizer, config)
    dataset = verl.SFTDataset([path], tokenizer, config)
    rows = 0
    for number, row in enumerate(dataset.view):
        try:
            expected = theirs[row.origin.row]
        except AssertionError:  # message by message is not what the template prints
            continue
        item = dataset[number]
        kept = len(row)  # a user turn at the end is cut here, and untrained there
        assert set(item) == set(expected)
        assert int(expected["loss_mask"].sum()) == int(item["loss_mask"].sum())
        for name, values in item.items():
            assert values.dtype == expected[name].dtype
            assert values[:kept].tolist() == expected[name][:kept].tolist(), name
        rows += 1
    return rows


@pytest.mark.parametrize("pad_mode", ["no_padding", "right"])
def test_sft_rows_are_verls_own_wherever_it_serves_them(
    conversations: str, tokenizer: Any, cache: str, pad_mode: str
) -> None:
    # verl asks for the generation prompt once, without what a row says of thinking.
    config = stated(cache, thinking_opener="trained", pad_mode=pad_mode)
    assert compared(conversations, tokenizer, config) > 20


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "deepseek-v3"])
def test_sft_rows_of_real_tokenizers_are_verls_own(
    shared: Path, tmp_path: Path, cache: str, name: str
) -> None:
    transformers = pytest.importorskip("transformers")
    real = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers" / name)
    rows = []
    for corpus in ("smilechat_zh", "alpaca_eval_en", "think_traces"):
        lines = (shared / "corpora" / f"{corpus}.jsonl").read_text().splitlines()[:20]
        rows += [{"messages": json.loads(line)["messages"]} for line in lines]
    path = str(tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    config = stated(cache, pad_mode="no_padding", max_length=1 << 20)
    assert compared(path, real, config) == len(rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_sft_batches_of_verls_collator_resume_exactly(
    conversations: str, tokenizer: Any, cache: str, workers: int
) -> None:
    dataset = verl.SFTDataset([conversations], tokenizer, stated(cache, pad_mode="no_padding"))

    def loader() -> Any:
        sampler = torch.utils.data.DistributedSampler(
            dataset, shuffle=True, num_replicas=1, rank=0, drop_last=True
        )
        return stateful_dataloader.StatefulDataLoader(
            dataset, batch_size=4, sampler=sampler, num_workers=workers, drop_last=True,
            collate_fn=SFTTensorCollator("no_padding"),
        )  # fmt: skip

    def ids(batch: Any) -> list[list[int]]:
        return [row.tolist() for row in batch["input_ids"].unbind()]

    whole = [ids(batch) for batch in loader()]
    first = loader()
    part = [ids(batch) for batch in islice(iter(first), 2)]
    again = loader()
    again.load_state_dict(first.state_dict())
    assert part + [ids(batch) for batch in again] == whole


def test_rl_rows_and_batches_are_verls_own(tmp_path: Path, tokenizer: Any, cache: str) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"How much is {number}? " * (1 + number % 5)}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "tools_kwargs": {"calc": number}},
        }
        for number in range(40)
    ]
    path = str(tmp_path / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    config = stated(
        cache, prompt_key="prompt", max_prompt_length=30, filter_overlong_prompts_workers=1,
        cache_dir=str(tmp_path / "verl"),
        custom_cls={"path": "pkg://tokenmill.integrations.verl", "name": "RLDataset"},
    )  # fmt: skip
    theirs = RLHFDataset([path], tokenizer, config)
    assert 0 < len(theirs) < len(rows)
    chosen = get_dataset_class(config)
    assert chosen is verl.RLDataset
    dataset = chosen(data_files=[path], tokenizer=tokenizer, config=config)
    assert len(dataset) == len(theirs)
    for item, expected in zip(dataset, theirs, strict=True):
        assert dict(item, dummy_tensor=0) == dict(expected, dummy_tensor=0)
    batch = collate_fn(dataset.__getitems__(range(8)))
    assert batch["raw_prompt"].shape == (8,)
    assert batch["dummy_tensor"].shape == (8, 1)


def test_rl_media_are_put_in_place_by_verls_own_code(
    tmp_path: Path, tokenizer: Any, cache: str
) -> None:
    turn = {"role": "user", "content": "What is <image>?"}
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"prompt": [turn], "images": ["a.png"]}) + "\n")
    dataset = verl.RLDataset(str(source), tokenizer, stated(cache, filter_overlong_prompts=False))
    dataset.processor = object()
    parts = dataset[0]["raw_prompt"][0]["content"]
    assert parts[1] == {"type": "image", "image": "a.png"}
    assert [part.get("text") for part in parts] == ["What is ", None, "?"]
    assert "images" not in dataset[0]
