"""The plan: which slices a recipe needs, in order.

A `Plan` is a function of three things: the recipe, the tokenizer's identity and the content of the
sources. It walks the content-cut blocks of the rows and names the slice that each becomes and its
place in the store. Nothing is kept per slice: blocks are walked again whenever they are needed, so
a million of them are never Python objects at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokenmill.build.keys import shape_key, slice_key, source_documents, store_document
from tokenmill.build.limits import base_key
from tokenmill.build.recipe import Recipe
from tokenmill.fingerprint import key as fingerprint_key
from tokenmill.source import Block, Rows
from tokenmill.store.commit import Placement
from tokenmill.tokenizer import IdentityCard


class Plan:
    """Which slices a recipe needs.

    Attributes:
        recipe: What is to be made.
        card: The tokenizer's identity card.
        document: The store's key document.
        key: The store's key.
        shape: Key of everything that shapes a row.
        base: The same without the length limit.
        slices: How many slices there are.
        rows: Source rows.
        bytes: Source bytes.
        paths: The source files of this call that have rows, in order.
    """

    def __init__(self, recipe: Recipe, card: IdentityCard, rows: Rows) -> None:
        self.recipe = recipe
        self.card = card
        self._rows = rows
        self._shaping = recipe.document()
        self.shape = shape_key(self._shaping, card.key)
        self.base = base_key(self._shaping, card.key)
        self.slices = 0
        sources = source_documents(self._counted(rows.blocks()))
        self.document = store_document(self._shaping, card.identity, sources)
        self.key = fingerprint_key(self.document)
        self.rows = sum(source["rows"] for source in sources)
        self.bytes = sum(source["bytes"] for source in sources)
        self.paths = [str(rows.files[source["file"]].path) for source in sources]
        self._source_of_file = {source["file"]: n for n, source in enumerate(sources)}

    def _counted(self, blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            self.slices += 1
            yield block

    @property
    def tokenizer(self) -> dict[str, Any]:
        """What the manifest says of the tokenizer."""
        card = self.card
        return {
            "identity": card.key,
            "pad_id": card.pad_id,
            "eos_id": card.eos_id,
            "bos_id": card.bos_id,
        }

    def walk(self) -> Iterator[tuple[str, Block]]:
        """Every slice's key and the block it is made of, in order."""
        return ((self.key_of(block), block) for block in self.blocks())

    def blocks(self) -> Iterator[Block]:
        """The block that each slice is made of, in order."""
        return self._rows.blocks()

    def key_of(self, block: Block) -> str:
        """The key of the slice that a block becomes."""
        return slice_key(self.shape, block)

    def shape_with_limit(self, limit: int | None) -> str:
        """The shape of the same recipe under another ``max_length``."""
        overlong = None if limit is None else "drop"
        other = {**self._shaping, "max_length": limit, "overlong": overlong}
        return shape_key(other, self.card.key)

    def placements(self) -> Iterator[Placement]:
        """Every slice's place in the store, in order."""
        for key, block in self.walk():
            yield Placement(
                key=key,
                source=self._source_of_file[block.file],
                source_row=block.first_row,
                line=block.first_line,
                offset=block.offset,
            )
