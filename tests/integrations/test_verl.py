"""verl: SFT rows and masks by its definition, RL rows with raw_prompt, both in our order."""

from __future__ import annotations

import functools
import json
import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.store.making import make_columns, make_store
from tokenmill.errors import SourceError, TemplateError, UsageError
from tokenmill.loader import OrderedView
from tokenmill.source import Rows
from tokenmill.store import Store

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

from tests.integrations import host_verl as host  # noqa: E402
from tokenmill.integrations import verl  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore:'set_vital' is deprecated", "ignore:The PyTorch API of nested tensors"
)

EXAMPLES = Path(tm.__file__).parent / "examples"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(1).integers(3, 40, 41).tolist()
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(lengths)], pad_id=9)


def config(cache: str = "", **fields: Any) -> dict[str, Any]:
    stated = {
        "pad_mode": "no_padding", "max_length": 4096, "truncation": "error",
        "messages_key": "messages", "tools_key": "tools", "apply_chat_template_kwargs": {},
        "enable_thinking_key": "enable_thinking",
        "tokenmill": {"cache_dir": cache or None, "num_workers": 0},
    }  # fmt: skip
    ours = {**stated["tokenmill"], **fields.pop("tokenmill", {})}  # type: ignore[dict-item]
    return {**stated, **fields, "tokenmill": ours}


# SFT


def test_sft_rows_and_masks_are_verls_where_its_ids_are_the_whole_render(
    tokenizer: Any, cache: str
) -> None:
    source = EXAMPLES / "conversations.jsonl"
    dataset = verl.SFTDataset(
        [str(source)], tokenizer, config(cache, tokenmill={"order": "sequential"})
    )
    rows = list(tm.open_rows(source))
    compared = 0
    for number, row in enumerate(dataset.view):
        messages = rows[row.origin.row]["messages"]
        if any(set(m) != {"role", "content"} for m in messages) or "tools" in rows[row.origin.row]:
            continue
        ids, mask = host.sft_reference(tokenizer, messages)
        item = dataset[number]
        if ids != row.input_ids.tolist():
            continue
        assert item["input_ids"].tolist() == ids
        assert item["loss_mask"].tolist() == mask
        assert item["position_ids"].tolist() == list(range(len(ids)))
        assert set(item) == {"input_ids", "position_ids", "loss_mask"}
        assert {value.dtype for value in item.values()} == {torch.int64}
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("name", ["qwen2.5"])
def test_sft_masks_of_real_conversations_are_verls(shared: Path, tmp_path: Path, name: str) -> None:
    real = transformers.AutoTokenizer.from_pretrained(shared / "tokenizers" / name)
    lines = (shared / "corpora" / "smilechat_zh.jsonl").read_text().splitlines()[:40]
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(lines) + "\n")
    dataset = verl.SFTDataset(
        str(source), real, config(str(tmp_path / "cache"), tokenmill={"order": "sequential"})
    )
    rows = list(tm.open_rows(source))
    compared = 0
    for number, row in enumerate(dataset.view):
        record = rows[row.origin.row]
        ids, mask = host.sft_reference(real, record.get("messages") or record["conversations"])
        if ids == row.input_ids.tolist():
            assert dataset[number]["loss_mask"].tolist() == mask
            compared += 1
    assert compared > 10


def test_sft_items_are_in_our_order_epoch_behind_epoch(store: Store, tokenizer: Any) -> None:
    stated = config(seed=3, tokenmill={"epochs": 2})
    dataset = verl.SFTDataset([str(store.path)], tokenizer, stated)
    ordered = OrderedView(store, seed=3)
    expected = []
    for epoch in range(2):
        ordered.set_epoch(epoch)
        expected += [row.input_ids.tolist() for row in ordered]
    assert [item["input_ids"].tolist() for item in dataset] == expected
    assert dataset[-1]["input_ids"].tolist() == expected[-1]
    with pytest.raises(IndexError):
        dataset[82]
    data = pickle.dumps(dataset)
    assert len(data) < 16 << 10
    assert pickle.loads(data)[50]["input_ids"].tolist() == expected[50]


def test_sft_validation_files_stay_in_file_order_once(store: Store, tokenizer: Any) -> None:
    stated = config(
        train_files="train.parquet", val_files=[str(store.path)], tokenmill={"epochs": 3}
    )
    dataset = verl.SFTDataset([str(store.path)], tokenizer, stated)
    assert [item["input_ids"].tolist() for item in dataset] == [r.input_ids.tolist() for r in store]


@pytest.mark.parametrize("truncation", ["left", "right"])
@pytest.mark.parametrize("pad_mode", ["right", "no_padding"])
def test_sft_rows_are_cut_and_padded_as_verl_does(
    store: Store, tokenizer: Any, truncation: str, pad_mode: str
) -> None:
    limit = 20
    stated = config(
        pad_mode=pad_mode, truncation=truncation, max_length=limit,
        tokenmill={"order": "sequential"},
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


def test_sft_first_token_is_never_trained(tmp_path: Path, tokenizer: Any) -> None:
    """Verl shifts the masks of a batch across its rows: it would train another row's end."""
    columns = make_columns([5, 4])
    columns.mask[:] = 1
    made = make_store(tmp_path, [columns])
    dataset = verl.SFTDataset(str(made.path), tokenizer, config())
    assert [int(item["loss_mask"][0]) for item in dataset] == [0, 0]
    assert sorted(int(item["loss_mask"].sum()) for item in dataset) == [3, 4]


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
    expected = [store[int(b["indices"][0])].input_ids.tolist() for b in islice(loader, len(served))]
    assert served == expected


@pytest.mark.parametrize(("pad_mode", "workers"), [("right", 2), ("no_padding", 0)])
def test_sft_dataloader_with_verls_collate_resumes_exactly(
    store: Store, tokenizer: Any, pad_mode: str, workers: int
) -> None:
    stated = config(pad_mode=pad_mode, max_length=64)
    dataset = verl.SFTDataset(str(store.path), tokenizer, stated)

    def loader() -> Any:
        sampler = torch.utils.data.DistributedSampler(
            dataset, shuffle=True, num_replicas=1, rank=0, drop_last=True
        )
        return stateful_dataloader.StatefulDataLoader(
            dataset, batch_size=8, sampler=sampler, num_workers=workers, drop_last=True,
            collate_fn=functools.partial(host.collate_sft, pad_mode=pad_mode),
        )  # fmt: skip

    def ids(batch: dict[str, Any]) -> list[list[int]]:
        return [row.tolist() for row in batch["input_ids"].unbind()]

    whole = [ids(batch) for batch in loader()]
    assert len(whole) == 5
    first = loader()
    part = [ids(batch) for batch in islice(iter(first), 2)]
    again = loader()
    again.load_state_dict(first.state_dict())
    assert part + [ids(batch) for batch in again] == whole


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"pad_mode": "left_right"}, "pad_mode"),
        ({"truncation": "middle"}, "truncation"),
        ({"tokenmill": {"sed": 1}}, "unknown names under data.tokenmill: sed"),
        ({"tokenmill": {"order": "random"}}, "order"),
        ({"tokenmill": {"epochs": 0}}, "epochs"),
    ],
)
def test_sft_wrong_settings_are_refused(
    store: Store, tokenizer: Any, fields: dict[str, Any], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        verl.SFTDataset(str(store.path), tokenizer, config(**fields))


def test_sft_what_a_store_cannot_say_is_refused(
    tmp_path: Path, tokenizer: Any, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    source.write_text(json.dumps({"messages": turns, "enable_thinking": True}) + "\n")
    with pytest.raises(UsageError, match="enable_thinking_default"):
        verl.SFTDataset(str(source), tokenizer, config(cache))

    class Processor:
        image_processor = object()

    with pytest.raises(UsageError, match="verl's own dataset"):
        verl.SFTDataset(str(source), tokenizer, config(cache), Processor())
    source.write_text(json.dumps({"messages": turns}) + "\n")
    dated = transformers.AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer")
    dated.chat_template = "{{ strftime_now('%Y') }}" + dated.chat_template
    with pytest.raises(TemplateError, match="TOKENMILL_DATE=2026-11-15"):
        verl.SFTDataset(str(source), dated, config(cache))
    monkeypatch.setenv("TOKENMILL_DATE", "2026-11-15")
    assert len(verl.SFTDataset(str(source), dated, config(cache))) == 1


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_sft_looks_at_every_row_for_a_thinking_switch(
    tmp_path: Path, tokenizer: Any, cache: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[dict[str, Any]] = [{"messages": turns, "enable_thinking": None} for _ in range(9)]

    def write(name: str) -> str:
        path = tmp_path / f"{name}.{ending}"
        if ending == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
        return str(path)

    quiet = write("quiet")
    assert len(verl.SFTDataset(quiet, tokenizer, config(cache))) == 9  # null is the default
    rows[7]["enable_thinking"] = False
    for _ in range(2):
        with pytest.raises(UsageError, match="enable_thinking_default") as refused:
            verl.SFTDataset(write("loud"), tokenizer, config(cache))
        assert refused.value.row == 7
    # What was looked at once is known by its content.
    monkeypatch.setattr(Rows, "scan", None)
    assert len(verl.SFTDataset(quiet, tokenizer, config(cache))) == 9
