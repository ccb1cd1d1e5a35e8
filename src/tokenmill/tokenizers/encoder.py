"""Encode texts and prove their masks.

Token positions come from the bytes of the tokens if these equal the bytes of the text. Other rows
use the offsets of the reference, and are rejected if these are invalid. Rows that need offsets, and
a sample of the others chosen by content, are compared with the reference. After one difference the
reference encodes this call again and all later calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash

from tokenmill._core.id_text import ids_of
from tokenmill.errors import RowError
from tokenmill.tokenizers import masks
from tokenmill.tokenizers.encoded import Encoded, starts_of
from tokenmill.tokenizers.engines import Engine, HfEngine, choose_engine
from tokenmill.tokenizers.identity import reraise_interrupts
from tokenmill.tokenizers.tokenizer import Tokenizer

AUDIT_SHARE = 1024  # the reference encodes one byte of this many again …
MIN_AUDIT_BYTES = 4096  # … but at least this many bytes per call, about one or two rows
AUDIT_CANDIDATES = 64  # if the sample is empty, the shortest of this many rows is audited
_MAX_HASH = (1 << 64) - 1
MAX_TEXT_BYTES = 4 << 20  # of one text; a tokenizer takes up to 250 bytes of memory for one of them
CHUNK_CHARS = 1 << 19  # text that is proven at a time: it fits into the CPU cache

TurnEnds = Sequence[Sequence[int]]


class _MismatchError(Exception):
    """The engine's ids differ from the reference's; the argument is the number of rows."""


class Encoder:
    """Encodes batches with one tokenizer; the engine changes only the speed."""

    def __init__(self, tokenizer: Tokenizer, engine: str = "auto") -> None:
        self.tokenizer = tokenizer
        self.reference = HfEngine(tokenizer)
        self.engine, self.engine_reason = choose_engine(tokenizer, engine)
        self.table = tokenizer.table
        self.min_audit_bytes = MIN_AUDIT_BYTES
        self.engine_seconds = 0.0  # without audits, proofs and masks

    def encode(
        self,
        texts: Sequence[str],
        spans: masks.Spans | None = None,
        turn_ends: TurnEnds | None = None,
        digests: np.ndarray | None = None,
        coded: Sequence[int] = (),
    ) -> Encoded:
        """Encode a batch.

        Args:
            texts: One rendered text per row.
            spans: Per row the trained spans in characters, sorted and disjoint; None trains the
                whole row. None instead of a list trains all rows.
            turn_ends: Per row the ends of its turns in characters, ascending. None: no turns.
            digests: uint64 per row, to choose the audited rows. None: hash the texts.
            coded: Rows whose text is an `IdText`, with positions in ids.
        """
        spans = [None] * len(texts) if spans is None else spans
        turn_ends = [()] * len(texts) if turn_ends is None else turn_ends
        if coded:
            return self._encode_coded(texts, spans, turn_ends, digests, coded)
        if not len(texts) == len(spans) == len(turn_ends):
            raise ValueError(
                f"{len(texts)} texts, {len(spans)} lists of spans, {len(turn_ends)} of turns"
            )
        batch = _Batch(texts, spans, turn_ends, digests)
        notes: dict[str, Any] = {"engine": self.engine.name, "audited": 0, "mismatches": 0,
                                    "engine_failures": 0, "reference_rows": 0}  # fmt: skip
        try:
            return self._encode(batch, self.engine, notes)
        except _MismatchError as mismatch:
            self.engine = self.reference
            notes.update(engine=self.reference.name, mismatches=mismatch.args[0])
            return self._encode(batch, self.reference, notes)

    def _encode_coded(
        self,
        texts: Sequence[str],
        spans: masks.Spans,
        turn_ends: TurnEnds,
        digests: np.ndarray | None,
        coded: Sequence[int],
    ) -> Encoded:
        """Encode the rows that have text; the others have their ids already."""
        is_coded = np.zeros(len(texts), dtype=bool)
        is_coded[list(coded)] = True
        rest = np.flatnonzero(~is_coded)
        encoded = self.encode(
            [texts[row] for row in rest.tolist()],
            [spans[row] for row in rest.tolist()],
            [turn_ends[row] for row in rest.tolist()],
            None if digests is None else digests[rest],
        )
        rejected = {int(rest[row]): error for row, error in encoded.rejected}
        rows = iter(range(len(rest)))
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for row, text in enumerate(texts):
            if not is_coded[row]:
                parts.append(encoded.row(next(rows)))
                continue
            ids = ids_of(text)
            mask = np.full(len(ids), spans[row] is None, np.uint8)
            for start, stop in spans[row] or ():
                mask[start:stop] = 1
            if len(ids) and int(ids.max()) >= len(self.table):
                rejected[row] = RowError(
                    f"the encoder returned the id {ids.max()}; the tokenizer's ids are below"
                    f" {len(self.table)}",
                    reason="mask_unproven",
                )
            parts.append((ids, mask, np.array(turn_ends[row], np.int32)))
        ids, mask, ends = (np.concatenate(column) for column in zip(*parts, strict=True))
        joined = Encoded(
            ids=ids.astype(np.int32),
            row_starts=starts_of([len(one) for one, _, _ in parts]),
            mask=mask.astype(np.uint8),
            turn_ends=ends.astype(np.int32),
            turn_starts=starts_of([len(one) for _, _, one in parts]),
            notes=encoded.notes,
        )
        return joined.with_rejected(rejected)

    def _encode(self, batch: _Batch, engine: Engine, notes: dict[str, Any]) -> Encoded:
        offsets = None
        if engine.name == self.reference.name and self.table.needs_offsets:
            # Most rows will need offsets: get them now instead of encoding twice.
            ids, row_starts, offsets = self.reference.encode_with_offsets(batch.texts)
        elif engine.name == self.reference.name:
            ids, row_starts = self.reference.encode(batch.texts)
        else:
            start = time.perf_counter()
            ids, row_starts, failures = self._encode_with_fallback(engine, batch.texts)
            self.engine_seconds += time.perf_counter() - start
            notes["engine_failures"] = failures
            self._audit(batch, ids, row_starts, notes)
        mask = np.zeros(len(ids), dtype=np.uint8)
        ends = np.zeros(len(batch.end_rows), dtype=np.int64)
        proven = np.ones(len(batch.texts), dtype=bool)
        tokens = _Tokens(ids, row_starts, mask, ends)
        for first, last, utf8 in batch.chunks:
            proven[first:last] = self._mask_proven_rows(batch, tokens, first, last, utf8)
        rest = np.flatnonzero(~proven)
        notes["reference_rows"] = len(rest)
        if len(rest):
            if offsets is None:
                expected, starts, offsets = self.reference.encode_with_offsets(
                    [batch.texts[row] for row in rest]
                )
                notes["audited"] += len(rest) if engine.name != self.reference.name else 0
                _require_equal_ids(rest, ids, row_starts, expected, starts)
            else:
                starts = row_starts[rest]
            self._mask_rows_by_offsets(batch, tokens, rest, starts, offsets)
        for row in batch.whole:
            mask[row_starts[row] : row_starts[row + 1]] = 1
        encoded = Encoded(
            ids=ids,
            row_starts=row_starts,
            mask=mask,
            turn_ends=ends.astype(np.int32),
            turn_starts=starts_of(batch.turn_counts),
            notes=dict(notes),
        )
        return encoded.with_rejected(batch.rejected)

    def _encode_with_fallback(
        self, engine: Engine, texts: Sequence[str]
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Encode with the engine, and the few texts on which it fails with the reference."""
        try:
            return *engine.encode(texts), 0
        except BaseException as error:
            reraise_interrupts(error)
            if len(texts) <= 1:
                return *self.reference.encode(texts), len(texts)
        half = len(texts) // 2
        ids, starts, failures = self._encode_with_fallback(engine, texts[:half])
        more_ids, more_starts, more_failures = self._encode_with_fallback(engine, texts[half:])
        joined = np.concatenate((starts, more_starts[1:] + starts[-1]))
        return np.concatenate((ids, more_ids)), joined, failures + more_failures

    def _audit(
        self, batch: _Batch, ids: np.ndarray, row_starts: np.ndarray, notes: dict[str, Any]
    ) -> None:
        rows = batch.audit_sample(self.min_audit_bytes)
        expected, starts = self.reference.encode([batch.texts[row] for row in rows])
        notes["audited"] += len(rows)
        _require_equal_ids(rows, ids, row_starts, expected, starts)

    def _mask_proven_rows(
        self, batch: _Batch, tokens: _Tokens, first: int, last: int, utf8: bytes
    ) -> np.ndarray:
        """Fill masks and turn ends of rows first..last-1; return which rows are proven."""
        ids, row_starts, mask, ends = tokens
        begin, end = int(row_starts[first]), int(row_starts[last])
        local_starts = row_starts[first : last + 1] - begin
        byte_starts = batch.byte_starts[first : last + 1] - batch.byte_starts[first]
        char_starts = batch.char_starts[first : last + 1] - batch.char_starts[first]
        offsets, known = masks.prove(self.table, ids[begin:end], local_starts, utf8, byte_starts)
        starts, stops = offsets[:-1], offsets[1:]
        if self.table.prefix != "never":  # an added space is part of the next character
            stops = np.maximum(stops, starts + 1)
        spans, turns = batch.spans_of(first, last), batch.turns_of(first, last)
        span_rows, turn_rows = batch.span_rows[spans] - first, batch.end_rows[turns] - first
        rows = np.concatenate((span_rows, span_rows, turn_rows))
        positions = char_starts[rows] + np.concatenate(
            (batch.span_starts[spans], batch.span_ends[spans], batch.end_chars[turns])
        )
        if len(utf8) != char_starts[-1]:
            positions = masks.byte_positions(utf8, positions)
        # After an unproven row, the positions of pieces and text differ.
        positions += (offsets[local_starts] - byte_starts)[rows]
        positions = positions.astype(offsets.dtype)
        span_starts, span_ends, turn_ends = np.split(
            positions, [len(span_rows), 2 * len(span_rows)]
        )
        if not known.all():
            some = known[span_rows]
            span_starts, span_ends, span_rows = span_starts[some], span_ends[some], span_rows[some]
        mask[begin:end] = masks.trained_tokens(
            starts, stops, local_starts, span_starts, span_ends, span_rows
        )
        ends[turns] = masks.tokens_before(starts, local_starts, turn_ends, turn_rows)
        return known

    def _mask_rows_by_offsets(
        self,
        batch: _Batch,
        tokens: _Tokens,
        rows: np.ndarray,
        starts: np.ndarray,
        offsets: np.ndarray,
    ) -> None:
        """Fill masks and turn ends of the other rows from the reference's character offsets."""
        ids, row_starts, mask, ends = tokens
        for place, row in enumerate(rows.tolist()):
            begin, end = int(row_starts[row]), int(row_starts[row + 1])
            opens, closes = offsets[starts[place] : starts[place] + end - begin].T
            one = np.array([0, end - begin], dtype=np.int64)
            spans, turns = batch.spans_of(row, row + 1), batch.turns_of(row, row + 1)
            if not _are_valid_offsets(opens, closes, len(batch.texts[row])):
                if row not in batch.whole:
                    batch.reject(row, "the tokenizer's offsets are outside the text or unordered")
                opens = np.maximum.accumulate(opens)  # good enough to show the ends of turns
            else:
                opens, closes = self._without_stripped_space(
                    batch.texts[row], ids[begin:end], opens, closes
                )
            closes = np.maximum(closes, opens + 1)
            zeros = np.zeros(spans.stop - spans.start, dtype=np.int64)
            mask[begin:end] = masks.trained_tokens(
                opens, closes, one, batch.span_starts[spans], batch.span_ends[spans], zeros
            )
            zeros = np.zeros(turns.stop - turns.start, dtype=np.int64)
            ends[turns] = masks.tokens_before(opens, one, batch.end_chars[turns], zeros)

    def _without_stripped_space(
        self, text: str, ids: np.ndarray, opens: np.ndarray, closes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return offsets in which added tokens do not include the white space that they strip.

        The offsets of `tokenizers` include it. The last token of a turn header would then overlap
        an answer that begins with a space, and be trained.
        """
        added = np.flatnonzero(self.table.is_added[ids])
        pieces = self.table.pieces(ids[added])
        opens, closes = opens.copy(), closes.copy()
        for token, piece in zip(added.tolist(), pieces, strict=True):
            content = piece.decode("utf-8", "replace")
            at = text.find(content, opens[token], closes[token])
            if at >= 0:
                opens[token], closes[token] = at, at + len(content)
        return opens, closes


class _Tokens(NamedTuple):
    ids: np.ndarray
    row_starts: np.ndarray
    mask: np.ndarray
    ends: np.ndarray


class _Batch:
    """The rows of one call as flat arrays, and the rejections so far."""

    def __init__(
        self,
        texts: Sequence[str],
        spans: masks.Spans,
        turn_ends: TurnEnds,
        digests: np.ndarray | None = None,
    ) -> None:
        self.rejected: dict[int, RowError] = {}
        self._digests = digests
        self.texts = list(texts)
        self.whole = {row for row, given in enumerate(spans) if given is None}
        self.span_starts, self.span_ends, self.span_rows = masks.flatten_spans(spans)
        self.turn_counts = np.fromiter(map(len, turn_ends), dtype=np.int64, count=len(turn_ends))
        self.end_rows = np.repeat(np.arange(len(self.texts)), self.turn_counts)
        flat = itertools.chain.from_iterable(turn_ends)
        self.end_chars = np.fromiter(flat, dtype=np.int64, count=len(self.end_rows))
        try:
            self._build_arrays()
        except UnicodeEncodeError:
            self._reject_lone_surrogates()
        self._reject_long_texts()
        self._reject_bad_positions()
        if self.rejected:
            for row in self.rejected:
                self.texts[row] = ""
            self._build_arrays()
            gone = np.zeros(len(self.texts), dtype=bool)
            gone[list(self.rejected)] = True
            stay = ~gone[self.span_rows]
            self.span_starts, self.span_ends = self.span_starts[stay], self.span_ends[stay]
            self.span_rows = self.span_rows[stay]
            self.end_chars = np.where(gone[self.end_rows], 0, self.end_chars)

    def _build_arrays(self) -> None:
        rows = len(self.texts)
        self.char_starts = starts_of(np.fromiter(map(len, self.texts), np.int64, rows))
        self.byte_starts = np.zeros(rows + 1, dtype=np.int64)
        self.chunks: list[tuple[int, int, bytes]] = []
        cuts = np.flatnonzero(np.diff(self.char_starts // CHUNK_CHARS)).tolist()
        for first, last in itertools.pairwise(sorted({0, *cuts, rows})):
            utf8 = list(map(str.encode, self.texts[first:last]))
            self.byte_starts[first + 1 : last + 1] = list(map(len, utf8))
            self.chunks.append((first, last, b"".join(utf8)))
        np.cumsum(self.byte_starts, out=self.byte_starts)

    def _reject_lone_surrogates(self) -> None:
        for row, text in enumerate(self.texts):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                self.rejected[row] = RowError(
                    f"the text has a lone surrogate at character {error.start}", reason="bad_json"
                )

    def _reject_long_texts(self) -> None:
        for row in np.flatnonzero(np.diff(self.char_starts) > MAX_TEXT_BYTES // 4).tolist():
            size = len(self.texts[row].encode("utf-8", "surrogatepass"))
            if size > MAX_TEXT_BYTES:
                self.rejected[row] = RowError(
                    f"the text has {size} bytes, more than the limit of {MAX_TEXT_BYTES} for a"
                    " tokenizer; divide the row into several rows",
                    reason="limit",
                )

    def _reject_bad_positions(self) -> None:
        """Reject rows with spans or turns that are outside the text or go backwards."""
        chars = np.diff(self.char_starts)
        bad = (self.span_starts < 0) | (self.span_ends < self.span_starts)
        bad |= self.span_ends > chars[self.span_rows]
        for row in np.unique(self.span_rows[bad]).tolist():
            self.reject(row, "a trained span is outside the text")
        bad = (self.end_chars < 0) | (self.end_chars > chars[self.end_rows])
        same_row = self.end_rows[1:] == self.end_rows[:-1]
        bad[1:] |= same_row & (self.end_chars[1:] < self.end_chars[:-1])
        for row in np.unique(self.end_rows[bad]).tolist():
            self.reject(row, "a turn ends outside the text or before it starts")

    def reject(self, row: int, message: str) -> None:
        self.rejected.setdefault(row, RowError(message, reason="mask_unproven"))

    def spans_of(self, first: int, last: int) -> slice:
        start, stop = np.searchsorted(self.span_rows, [first, last])
        return slice(int(start), int(stop))

    def turns_of(self, first: int, last: int) -> slice:
        start, stop = np.searchsorted(self.end_rows, [first, last])
        return slice(int(start), int(stop))

    def digests(self) -> np.ndarray:
        if self._digests is None:
            hashes = map(xxhash.xxh3_64_intdigest, map(str.encode, self.texts))
            self._digests = np.fromiter(hashes, np.uint64, len(self.texts))
        return self._digests

    def audit_sample(self, at_least: int = MIN_AUDIT_BYTES) -> np.ndarray:
        """Choose about one byte in `AUDIT_SHARE` by the digests of rows, whatever their length.

        If this chooses no row, take one of the shorter ones.
        """
        total = int(self.byte_starts[-1])
        share = min(1.0, max(at_least, total // AUDIT_SHARE) / max(total, 1))
        digests = self.digests()
        chosen = np.flatnonzero(digests <= np.uint64(min(int(share * 2.0**64), _MAX_HASH)))
        if len(chosen) or not at_least:
            return chosen
        order = np.argsort(digests, kind="stable")[:AUDIT_CANDIDATES]
        lengths = np.diff(self.byte_starts)[order]
        return order[np.argsort(lengths, kind="stable")[:1]]


def _require_equal_ids(
    rows: np.ndarray,
    ids: np.ndarray,
    row_starts: np.ndarray,
    expected: np.ndarray,
    starts: np.ndarray,
) -> None:
    different = sum(
        not np.array_equal(
            ids[row_starts[row] : row_starts[row + 1]], expected[starts[n] : starts[n + 1]]
        )
        for n, row in enumerate(rows.tolist())
    )
    if different:
        raise _MismatchError(different)


def _are_valid_offsets(opens: np.ndarray, closes: np.ndarray, chars: int) -> bool:
    if len(opens) == 0:
        return True
    inside = int(opens.min()) >= 0 and int(closes.max()) <= chars and bool((opens <= closes).all())
    return inside and bool((np.diff(opens) >= 0).all()) and bool((np.diff(closes) >= 0).all())
