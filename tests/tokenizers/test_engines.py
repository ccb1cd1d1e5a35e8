"""Engines: parity with the reference, audits, and fallbacks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from tests.programs import python
from tests.tokenizers.families import FAMILIES, family
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.tokenizers import encoder as encoder_module
from tokenmill.tokenizers import engines
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.engines import HfEngine, choose_engine, first_difference
from tokenmill.tokenizers.parity_texts import parity_texts, probe_text


def random_texts(added: Sequence[str], seed: int) -> list[str]:
    generator = random.Random(seed)
    texts = []
    for _ in range(120):
        points = [generator.choice((0x80, 0x800, 0x3000, 0xD7FF, 0x1FFFF)) for _ in range(40)]
        text = "".join(chr(generator.randrange(1, limit)) for limit in points)
        texts.append(text.encode("utf-8", "ignore").decode())  # without lone surrogates
    pool = [*generator.sample(list(added), min(40, len(added))), " ", "\n", "  ", "\t", *"xé1"]
    texts += ["".join(generator.choices(pool, k=30)) for _ in range(120)]
    return texts


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_result_is_the_same_for_every_engine(name: str) -> None:
    tokenizer = family(name)
    texts = [*random_texts(tokenizer.added_contents, seed=2), "Hello world <|im_end|> 你好"]
    spans = [[(len(text) // 3, len(text))] for text in texts]
    ends = [[len(text) // 2, len(text)] for text in texts]
    auto = Encoder(tokenizer, "auto").encode(texts, spans, ends)
    hf = Encoder(tokenizer, "hf").encode(texts, spans, ends)
    for field in ("ids", "mask", "row_starts", "turn_ends", "turn_starts"):
        assert np.array_equal(getattr(auto, field), getattr(hf, field)), field
    assert [row for row, _ in auto.rejected] == [row for row, _ in hf.rejected]


def test_parity_texts_reveal_one_difference() -> None:
    tokenizer = family("byte_level")

    class Sloppy(HfEngine):
        def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
            return super().encode([text.replace("o<|im_end|>", "o<|im_end") for text in texts])

    text = first_difference(
        Sloppy(tokenizer), HfEngine(tokenizer), parity_texts(tokenizer.added_contents)
    )
    assert text is not None
    assert "o<|im_end|>" in text


def test_parity_texts_and_probe_contain_every_kind_of_text_and_are_reproducible() -> None:
    tokens = ["<|b|>", "<|a|>"]
    texts = parity_texts(tokens)
    assert texts == parity_texts(tokens[::-1])
    whole = "".join(texts)
    assert all(f"Hello{token}" in whole or f"world{token}" in whole for token in tokens)
    assert {0x3042 // 128, 0x5B57 // 128, 0x1F600 // 128} <= {ord(char) // 128 for char in whole}
    assert all(space * 33 in whole for space in (" ", "\t", "\n", "\u3000"))
    assert max(len(text) for text in texts) >= 1000
    assert all(token in probe_text(tokens) for token in tokens)


class _Wrapped:
    name = "fastokens"

    def __init__(self, inner: HfEngine, spoil: str | None = None, fail: str | None = None) -> None:
        self.inner, self.spoil, self.fail = inner, spoil, fail

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        if self.fail is not None and any(self.fail in text for text in texts):
            raise RuntimeError("resource limit")
        ids, starts = self.inner.encode(texts)
        for row, text in enumerate(texts):
            if self.spoil is not None and self.spoil in text:
                ids[starts[row]] += 1
        return ids, starts


def test_reference_encodes_rows_on_which_the_engine_fails() -> None:
    encoder = Encoder(family("byte_level"), "hf")
    texts = [f"Hello {n}" for n in range(50)]
    expected = encoder.encode(texts)
    encoder.engine = _Wrapped(encoder.reference, fail="lo 3")
    encoded = encoder.encode(texts)
    assert np.array_equal(encoded.ids, expected.ids)
    assert np.array_equal(encoded.row_starts, expected.row_starts)
    assert encoded.notes["engine_failures"] == 11
    assert encoded.notes["engine"] == "fastokens"


def test_reference_encodes_the_whole_call_after_an_audit_mismatch() -> None:
    encoder = Encoder(family("byte_level"), "hf")
    texts = [f"Hello {n} world" for n in range(50)]
    expected = encoder.encode(texts, [[(0, 5)]] * 50)
    encoder.engine = _Wrapped(encoder.reference, spoil="Hello")
    encoded = encoder.encode(texts, [[(0, 5)]] * 50)
    assert np.array_equal(encoded.ids, expected.ids)
    assert np.array_equal(encoded.mask, expected.mask)
    assert encoded.notes["mismatches"] > 0
    assert encoded.notes["engine"] == "hf"


def test_rows_that_need_offsets_are_always_compared() -> None:
    encoder = Encoder(family("byte_level"), "hf")
    texts = [f"Hello {n} world, many words in this row" * 40 for n in range(200)]
    texts[77] = "\u212b\u212b spoiled" * 99
    expected = encoder.encode(texts, [[(0, 5)]] * 200)
    encoder.engine = _Wrapped(encoder.reference, spoil="spoiled")
    sampled = _sample(encoder, texts)
    assert 77 not in sampled
    encoded = encoder.encode(texts, [[(0, 5)]] * 200)
    assert np.array_equal(encoded.ids, expected.ids)
    assert encoded.notes["mismatches"] == 1
    encoder.engine = _Wrapped(encoder.reference)
    assert encoder.encode(texts).notes["audited"] == len(sampled) + 1


def _sample(encoder: Encoder, texts: list[str]) -> list[int]:
    seen: list[str] = []
    real, engine = encoder.reference.encode, encoder.engine
    encoder.engine = _Wrapped(HfEngine(encoder.tokenizer))
    encoder.reference.encode = lambda texts: (seen.extend(texts), real(texts))[1]  # type: ignore[method-assign]
    encoder.encode(texts)
    del encoder.reference.encode  # type: ignore[method-assign]
    encoder.engine = engine
    return sorted(texts.index(text) for text in seen)


def test_audit_sample_depends_on_the_content_alone() -> None:
    encoder = Encoder(family("byte_level"), "hf")
    texts = [f"Row number {n} with words" * 30 for n in range(300)]
    one = {texts[row] for row in _sample(encoder, texts)}
    texts.reverse()
    other = {texts[row] for row in _sample(encoder, texts)}
    assert one == other
    assert 1 <= len(one) < 60


def test_unknown_or_unsupported_engine_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"engine.*'gpu'"):
        Encoder(family("byte_level"), "gpu")
    with pytest.raises(TokenizerError, match="cannot load"):
        Encoder(family("word_piece"), "fastokens")
    engine, reason = choose_engine(family("word_piece"))
    assert engine.name == "hf"
    assert "cannot load" in reason


def test_engine_that_fails_the_parity_texts_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(_Wrapped):
        def __init__(self, tokenizer: object) -> None:
            super().__init__(HfEngine(family("byte_level")), spoil="\u0958")

    monkeypatch.setattr(engines, "FastokensEngine", Wrong)
    assert choose_engine(family("byte_level"))[0].name == "hf"
    with pytest.raises(TokenizerError, match="different ids"):
        choose_engine(family("byte_level"), "fastokens")


FORK = """
import os
from tests.tokenizers.families import family
from tokenmill.tokenizers.encoder import Encoder
parent = Encoder(family("byte_level"))
texts = [f"Hello {n} \\u212b world" for n in range(400)]
before = parent.encode(texts, [[(0, 5)]] * 400)
assert parent.engine.name == "fastokens", parent.engine_reason
parent.reference.encode(texts)      # starts the threads of tokenizers, too
child = os.fork()
if child == 0:
    after = parent.encode(texts, [[(0, 5)]] * 400)          # the parent's own encoder
    fresh = Encoder(family("byte_level")).encode(texts, [[(0, 5)]] * 400)
    same = [(x.ids == before.ids).all() and (x.mask == before.mask).all() for x in (after, fresh)]
    os._exit(0 if all(same) else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("parallelism", ["true", None])
def test_forked_child_encodes_alike_and_does_not_hang(
    parallelism: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if parallelism:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallelism)
    done = python(FORK)
    assert (done.stdout.strip(), done.returncode) == ("0", 0), done.stderr


def test_audit_samples_long_rows_as_often_as_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is wrong for long rows only must be detected."""
    least = encoder_module.MIN_AUDIT_BYTES // 10  # for batches of a tenth
    monkeypatch.setattr(encoder_module, "MIN_AUDIT_BYTES", least)
    encoder = Encoder(family("byte_level"), "hf")
    chosen = []
    for batch in range(40):
        texts = [f"{batch}.{n} " + "word " * (400 if n % 4 == 0 else 4) for n in range(40)]
        chosen += [row % 4 == 0 for row in _sample(encoder, texts)]  # a quarter of them is long
    assert sum(chosen) > 3


def test_engine_is_not_used_after_a_mismatch() -> None:
    encoder = Encoder(family("byte_level"), "hf")
    encoder.engine = _Wrapped(encoder.reference, spoil="Hello")
    assert encoder.encode(["Hello"]).notes["mismatches"] == 1
    after = encoder.encode(["Hello", "world"])
    assert (after.notes["engine"], after.notes["audited"]) == ("hf", 0)
