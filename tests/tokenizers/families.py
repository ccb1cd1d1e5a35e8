"""Small trained tokenizers of every family, and a slow oracle for masks.

Byte-level with normalization (Qwen), byte fallback with an added space (Phi-3) or without one
(Gemma), Unigram with a normalizing Metaspace (T5), WordPiece with lower case (BERT).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenmill.tokenizers.tokenizer import Tokenizer as OurTokenizer

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
CORPUS = [
    "Hello world, this is a small corpus of text. The quick brown fox jumps over the lazy dog.",
    "user assistant system tool think answer question don't can't it's I'm you're 12345 67890",
    "你好，世界。今天天气很好，我们去散步吧。 日本語のテキスト 한국어 텍스트",
    "naïve café résumé Straße Ελλάδα Привет мир हिन्दी עברית العربية",
    "def main():\n    return {'a': 1}\n\n\nif x != y:\n\tprint(x)\n",
] * 4
Spans = Sequence[tuple[int, int]]


def _trained(
    model: Any, trainer: type, size: int, special: Sequence[str] = (), *, parts: dict[str, Any],
    **options: Any,
) -> dict[str, Any]:  # fmt: skip
    tokenizer = Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    options |= {"special_tokens": [*SPECIAL, *special], "show_progress": False}
    tokenizer.train_from_iterator(CORPUS, trainer(vocab_size=size, **options))
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    return document


def byte_level() -> dict[str, Any]:
    parts = {
        "normalizer": normalizers.NFC(),
        "pre_tokenizer": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "decoder": decoders.ByteLevel(),
    }
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(models.BPE(), trainers.BpeTrainer, 600, parts=parts, initial_alphabet=alphabet)


def _with_byte_fallback(**parts: Any) -> dict[str, Any]:
    document = _trained(models.BPE(), trainers.BpeTrainer, 400, parts=parts)
    vocab = document["model"]["vocab"]
    first = 1 + max(vocab.values())
    vocab.update({f"<0x{byte:02X}>": first + byte for byte in range(256)})
    document["model"].update(byte_fallback=True, fuse_unk=True, unk_token="<unk>")
    vocab["<unk>"] = first + 256
    return document


def fallback_prepend() -> dict[str, Any]:
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    return _with_byte_fallback(normalizer=normalizers.Sequence(steps))


def fallback_gemma() -> dict[str, Any]:
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    return _with_byte_fallback(normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=split)


def metaspace_first() -> dict[str, Any]:
    first = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _with_byte_fallback(pre_tokenizer=first)


def unigram() -> dict[str, Any]:
    space = pre_tokenizers.Metaspace()
    parts = {"normalizer": normalizers.NFKC(), "pre_tokenizer": space}
    parts["decoder"] = decoders.Metaspace()
    return _trained(
        models.Unigram(), trainers.UnigramTrainer, 300, ["<unk>"], parts=parts, unk_token="<unk>"
    )


def word_piece() -> dict[str, Any]:
    parts = {
        "normalizer": normalizers.BertNormalizer(lowercase=True),
        "pre_tokenizer": pre_tokenizers.BertPreTokenizer(),
        "decoder": decoders.WordPiece(),
    }
    model = models.WordPiece(unk_token="[UNK]")
    return _trained(model, trainers.WordPieceTrainer, 400, ["[UNK]"], parts=parts)


def stripping() -> dict[str, Any]:
    document = byte_level()
    for token in document["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_start|>"
        token["lstrip"] = token["content"] == "<|im_end|>"
        token["single_word"] = token["content"] == "<s>"
    return document


FAMILIES: dict[str, Callable[[], dict[str, Any]]] = {
    builder.__name__: builder
    for builder in (byte_level, fallback_prepend, fallback_gemma, metaspace_first, unigram,
                    word_piece, stripping)
}  # fmt: skip


@cache
def family_json(name: str) -> bytes:
    return json.dumps(FAMILIES[name](), ensure_ascii=False).encode()


def write_directory(path: Path, config: Any, name: str = "byte_level", **changes: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    document = {**json.loads(family_json(name)), **changes}
    (path / "tokenizer.json").write_text(json.dumps(document))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@cache
def family(name: str) -> OurTokenizer:
    return OurTokenizer(
        family_json(name), special_tokens={"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    )


def oracle_mask(data: bytes, text: str, spans: Spans | None) -> tuple[list[int], list[int]]:
    document = json.loads(data)
    document.update(truncation=None, padding=None, post_processor=None)
    return oracle_mask_by(_raw(json.dumps(document)), text, spans)


def oracle_mask_by(raw: Tokenizer, text: str, spans: Spans | None) -> tuple[list[int], list[int]]:
    encoding = raw.encode(text, add_special_tokens=False)
    added = {number: token.content for number, token in raw.get_added_tokens_decoder().items()}
    mask = []
    for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
        if number in added and added[number] in text[start:end]:
            # White space that an added token strips is not part of it.
            start = text.index(added[number], start)
            end = start + len(added[number])
        chars = range(start, max(end, start + 1))
        trained = spans is None or any(a <= char < b for char in chars for a, b in spans)
        mask.append(int(trained))
    return list(encoding.ids), mask


@cache
def _raw(text: str) -> Tokenizer:
    return Tokenizer.from_str(text)
