"""verl: SFT rows and masks by its definition, RL rows with raw_prompt, both in our order."""

from __future__ import annotations

import json
import pickle
import types
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.integrations.conftest import EXAMPLES
from tokenmill.errors import SourceError, UsageError
from tokenmill.sources.rows import Rows
from tokenmill.store import Store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.integrations import stand_in_verl  # noqa: E402
from tokenmill.integrations import verl  # noqa: E402

SEQUENTIAL = {"order": "sequential"}


def config(cache: str = "", **fields: Any) -> dict[str, Any]:
    stated = {
        "pad_mode": "no_padding", "max_length": 4096, "truncation": "error",
        "messages_key": "messages", "tools_key": "tools", "apply_chat_template_kwargs": {},
        "enable_thinking_key": "enable_thinking", "prompt_key": "prompt", "max_prompt_length": 60,
        "filter_overlong_prompts": True,
    }  # fmt: skip
    ours = {"cache_dir": cache or None, "num_workers": 0, **fields.pop("tokenmill", {})}
    return {**stated, **fields, "tokenmill": ours}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def real_config(stated: dict[str, Any]) -> Any:
    pytest.importorskip("verl", reason="verl is not installed: only its stand-in is tried")
    from omegaconf import OmegaConf

    return OmegaConf.create(stated)


# SFT


def examples(shared: Path) -> tuple[Path, list[dict[str, Any]]]:
    rows = [
        {"messages": row["messages"]}
        for row in tm.open_rows(EXAMPLES / "conversations.jsonl")
        if all(set(turn) == {"role", "content"} for turn in row.get("messages") or [{}])
    ]
    return EXAMPLES / "tokenizer", rows


def real_conversations(shared: Path) -> tuple[Path, list[dict[str, Any]]]:
    lines = (shared / "corpora" / "smilechat_zh.jsonl").read_text().splitlines()[:24]
    return shared / "tokenizers" / "qwen2.5", [
        {"messages": json.loads(line)["messages"]} for line in lines
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("by", ["stand-in", "verl"])
@pytest.mark.parametrize("conversations", [examples, real_conversations])
def test_sft_rows_and_masks_are_verls_where_its_ids_are_the_whole_render(
    shared: Path, tmp_path: Path, cache: str, conversations: Any, by: str
) -> None:
    directory, rows = conversations(shared)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    source = write_rows(tmp_path / "rows.parquet", rows)
    stated = config(cache, tokenmill=SEQUENTIAL)
    if by == "verl":
        settings = real_config(stated)
        from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

        theirs = MultiTurnSFTDataset([source], tokenizer, settings)
    else:
        theirs = stand_in_verl.SFTDataset(rows, tokenizer)
    dataset = verl.SFTDataset([source], tokenizer, stated)
    compared = 0
    for number, row in enumerate(dataset.view):
        try:
            expected = theirs[row.origin.row]
        except AssertionError:  # message by message is not what the template prints
            continue
        item = dataset[number]
        assert set(item) == set(expected) == {"input_ids", "position_ids", "loss_mask"}
        assert {value.dtype for value in item.values()} == {torch.int64}
        # A user turn at the end is cut here, and untrained there.
        assert int(expected["loss_mask"].sum()) == int(item["loss_mask"].sum())
        for name, values in item.items():
            assert values.tolist() == expected[name][: len(row)].tolist(), name
        compared += 1
    assert compared > 20


def test_sft_validation_files_stay_in_file_order_once(store: Store, tokenizer: Any) -> None:
    stated = config(
        train_files="train.parquet", val_files=[str(store.path)], tokenmill={"epochs": 3}
    )
    dataset = verl.SFTDataset([str(store.path)], tokenizer, stated)
    assert [item["input_ids"].tolist() for item in dataset] == [r.input_ids.tolist() for r in store]


@pytest.mark.parametrize("truncation", ["left", "right"])
@pytest.mark.parametrize("pad_mode", ["right", "no_padding"])
def test_sft_rows_are_truncated_and_padded_as_in_verl(
    store: Store, tokenizer: Any, truncation: str, pad_mode: str
) -> None:
    limit = 20
    stated = config(
        pad_mode=pad_mode, truncation=truncation, max_length=limit,
        tokenmill=SEQUENTIAL,
    )  # fmt: skip
    dataset = verl.SFTDataset(str(store.path), tokenizer, stated)
    for row, item in zip(store, dataset, strict=True):
        columns = {
            "input_ids": row.input_ids.tolist(),
            "position_ids": list(range(len(row))),
            "loss_mask": row.loss_mask.tolist(),
        }
        pads = {"input_ids": tokenizer.pad_token_id or 0}
        if pad_mode == "right":
            columns["attention_mask"] = [1] * len(row)
        for name, values in columns.items():
            cut = values[-limit:] if truncation == "left" else values[:limit]
            if name == "loss_mask":
                cut[0] = 0
            if pad_mode == "right":
                cut = cut + [pads.get(name, 0)] * (limit - len(cut))
            assert item[name].tolist() == cut, name
        assert set(item) == set(columns)


def test_sft_overlong_rows_are_refused_before_the_run(tokenizer: Any, cache: str) -> None:
    source = str(EXAMPLES / "conversations.jsonl")
    with pytest.raises(SourceError, match=r"conversations\.jsonl:\d+ .*max_length is 30"):
        verl.SFTDataset(source, tokenizer, config(cache, max_length=30))
    cut = config(cache, max_length=60, truncation="right")
    assert max(len(item["input_ids"]) for item in verl.SFTDataset(source, tokenizer, cut)) == 60


def test_sft_max_samples_are_the_first_or_a_draw(store: Store, tokenizer: Any) -> None:
    numbers = {tuple(row.input_ids.tolist()): number for number, row in enumerate(store)}

    def served(**fields: Any) -> list[int]:
        dataset = verl.SFTDataset(str(store.path), tokenizer, config(**fields), max_samples=10)
        return [numbers[tuple(item["input_ids"].tolist())] for item in dataset]

    assert sorted(served()) == list(range(10))
    drawn = served(shuffle=True, seed=1)
    assert len(set(drawn)) == 10
    assert max(drawn) > 9
    assert served(shuffle=True, seed=1) == drawn != served(shuffle=True, seed=2)


def test_sft_undo_shuffle_serves_our_order_through_verls_sampler(
    store: Store, tokenizer: Any
) -> None:
    dataset = verl.SFTDataset(
        str(store.path), tokenizer, config(seed=5, tokenmill={"undo_shuffle": True, "epochs": 2})
    )
    dataset = pickle.loads(pickle.dumps(dataset))
    ranks = [
        torch.utils.data.DistributedSampler(
            dataset, shuffle=True, num_replicas=2, rank=rank, drop_last=True
        )
        for rank in range(2)
    ]
    both = [item for pair in zip(*ranks, strict=True) for item in pair]
    served = [item["input_ids"].tolist() for item in dataset.__getitems__(both)]
    loader = tm.Loader(store, 1, seed=5, indices=True)
    batches = islice(loader.repeat(), len(served))
    expected = [store[int(b["indices"][0])].input_ids.tolist() for b in batches]
    assert served == expected


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"pad_mode": "left_right"}, "pad_mode"),
        ({"truncation": "middle"}, "truncation"),
        ({"tokenmill": {"sed": 1}}, "unknown settings under data.tokenmill: sed"),
        ({"tokenmill": {"order": "random"}}, "order"),
        ({"tokenmill": {"epochs": 0}}, "epochs"),
    ],
)
def test_sft_wrong_settings_are_refused(
    store: Store, tokenizer: Any, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        verl.SFTDataset(str(store.path), tokenizer, config(**fields))


# What rows say themselves

TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(scope="module")
def switchable() -> Any:
    """A tokenizer whose template prints the value of `enable_thinking`."""
    found = transformers.AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer")
    detail = "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    found.chat_template = detail + found.chat_template
    return found


@pytest.mark.parametrize(("ending", "default"), [("jsonl", None), ("parquet", False)])
@pytest.mark.parametrize(
    "said",
    [[None] * 5, [False] * 5, [True, False, None, False, True, None], [1, 0, 1]],
    ids=["null", "constant", "mixed", "numbers"],
)
def test_sft_rows_are_rendered_with_their_own_thinking_value(
    tmp_path: Path, switchable: Any, cache: str, ending: str, said: list[Any], default: bool | None
) -> None:
    rows = []
    for number, switch in enumerate(said):
        turns = [{"role": "user", "content": f"{number}"}, TURNS[1]]
        rows.append({"messages": turns, "enable_thinking": switch})
    source = write_rows(tmp_path / f"rows.{ending}", rows)
    stated = config(cache, enable_thinking_default=default, tokenmill=SEQUENTIAL)
    dataset = verl.SFTDataset(source, switchable, stated)
    dataset = pickle.loads(pickle.dumps(dataset))
    expected = []
    for row in rows:
        switch = default if row["enable_thinking"] is None else bool(row["enable_thinking"])
        detail = {} if switch is None else {"enable_thinking": switch}
        text = switchable.apply_chat_template(row["messages"], tokenize=False, **detail)
        expected.append(switchable(text, add_special_tokens=False)["input_ids"])
    assert [item["input_ids"].tolist() for item in dataset] == expected
    assert dataset.view.lengths.tolist() == [len(ids) for ids in expected]
    assert dataset.view.trained.tolist() == [int(row.loss_mask.sum()) for row in dataset.view]


def test_sft_rows_that_differ_keep_their_order_over_files_and_rejections(
    tmp_path: Path, switchable: Any, cache: str
) -> None:
    files, expected = [], []
    for part in range(2):
        rows: list[dict[str, Any]] = [
            {"messages": TURNS, "enable_thinking": number % 3 == 0} for number in range(20)
        ]
        rows[4 + part] = {"messages": [], "enable_thinking": True}
        files.append(write_rows(tmp_path / f"{part}.jsonl", rows))
        expected += [(files[-1], number) for number in range(20) if number != 4 + part]
    dataset = verl.SFTDataset(files, switchable, config(cache, tokenmill=SEQUENTIAL))
    assert [(row.origin.path, row.origin.row) for row in dataset.view] == expected


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_sft_every_row_is_scanned_once_per_content(
    tmp_path: Path, switchable: Any, cache: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row: dict[str, Any] = {
        "messages": TURNS, "enable_thinking": None, "images": [], "videos": None
    }  # fmt: skip
    rows = [row] * 9
    quiet = write_rows(tmp_path / f"quiet.{ending}", rows)
    assert len(verl.SFTDataset(quiet, switchable, config(cache))) == 9
    for name, value, match in (
        ("enable_thinking", "false", "enable_thinking must be true, false or null, got 'false'"),
        ("images", ["a.png"], "The row has images: verl passed no processor"),
        ("videos", ["a.mp4"], "The row has videos: .* verl's own dataset"),
    ):
        rows[7] = {**row, name: value}
        loud = write_rows(tmp_path / f"{name}.{ending}", rows)
        for _ in range(2):
            with pytest.raises(UsageError, match=match) as refused:
                verl.SFTDataset(loud, switchable, config(cache))
            assert refused.value.row == 7
    monkeypatch.setattr(Rows, "scan", None)
    assert len(verl.SFTDataset(quiet, switchable, config(cache))) == 9


def test_sft_text_rows_are_rendered_by_the_processors_template(
    tmp_path: Path, switchable: Any, cache: str
) -> None:
    """Positions of Qwen-VL's text rows: test_verl_images.py."""
    processor = types.SimpleNamespace(
        image_processor=object(), chat_template="hello" + switchable.chat_template
    )
    source = write_rows(tmp_path / "rows.jsonl", [{"messages": TURNS}])
    item = verl.SFTDataset(source, switchable, config(cache), processor)[0]
    assert switchable.decode(item["input_ids"]).startswith("hello<|im_start|>user\na")
    assert item["position_ids"].tolist() == list(range(len(item["input_ids"])))
    assert "multi_modal_inputs" not in item


def test_sft_user_turn_at_the_end_is_removed_or_rejected(
    tmp_path: Path, tokenizer: Any, cache: str
) -> None:
    rows = [{"messages": TURNS}, {"messages": [*TURNS, TURNS[0]]}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    whole, cut = verl.SFTDataset(source, tokenizer, config(cache))
    assert whole["input_ids"].tolist() == cut["input_ids"].tolist()
    strict = config(cache, tokenmill={"trailing": "reject"})
    assert len(verl.SFTDataset(source, tokenizer, strict)) == 1


@pytest.mark.parametrize(
    ("base", "hook"),
    [(verl.SFTDataset, "_build_messages"), (verl.RLDataset, "_read_files_and_tokenize")],
)
def test_hooks_that_would_never_be_called_are_refused(base: type, hook: str) -> None:
    with pytest.raises(UsageError, match=rf"Mine\.{hook} would never be called"):
        type("Mine", (base,), {hook: lambda self: None})


# RL


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = []
    for number in range(50):
        text = f"How much is {number} and {number}? " * (30 if number % 7 == 0 else 1)
        row: dict[str, Any] = {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": f"0{2 * number}"},
        }
        if number % 5:
            extra = {"split": "train", "index": number, "tools_kwargs": {"calc": number}}
            row["extra_info"] = extra
        rows.append(row)
    return Path(write_rows(tmp_path_factory.mktemp("prompts") / "train.jsonl", rows))


def eager(path: Path, tokenizer: Any, limit: int | None) -> list[dict[str, Any]]:
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


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("filtered", [True, False])
def test_rl_rows_equal_an_eager_reference(
    prompts: Path, tokenizer: Any, cache: str, tmp_path: Path, filtered: bool, ending: str
) -> None:
    """Their order and epochs are tested for all trainers (test_trainers.py)."""
    source = str(prompts)
    if ending == "parquet":
        rows = [json.loads(line) for line in prompts.read_text().splitlines()]
        table = pa.table({name: [row.get(name) for row in rows] for name in rows[1]})
        source = str(tmp_path / "train.parquet")
        pq.write_table(table, source)
    stated = config(cache, filter_overlong_prompts=filtered, tokenmill=SEQUENTIAL)
    dataset = verl.RLDataset([source], tokenizer, stated)
    expected = eager(prompts, tokenizer, 60 if filtered else None)
    assert len(expected) == (42 if filtered else 50)
    assert [without_tensor(item) for item in dataset] == expected


@pytest.mark.filterwarnings("ignore")
def test_rl_rows_and_batches_are_those_of_verl_itself(
    tmp_path: Path, tokenizer: Any, cache: str
) -> None:
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"How much is {number}? " * (1 + number % 5)}],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "extra_info": {"index": number, "tools_kwargs": {"calc": number}},
        }
        for number in range(40)
    ]
    path = write_rows(tmp_path / "train.parquet", rows)
    stated = real_config(
        config(
            cache, max_prompt_length=30, filter_overlong_prompts_workers=1, tokenmill=SEQUENTIAL,
            cache_dir=str(tmp_path / "verl"),
            custom_cls={"path": "pkg://tokenmill.integrations.verl", "name": "RLDataset"},
        )
    )  # fmt: skip
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn, get_dataset_class

    theirs = RLHFDataset([path], tokenizer, stated)
    assert 0 < len(theirs) < len(rows)
    chosen = get_dataset_class(stated)
    assert chosen is verl.RLDataset
    dataset = chosen(data_files=[path], tokenizer=tokenizer, config=stated)
    for item, expected in zip(dataset, theirs, strict=True):
        assert dict(item, dummy_tensor=0) == dict(expected, dummy_tensor=0)
    batch = collate_fn(dataset.__getitems__(range(8)))
    assert batch["raw_prompt"].shape == (8,)
    assert batch["dummy_tensor"].shape == (8, 1)


def test_rl_validation_and_max_samples_are_verls(prompts: Path, tokenizer: Any, cache: str) -> None:
    stated = config(
        cache, train_files="other.parquet", val_files=str(prompts), tokenmill={"epochs": 4}
    )
    dataset = verl.RLDataset(str(prompts), tokenizer, stated, max_samples=20)
    kept = eager(prompts, tokenizer, 60)
    # The first rows of the source, of which the filter then leaves some.
    expected = [row for row in kept if int(row["reward_model"]["ground_truth"]) < 40]
    assert [without_tensor(item) for item in dataset] == expected


def test_rl_rows_of_a_batch_have_the_same_columns(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "one", "hint": 1}, {"prompt": [{"role": "user", "content": "two"}]}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    stated = config(str(tmp_path / "cache"), tokenmill=SEQUENTIAL)
    dataset = verl.RLDataset(source, tokenizer, stated)
    batch = dataset.__getitems__([0, 1])
    assert [item["hint"] for item in batch] == [1, None]
    assert batch[0]["raw_prompt"] == [{"role": "user", "content": "one"}]
    assert "hint" not in dataset[1]


def test_rl_what_cannot_be_measured_is_refused(
    prompts: Path, tokenizer: Any, cache: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="filter_overlong_prompts=False"):
        verl.RLDataset(str(prompts), tokenizer, config(cache, seed=7, tool_config_path="t.yaml"))
    with pytest.raises(UsageError, match="No prompt is left"):
        verl.RLDataset(str(prompts), tokenizer, config(cache, seed=7, max_prompt_length=1))
    turn = {"role": "user", "content": "what is <image>?"}
    source = write_rows(tmp_path / "rows.jsonl", [{"prompt": [turn], "images": ["a.png"]}])
    dataset = verl.RLDataset(source, tokenizer, config(cache, seed=7))
    with pytest.raises(UsageError, match="processor"):
        dataset[0]


def test_rl_subclasses_make_the_prompt(prompts: Path, tokenizer: Any, cache: str) -> None:
    class Polite(verl.RLDataset):
        def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
            messages = super()._build_messages(example, key=key)
            return [*messages, {"role": "user", "content": "Please."}]

    for item in Polite(str(prompts), tokenizer, config(cache, seed=7)):
        assert item["raw_prompt"] == [*item["prompt"], {"role": "user", "content": "Please."}]
