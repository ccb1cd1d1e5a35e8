"""TRL's trainers for groups: the ids of TRL's own preparation, without preparing anything."""

from __future__ import annotations

import functools
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

from tests.integrations.test_trl import settings, stop_at, tiny_model  # noqa: E402
from tokenmill.integrations import hf  # noqa: E402

COUNT, STEPS, STOP, BATCH, SEED = 24, 4, 2, 3, 5

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.timeout(300),
]

PAIRS = [row for row in map(pair, range(3 * COUNT)) if isinstance(row.get("prompt"), list)]
KTO = [kto(number) for number in range(COUNT)]
TEXTS = [row for row in map(pair, range(3 * COUNT)) if isinstance(row.get("prompt"), str)]


def prepare(directory: Path, rows: list[dict[str, Any]]) -> Store:
    source = write_rows(directory / "rows.jsonl", rows)
    return tm.prepare(str(source), str(TOKENIZER), cache_dir=directory / "cache", **INLINE)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return prepare(tmp_path_factory.mktemp("pairs"), PAIRS)


def raw(rows: list[dict[str, Any]]) -> Any:
    wanted = ("prompt", "chosen", "rejected", "completion", "label")
    return datasets.Dataset.from_list([{k: r[k] for k in wanted if k in r} for r in rows])


def trainer_of(
    kind: str, out: Path, tokenizer: Any, data: Any, more: dict[str, Any], **named: Any
) -> Any:
    config = getattr(trl, f"{kind}Config")(**run_settings(out), **more)
    return hf.as_prepared(getattr(trl, f"{kind}Trainer"))(
        model=tiny_model(), args=config, train_dataset=data, processing_class=tokenizer, **named
    )


def run_settings(out: Path) -> dict[str, Any]:
    return settings(
        out, max_steps=STEPS, per_device_train_batch_size=BATCH, save_steps=STOP,
        logging_strategy="steps", logging_steps=1,
    )  # fmt: skip


dpo = functools.partial(trainer_of, "DPO")


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


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_reference_model_is_not_called_if_its_values_are_attached(
    kind: str, tmp_path: Path, tokenizer: Any
) -> None:
    store = prepare(tmp_path, PAIRS if kind == "DPO" else KTO)
    # Of KTO's losses, one without a KL term.
    loss = {} if kind == "DPO" else {"loss_type": "apo_zero_unpaired"}
    data, arguments = hf.for_trl(store, epochs=2, seed=SEED)
    asked = trainer_of(
        kind, tmp_path / "a", tokenizer, data, arguments | loss, ref_model=tiny_model(7)
    )
    values = [
        float(value)
        for row in hf.for_trl(store, order="sequential")[0]
        for value in asked.compute_ref_log_probs(asked.ref_model, asked.data_collator([row]))[
            : 2 if kind == "DPO" else 1
        ]
    ]
    asked.train()
    store.attach("ref_logps", np.asarray(values, np.float32), producer="tiny model 7")
    data, arguments = hf.for_trl(store, epochs=2, seed=SEED, ref_logps="ref_logps")
    assert arguments["precompute_ref_log_probs"] is True
    known = trainer_of(kind, tmp_path / "b", tokenizer, data, arguments | loss)
    assert known.ref_model is None
    known.compute_ref_log_probs = Uncalled()
    known.train()
    np.testing.assert_allclose(losses(known), losses(asked), rtol=1e-3)
    if kind == "DPO":
        batch = next(iter(tm.Loader(store, batch_size=2, indices=True)))
        by_row = np.asarray(values, np.float32)[batch["indices"]].tolist()
        assert batch["chosen_ref_logps"].tolist() == by_row[::2]
        assert batch["rejected_ref_logps"].tolist() == by_row[1::2]
    else:
        with pytest.raises(UsageError, match=r"mismatched answers.*apo_zero_unpaired"):
            trainer_of(kind, tmp_path / "c", tokenizer, data, arguments | {"loss_type": "kto"})


def test_kto_trains(tmp_path: Path, tokenizer: Any) -> None:
    store = prepare(tmp_path, KTO)
    run = hf.for_trl(store, epochs=2, seed=SEED)
    trainer = trainer_of("KTO", tmp_path / "out", tokenizer, *run, ref_model=tiny_model())
    loader = tm.Loader(store, batch_size=BATCH, seed=SEED)
    for number, batch in zip(range(0, STEPS * BATCH, BATCH), loader.repeat(), strict=False):
        given = trainer.data_collator([run[0][n] for n in range(number, number + BATCH)])
        assert given["input_ids"].tolist() == batch["input_ids"].tolist()
        assert given["KL_input_ids"].tolist() == batch["kl_input_ids"].tolist()
        assert given["label"].tolist() == (batch["label"] == 1).tolist()
    trainer.train()
    assert len(losses(trainer)) == STEPS


def test_reward_models_see_whole_answers_and_margins(tmp_path: Path, tokenizer: Any) -> None:
    store = prepare(tmp_path, PAIRS)
    data, arguments = hf.for_trl(store, trainer="reward", order="sequential")
    for group, row in zip(store.groups, data, strict=True):
        assert row["chosen_ids"] == group.rows[0].input_ids.tolist()
        assert row["rejected_ids"] == group.rows[1].input_ids.tolist()
        assert row["margin"] == (group.margin or 0.0)
    config = trl.RewardConfig(**run_settings(tmp_path / "out"), **arguments)
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


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"trainer": "kto"}, "needs groups of kind kto"),
        ({"pack": tm.Pack(length=512)}, "cannot pack rows with groups"),
        ({"trainer": "ppo"}, "trainer"),
        ({"trainer": "reward", "ref_logps": "ref_logps"}, "has no reference"),
    ],
)
def test_what_does_not_fit_is_refused(store: Store, given: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        hf.for_trl(store, **given)


def test_rows_without_groups_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has none"):
        hf.for_trl(prepare(tmp_path, [{"text": "a"}]), trainer="dpo")


def test_rows_of_groups_are_rows_for_datasets(store: Store) -> None:
    rows = tm.to_hf(store)
    assert [row["input_ids"] for row in rows] == [row.input_ids.tolist() for row in store]


def test_plain_trainer_of_groups_says_what_to_use(
    store: Store, tmp_path: Path, tokenizer: Any
) -> None:
    data, arguments = hf.for_trl(store)
    config = trl.DPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False,
                           **arguments)  # fmt: skip
    for dataset in (data, tm.to_hf(store)):
        with pytest.raises(UsageError, match=r"use hf\.as_prepared\(DPOTrainer\)"):
            trl.DPOTrainer(
                model=tiny_model(), args=config, train_dataset=dataset, processing_class=tokenizer
            )


def test_own_arguments_are_merged_and_replaced_ones_are_named(store: Store) -> None:
    own = {"output_dir": "out", "num_train_epochs": 3}
    with pytest.warns(UserWarning, match="for_trl replaces num_train_epochs=3 by 1"):
        _, merged = hf.for_trl(store, epochs=3, config=own)
    _, needed = hf.for_trl(store, epochs=3)
    assert merged == own | needed
    assert list(merged)[:2] == list(own)
