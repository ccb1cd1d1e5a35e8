"""verl: RL rows with raw_prompt against an eager reference, in our order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import UsageError
from tokenmill.sampling import FeistelOrder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

from tests.integrations import host_verl as host  # noqa: E402
from tokenmill.integrations import verl  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated", "ignore:The PyTorch API of nested tensors"
)

EXAMPLES = Path(tm.__file__).parent / "examples"


# RL


def rl_config(cache: str, **fields: Any) -> dict[str, Any]:
    stated = {
        "prompt_key": "prompt", "max_prompt_length": 60, "filter_overlong_prompts": True,
        "shuffle": False, "seed": 7, "apply_chat_template_kwargs": {},
        "tokenmill": {"cache_dir": cache, "num_workers": 0},
    }  # fmt: skip
    ours = {**stated["tokenmill"], **fields.pop("tokenmill", {})}  # type: ignore[dict-item]
    return {**stated, **fields, "tokenmill": ours}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows as verl's examples write them; every seventh has a long prompt, every fifth no extra."""
    path = tmp_path_factory.mktemp("prompts") / "train.jsonl"
    with open(path, "w") as file:
        for number in range(50):
            text = f"How much is {number} and {number}? " * (30 if number % 7 == 0 else 1)
            row: dict[str, Any] = {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": f"0{2 * number}"},
            }
            if number % 5:
                row["extra_info"] = {
                    "split": "train", "index": number, "tools_kwargs": {"calc": number}
                }  # fmt: skip
            file.write(json.dumps(row) + "\n")
    return path


def eager(path: Path, tokenizer: Any, limit: int | None) -> list[dict[str, Any]]:
    """What verl's own dataset would hold, by its documented behaviour."""
    kept = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=True
        )["input_ids"]
        if limit is None or len(ids) <= limit:
            extra = row.get("extra_info") or {}
            kept.append(
                {
                    **row,
                    "raw_prompt": row["prompt"],
                    "extra_info": extra,
                    "index": extra.get("index", 0),
                    "tools_kwargs": extra.get("tools_kwargs", {}),
                    "interaction_kwargs": extra.get("interaction_kwargs", {}),
                }
            )
    return kept


def without_tensor(item: dict[str, Any]) -> dict[str, Any]:
    tensor = item["dummy_tensor"]
    assert tensor.dtype == torch.uint8
    assert tensor.tolist() == [0]
    return {name: value for name, value in item.items() if name != "dummy_tensor"}


@pytest.mark.parametrize("filtered", [True, False])
def test_rl_rows_equal_an_eager_reference_in_our_order(
    prompts: Path, tokenizer: Any, cache: str, filtered: bool
) -> None:
    stated = rl_config(cache, filter_overlong_prompts=filtered, tokenmill={"epochs": 2})
    dataset = verl.RLDataset([str(prompts)], tokenizer, stated)
    kept = eager(prompts, tokenizer, 60 if filtered else None)
    assert len(kept) == (42 if filtered else 50)
    order = FeistelOrder(len(kept), 7)
    expected = [
        kept[number]
        for epoch in range(2)
        for number in order.indices(epoch, np.arange(len(kept))).tolist()
    ]
    assert [without_tensor(dataset[i]) for i in range(len(dataset))] == expected


def test_rl_validation_and_max_samples_are_verls(prompts: Path, tokenizer: Any, cache: str) -> None:
    stated = rl_config(
        cache, train_files="other.parquet", val_files=str(prompts), tokenmill={"epochs": 4}
    )
    dataset = verl.RLDataset(str(prompts), tokenizer, stated, max_samples=20)
    kept = eager(prompts, tokenizer, 60)
    # The first rows of the source, of which the filter then leaves some.
    expected = [row for row in kept if int(row["reward_model"]["ground_truth"]) < 40]
    assert [without_tensor(item) for item in dataset] == expected


def test_rl_parquet_rows_equal_those_of_json_lines(
    prompts: Path, tokenizer: Any, cache: str, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    columns = {name: [row.get(name) for row in rows] for name in rows[1]}
    pq.write_table(pa.table(columns), tmp_path / "train.parquet")
    ours = verl.RLDataset(str(prompts), tokenizer, rl_config(cache))
    theirs = verl.RLDataset(str(tmp_path / "train.parquet"), tokenizer, rl_config(cache))
    assert [without_tensor(item) for item in ours] == [without_tensor(item) for item in theirs]


def test_rl_rows_of_a_batch_have_the_same_columns(tmp_path: Path, tokenizer: Any) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": "one", "hint": 1}, {"prompt": [{"role": "user", "content": "two"}]}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stated = rl_config(str(tmp_path / "cache"), tokenmill={"order": "sequential"})
    dataset = verl.RLDataset(str(source), tokenizer, stated)
    batch = host.collate_rl(dataset.__getitems__([0, 1]))
    assert batch["dummy_tensor"].shape == (2, 1)
    assert batch["hint"].tolist() == [1, None]
    assert batch["raw_prompt"][0] == [{"role": "user", "content": "one"}]
    assert "hint" not in dataset[1]


def test_rl_what_cannot_be_measured_is_refused(
    prompts: Path, tokenizer: Any, cache: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="filter_overlong_prompts=False"):
        verl.RLDataset(str(prompts), tokenizer, rl_config(cache, tool_config_path="t.yaml"))
    with pytest.raises(UsageError, match="no prompt is left"):
        verl.RLDataset(str(prompts), tokenizer, rl_config(cache, max_prompt_length=1))
    source = tmp_path / "rows.jsonl"
    turn = {"role": "user", "content": "what is <image>?"}
    source.write_text(json.dumps({"prompt": [turn], "images": ["a.png"]}) + "\n")
    dataset = verl.RLDataset(str(source), tokenizer, rl_config(cache))
    with pytest.raises(UsageError, match="processor"):
        dataset[0]


def test_rl_subclasses_make_the_prompt(prompts: Path, tokenizer: Any, cache: str) -> None:
    class Polite(verl.RLDataset):
        def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
            messages = super()._build_messages(example, key=key)
            return [*messages, {"role": "user", "content": "Please."}]

    for item in Polite(str(prompts), tokenizer, rl_config(cache)):
        assert item["raw_prompt"] == [*item["prompt"], {"role": "user", "content": "Please."}]
