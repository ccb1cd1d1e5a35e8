"""Train the small bundled tokenizer: byte-level BPE, 4,096 tokens, our own ChatML template.

The training corpus is stable text of this repository: the bundled examples (see `make_examples.py`)
and the licence. The same corpus gives the same bytes of tokenizer.json, which a test checks. The
vocabulary has the 256 bytes, the control tokens below and learned merges, so any text survives
encoding and decoding. Every digit is a token.

`python scripts/train_tokenizer.py [DIRECTORY]` writes tokenizer.json and tokenizer_config.json
beside the hand-written chat_template.jinja.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PROJECT = Path(__file__).resolve().parent.parent
EXAMPLES = PROJECT / "src" / "tokenmill" / "examples"
VOCABULARY = 4096  # tokens in all: small enough to commit, large enough to merge common words
LONGEST = 16  # bytes; longer tokens would be phrases of this small corpus
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that are never text; decoding may skip them."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that are shown in decoded text."""


def corpus() -> list[str]:
    """Return the training texts, each once."""
    return list(dict.fromkeys(_pieces()))


def _pieces() -> Iterator[str]:
    for line in (EXAMPLES / "conversations.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for tool in row.get("tools", ()):
            yield json.dumps(tool)
        for message in row["messages"]:
            yield message["role"]
            yield message["content"]
            yield message.get("reasoning_content", "")
            for call in message.get("tool_calls", ()):
                yield json.dumps(call["function"])
    for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["text"]
    yield (PROJECT / "LICENSE").read_text(encoding="utf-8")


def train() -> Tokenizer:
    """Learn the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=1,  # the corpus is small
        max_token_length=LONGEST,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CONTROL]
        + [AddedToken(token, special=False, normalized=False) for token in MARKS],
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def document(tokenizer: Tokenizer) -> str:
    """Return tokenizer.json in a format that `tokenizers` 0.19 and newer read."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    # Newer versions write a merge as a pair; older ones read only "left right".
    content["model"]["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    for token in content["added_tokens"]:
        token["special"] = token["content"] in CONTROL
    return json.dumps(content, ensure_ascii=False, indent=0) + "\n"


def configuration() -> dict[str, Any]:
    """Return tokenizer_config.json for `transformers.AutoTokenizer`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
    }


def main(directory: Path) -> None:
    """Train and write."""
    tokenizer = train()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_bytes(document(tokenizer).encode())
    config = json.dumps(configuration(), indent=2) + "\n"
    (directory / "tokenizer_config.json").write_bytes(config.encode())
    print(f"{tokenizer.get_vocab_size()} tokens", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES / "tokenizer")
