"""Texts that reveal differences between two tokenizers.

fastokens is used only if it gives the ids of the reference for these texts. AutoTokenizer and
tokenizer.json are compared on them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

_SPACES = (" ", "\t", "\n", "\r\n", "\r", "\u00a0", "\u3000", "\u2028", "\u0085", "\u200b", "\x0b")
_WORDS = (
    "Hello", "world", "the", "quick", "naïve", "Straße", "ИЖЕВСК", "Ελλάδα", "你好",
    "日本語テキスト", "한국어", "עברית", "العربية", "हिन्दी", "ไทย", "𝔘𝔫𝔦", "🙂",
    "12345", "3.14", "x=y", "don't", "A",
)  # fmt: skip
_TRICKY = (
    # Contractions, also with upper case and with ſ (long s) or K (Kelvin), which fold to ASCII.
    "I'm you're he'll WE'VE they'd it's IT'S 'S 'T 'LL 'Re o'ſ don’t 'ſ 'K \u212aelvin",
    # Text that NFC, NFKC or case folding makes longer or shorter.
    "e\u0301 é \u212b \u212b\u212b \u0958 \u0915\u093c \u1100\u1161\u11a8 각 ﬁ ﬀ Ａｂｃ ½ ② İ i̇ ẞ",
    "a\u0323\u0307 a\u0307\u0323 \u0344 \u2126 \u1e9b\u0323 \ufb1d \u0f73 \uac00\u11a8 =\u0338",
    "👩‍👩‍👧‍👦 🇩🇪🇫🇷🇩 👍🏽 ❤️ ☎︎ \u202eabc\u202c a\u200db \ufeffx x\ufeff \ufffd \ufdd0 \uffff",
    # Notation of vocabularies, as ordinary text.
    "▁ ▁▁x ▁Hello Ġ Ġworld Ċ ĉ <0x0A> <0xE4> ## ##ing </w> <unk> <s> </s> [UNK] [CLS] <pad>",
    "\x00 \x01\x02 \x1b[0m \x7f \x80 a\x00b",
    "def f(x):\n    return {'a': [1, 2.5e-3, 0xFF]}  # π ≈ 3\n\tif x!=y:\r\n\t\tpass;\n\n\n\n",
    '{"name": "f", "arguments": {"q": "a\\"b", "n": -1}} https://example.org/a?b=c&d=%20#e',
    "1 12 123 1234 12345 1234567890 ١٢٣٤ १२३४ 1,000.00 ³²¹ Ⅷ 10²³ 1a2b3c",
    "...!!!???---___***///\\\\|||@@@###$$$%%%^^^&&& ----- ===== ~~~~~ ''''' \"\"\" ``` «» “” …",
    "ABCdefGHI aBC iPhone McDonald HTTPServer éÉ ǅ ǆ Ǆ ʰ ªº",
)
MAX_ADDED_TOKENS = 768  # enough for all known families; gemma has 6,415 similar ones


def parity_texts(added: Iterable[str]) -> list[str]:
    tokens = _spread(sorted({token for token in added if token}), MAX_ADDED_TOKENS)
    texts = ["", *_TRICKY]
    texts += _white_space()
    texts += _unicode_blocks()
    texts += _long_words()
    texts += _around_tokens(tokens)
    texts += _random_mixtures(tokens)
    return texts


def probe_text(added: Iterable[str]) -> str:
    """Return one text with added tokens; its ids are part of a tokenizer's identity."""
    tokens = _spread(sorted({token for token in added if token}), 48)
    mixture = "".join(
        f"{_WORDS[n % len(_WORDS)]}{token}{_SPACES[n % 3]}" for n, token in enumerate(tokens)
    )
    return f"{mixture} {_TRICKY[0]} {_TRICKY[1]}  \n\n {_TRICKY[6]} {' '.join(_WORDS)}"


def vocabulary_texts(pieces: Sequence[bytes], chunk: int = 512) -> list[str]:
    """Return all pieces of a vocabulary as texts, which reveal a difference in one merge."""
    words = [piece.decode("utf-8", "ignore") for piece in pieces]
    words = [word for word in words if word]
    return ["".join(words[start : start + chunk]) for start in range(0, len(words), chunk)]


def _spread(items: Sequence[str], limit: int) -> list[str]:
    if len(items) <= limit:
        return list(items)
    return [items[n * len(items) // limit] for n in range(limit)]


def _white_space() -> list[str]:
    texts = [f"a{space * count}b{space * count}" for space in _SPACES for count in (1, 2, 3, 7, 33)]
    texts += [f"{one}{two}x{two}{one}.{one}{one}{two}" for one in _SPACES for two in _SPACES]
    texts += ["\n \n  \n   \n", " \n", "\n ", "  ", " " * 300, "\n" * 300, "\t" * 90 + "x"]
    return texts


def _unicode_blocks() -> list[str]:
    texts = []
    starts = [*range(0, 0x20000, 0x80), *range(0x20000, 0x32000, 0x800), 0xE0000, 0xE0100, 0xF0000]
    for start in starts:
        if 0xD800 <= start < 0xE000:
            continue
        chars = [chr(start + step) for step in (0x00, 0x11, 0x25, 0x3A, 0x4F, 0x61, 0x7F)]
        texts.append(
            f"{chars[0]}a{chars[1]} {chars[2]}{chars[3]}1{chars[4]}\n{chars[5]}.{chars[6]}"
        )
    return texts


def _long_words() -> list[str]:
    units = ("a", "ab", "Xy9", "你", "한글", "0", "123", "!", "é", "🙂", "ا", "e\u0301", "_-")
    return [unit * (1200 // len(unit)) for unit in units] + ["antidisestablishment" * 40 + "s'"]


def _around_tokens(tokens: Sequence[str]) -> list[str]:
    texts = []
    for n, token in enumerate(tokens):
        word = _WORDS[n % len(_WORDS)]
        space = _SPACES[n % len(_SPACES)]
        texts.append(
            f"{word}{token}{word}{space}{token}{space}{space}{word} {token} {token}{token}"
        )
        texts.append(f"{token}{token[:-1]}{word}{token[1:]}{token.upper()}\n{token}\n{word}")
    return texts


def _random_mixtures(tokens: Sequence[str]) -> list[str]:
    generator = random.Random(20261115)  # seeded: the texts are a function of the tokens alone
    choices = [*_WORDS, *_SPACES, *_SPACES, "'s", ".", ",\n", *tokens[:64]]
    return ["".join(generator.choices(choices, k=24)) for _ in range(160)]
