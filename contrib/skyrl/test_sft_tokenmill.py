"""CPU tests of SFT on stores of tokenmill: SkyRL's reader, its tokenization, and the sampler.

uv run --extra dev --with tokenmill pytest tests/train/test_sft_tokenmill.py
"""

import json

import pytest

tm = pytest.importorskip("tokenmill")

from skyrl.train.config import SFTConfig  # noqa: E402
from skyrl.train.dataset.pretokenized import load_from_pretokenized  # noqa: E402
from skyrl.train.sft_trainer import SFTTrainer, tokenize_chat_example  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURN_ENDS = {"last_assistant_message": "turn", "all_assistant_messages": "stop"}
SAMPLER = "tokenmill.integrations.skyrl.Sampler"


@pytest.fixture
def tokenizer():
    """One token per byte, and the two special tokens of the template."""
    vocab = {char: n for n, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, eos_token="<|im_end|>"
    )


@pytest.fixture
def rows():
    def turns(n):
        pairs = [
            [("user", f"{n} + {k}?"), ("assistant", f"{n + k}, sure")] for k in range(n % 3 + 1)
        ]
        return [{"role": role, "content": text} for pair in pairs for role, text in pair]

    return [{"messages": turns(n)} for n in range(20)]


@pytest.fixture
def prepare(tokenizer, rows, tmp_path):
    source = tmp_path / "chat.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    def prepare(train_on="all_assistant_messages"):
        end = TURN_ENDS[train_on]
        options = {"train_on": train_on, "turn_end": end, "cache_dir": tmp_path / "cache"}
        return str(tm.prepare(str(source), tokenizer, executor="inline", **options).path)

    return prepare


def tokens_and_mask(row):
    """The mask of the whole row; `loss_mask` is that of its end, which has all trained tokens."""
    ids, mask = list(row["input_ids"]), list(row["loss_mask"])
    assert len(mask) == row["num_actions"]
    return ids, [0] * (len(ids) - len(mask)) + mask


@pytest.mark.parametrize("train_on", TURN_ENDS)
def test_rows_equal_those_of_skyrl(tokenizer, rows, prepare, train_on):
    stored = load_from_pretokenized(prepare(train_on), max_length=512)
    assert len(stored) == len(rows)
    for number, row in enumerate(rows):
        expected = tokenize_chat_example(row, tokenizer, max_length=512, train_on_what=train_on)
        assert tokens_and_mask(stored[number]) == tokens_and_mask(expected)


def test_sampler_resumes_at_every_step_of_every_epoch(prepare):
    data = load_from_pretokenized(prepare())

    def loader():
        trainer = object.__new__(SFTTrainer)
        trainer.sft_cfg = SFTConfig(
            sampler="custom", sampler_class_path=SAMPLER, sampler_kwargs={"seed": 1}
        )
        sampler = trainer.build_train_sampler(data)
        return StatefulDataLoader(data, batch_size=4, sampler=sampler, collate_fn=list)

    def served(loader, epochs):
        return [[row["input_ids"] for row in batch] for _ in range(epochs) for batch in loader]

    whole, steps = served(loader(), 3), len(data) // 4
    assert sorted(map(sorted, whole[:steps])) != sorted(map(sorted, whole[steps : 2 * steps]))
    for stop in range(1, 2 * steps):
        first, second = loader(), loader()
        taken, batches = [], iter(first)
        while len(taken) < stop:
            try:
                taken.append([row["input_ids"] for row in next(batches)])
            except StopIteration:
                batches = iter(first)
        second.load_state_dict(first.state_dict())
        rest = served(second, 3 - (stop - 1) // steps)
        assert taken + rest == whole
