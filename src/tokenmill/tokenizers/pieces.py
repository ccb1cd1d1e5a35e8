"""Pieces: which bytes of the text a token id stands for.

In goes a parsed tokenizer.json; out comes the table by which masks are proven and tokens are shown.
A `PieceTable` holds one byte string per id. Vocabularies write bytes in three ways: *byte-level*
ones spell every byte as one printable character (GPT-2's alphabet), *metaspace* ones write a space
as ``▁`` and, with byte fallback, a lone byte as ``<0xE4>``; the rest are plain text, where a
WordPiece continues a word with ``##``. Added tokens stand for their own text.

Metaspace tokenizers also invent a ``▁`` that no text holds, before the first word or before
every stretch between added tokens. Such a token has a *twin* in the table, number ``id + size``,
without that first space; `PieceTable.twins` says which tokens of a row are to be read as twins.

A table may be wrong about a tokenizer it does not understand: whoever uses it compares the
pieces, joined, with the text, and a wrong table then proves nothing instead of proving wrongly.
So a table may also be written to a cache and read back, which is quicker than making it.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
import numpy as np
import pyarrow as pa

from tokenmill._core.fingerprint import canonical
from tokenmill.tokenizers.identity import added_tokens, components, prepend_scheme, vocabulary

TABLE_FORMAT = 1  # raised when a table's bytes change, or what is put into them

Spelling = Literal["byte_level", "metaspace", "plain"]
Prefix = Literal["never", "first", "always"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[int, int]:
    """Code point → byte of the byte-level alphabet.

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for the code
    points from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: byte for byte in printable}
    alphabet.update({256 + place: byte for place, byte in enumerate(others)})
    return alphabet


class PieceTable:
    """Bytes per token id of one backend, by its parsed tokenizer.json."""

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
            # Gemma lists runs of ▁ as added tokens, too; in a text they nearly always are the
            # model's runs of spaces, and a text that does hold a ▁ goes unproven.
            if not (self.space and self.space in token["content"] and pieces[token["id"]]):
                pieces[token["id"]] = token["content"].encode("utf-8", "surrogatepass")
            self.is_added[token["id"]] = True
            self.is_special[token["id"]] = token["special"]
        # Whether ordinary rows can be proven at all; a hint for speed, not a proof.
        self.hopeless = self.spelling == "plain" or any(t["lstrip"] or t["rstrip"] for t in added)
        if self.prefix == "never":
            self.has_twin = np.zeros(self.size, dtype=bool)
        else:
            self.has_twin = np.array([piece.startswith(b" ") for piece in pieces], dtype=bool)
            self.has_twin &= ~self.is_added
            pieces += [piece[1:] if piece.startswith(b" ") else piece for piece in pieces]
        starts = np.zeros(len(pieces) + 1, dtype=np.int32)
        np.cumsum([len(piece) for piece in pieces], out=starts[1:])
        self._lay_out(starts, b"".join(pieces))

    def _lay_out(self, starts: np.ndarray, data: bytes) -> None:
        # From buffers: `pa.array` would import pandas where it is installed, a quarter second.
        buffers = [None, pa.py_buffer(starts), pa.py_buffer(data)]
        self._table = pa.Array.from_buffers(pa.binary(), len(starts) - 1, buffers)

    def to_bytes(self) -> bytes:
        """The table as `from_bytes` reads it: a line that describes it, then its arrays."""
        head = {
            "format": TABLE_FORMAT,
            "size": self.size,
            "spelling": self.spelling,
            "space": self.space,
            "prefix": self.prefix,
            "hopeless": self.hopeless,
            "pieces": len(self._table),
        }
        flags = self.is_added | self.is_special * 2 | self.has_twin * 4
        starts = np.frombuffer(self._table.buffers()[1], dtype=np.int32)
        body: bytes = flags.astype(np.uint8).tobytes() + starts.astype("<i4").tobytes()
        pieces: bytes = self._table.buffers()[2].to_pybytes()
        return canonical(head) + b"\n" + body + pieces

    @classmethod
    def from_bytes(cls, data: bytes) -> PieceTable | None:
        """The table that `to_bytes` wrote; None where another version did.

        Raises:
            ValueError: These are no bytes of a table.
        """
        line, _, body = data.partition(b"\n")
        head = msgspec.json.decode(line)
        if head["format"] != TABLE_FORMAT:
            return None
        table = cls.__new__(cls)
        table.size, table.spelling, table.space = head["size"], head["spelling"], head["space"]
        table.prefix, table.hopeless = head["prefix"], head["hopeless"]
        flags = np.frombuffer(body, dtype=np.uint8, count=table.size)
        table.is_added, table.is_special = flags & 1 > 0, flags & 2 > 0
        table.has_twin = flags & 4 > 0
        starts = np.frombuffer(body, "<i4", head["pieces"] + 1, table.size).astype(np.int32)
        pieces = body[table.size + starts.nbytes :]
        count = table.size if table.prefix == "never" else 2 * table.size
        # pyarrow believes whatever offsets it is given.
        if (starts[0], starts[-1], len(starts)) != (0, len(pieces), count + 1):
            raise ValueError("not the pieces of a table")
        if (np.diff(starts) < 0).any():
            raise ValueError("a piece ends before it starts")
        table._lay_out(starts, pieces)
        return table

    def _model_pieces(self, document: dict[str, Any], vocab: list[tuple[str, int]]) -> list[bytes]:
        pieces = [b""] * self.size
        if self.spelling == "byte_level":
            alphabet = byte_alphabet()
            for token, number in vocab:
                try:
                    pieces[number] = token.translate(alphabet).encode("latin-1")
                except UnicodeEncodeError:  # not spelled in the alphabet: it can only be itself
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
        """The bytes of one id; an id outside the vocabulary has none."""
        if not 0 <= number < self.size:
            return b""
        return self._table[number].as_py()  # type: ignore[no-any-return]

    def pieces(self, ids: Any) -> list[bytes]:
        return [self.piece(int(number)) for number in ids]

    def twins(self, ids: np.ndarray, row_starts: np.ndarray) -> np.ndarray:
        """The ids, with those replaced by their twin whose leading space the tokenizer invented.

        Args:
            ids: Token ids of several rows, flat.
            row_starts: Where each row starts in ``ids``, and the total.
        """
        if self.prefix == "never" or len(ids) == 0:
            return ids
        opens = np.zeros(len(ids), dtype=bool)
        if self.prefix == "always":  # every stretch between added tokens is normalised alone
            opens[1:] = self.is_added[ids[:-1]]
        starts = row_starts[:-1]
        opens[starts[starts < row_starts[1:]]] = True
        opens &= self.has_twin[ids]
        return np.where(opens, ids + np.int32(self.size), ids)

    def joined(self, ids: np.ndarray) -> tuple[np.ndarray, pa.Buffer]:
        """All pieces of ``ids`` (or twins) one after the other.

        Returns:
            Where each piece starts, and the total (int32 or int64), and the bytes.
        """
        numbers = pa.py_buffer(np.ascontiguousarray(ids, dtype=np.int32))
        taken = self._table.take(pa.Array.from_buffers(pa.int32(), len(ids), [None, numbers]))
        _, offsets, data = taken.buffers()
        starts = np.frombuffer(offsets, dtype=np.int32)[: len(ids) + 1]
        return starts, pa.py_buffer(b"") if data is None else data.slice(0, int(starts[-1]))


def _spelling(document: dict[str, Any]) -> tuple[Spelling, str]:
    """How the vocabulary spells text, read from how the backend prepares text for it."""
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
    """Where the backend invents a space: nowhere, at the row's start, at every stretch's start."""
    steps = components(document, "normalizer") + components(document, "pre_tokenizer")
    for step in steps:
        if step.get("type") == "Prepend":
            return "always"
        if step.get("type") == "Metaspace":
            known: dict[str, Prefix] = {"first": "first", "always": "always"}
            return known.get(str(prepend_scheme(step)), "never")
    return "never"
