"""The plan: which slices a recipe needs, in order, under which keys, and who builds which.

A `Plan` is a function of three things: the recipe, the tokenizer's identity and the content of the
sources. It walks the content-cut blocks of the rows and names the slice that each becomes and its
place in the store. Nothing is kept per slice: blocks are walked again whenever they are needed, so
a million of them are never Python objects at once.

A *slice key* is the fingerprint of (format, row-shaping fields, tokenizer identity, kind and digest
of the slice's bytes), with a processor also of its identity and the pictures that rows refer to. A
*store key* is the fingerprint of (format, row-shaping fields, tokenizer identity, the sources by
content, in order), likewise. Neither holds a path, a time, a worker count, an engine or a library's
version (promise P5).

A `Share` is written ``i/n`` and means every n-th slice from the i-th on, counted from 1: neighbours
in a file are about equally costly, so shares are too. ``0/n`` is another name of ``n/n``, so job
arrays that count from 0 to n-1 cover all slices as well. A share is a function of the slice's
number alone; processes that are given shares need not know of each other, may be given the same one
twice, may come in any number and any order, and may die. What is built is the same whoever builds
it, and whoever finds that no slice is missing commits the store: usually the last one, sometimes
two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenmill import fingerprint
from tokenmill.build.recipe import Recipe
from tokenmill.errors import UsageError
from tokenmill.source import Block, Rows
from tokenmill.store import FORMAT, CacheLayout
from tokenmill.store.commit import Placement
from tokenmill.tokenizer import IdentityCard
from tokenmill.work.inputs import source_documents
from tokenmill.work.processor import ProcessorCard

Document = dict[str, Any]


def shape_key(recipe: Document, identity: str) -> str:
    """Fingerprint of everything that shapes a row: computed once, shared by all slices."""
    return fingerprint.key({"format": FORMAT, "recipe": recipe, "tokenizer": identity})


def slice_key(shape: str, block: Block, pictures: str = "") -> str:
    """The key of the slice that a block becomes, and the pictures that its rows refer to."""
    document = {"shape": shape, "kind": block.kind, "digest": block.digest}
    return fingerprint.key({**document, "pictures": pictures} if pictures else document)


class PicturesOfBlocks:
    """The digests of the pictures that blocks refer to, for the blocks that do."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, int], str] = {}

    def add(self, block: Block, digest: str) -> None:
        if digest:
            self._digests[block.file, block.first_row] = digest

    def of(self, block: Block) -> str:
        """The digest of a block's pictures; empty where it refers to none."""
        return self._digests.get((block.file, block.first_row), "")

    def digest(self) -> str:
        """Of all of them, in the order of the blocks."""
        return fingerprint.key({"pictures": [self._digests[at] for at in sorted(self._digests)]})


@dataclass(frozen=True, slots=True)
class Share:
    """Every ``count``-th slice from the ``number``-th on.

    Args:
        number: Which share, from 1 to ``count``; 0 is the last.
        count: How many shares there are.
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        for value in (self.number, self.count):
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"part is {self}; it is two whole numbers i/n")
        if not 0 <= self.number <= self.count or self.count < 1:
            raise UsageError(
                f"part is {self}; parts count from 1 to n, or from 0 to n-1 "
                "(with Slurm: sbatch --array=1-n)"
            )

    @classmethod
    def of(cls, value: Any) -> Share:
        """A share from ``"3/8"``, ``(3, 8)`` or a share."""
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value.strip(), re.ASCII)
            value = tuple(map(int, found.groups())) if found else value
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UsageError(f"part is {value!r}; it is i/n, for example 3/8")
        return cls(*value)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def has(self, slice_number: int) -> bool:
        """Whether the slice with this number, from 0, is in it."""
        return (slice_number + 1 - self.number) % self.count == 0


WHOLE = Share()


class Plan:
    """Which slices a recipe needs.

    Attributes:
        recipe: What is to be made.
        card: The tokenizer's identity card.
        processor: The processor's, for rows with pictures.
        pictures: What the rows refer to outside of themselves.
        document: The store's key document: what its key is the fingerprint of.
        key: The store's key.
        shape: Key of everything that shapes a row.
        base: The same without the length limit.
        slices: How many slices there are.
        rows: Source rows.
        bytes: Source bytes.
        paths: The source files of this call that have rows, in order.
    """

    def __init__(
        self,
        recipe: Recipe,
        card: IdentityCard,
        rows: Rows,
        processor: ProcessorCard | None = None,
        pictures: PicturesOfBlocks | None = None,
    ) -> None:
        self.recipe = recipe
        self.card = card
        self.processor = processor
        self.pictures = pictures or PicturesOfBlocks()
        self._rows = rows
        self._shaping = recipe.document()
        media: Document = {}
        if processor is not None:
            self._shaping["processor"] = processor.key
            media = {"processor": processor.identity, "pictures": self.pictures.digest()}
        self.shape = shape_key(self._shaping, card.key)
        self.base = self.shape_with_limit(None)
        self.slices = 0
        sources = source_documents(self._counted(rows.blocks()))
        documents = [document for _, document in sources]
        self.document: Document = {
            "format": FORMAT,
            "recipe": self._shaping,
            "tokenizer": card.identity,
            "sources": documents,
            **media,
        }
        self.key = fingerprint.key(self.document)
        self.rows = sum(document["rows"] for document in documents)
        self.bytes = sum(document["bytes"] for document in documents)
        self.paths = [str(rows.files[file].path) for file, _ in sources]
        self._source_of_file = {file: n for n, (file, _) in enumerate(sources)}

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

    def size_of(self, share: Share) -> tuple[int, int]:
        """Rows and bytes of the slices of a share."""
        if share.is_whole:
            return self.rows, self.bytes
        rows = size = 0
        for number, block in enumerate(self.blocks()):
            if share.has(number):
                rows, size = rows + block.rows, size + block.length
        return rows, size

    def count_missing(self, cache: CacheLayout) -> int:
        """Slices that nobody has published yet.

        Opening a directory makes a network file system ask its server again. Otherwise two
        processes that finish at the same time might each believe an old answer that the other's
        slice is missing.
        """
        directory = ""
        missing = 0
        for key, _ in self.walk():
            record = cache.slice(key).record
            if record.exists():
                continue
            if str(record.parent) != directory:
                directory = str(record.parent)
                try:
                    os.scandir(directory).close()
                except FileNotFoundError:
                    missing += 1
                    continue
            missing += not record.exists()
        return missing

    def blocks(self) -> Iterator[Block]:
        """The block that each slice is made of, in order."""
        return self._rows.blocks()

    def key_of(self, block: Block, shape: str | None = None) -> str:
        """The key of the slice that a block becomes, or would become with another shape."""
        return slice_key(shape or self.shape, block, self.pictures.of(block))

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
                rows=block.rows,
            )
