"""Convert tokenizers that rank byte sequences (tiktoken, tekken.json) to a tokenizer.json.

The conversion keeps every id. `require_equal_ids` compares it with the original on the texts
that AutoTokenizer is compared on; a tokenizer that gives other ids is refused. Of any other
tokenizer in Python, only the vocabulary is converted, to decode the ids that its class returns.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.parity_texts import parity_texts, vocabulary_texts
from tokenmill.tokenizers.pieces import byte_alphabet
from tokenmill.tokenizers.tokenizer import Tokenizer

_BYTE_LEVEL = {
    "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
}  # fmt: skip


def _added_tokens(special: Mapping[str, int]) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": number, "content": text, **flags, "special": True}
        for text, number in sorted(special.items(), key=lambda one: one[1])
    ]


def convert(
    tokens: Mapping[bytes, int], pattern: str, special: dict[str, int], added: int = 0
) -> bytes:
    """Return the tokenizer.json of ranked tokens; ``added`` is what ids are larger than ranks."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    names = {token: "".join(chr(letters[byte]) for byte in token) for token in tokens}
    merges: list[tuple[str, str]] = []
    for token in sorted(tokens, key=tokens.__getitem__):
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in tokens and pair[1] in tokens]
        pairs.sort(key=lambda pair: (tokens[pair[0]], tokens[pair[1]]))
        merges += [(names[left], names[right]) for left, right in pairs]
    split = {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip
    document = {
        "version": "1.0",
        "added_tokens": _added_tokens(special),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, _BYTE_LEVEL]},
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            # `tokenizers` takes the ids of added tokens from here.
            "vocab": {names[token]: rank + added for token, rank in tokens.items()} | special,
            "merges": merges,
            "ignore_merges": True,
        },
    }
    return msgspec.json.encode(document)


def of_tiktoken(encoding: Any) -> bytes:
    """Convert a `tiktoken.Encoding`."""
    return convert(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens)


def of_vocabulary(tokenizer: Any) -> bytes:
    """Return a tokenizer.json that decodes the ids of a transformers tokenizer; it has no merges.

    The tokens are spelled in the byte alphabet, or as sentencepiece spells them.
    """
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
    alphabet, vocab = byte_alphabet(), tokenizer.get_vocab()
    if alphabet.keys() >= {ord(letter) for token in vocab.keys() - added for letter in token}:
        spelling: dict[str, Any] = {"pre_tokenizer": _BYTE_LEVEL, "decoder": _BYTE_LEVEL}
    else:
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        steps = [{**space, "pattern": {"String": "▁"}, "content": " "},
                 {"type": "ByteFallback"}, {"type": "Fuse"}]  # fmt: skip
        spelling = {"normalizer": space, "decoder": {"type": "Sequence", "decoders": steps}}
    return msgspec.json.encode({
        "version": "1.0", "added_tokens": _added_tokens(added), **spelling,
        "model": {"type": "BPE", "vocab": vocab | added, "merges": [], "byte_fallback": True},
    })  # fmt: skip


class _TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: str | None = None
    token_str: str | None = None


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenToken] | None = None


# Of files that list none, by rank.
TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
TEKKEN_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def of_tekken(path: Path) -> Tokenizer:
    """Load a tekken.json, whose ids begin with those of the control tokens."""
    try:
        tekken = msgspec.json.decode(path.read_bytes(), type=_Tekken)
        config = tekken.config
        ranked = tekken.vocab[: config.default_vocab_size - config.default_num_special_tokens]
        tokens = {base64.b64decode(one.token_bytes or ""): one.rank for one in ranked}
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise TokenizerError(f"not a tekken.json: {error}", path=path) from error
    named = {one.rank: one.token_str or "" for one in tekken.special_tokens or ()}
    named = named or dict(enumerate(TEKKEN_SPECIAL))
    special = {
        named.get(number, f"<SPECIAL_{number}>"): number
        for number in range(config.default_num_special_tokens)
    }
    data = convert(tokens, config.pattern, special, config.default_num_special_tokens)
    names = {name: text for name, text in TEKKEN_NAMES.items() if text in special}
    return Tokenizer(data, special_tokens=names)


def require_equal_ids(
    tokenizer: Tokenizer, encode: Callable[[str], Iterable[int]], path: Path | None
) -> None:
    """Raise `TokenizerError` if the original encodes a text differently."""
    texts = parity_texts({*tokenizer.added_contents})
    texts += vocabulary_texts(tokenizer.pieces(range(len(tokenizer.table))))
    for text in texts:
        if list(encode(text)) != tokenizer.segment_ids(text, special=True):
            raise TokenizerError(
                f"{text[:80]!r} has other ids after the conversion to tokenizer.json", path=path
            )
