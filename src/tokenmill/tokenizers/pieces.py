"""The bytes of each token id.

Byte-level vocabularies write every byte as one printable character (GPT-2's alphabet). Metaspace
vocabularies write a space as ``▁`` and, with byte fallback, a single byte as ``<0xE4>``. The others
are plain text; WordPiece continues a word with ``##``. Metaspace tokenizers also add a ``▁`` that
is not in the text. The piece without this space is in the table at ``id + size``.

A table may be wrong for an unknown kind of tokenizer. Then it proves no mask, because the joined
pieces are always compared with the text.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa

from tokenmill.tokenizers.identity import added_tokens, components, prepend_scheme, vocabulary

TABLE_FORMAT = 2  # raised when the form or the contents of stored tables change

Spelling = Literal["byte_level", "metaspace", "plain"]
Prefix = Literal["never", "first", "always"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, int]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: byte for byte in printable}
    alphabet.update({256 + place: byte for place, byte in enumerate(others)})
    return alphabet


class StoredTable(msgspec.Struct):
    format: int
    size: int
    spelling: Spelling
    space: str
    prefix: Prefix
    needs_offsets: bool
    flags: bytes
    starts: bytes
    pieces: bytes


class PieceTable:
    """The bytes of every token id, from a parsed tokenizer.json."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.spelling, self.space = _spelling(document)
        self.prefix = _prefix(document) if self.spelling == "metaspace" else "never"
        added = added_tokens(document)
        vocab = vocabulary(document)
        self.size = 1 + max((number for _, number in vocab), default=-1)
        self.size = max([self.size, *(int(token["id"]) + 1 for token in added)])
        pieces = self._model_pieces(document, vocab)
        self.is_added = np.zeros(self.size, dtype=bool)
        self.is_special = np.zeros(self.size, dtype=bool)
        for token in added:
            # Gemma lists runs of ▁ as added tokens. They nearly always encode runs of spaces. A
            # text that contains a ▁ stays unproven.
            if not (self.space and self.space in token["content"] and pieces[token["id"]]):
                pieces[token["id"]] = token["content"].encode("utf-8", "surrogatepass")
            self.is_added[token["id"]] = True
            self.is_special[token["id"]] = token["special"]
        # Whether most rows need offsets. It affects only the speed.
        self.needs_offsets = self.spelling == "plain" or any(
            t["lstrip"] or t["rstrip"] for t in added
        )
        if self.prefix == "never":
            self.has_counterpart = np.zeros(self.size, dtype=bool)
        else:
            self.has_counterpart = np.array(
                [piece.startswith(b" ") for piece in pieces], dtype=bool
            )
            self.has_counterpart &= ~self.is_added
            pieces += [piece[1:] if piece.startswith(b" ") else piece for piece in pieces]
        starts = np.zeros(len(pieces) + 1, dtype=np.int32)
        np.cumsum([len(piece) for piece in pieces], out=starts[1:])
        self._set_table(starts, b"".join(pieces))

    def _set_table(self, starts: np.ndarray, data: bytes) -> None:
        # `pa.array` would import pandas if it is installed, which takes a quarter of a second.
        buffers = [None, pa.py_buffer(starts), pa.py_buffer(data)]
        self._table = pa.Array.from_buffers(pa.binary(), len(starts) - 1, buffers)

    def to_bytes(self) -> bytes:
        flags = self.is_added | self.is_special * 2 | self.has_counterpart * 4
        _, starts, pieces = self._table.buffers()
        stored = StoredTable(
            TABLE_FORMAT, self.size, self.spelling, self.space, self.prefix, self.needs_offsets,
            flags.astype(np.uint8).tobytes(), starts.to_pybytes(), pieces.to_pybytes(),
        )  # fmt: skip
        return msgspec.msgpack.encode(stored)

    @classmethod
    def from_bytes(cls, data: bytes) -> PieceTable:
        """Read a table of `to_bytes`; raise `ValueError` if another version wrote it."""
        try:
            stored = msgspec.msgpack.decode(data, type=StoredTable)
        except msgspec.MsgspecError as error:
            raise ValueError("not a table of pieces") from error
        table = cls.__new__(cls)
        for name in ("size", "spelling", "space", "prefix", "needs_offsets"):
            setattr(table, name, getattr(stored, name))
        flags = np.frombuffer(stored.flags, np.uint8)
        table.is_added, table.is_special = flags & 1 > 0, flags & 2 > 0
        table.has_counterpart = flags & 4 > 0
        table._set_table(np.frombuffer(stored.starts, np.int32), stored.pieces)
        table._table.validate(full=True)  # pyarrow uses any offsets unchecked
        count = table.size if table.prefix == "never" else 2 * table.size
        if (stored.format, len(flags), len(table._table)) != (TABLE_FORMAT, table.size, count):
            raise ValueError("not a table of pieces")
        return table

    def _model_pieces(self, document: dict[str, Any], vocab: list[tuple[str, int]]) -> list[bytes]:
        pieces = [b""] * self.size
        if self.spelling == "byte_level":
            alphabet = byte_alphabet()
            for token, number in vocab:
                try:
                    pieces[number] = token.translate(alphabet).encode("latin-1")
                except UnicodeEncodeError:  # not in the alphabet, so it is plain text
                    pieces[number] = token.encode("utf-8", "surrogatepass")
            return pieces
        continuing = document["model"].get("continuing_subword_prefix") or ""
        fallback = bool(document["model"].get("byte_fallback"))
        for token, number in vocab:
            if fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
                pieces[number] = bytes.fromhex(byte[1])
                continue
            if continuing:
                token = token.removeprefix(continuing)
            if self.space:
                token = token.replace(self.space, " ")
            pieces[number] = token.encode("utf-8", "surrogatepass")
        return pieces

    def __len__(self) -> int:
        return self.size

    def piece(self, number: int) -> bytes:
        if not 0 <= number < self.size:
            return b""
        return self._table[number].as_py()  # type: ignore[no-any-return]

    def pieces(self, ids: Any) -> list[bytes]:
        return [self.piece(int(number)) for number in ids]

    def prefixless_ids(self, ids: np.ndarray, row_starts: np.ndarray) -> np.ndarray:
        """Replace the ids to which the tokenizer added a leading space by those without it."""
        if self.prefix == "never" or len(ids) == 0:
            return ids
        opens = np.zeros(len(ids), dtype=bool)
        if self.prefix == "always":  # text between added tokens is normalized separately
            opens[1:] = self.is_added[ids[:-1]]
        starts = row_starts[:-1]
        opens[starts[starts < row_starts[1:]]] = True
        opens &= self.has_counterpart[ids]
        return np.where(opens, ids + np.int32(self.size), ids)

    def joined(self, ids: np.ndarray) -> tuple[np.ndarray, pa.Buffer]:
        """Return the starts of all pieces, followed by the total, and the joined bytes."""
        numbers = pa.py_buffer(np.ascontiguousarray(ids, dtype=np.int32))
        pieces = self._table.take(pa.Array.from_buffers(pa.int32(), len(ids), [None, numbers]))
        _, offsets, data = pieces.buffers()
        starts = np.frombuffer(offsets, dtype=np.int32)[: len(ids) + 1]
        return starts, pa.py_buffer(b"") if data is None else data.slice(0, int(starts[-1]))


def _spelling(document: dict[str, Any]) -> tuple[Spelling, str]:
    """Return the notation of the vocabulary and its space character."""
    before = components(document, "normalizer") + components(document, "pre_tokenizer")
    if any(step.get("type") == "ByteLevel" for step in before):
        return "byte_level", ""
    for step in before:
        if step.get("type") == "Metaspace":
            return "metaspace", str(step.get("replacement") or "▁")
        if step.get("type") == "Replace" and step.get("pattern") == {"String": " "}:
            return "metaspace", str(step.get("content") or "")
    return "plain", ""


def _prefix(document: dict[str, Any]) -> Prefix:
    """Return where a space is added: never, at the start of a row, after every added token."""
    steps = components(document, "normalizer") + components(document, "pre_tokenizer")
    for step in steps:
        if step.get("type") == "Prepend":
            return "always"
        if step.get("type") == "Metaspace":
            known: dict[str, Prefix] = {"first": "first", "always": "always"}
            return known.get(str(prepend_scheme(step)), "never")
    return "never"
