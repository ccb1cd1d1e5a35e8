"""TRL's own trainers, stopped and resumed on a tiny random model, see the loader's batches."""

from __future__ import annotations

import functools
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import EXAMPLES, INLINE, TOKENIZER, write_rows
from tests.sampling import sampled
from tokenmill import Loader, Pack, prepare
from tokenmill.data.view import View
from tokenmill.errors import UsageError

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tokenmill.integrations import hf  # noqa: E402

STEPS, STOP, BATCH, SEED = 20, 10, 4, 5
PACK = Pack(length=160, window=16)

# Third-party noise of a trainer on a machine without an accelerator.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:multiprocessing.*"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """35 short rows: 20 steps of 4 cross two epoch ends, neither at a step's end."""
    cache = tmp_path_factory.mktemp("cache")
    source = str(EXAMPLES / "conversations.jsonl")
    store = prepare(source, tokenizer=str(TOKENIZER), cache_dir=cache, **INLINE)
    return store.filter("length < 90")[:35]


def tiny_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    return transformers.Qwen2ForCausalLM(config)


# Made on first use, because importing TRL's trainers takes seconds, and collecting tests does not
# need them.


@functools.cache
def recorder() -> Any:
    class Recorder(trl.SFTTrainer):  # type: ignore[misc,name-defined]
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.seen: list[dict[str, Any]] = []

        def training_step(
            self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any
        ) -> Any:
            self.seen.append(
                {
                    name: value.numpy(force=True).copy() if torch.is_tensor(value) else value
                    for name, value in inputs.items()
                }
            )
            return super().training_step(model, inputs, *rest, **named)

    return Recorder


def stop_at(step: int) -> Any:
    class StopAt(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            control.should_training_stop = state.global_step >= step
            return control

    return StopAt()


def settings(out: Path, **stated: Any) -> dict[str, Any]:
    quiet = {
        "output_dir": str(out), "report_to": [], "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "dataloader_pin_memory": False, "disable_tqdm": True,
        "logging_strategy": "no", "per_device_train_batch_size": BATCH,
    }  # fmt: skip
    return {**quiet, **stated}


def trainer_of(
    out: Path, tokenizer: Any, data: Any, wanted: dict[str, Any], workers: int, **named: Any
) -> Any:
    stated = settings(out, max_steps=STEPS, save_steps=STOP, dataloader_num_workers=workers)
    return recorder()(
        model=tiny_model(), args=trl.SFTConfig(**stated, **wanted), train_dataset=data,
        processing_class=tokenizer, **named,
    )  # fmt: skip


def stopped_and_resumed(
    out: Path, tokenizer: Any, run: tuple[Any, dict[str, Any]], before: int, after: int
) -> tuple[list[dict[str, Any]], Any]:
    first = trainer_of(out, tokenizer, *run, before, callbacks=[stop_at(STOP)])
    first.train()
    assert len(first.seen) == STOP
    second = trainer_of(out, tokenizer, *run, after)
    second.train(resume_from_checkpoint=str(out / f"checkpoint-{STOP}"))
    return first.seen + second.seen, second.model


@pytest.mark.parametrize(("pack", "before", "after"), sampled([(PACK, 2, 0), (None, 0, 2)], 2))
def test_run_resumed_sees_the_loaders_batches(
    view: View, tokenizer: Any, tmp_path: Path, pack: Pack | None, before: int, after: int
) -> None:
    run = hf.for_trl(view, epochs=9, seed=SEED, pack=pack)
    seen, resumed = stopped_and_resumed(tmp_path / "cut", tokenizer, run, before, after)
    wanted = Loader(view, BATCH, seed=SEED, pack=pack)
    assert len(seen) == STEPS
    names = ("input_ids", "labels", "position_ids" if pack else "attention_mask")
    for batch, expected in zip(seen, wanted.repeat(), strict=False):
        if pack:  # the trainer's packs have no padding tail
            kept = expected["seq_idx"] >= 0
            expected = {name: expected[name][kept][None] for name in names}
            starts = np.flatnonzero(batch["position_ids"][0] == 0)
            ends = [*starts.tolist(), batch["input_ids"].shape[1]]
            assert batch["cu_seq_lens_q"].tolist() == ends
            assert "attention_mask" not in batch
        for name in names:
            np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)
    if pack is None:
        whole = trainer_of(tmp_path / "whole", tokenizer, *run, 0)
        whole.train()
        for name, weights in whole.model.state_dict().items():
            assert torch.equal(weights, resumed.state_dict()[name]), name


def test_concatenated_rows_do_not_attend_to_each_other(
    view: View, tokenizer: Any, tmp_path: Path
) -> None:
    """Logits of a row in a pack equal those of the row alone."""
    model = tiny_model().eval()
    for name, pack in (("free", None), ("packs", PACK)):
        run = hf.for_trl(view, seed=SEED, pack=pack, padding_free=True)
        trainer = trainer_of(tmp_path / name, tokenizer, *run, 0)
        batch = next(iter(trainer.get_train_dataloader()))
        inputs = {key: batch[key] for key in ("input_ids", "position_ids")}
        with torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        starts = torch.where(inputs["position_ids"][0] == 0)[0].tolist()
        for first, stop in zip(starts, [*starts[1:], inputs["input_ids"].shape[1]], strict=True):
            with torch.no_grad():
                alone = model(input_ids=inputs["input_ids"][:, first:stop]).logits
            torch.testing.assert_close(logits[:, first:stop], alone, rtol=1e-4, atol=1e-5)


def test_trainer_class_in_order_does_not_shuffle_where_transformers_would(
    view: View, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.integrations.hf._SEQUENTIAL", "no_such_setting")
    with pytest.warns(UserWarning, match="in_order"):
        data, wanted = hf.for_trl(view, seed=SEED)
    assert "no_such_setting" not in wanted
    config = trl.SFTConfig(**settings(tmp_path), **wanted)
    trainer = hf.in_order(trl.SFTTrainer)(
        model=tiny_model(), args=config, train_dataset=data, processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    expected = next(iter(Loader(view, BATCH, seed=SEED)))
    np.testing.assert_array_equal(batch["input_ids"].numpy(), expected["input_ids"])


def test_store_opened_by_load_from_disk_trains_every_token_in_trl(
    view: View, tokenizer: Any, tmp_path: Path
) -> None:
    """docs/trainers/trl.md warns of this first. If it fails, update the page."""
    bare = datasets.load_from_disk(str(view.stores[0].path)).select(range(BATCH))
    assert bare.column_names == ["input_ids", "loss_mask"]
    wanted = {"num_train_epochs": 1, "train_sampling_strategy": "sequential"}
    trainer = trainer_of(tmp_path, tokenizer, bare, wanted, 0)
    batch = next(iter(trainer.get_train_dataloader()))
    real = batch["attention_mask"].bool()
    assert torch.equal(batch["labels"][real], batch["input_ids"][real])
    ours = tm.to_hf(view.stores[0]).select(range(BATCH))
    trainer = trainer_of(tmp_path, tokenizer, ours, wanted, 0)
    batch = next(iter(trainer.get_train_dataloader()))
    trained = sum(int(row.loss_mask[1:].sum()) for row in view.stores[0][:BATCH])
    assert int((batch["labels"] != -100).sum()) == trained


@pytest.mark.parametrize("packing", [False, True])
def test_trl_converts_assistant_masks_to_our_labels(
    view: View, tokenizer: Any, tmp_path: Path, packing: bool
) -> None:
    """TRL truncates, or packs, by itself: what it trains is what we would have cut and packed."""
    data = tm.to_hf(view, mask="assistant_masks")
    wanted = {"max_length": 60, "packing": packing, "train_sampling_strategy": "sequential"}
    prepared = trainer_of(tmp_path, tokenizer, data, wanted, 0).train_dataset
    found = [row for sample in prepared for row in rows_of(sample)]
    cut = [{name: row[name][:60] for name in row} for row in tm.to_hf(view)]
    expected = [row for row in cut if packing or set(row["labels"]) != {-100}]
    assert any(len(row["input_ids"]) == 60 for row in expected)
    assert sorted(found, key=itemgetter("input_ids")) == sorted(
        expected, key=itemgetter("input_ids")
    )


def rows_of(sample: dict[str, Any]) -> list[dict[str, Any]]:
    rows, first = [], 0
    for length in sample.get("seq_lengths") or [len(sample["input_ids"])]:
        cut = slice(first, first + length)
        rows.append({"input_ids": sample["input_ids"][cut], "labels": sample["labels"][cut]})
        first += length
    return rows


def test_assistant_only_loss_of_the_users_does_not_stop_a_run(
    view: View, tokenizer: Any, tmp_path: Path
) -> None:
    data, wanted = hf.for_trl(view)
    assert wanted["assistant_only_loss"] is False
    with pytest.raises(ValueError, match="conversational"):
        trainer_of(tmp_path, tokenizer, data, wanted | {"assistant_only_loss": True}, 0)
    trainer_of(tmp_path, tokenizer, data, {"assistant_only_loss": True} | wanted, 0)


@pytest.mark.parametrize(
    ("version", "packed", "lowest"),
    [
        ("0.18.2", False, "0.19.0"),
        ("0.19.0", False, None),
        ("0.23.0", True, "0.23.1"),
        ("0.23.1", True, None),
        ("1.0.0.dev0", True, None),
        (trl.__version__, True, None),
    ],
)
def test_trl_that_would_ignore_labels_or_boundaries_is_refused_by_its_version(
    view: View, monkeypatch: pytest.MonkeyPatch, version: str, packed: bool, lowest: str | None
) -> None:
    monkeypatch.setattr("tokenmill.integrations.hf.installed_version", lambda _: version)
    if lowest is None:
        _, wanted = hf.for_trl(view, padding_free=packed)
        assert ("shuffle_dataset" in wanted) == (version[:4] not in ("0.19", "0.23"))
        return
    for more in [{"pack": PACK}, {"padding_free": True}] if packed else [{}]:
        with pytest.raises(UsageError, match=f"TRL {version} silently ignores.*trl>={lowest}"):
            hf.for_trl(view, **more)


# Prompts


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> tm.PromptDataset:
    place, rows = tmp_path_factory.mktemp("prompts"), []
    for number in range(11):
        row = {"question": f"say {number} " * (30 if number == 4 else 1), "answer": number}
        rows.append(row if number % 2 else {**row, "hint": {"of": [number]}})
    return hf.grpo_prompts(
        write_rows(place / "prompts.jsonl", rows), str(TOKENIZER), max_length=40, seed=SEED,
        prompt_key="question", apply_chat_template=True, num_workers=0,
        cache_dir=place / "cache",
    )  # fmt: skip


def test_prompts_for_grpo_are_rows_with_messages_in_our_order(prompts: tm.PromptDataset) -> None:
    dataset, wanted = hf.for_grpo(prompts, epochs=2)
    assert len(prompts) == 10
    assert len(dataset) == 20
    assert not wanted["shuffle_dataset"]
    for epoch in range(2):
        prompts.shuffle(epoch)
        for number, prompt in enumerate(prompts):
            row = dataset[10 * epoch + number]
            assert row["prompt"] == prompt.messages
            assert "question" not in row
            assert row["answer"] == prompt.row
            assert row.get("hint") == (None if prompt.row % 2 else {"of": [prompt.row]})
    columns = dataset[8:12]  # over the end of an epoch, all with the same columns
    assert {len(values) for values in columns.values()} == {4}
    assert set(columns) == {"prompt", "answer", "hint"}
    assert hf.for_grpo(prompts, epochs=2)[0]._fingerprint == dataset._fingerprint
    with pytest.raises(UsageError, match="epochs"):
        hf.for_grpo(prompts, epochs=0)


def test_grpo_takes_prompts_only(view: View) -> None:
    for other in (view, view[:0], None, [], {"prompt": ["x"]}, 3):
        got = type(other).__name__
        with pytest.raises(UsageError, match=f"prompts must be a PromptDataset, got {got}"):
            hf.for_grpo(other)  # type: ignore[arg-type]


def test_grpo_resumed_is_given_our_prompts_in_our_order(
    prompts: tm.PromptDataset, tokenizer: Any, tmp_path: Path
) -> None:
    dataset, wanted = hf.for_grpo(prompts, epochs=3)
    seen: list[int] = []

    def reward(completions: list[Any], answer: list[int], **_: Any) -> list[float]:
        seen.extend(answer)
        return [float(number) for number in range(len(completions))]

    def trainer(workers: int, *callbacks: Any) -> Any:
        stated = settings(tmp_path, max_steps=6, save_steps=3, dataloader_num_workers=workers)
        config = trl.GRPOConfig(**stated, num_generations=2, max_completion_length=3, **wanted)
        return trl.GRPOTrainer(
            model=tiny_model(), reward_funcs=reward, args=config, train_dataset=dataset,
            processing_class=tokenizer, callbacks=list(callbacks),
        )  # fmt: skip

    trainer(0, stop_at(3)).train()
    trainer(2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    expected = [row["answer"] for row in dataset.select(range(12)) for _ in range(2)]
    assert seen == expected
