"""Training runs on a tiny random model: prepared and tokenized on request, whole and resumed.

The loss of every step is that of a loop without batches, padding or collators.
"""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversations, write_rows
from tests.build.test_groups import pair
from tokenmill.errors import SourceError, UsageError
from tokenmill.store.by_source import SourceRows, StoreBySource

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.integrations.test_trl import settings, stop_at, tiny_model  # noqa: E402
from tests.sampling import sampled  # noqa: E402
from tokenmill.integrations.torch import DataLoader, Dataset  # noqa: E402

BATCH, STEPS, STOP, SEED, RATE = 3, 8, 3, 5, 0.05

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(300),
]


class Both(NamedTuple):
    lazy: SourceRows
    prepared: StoreBySource


def both(directory: Path, rows: list[Any], **options: Any) -> Both:
    source = write_rows(directory / "rows.jsonl", rows)
    given = {**INLINE, "tokenizer": str(TOKENIZER), **options}
    lazy = tm.prepare(source, cache_dir=directory / "lazy", lazy=True, **given)
    return Both(lazy, tm.prepare(source, cache_dir=directory / "store", **given).by_source())


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """17 rows, of which 4 are rejected: 8 steps of 3 cross the end of an epoch."""
    lines: list[Any] = conversations(17, words=5)
    for number in (1, 6, 7, 12):
        lines[number] = '{"messages": ['
    return both(tmp_path_factory.mktemp("rows"), lines)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Both:
    lines = [row for row in map(pair, range(60)) if isinstance(row.get("prompt"), list)]
    lines[2] = {"prompt": "p", "chosen": "same", "rejected": "same"}
    return both(tmp_path_factory.mktemp("pairs"), lines)


def chosen_rows(data: Any) -> list[list[int]]:
    batches = tm.Loader(data, BATCH, seed=SEED, indices=True).repeat()
    return [batch["indices"].tolist() for batch in islice(batches, STEPS)]


def sum_of_losses(model: Any, ids: Any, mask: Any) -> Any:
    """The loss of one row on its own, token by token."""
    ids = torch.tensor(np.asarray(ids, np.int64))
    scores = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    places = [place for place in range(1, len(ids)) if mask[place]]
    return -sum(scores[place - 1, ids[place]] for place in places), len(places)


def losses_by_hand(data: Any) -> list[float]:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for numbers in chosen_rows(data):
        parts = [sum_of_losses(model, row.input_ids, row.loss_mask) for row in data.batch(numbers)]
        loss = sum(part for part, _ in parts) / sum(count for _, count in parts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def by_hand(rows: Both) -> list[float]:
    return losses_by_hand(rows.prepared)


def near(losses: list[float]) -> Any:
    return pytest.approx(losses, abs=2e-4)


def steps(model: Any, optimizer: Any, batches: Any) -> list[float]:
    losses = []
    for batch in batches:
        names = ("input_ids", "labels", "attention_mask")
        loss = model(**{name: torch.as_tensor(batch[name]).long() for name in names}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize(("workers", "kind"), sampled(product((2, 0), Both._fields), 3))
def test_plain_torch_and_its_resume(
    rows: Both, by_hand: list[float], kind: str, workers: int
) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses: list[float] = []
    state = None
    for data, count in ((getattr(rows, kind), STOP), (rows.lazy, STEPS - STOP)):
        loader = DataLoader(data, batch_size=BATCH, seed=SEED, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        losses += steps(model, optimizer, islice(loader.repeat(), count))
        state = loader.state_dict()
    assert losses == near(by_hand)


def logged(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run_settings(out: Path) -> dict[str, Any]:
    return settings(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, save_steps=STOP,
        logging_strategy="steps", logging_steps=1, learning_rate=RATE, optim="sgd",
        lr_scheduler_type="constant", max_grad_norm=0.0, weight_decay=0.0,
    )  # fmt: skip


def whole_and_resumed(make: Any, out: Path) -> list[list[float]]:
    """Losses of a run, and of one that was stopped and continues with new objects."""
    whole = make(out / "whole")
    whole.train()
    make(out / "cut", callbacks=[stop_at(STOP)]).train()
    resumed = make(out / "cut")
    resumed.train(resume_from_checkpoint=str(out / "cut" / f"checkpoint-{STOP}"))
    return [logged(whole), logged(resumed)]


@pytest.mark.parametrize("kind", sampled(Both._fields, 2))
def test_trainer_of_transformers(
    rows: Both, by_hand: list[float], tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    hf = pytest.importorskip("tokenmill.integrations.hf")
    dataset, stated = hf.for_trl(getattr(rows, kind), epochs=3, seed=SEED)
    known = transformers.TrainingArguments.__dataclass_fields__
    own = {name: value for name, value in stated.items() if name in known}

    def make(out: Path, **named: Any) -> Any:
        return transformers.Trainer(
            model=tiny_model(), train_dataset=dataset, processing_class=tokenizer,
            args=transformers.TrainingArguments(**run_settings(out), **own),
            data_collator=transformers.DataCollatorForSeq2Seq(tokenizer), **named,
        )  # fmt: skip

    for losses in whole_and_resumed(make, tmp_path):
        assert losses == near(by_hand)


@pytest.mark.parametrize("kind", sampled(Both._fields, 2))
def test_sft_of_trl(
    rows: Both, by_hand: list[float], tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    trl, hf = pytest.importorskip("trl"), pytest.importorskip("tokenmill.integrations.hf")
    dataset, stated = hf.for_trl(getattr(rows, kind), epochs=3, seed=SEED)

    def make(out: Path, **named: Any) -> Any:
        return trl.SFTTrainer(
            model=tiny_model(), train_dataset=dataset, processing_class=tokenizer,
            args=trl.SFTConfig(**run_settings(out), **stated), **named,
        )  # fmt: skip

    for losses in whole_and_resumed(make, tmp_path):
        assert losses == near(by_hand)


def test_dpo_of_trl(pairs: Both, tokenizer: Any, tmp_path: Path) -> None:
    trl, hf = pytest.importorskip("trl"), pytest.importorskip("tokenmill.integrations.hf")
    beta = 0.1
    model, reference = tiny_model(), tiny_model(7).eval()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    expected = []
    for numbers in chosen_rows(pairs.prepared):
        terms = []
        for group in pairs.prepared.batch(numbers):
            margin = 0.0
            for row, sign in zip(group.rows, (1, -1), strict=True):
                answer = np.arange(len(row)) >= row.prompt_tokens  # as TRL scores it
                margin -= sign * sum_of_losses(model, row.input_ids, answer)[0]
                with torch.no_grad():
                    margin += sign * sum_of_losses(reference, row.input_ids, answer)[0]
            terms.append(-torch.nn.functional.logsigmoid(beta * margin))
        loss = sum(terms) / len(terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    for kind in Both._fields:
        dataset, stated = hf.for_trl(getattr(pairs, kind), epochs=3, seed=SEED)

        def make(out: Path, dataset: Any = dataset, stated: Any = stated, **named: Any) -> Any:
            return hf.as_prepared(trl.DPOTrainer)(
                model=tiny_model(), ref_model=tiny_model(7), train_dataset=dataset,
                processing_class=tokenizer,
                args=trl.DPOConfig(**run_settings(out), **stated, beta=beta), **named,
            )  # fmt: skip

        for losses in whole_and_resumed(make, tmp_path / kind):
            assert losses == near(expected)


def test_datasets_of_torch_and_verl(rows: Both, tokenizer: Any, tmp_path: Path) -> None:
    """Item i is the row at position i of the order; rejected rows are replaced."""
    verl = pytest.importorskip("tokenmill.integrations.verl")
    expected = tm.Loader(rows.prepared, len(rows.prepared), shuffle=False, indices=True, seed=0)
    numbers = next(iter(expected))["indices"].tolist()
    for data in rows:
        items = Dataset(data)
        assert len(items) == 17
        found = [item["input_ids"].tolist() for item in items]
        assert found == [data[number].input_ids.tolist() for number in numbers]
    source = str(tmp_path / "rows.jsonl")
    write_rows(Path(source), conversations(11, words=5))
    config = {"pad_mode": "no_padding", "max_length": 400, "truncation": "error"}

    def dataset(**ours: Any) -> Any:
        stated = {"cache_dir": str(tmp_path), "num_workers": 0, "epochs": 2, **ours}
        return verl.SFTDataset([source], tokenizer, {**config, "tokenmill": stated})

    for undo in (False, True):  # nothing is prepared before the last one
        lazy = dataset(lazy=True, undo_shuffle=undo)
        assert type(lazy.view.stores[0]).__name__ == "LazyRows"
        found = [{name: value.tolist() for name, value in item.items()} for item in lazy]
        if undo:
            prepared = dataset(undo_shuffle=True)
            assert found == [{k: v.tolist() for k, v in item.items()} for item in prepared]
    config["max_length"] = 20
    with pytest.raises(SourceError, match=r"The row has \d+ tokens, but data.max_length is 20"):
        dataset(lazy=True, cache_dir=str(tmp_path / "other"))[0]
    mixed = [
        {**row, "enable_thinking": bool(number % 2)} for number, row in enumerate(conversations(4))
    ]
    write_rows(Path(source), mixed)
    with pytest.raises(UsageError, match=r"lazy=true needs one value .* the rows have 2"):
        dataset(lazy=True, cache_dir=str(tmp_path / "third"))


def of_verl() -> tuple[Any, Any]:
    """Return verl's collator and loss; without verl, stand-ins of the same form."""
    try:
        from verl.utils.dataset.dataset_utils import SFTTensorCollator
        from verl.workers.utils.losses import sft_loss
    except ImportError:
        nested = torch.nested.as_nested_tensor

        def collate(items: list[Any]) -> dict[str, Any]:
            return {n: nested([item[n] for item in items], layout=torch.jagged) for n in items[0]}

        def loss_of(config: Any, output: Any, data: Any) -> tuple[Any, dict[str, Any]]:
            mask = torch.roll(data["loss_mask"].values(), shifts=-1, dims=0)
            scores = output["log_probs"].values()
            return -(scores * mask).sum() / data["batch_num_tokens"] * data["dp_size"], {}

        return collate, loss_of
    return SFTTensorCollator("no_padding"), sft_loss


@pytest.mark.parametrize("kind", Both._fields)
def test_datasets_of_verl_and_their_resume(rows: Both, tokenizer: Any, kind: str) -> None:
    """As verl's SFT trainer reads them; the forward pass of single rows replaces its engine."""
    verl = pytest.importorskip("tokenmill.integrations.verl")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    collate, loss_of = of_verl()
    source = rows.prepared.store.sources[0]
    cache = Path(source).parent / f"verl-{kind}"
    ours = {"cache_dir": str(cache), "num_workers": 0, "seed": SEED, "epochs": 3,
            "lazy": kind == "lazy", "undo_shuffle": True}  # fmt: skip
    config = {"pad_mode": "no_padding", "max_length": 400, "tokenmill": ours}
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses: list[float] = []
    state = None
    for count in (STOP, STEPS - STOP):
        dataset = verl.SFTDataset([source], tokenizer, config)
        loader = stateful.StatefulDataLoader(
            dataset, BATCH, collate_fn=collate, drop_last=True, num_workers=2 * (kind == "lazy"),
            sampler=torch.utils.data.DistributedSampler(dataset, 1, 0, drop_last=True),
        )  # fmt: skip
        if state is not None:
            loader.load_state_dict(state)
        for batch in islice(loader, count):
            ids, mask = batch["input_ids"], batch["loss_mask"]
            scores = [model(input_ids=row[None]).logits[0].log_softmax(-1) for row in ids.unbind()]
            chosen = torch.cat(scores).gather(1, torch.roll(ids.values(), -1)[:, None])[:, 0]
            output = {"log_probs": torch.nested.nested_tensor_from_jagged(chosen, ids.offsets())}
            counted = {"dp_size": 1, "batch_num_tokens": mask.values().sum()}
            loss, _ = loss_of(None, output, {"loss_mask": mask, **counted})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
            state = loader.state_dict()
    stated = {**INLINE, "tokenizer": str(TOKENIZER), "turn_end": "turn", "trailing": "trim"}
    store = tm.prepare(source, cache_dir=cache, **stated)
    assert losses == near(losses_by_hand(store.by_source() if kind == "lazy" else store))
    assert len(losses) == STEPS


def test_weights_are_refused_where_the_trainer_ignores_them(tmp_path: Path) -> None:
    hf = pytest.importorskip("tokenmill.integrations.hf")
    lines = [{**row, "weight": 0.5} for row in conversations(4)]
    for data in both(tmp_path, lines):
        with pytest.raises(UsageError, match=r"loss weights, which only tm\.Loader"):
            Dataset(data)[0]
        dataset, _ = hf.for_trl(data)
        with pytest.raises(UsageError, match=r"loss weights, which only tm\.Loader"):
            dataset[0]
        with pytest.raises(UsageError, match="packs of a dataset with a length"):
            hf.for_trl(data, pack=tm.Pack(64))
