"""TRL's own trainer on a tiny random model sees the batches that our loader says it will see.

A trainer is stopped at step 10 and another one goes on from its checkpoint; what the model was
given in both, step by step, is compared with `tokenmill.Loader`: padded and packed, without worker
processes, with two, and with a change in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import EXAMPLES, INLINE, TOKENIZER
from tokenmill import Loader, Pack, filtered, prepare
from tokenmill.dataset import View, mix

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
    return filtered(store, "length < 90")[:35]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """A model this small spends its time on waking threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(TOKENIZER))


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


class Recorder(trl.SFTTrainer):  # type: ignore[misc,name-defined]
    """Keeps what every training step was given."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seen: list[dict[str, Any]] = []

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **named: Any) -> Any:
        self.seen.append(
            {
                name: value.numpy(force=True).copy() if torch.is_tensor(value) else value
                for name, value in inputs.items()
            }
        )
        return super().training_step(model, inputs, *rest, **named)


class StopAt(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """The run is cut off behind a step, as a job's time limit would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        control.should_training_stop = state.global_step >= self._step
        return control


def trainer_of(
    out: Path, tokenizer: Any, data: Any, wanted: dict[str, Any], workers: int, **named: Any
) -> Recorder:
    config = trl.SFTConfig(
        output_dir=str(out),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_steps=STOP,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
        disable_tqdm=True,
        logging_strategy="no",
        **wanted,
    )
    return Recorder(
        model=tiny_model(), args=config, train_dataset=data, processing_class=tokenizer, **named
    )


def stopped_and_resumed(
    out: Path, tokenizer: Any, run: tuple[Any, dict[str, Any]], before: int, after: int
) -> tuple[list[dict[str, Any]], Any]:
    """What the model saw in both halves, and the model in the end."""
    first = trainer_of(out, tokenizer, *run, before, callbacks=[StopAt(STOP)])
    first.train()
    assert len(first.seen) == STOP
    second = trainer_of(out, tokenizer, *run, after)
    second.train(resume_from_checkpoint=str(out / f"checkpoint-{STOP}"))
    return first.seen + second.seen, second.model


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 2), (0, 2)])
def test_padded_run_resumed_sees_the_loaders_batches(
    view: View, tokenizer: Any, tmp_path: Path, before: int, after: int
) -> None:
    run = hf.for_trl(view, epochs=3, seed=SEED)
    seen, _ = stopped_and_resumed(tmp_path, tokenizer, run, before, after)
    wanted = Loader(view, BATCH, seed=SEED, epochs=3)
    assert len(seen) == STEPS
    for batch, expected in zip(seen, wanted, strict=False):
        for name in ("input_ids", "labels", "attention_mask"):
            np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)


@pytest.mark.parametrize(("before", "after"), [(0, 0), (2, 2)])
def test_packed_run_resumed_sees_the_loaders_packs(
    view: View, tokenizer: Any, tmp_path: Path, before: int, after: int
) -> None:
    run = hf.for_trl(view, epochs=9, seed=SEED, pack=PACK)
    seen, _ = stopped_and_resumed(tmp_path, tokenizer, run, before, after)
    wanted = Loader(view, BATCH, seed=SEED, epochs=9, pack=PACK)
    assert len(seen) == STEPS
    for batch, expected in zip(seen, wanted, strict=False):
        kept = expected["seq_idx"] >= 0  # the trainer's packs have no padding tail
        for name in ("input_ids", "labels", "position_ids"):
            np.testing.assert_array_equal(batch[name][0], expected[name][kept], err_msg=name)
        assert "attention_mask" not in batch
        starts = np.flatnonzero(batch["position_ids"][0] == 0)
        ends = [*starts.tolist(), batch["input_ids"].shape[1]]
        assert batch["cu_seq_lens_q"].tolist() == ends


def test_uninterrupted_run_ends_with_the_weights_of_a_resumed_one(
    view: View, tokenizer: Any, tmp_path: Path
) -> None:
    run = hf.for_trl(view, epochs=3, seed=SEED)
    whole = trainer_of(tmp_path / "whole", tokenizer, *run, 0)
    whole.train()
    _, resumed = stopped_and_resumed(tmp_path / "cut", tokenizer, run, 0, 0)
    ours, theirs = whole.model.state_dict(), resumed.state_dict()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def test_rows_laid_behind_each_other_do_not_see_each_other(
    view: View, tokenizer: Any, tmp_path: Path
) -> None:
    """What the model says of a row in a pack is what it says of the row alone."""
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


def test_mixture_is_served_as_its_loader_serves_it(
    view: View, tokenizer: Any, tmp_path: Path
) -> None:
    data = mix({"a": view[:20], "b": view[20:]}, {"a": 0.25, "b": 0.75})
    trainer = trainer_of(tmp_path, tokenizer, *hf.for_trl(data, epochs=2, seed=SEED), 0)
    batches = iter(trainer.get_train_dataloader())
    for batch, expected in zip(batches, Loader(data, BATCH, seed=SEED, epochs=2), strict=False):
        if batch["input_ids"].shape[0] == BATCH:  # the loader fills up a run's last batch
            np.testing.assert_array_equal(batch["input_ids"].numpy(), expected["input_ids"])


def test_trainer_class_in_order_does_not_shuffle_where_transformers_would(
    view: View, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenmill.integrations.hf.trl._SEQUENTIAL", "no_such_setting")
    with pytest.warns(UserWarning, match="in_order"):
        data, wanted = hf.for_trl(view, seed=SEED)
    assert "no_such_setting" not in wanted
    config = trl.SFTConfig(
        str(tmp_path), use_cpu=True, bf16=False, report_to=[], dataloader_pin_memory=False,
        per_device_train_batch_size=BATCH, **wanted,
    )  # fmt: skip
    trainer = hf.in_order(trl.SFTTrainer)(
        model=tiny_model(), args=config, train_dataset=data, processing_class=tokenizer
    )
    batch = next(iter(trainer.get_train_dataloader()))
    expected = next(iter(Loader(view, BATCH, seed=SEED)))
    np.testing.assert_array_equal(batch["input_ids"].numpy(), expected["input_ids"])


def test_store_opened_by_load_from_disk_trains_every_token_in_trl(
    view: View, tokenizer: Any, tmp_path: Path
) -> None:
    """What docs/trl.md warns of first: should TRL learn of the mask, the page must change."""
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
