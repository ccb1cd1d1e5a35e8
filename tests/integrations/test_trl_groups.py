"""TRL's trainers for groups: the same ids as TRL's own preparation, without preparing anything.

TRL's own way is the reference: its trainer is made from the raw rows, and what it tokenized is
compared with what it is given here. Where TRL warns that its prompt is no prefix of the whole, the
whole is still compared, and only the place of the cut may differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, write_rows
from tests.build.test_groups import kto, pair
from tokenmill.errors import UsageError
from tokenmill.store import Store

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.integrations.test_trl import stop_at, tiny_model  # noqa: E402
from tokenmill.integrations import hf  # noqa: E402

COUNT, STEPS, STOP, BATCH, SEED = 24, 4, 2, 3, 5

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]

PAIRS = [row for row in map(pair, range(3 * COUNT)) if isinstance(row.get("prompt"), list)]
TEXTS = [row for row in map(pair, range(3 * COUNT)) if isinstance(row.get("prompt"), str)]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(TOKENIZER))


def prepare(directory: Path, rows: list[dict[str, Any]]) -> Store:
    source = write_rows(directory / "rows.jsonl", rows)
    return tm.prepare(str(source), str(TOKENIZER), cache_dir=directory / "cache", **INLINE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return prepare(tmp_path_factory.mktemp("pairs"), PAIRS)


def settings(out: Path) -> dict[str, Any]:
    return {
        "output_dir": str(out), "max_steps": STEPS, "per_device_train_batch_size": BATCH,
        "save_steps": STOP, "report_to": [], "use_cpu": True, "bf16": False, "logging_steps": 1,
        "gradient_checkpointing": False, "dataloader_pin_memory": False, "disable_tqdm": True,
    }  # fmt: skip


def raw(rows: list[dict[str, Any]]) -> Any:
    """The rows as TRL takes them, without columns of ours."""
    wanted = ("prompt", "chosen", "rejected", "completion", "label")
    return datasets.Dataset.from_list([{k: r[k] for k in wanted if k in r} for r in rows])


def dpo(out: Path, tokenizer: Any, data: Any, more: dict[str, Any], **named: Any) -> Any:
    config = trl.DPOConfig(**settings(out), **more)
    return hf.as_prepared(trl.DPOTrainer)(
        model=tiny_model(), ref_model=named.pop("ref_model", None), args=config,
        train_dataset=data, processing_class=tokenizer, **named,
    )  # fmt: skip


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("rows", [PAIRS, TEXTS], ids=["messages", "texts"])
def test_ids_are_those_of_trl(tmp_path: Path, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    own = dpo(tmp_path, tokenizer, raw(rows), {"max_length": None}, ref_model=tiny_model())
    ours, _ = hf.for_trl(prepare(tmp_path, rows), order="sequential")
    apart = 0
    for theirs, mine in zip(own.train_dataset, ours, strict=True):
        for side in ("chosen_ids", "rejected_ids"):
            assert mine["prompt_ids"] + mine[side] == theirs["prompt_ids"] + theirs[side]
        text = tokenizer.apply_chat_template(
            theirs["prompt"], add_generation_prompt=True, tokenize=False
        ) if isinstance(theirs["prompt"], list) else theirs["prompt"]  # fmt: skip
        alone = tokenizer(text, add_special_tokens=False)["input_ids"]
        warned = len(theirs["prompt_ids"]) < len(alone)
        apart += warned
        assert warned or mine["prompt_ids"] == theirs["prompt_ids"]
    assert apart == (len(rows) // 2 if rows is TEXTS else 0)  # every other text ends with a blank


def test_dpo_resumed_is_the_same_run_and_has_trls_losses(
    store: Store, tmp_path: Path, tokenizer: Any
) -> None:
    run = hf.for_trl(store, epochs=2, seed=SEED)
    through = dpo(tmp_path / "a", tokenizer, *run, ref_model=tiny_model())
    through.train()
    first = dpo(tmp_path / "b", tokenizer, *run, ref_model=tiny_model(), callbacks=[stop_at(STOP)])
    first.train()
    second = dpo(tmp_path / "b", tokenizer, *run, ref_model=tiny_model())
    second.train(resume_from_checkpoint=str(tmp_path / "b" / f"checkpoint-{STOP}"))
    for name, weights in through.model.state_dict().items():
        assert torch.equal(weights, second.model.state_dict()[name]), name
    batches = tm.Loader(store, batch_size=BATCH, seed=SEED, indices=True).repeat()
    order = [n // 2 for _, batch in zip(range(STEPS), batches, strict=False)
             for n in batch["indices"][::2]]  # fmt: skip
    theirs = dpo(tmp_path / "c", tokenizer, raw([PAIRS[number] for number in order]), run[1],
                 ref_model=tiny_model())  # fmt: skip
    theirs.train()
    assert losses(theirs) == losses(through)
    assert len(losses(through)) == STEPS


class Uncalled(torch.nn.Module):  # type: ignore[misc,name-defined]
    def forward(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the reference model was called")


def test_known_reference_is_not_asked(tmp_path: Path, tokenizer: Any) -> None:
    store = prepare(tmp_path, PAIRS)
    asked = dpo(tmp_path / "a", tokenizer, *hf.for_trl(store, epochs=2, seed=SEED),
                ref_model=tiny_model(7))  # fmt: skip
    values = np.zeros(len(store), np.float32)
    collate = asked.data_collator
    for number, row in enumerate(hf.for_trl(store, order="sequential")[0]):
        pair_of = asked.compute_ref_log_probs(asked.ref_model, collate([row]))
        values[2 * number : 2 * number + 2] = [float(value) for value in pair_of]
    asked.train()
    store.attach("ref_logps", values, made_by="tiny model 7")
    run = hf.for_trl(store, epochs=2, seed=SEED, ref_logps="ref_logps")
    assert run[1]["precompute_ref_log_probs"] is True
    known = dpo(tmp_path / "b", tokenizer, *run)
    assert known.ref_model is None
    known.compute_ref_log_probs = Uncalled()
    known.train()
    np.testing.assert_allclose(losses(known), losses(asked), rtol=1e-3)
    batch = next(iter(tm.Loader(store, batch_size=2)))
    numbers = next(iter(tm.Loader(store, batch_size=2, indices=True)))["indices"]
    assert batch["chosen_ref_logps"].tolist() == values[numbers[::2]].tolist()
    assert batch["rejected_ref_logps"].tolist() == values[numbers[1::2]].tolist()


def test_kto_is_fed(tmp_path: Path, tokenizer: Any) -> None:
    rows = [kto(number) for number in range(COUNT)]
    store = prepare(tmp_path, rows)
    run = hf.for_trl(store, epochs=2, seed=SEED)
    config = trl.KTOConfig(**settings(tmp_path / "out"), **run[1])
    trainer = hf.as_prepared(trl.KTOTrainer)(
        model=tiny_model(), ref_model=tiny_model(), args=config, train_dataset=run[0],
        processing_class=tokenizer,
    )  # fmt: skip
    loader = tm.Loader(store, batch_size=BATCH, seed=SEED)
    for number, batch in zip(range(0, STEPS * BATCH, BATCH), loader.repeat(), strict=False):
        given = trainer.data_collator([run[0][n] for n in range(number, number + BATCH)])
        assert given["input_ids"].tolist() == batch["input_ids"].tolist()
        assert given["KL_input_ids"].tolist() == batch["kl_input_ids"].tolist()
        assert given["label"].tolist() == (batch["label"] == 1).tolist()
    trainer.train()
    assert len(losses(trainer)) == STEPS


def test_known_reference_of_kto_is_not_asked_where_the_loss_has_no_kl_term(
    tmp_path: Path, tokenizer: Any
) -> None:
    store = prepare(tmp_path, [kto(number) for number in range(COUNT)])

    def trainer(name: str, ref_logps: str | None, loss: str, **named: Any) -> Any:
        data, arguments = hf.for_trl(store, epochs=2, seed=SEED, ref_logps=ref_logps)
        config = trl.KTOConfig(**settings(tmp_path / name), **arguments, loss_type=loss)
        return hf.as_prepared(trl.KTOTrainer)(
            model=tiny_model(), args=config, train_dataset=data, processing_class=tokenizer, **named
        )

    asked = trainer("a", None, "apo_zero_unpaired", ref_model=tiny_model(7))
    values = np.zeros(len(store), np.float32)
    for number, row in enumerate(hf.for_trl(store, order="sequential")[0]):
        value, _ = asked.compute_ref_log_probs(asked.ref_model, asked.data_collator([row]))
        values[number] = float(value)
    asked.train()
    store.attach("ref_logps", values, made_by="tiny model 7")
    known = trainer("b", "ref_logps", "apo_zero_unpaired")
    assert known.ref_model is None
    known.compute_ref_log_probs = Uncalled()
    known.train()
    np.testing.assert_allclose(losses(known), losses(asked), rtol=1e-3)
    with pytest.raises(UsageError, match=r"mismatched answers.*apo_zero_unpaired"):
        trainer("c", "ref_logps", "kto")


def test_reward_models_see_whole_answers_and_margins(tmp_path: Path, tokenizer: Any) -> None:
    store = prepare(tmp_path, PAIRS)
    data, arguments = hf.for_trl(store, trainer="reward", order="sequential")
    for group, row in zip(store.groups, data, strict=True):
        assert row["chosen_ids"] == group.rows[0].input_ids.tolist()
        assert row["rejected_ids"] == group.rows[1].input_ids.tolist()
        assert row["margin"] == (group.margin or 0.0)
    config = trl.RewardConfig(**settings(tmp_path / "out"), **arguments)
    torch.manual_seed(0)
    model = transformers.Qwen2ForSequenceClassification(
        transformers.Qwen2Config(**{**tiny_model().config.to_dict(), "num_labels": 1,
                                    "pad_token_id": tokenizer.pad_token_id})
    )  # fmt: skip
    trainer = trl.RewardTrainer(
        model=model, args=config, train_dataset=data, processing_class=tokenizer
    )
    trainer.train()
    assert len(losses(trainer)) == STEPS


def test_what_does_not_fit_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="wants groups of kto"):
        hf.for_trl(store, trainer="kto")
    with pytest.raises(UsageError, match="does not pack groups"):
        hf.for_trl(store, pack=tm.Pack(length=512))
    with pytest.raises(UsageError, match="trainer"):
        hf.for_trl(store, trainer="ppo")
    with pytest.raises(UsageError, match="has no reference"):
        hf.for_trl(store, trainer="reward", ref_logps="ref_logps")
    rows = tm.prepare(
        str(write_rows(tmp_path / "t.jsonl", [json.dumps({"text": "a"})])), str(TOKENIZER), **INLINE
    )
    with pytest.raises(UsageError, match="has none"):
        hf.for_trl(rows, trainer="dpo")


def test_rows_of_groups_are_rows_elsewhere_as_they_stand(store: Store, tmp_path: Path) -> None:
    """`to_hf` and `export` serve rows: in the store's order nothing is parted, in another it is."""
    rows = tm.to_hf(store)
    assert [row["input_ids"] for row in rows] == [row.input_ids.tolist() for row in store]
    made = tm.export(store, "jsonl", tmp_path / "rows.jsonl")
    assert made.rows == len(store)
    with pytest.raises(UsageError, match="would be parted"):
        tm.export(store, "jsonl", tmp_path / "shuffled.jsonl", order="feistel")
