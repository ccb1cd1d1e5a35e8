"""OpenRLHF's program over stores: its side written out, and OpenRLHF itself if installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.conftest import stand_in
from tests.store.making import make_columns, make_store
from tokenmill.errors import SourceError, UsageError
from tokenmill.store import Store

torch = pytest.importorskip("torch")
datasets = pytest.importorskip("datasets")

OURS = "tokenmill.integrations.openrlhf.train_sft"
PROGRAM = """
from openrlhf.datasets import SFTDataset
from openrlhf.datasets.utils import blending_datasets

def train(args):
    rows = blending_datasets(
        args.paths, None, args.strategy, 42, max_count=args.count, dataset_split="train"
    )
    rows = rows.select(range(min(args.count, len(rows))))
    args.made = SFTDataset(
        rows, args.tokenizer, args.strategy.args.data.max_len, args.strategy,
        pretrain_mode=args.pretrain, input_template="User: {}", multiturn=True,
    )

if __name__ == "__main__":
    import stated_args
    train(stated_args)
"""


class HostDataset(torch.utils.data.Dataset):  # type: ignore[misc]
    def __init__(self, *given: Any, **named: Any) -> None:
        raise AssertionError("its rows would be rendered")

    def collate_fn(self, items: list[Any]) -> tuple[Any, Any, Any]:
        size = max(ids.size(-1) for ids, _, _ in items)

        def padded(number: int, value: int) -> Any:
            rows = [item[number] for item in items]
            pad = torch.nn.functional.pad
            return torch.cat([pad(row, (0, size - row.size(-1)), value=value) for row in rows])

        return padded(0, self.tokenizer.pad_token_id), padded(1, 0), padded(2, 0)


def blended(
    paths: str, probabilities: Any = None, strategy: Any = None, seed: int = 42,
    max_count: float = 1e8, dataset_split: str | None = "train",
) -> Any:  # fmt: skip
    found = []
    for path in paths.split(","):
        rows = datasets.load_from_disk(path.strip())
        if dataset_split and dataset_split in rows:  # as there: every row is compared
            rows = rows[dataset_split]
        found.append(rows.select(range(min(int(max_count), len(rows)))))
    return datasets.concatenate_datasets(found)


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    (tmp_path / "train_sft.py").write_text(PROGRAM)
    stand_in(monkeypatch, "openrlhf.cli", __path__=[str(tmp_path)])
    stand_in(monkeypatch, "openrlhf.datasets", SFTDataset=HostDataset)
    stand_in(monkeypatch, "openrlhf.datasets.utils", blending_datasets=blended)
    data = SimpleNamespace(max_len=4096)
    stated = stand_in(
        monkeypatch, "stated_args", strategy=SimpleNamespace(args=SimpleNamespace(data=data)),
        count=1_000_000, tokenizer=SimpleNamespace(pad_token_id=9), pretrain=False,
    )  # fmt: skip
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield stated
    sys.modules.pop(OURS, None)


def run(args: Any, *stores: Store | str) -> Any:
    args.paths = " , ".join(str(getattr(store, "path", store)) for store in stores)
    importlib.import_module(OURS).main()
    return args.made


def check(item: tuple[Any, Any, Any], row: Any) -> None:
    ids, attention, mask = (values.tolist() for values in item)
    size = len(row)
    assert ids[:size] == row.input_ids.tolist()
    assert attention == [1] * size + [0] * (len(ids) - size)
    # Its loss reads at a token whether the next one is trained.
    assert mask == [*row.loss_mask[1:].tolist(), *[0] * (len(ids) - size + 1)]


def test_batches_of_its_program_are_the_rows_of_the_stores(
    args: Any, chat: Store, store: Store
) -> None:
    made = run(args, chat, store)
    assert len(made) == len(chat) + len(store)
    rows = [*chat, *store]
    assert len(rows) > 80
    for start in range(0, len(rows), 4):
        numbers = range(start, min(start + 4, len(rows)))
        batch = made.collate_fn([made[number] for number in numbers])
        assert [values.dtype for values in batch] == [torch.int64, torch.int64, torch.float32]
        for number, *item in zip(numbers, *batch, strict=True):
            check(tuple(item), rows[number])
    args.count = 5
    assert len(run(args, chat)) == 5


def test_the_name_of_a_split_is_not_compared_with_every_row(
    args: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.Dataset, "__iter__", None)
    assert len(run(args, store)) == len(store)


def test_data_that_it_would_train_wrongly_is_refused(
    args: Any, chat: Store, pairs: Store, tmp_path: Path
) -> None:
    longest = int(max(chat.lengths))
    args.strategy.args.data.max_len = longest - 1
    with pytest.raises(SourceError, match=rf"--data.max_len is {longest - 1} \(\d+ such rows\)"):
        run(args, chat)
    args.strategy.args.data.max_len = longest
    run(args, chat)
    with pytest.raises(UsageError, match="Not a store"):
        run(args, chat, str(tmp_path))
    with pytest.raises(UsageError, match="contains preference groups"):
        run(args, pairs)
    args.pretrain = True
    with pytest.raises(UsageError, match="--train-on everything"):
        run(args, chat)


def test_openrlhf_itself_mixes_shards_and_resumes(tmp_path: Path, store: Store) -> None:
    pytest.importorskip(
        "openrlhf.datasets", reason="OpenRLHF is not installed: only its stand-in is tried"
    )
    from openrlhf.utils.distributed_sampler import DistributedSampler

    ours = importlib.import_module(OURS)
    other = make_store(tmp_path, [make_columns([6, 7, 8, 9] * 5)], pad_token_id=9)
    strategy = SimpleNamespace(
        args=SimpleNamespace(data=SimpleNamespace(max_len=64), use_ms=False),
        print=lambda *said: None, is_rank_0=lambda: False,
    )  # fmt: skip
    tokenizer = SimpleNamespace(pad_token_id=9)
    paths = f"{store.path},{other.path}"
    rows = ours.blending_datasets(paths, None, strategy, 42, max_count=1000, dataset_split="train")
    made = ours.SFTDataset(rows, tokenizer, 64, strategy, multiturn=True)
    expected = [*store, *other]
    for start in range(0, len(expected), 3):
        numbers = range(start, min(start + 3, len(expected)))
        for number, *item in zip(
            numbers, *made.collate_fn([made[number] for number in numbers]), strict=True
        ):
            check(tuple(item), expected[number])

    shares = ours.blending_datasets(paths, "0.2,0.8", strategy, 42)
    mixed = ours.SFTDataset(shares, tokenizer, 64, strategy)

    def batches(consumed: int) -> list[list[list[int]]]:
        sampler = DistributedSampler(mixed, num_replicas=2, rank=1, seed=1, drop_last=True)
        sampler.set_epoch(1, consumed_samples=consumed)
        loader = torch.utils.data.DataLoader(
            mixed, batch_size=2, sampler=sampler, collate_fn=mixed.collate_fn
        )
        return [ids.tolist() for ids, _, _ in loader]

    assert batches(8) == batches(0)[2:]
