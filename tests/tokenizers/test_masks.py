"""Masks: the vectorized code against a slow oracle, and difficult cases."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizers.families import FAMILIES, SPECIAL, family, oracle_mask
from tokenmill.errors import RowError
from tokenmill.tokenizers import encoder as encoder_module
from tokenmill.tokenizers import masks
from tokenmill.tokenizers.encoder import Encoder


@cache
def encoder_of(name: str) -> Encoder:
    return Encoder(family(name))


WORDS = st.sampled_from(
    [*SPECIAL, " ", "  ", "\n", "\t", "Hello", " world", "你好", "naïve", "e\u0301", "\u0958",
     "\u212b", "🙂", "👩‍👧", "▁", "Ġ", "<0x0A>", "ﬁ", "don't", "A", "12345", "각", "\u1100\u1161",
     "=\u0338", "ẞ", "\x00", "\u3000"]
)  # fmt: skip
TEXTS = st.lists(WORDS | st.text(max_size=4), max_size=12).map("".join)


@st.composite
def rows(draw: st.DrawFn) -> tuple[str, list[tuple[int, int]] | None, list[int]]:
    text = draw(TEXTS.filter(lambda t: t.isprintable() or "\ud800" not in t))
    positions = st.integers(0, len(text))
    cuts = sorted(draw(st.lists(positions, max_size=8)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    ends = sorted(draw(st.lists(positions, max_size=3)))
    return text, (None if draw(st.integers(0, 5)) == 0 else spans), [*ends, len(text)]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@settings(max_examples=60, deadline=None)
@given(batch=st.lists(rows(), max_size=6))
def test_mask_of_random_rows_and_spans_equals_oracle(name: str, batch: list) -> None:
    texts = [text for text, _, _ in batch]
    encoded = encoder_of(name).encode(
        texts, [spans for _, spans, _ in batch], [ends for _, _, ends in batch]
    )
    assert encoded.ids.dtype == np.int32
    assert encoded.mask.dtype == np.uint8
    assert encoded.turn_ends.dtype == np.int32
    assert encoded.row_starts.dtype == encoded.turn_starts.dtype == np.int64
    rejected = {row for row, _ in encoded.rejected}
    for number, (text, spans, ends) in enumerate(batch):
        if number in rejected:
            continue
        ids, mask = oracle_mask(family(name).data, text, spans)
        row_ids, row_mask, row_ends = encoded.row(number)
        assert row_ids.tolist() == ids
        assert row_mask.tolist() == mask
        assert len(row_ends) == len(ends)
        assert row_ends.tolist()[-1:] == [len(ids)]
        assert (np.diff(row_ends) >= 0).all()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_ordinary_rows_are_proven_without_the_reference(name: str) -> None:
    texts = [f"<|im_start|>\nHello {n} world<|im_end|>\n<|im_start|>你好" for n in range(20)]
    notes = encoder_of(name).encode(texts, [[(0, 5)]] * 20).notes
    # Only these two lose text: upper case, and white space that a token strips.
    assert notes["reference_rows"] == (20 if name in ("word_piece", "stripping") else 0)


def test_mask_uses_offsets_if_normalization_keeps_the_total_length_by_chance() -> None:
    # U+0958 grows by three bytes under NFC, three U+212B shrink by one each: the sum of the tokens'
    # byte lengths equals the text's, and every offset in between is wrong.
    user, answer = "\u0958 what", "\u212b\u212b\u212b yes"
    text = f"<|im_start|>{user}<|im_end|><|im_start|>{answer}<|im_end|>"
    start = text.index(answer)
    span = (start, start + len(answer) + len("<|im_end|>"))
    tokenizer = family("byte_level")
    encoded = encoder_of("byte_level").encode([text], [[span]])
    assert sum(map(len, tokenizer.pieces(encoded.ids))) == len(text.encode())
    assert encoded.notes["reference_rows"] == 1
    ids, mask = oracle_mask(tokenizer.data, text, [span])
    assert encoded.ids.tolist() == ids
    assert encoded.mask.tolist() == mask
    assert mask[-1] == 1


def test_added_space_counts_as_part_of_the_next_character() -> None:
    text = "<|im_start|>猫好"  # the tokenizer adds the token "▁" before 猫
    encoded = encoder_of("fallback_prepend").encode([text] * 2, [[(12, 13)], [(13, 14)]])
    pieces = family("fallback_prepend").pieces(encoded.row(0)[0])
    assert pieces[1] == b" "
    assert encoded.row(0)[1].tolist()[:2] == [0, 1]
    assert encoded.row(1)[1].tolist()[:2] == [0, 0]


def test_added_token_that_strips_white_space_of_an_answer_is_not_trained() -> None:
    # <|im_start|> strips the white space after it, <|im_end|> that before it.
    text = "<|im_start|> \n Hello <|im_end|> \n<|im_start|>"
    answer = text.index(" \n Hello"), text.index("<|im_end|>")
    closed = answer[0], answer[1] + len("<|im_end|>")
    encoded = encoder_of("stripping").encode([text] * 2, [[answer], [closed]])
    pieces = family("stripping").pieces(encoded.row(0)[0])
    trained = [
        b"".join(p for p, bit in zip(pieces, encoded.row(n)[1], strict=True) if bit).decode()
        for n in range(2)
    ]
    assert [one.strip() for one in trained] == ["Hello", "Hello<|im_end|>"]


def test_token_that_overlaps_a_span_is_trained_and_empty_spans_train_nothing() -> None:
    text = "Hello world"
    encoded = encoder_of("byte_level").encode([text] * 3, [[(4, 5)], [(2, 2)], []])
    assert encoded.row(0)[1].sum() == 1
    assert encoded.row(1)[1].sum() == 0
    assert encoded.row(2)[1].sum() == 0


def test_turn_ends_count_the_tokens_that_start_before_them() -> None:
    text = "<|im_start|>Hello<|im_end|>你好<|im_end|>"
    ends = [12, 17, 27, len(text)]
    encoded = encoder_of("byte_level").encode([text], [[]], [ends])
    pieces = family("byte_level").pieces(encoded.ids)
    for end, tokens in zip(ends, encoded.turn_ends.tolist(), strict=True):
        assert len(b"".join(pieces[:tokens])) == len(text[:end].encode())


def test_rows_with_lone_surrogates_or_bad_positions_are_rejected() -> None:
    encoded = encoder_of("byte_level").encode(
        ["good", "half \ud800 pair", "outside", "backwards", "good"],
        [None, None, [(0, 99)], [], [(0, 2)]],
        [[4], [3], [7], [5, 2], [4]],
    )
    reasons = {row: error.reason for row, error in encoded.rejected}
    assert reasons == {1: "bad_json", 2: "mask_unproven", 3: "mask_unproven"}
    assert encoded.kept.tolist() == [0, 4]
    assert encoded.lengths.tolist()[1:4] == [0, 0, 0]
    assert np.diff(encoded.turn_starts).tolist() == [1, 0, 0, 0, 1]
    assert all(isinstance(error, RowError) for _, error in encoded.rejected)


def test_offsets_that_go_backwards_reject_the_row_unless_everything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = Encoder(family("word_piece"), "hf")
    real = encoder.reference.encode_with_offsets

    def backwards(texts: list[str]) -> tuple:
        ids, starts, offsets = real(texts)
        return ids, starts, offsets[::-1].copy()

    monkeypatch.setattr(encoder.reference, "encode_with_offsets", backwards)
    encoded = encoder.encode(["Hello big world"] * 2, [[(0, 5)], None])
    assert [(row, error.reason) for row, error in encoded.rejected] == [(0, "mask_unproven")]
    assert encoded.row(1)[1].all()


def test_chunks_of_any_size_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"<|im_start|>Hello {n} 你好 é<|im_end|>" * (n % 4) for n in range(40)]
    spans = [[(n % 7, len(text))] if len(text) > 7 else [] for n, text in enumerate(texts)]
    ends = [[len(text) // 2, len(text)] for text in texts]
    whole = encoder_of("byte_level").encode(texts, spans, ends)
    monkeypatch.setattr(encoder_module, "CHUNK_CHARS", 64)
    cut = encoder_of("byte_level").encode(texts, spans, ends)
    for field in ("ids", "mask", "row_starts", "turn_ends", "turn_starts"):
        assert np.array_equal(getattr(whole, field), getattr(cut, field)), field


def test_empty_batch_and_empty_texts_give_empty_arrays() -> None:
    for texts in ([], [""], ["", ""]):
        encoded = encoder_of("byte_level").encode(texts)
        assert len(encoded) == len(texts)
        assert len(encoded.ids) == len(encoded.mask) == 0


@given(text=st.lists(WORDS | st.just("plain words " * 8) | st.text(max_size=3)).map("".join))
def test_byte_positions_are_the_lengths_of_the_text_before(text: str) -> None:
    expected = [len(text[:char].encode()) for char in range(len(text) + 1)]
    positions = masks.byte_positions(text.encode(), np.arange(len(text) + 1))
    assert positions.tolist() == expected


@given(
    lengths=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=5),
    drawn=st.data(),
)
def test_spans_in_any_order_train_every_token_that_they_overlap(
    lengths: list[list[int]], drawn: st.DataObject
) -> None:
    flat = np.array([length for row in lengths for length in row], np.int32)
    ends = np.cumsum(flat, dtype=np.int32)
    starts = ends - flat
    row_starts = np.cumsum([0, *map(len, lengths)])
    bases = np.cumsum([0, *map(sum, lengths)])
    spans = []
    for row in range(len(lengths)):
        positions = st.integers(int(bases[row]), int(bases[row + 1]))
        pairs = drawn.draw(st.lists(st.tuples(positions, positions), max_size=4))
        spans += [(min(pair), max(pair), row) for pair in pairs if min(pair) < max(pair)]
    if drawn.draw(st.booleans()):
        spans.reverse()
    columns = np.array(spans, np.int64).reshape(-1, 3).T
    mask = masks.trained_tokens(starts, ends, row_starts, *columns)
    expected = [
        any(starts[n] < stop and ends[n] > start and row_starts[row] <= n < row_starts[row + 1]
            for start, stop, row in spans)
        for n in range(len(flat))
    ]  # fmt: skip
    assert [bool(one) for n, one in enumerate(mask) if flat[n]] == [
        one for n, one in enumerate(expected) if flat[n]
    ]
