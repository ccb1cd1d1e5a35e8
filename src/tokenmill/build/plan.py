"""Plan a build: the slices of a recipe in order, their keys, and their partition among processes.

docs/internals/format.md defines the keys of slices and stores.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill._core import fingerprint
from tokenmill.build.blocks import missing_columns, source_documents
from tokenmill.build.processor import ProcessorInfo
from tokenmill.build.recipe import Recipe
from tokenmill.chat.spec import OPTIONAL_ROLES, ROLLOUTS
from tokenmill.errors import TokenmillError, UsageError
from tokenmill.sources.block import Block
from tokenmill.sources.rows import Rows
from tokenmill.store import FORMAT, CacheLayout
from tokenmill.store.commit import Placement
from tokenmill.store.manifest import read_manifest
from tokenmill.tokenizers.identity import TokenizerFingerprint

Document = dict[str, Any]

_LIMIT_FIELDS = ("max_length", "overlong")
log = logging.getLogger("tokenmill.build")


class Limit(NamedTuple):
    max_length: int
    overlong: str  # "drop" or "truncate"

    def key_of(self, slice_key: str) -> str:
        return fingerprint.key({"slice": slice_key, **self._asdict()})


class SliceKeys:
    def __init__(self, recipe: Document, tokenizer: str) -> None:
        shape = {name: value for name, value in recipe.items() if name not in _LIMIT_FIELDS}
        self._shape = fingerprint.key({"format": FORMAT, "recipe": shape, "tokenizer": tokenizer})
        self.limit: Limit | None = None
        if recipe.get("max_length") is not None:
            self.limit = Limit(recipe["max_length"], recipe["overlong"])

    def of(self, block: Block, images: str = "") -> str:
        """Return the key of a block's slice; `images` is the digest of images outside of rows."""
        document = {"shape": self._shape, "kind": block.kind, "digest": block.digest}
        return fingerprint.key({**document, "images": images} if images else document)

    def in_store(self, block: Block) -> set[str]:
        """Return the keys under which a store may use a block's slice."""
        key = self.of(block)
        return {key} if self.limit is None else {key, self.limit.key_of(key)}


class ImagesOfBlocks:
    """The digests of the images that blocks refer to, for the blocks that do."""

    def __init__(self) -> None:
        self._digests: dict[tuple[int, int], str] = {}

    def add(self, block: Block, digest: str) -> None:
        if digest:
            self._digests[block.file, block.first_row] = digest

    def of(self, block: Block) -> str:
        return self._digests.get((block.file, block.first_row), "")

    def digest(self) -> str:
        return fingerprint.key({"images": [self._digests[at] for at in sorted(self._digests)]})


@dataclass(frozen=True, slots=True)
class Partition:
    """Every ``count``-th slice from the ``number``-th on; number 0 means the last part.

    Neighbouring slices of a file cost about the same, so parts do as well.
    """

    number: int = 1
    count: int = 1

    def __post_init__(self) -> None:
        for value in (self.number, self.count):
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(("part",), f" must be two integers i/n, got {self}")
        if not 0 <= self.number <= self.count or self.count < 1:
            raise UsageError(
                ("part",),
                f" must be from 1/n to n/n, or from 0/n to (n-1)/n, got {self} "
                "(with Slurm: sbatch --array=1-n)",
            )

    @classmethod
    def of(cls, value: Any) -> Partition:
        """Parse ``"3/8"`` or ``(3, 8)``."""
        if isinstance(value, str):
            match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", value.strip(), re.ASCII)
            value = tuple(map(int, match.groups())) if match else value
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise UsageError(("part",), f" must be i/n, for example 3/8, got {value!r}")
        return cls(*value)

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_whole(self) -> bool:
        return self.count == 1

    def has(self, slice_number: int) -> bool:
        return (slice_number + 1 - self.number) % self.count == 0


ALL = Partition()


class Plan:
    """The slices that a recipe needs, and the key and document of the store.

    Blocks are read again whenever they are needed, so memory does not grow with them.
    """

    def __init__(
        self,
        recipe: Recipe,
        card: TokenizerFingerprint,
        rows: Rows,
        processor: ProcessorInfo | None = None,
        images: ImagesOfBlocks | None = None,
    ) -> None:
        self.recipe = recipe
        self.card = card
        self.processor = processor
        self.images = images or ImagesOfBlocks()
        self.source = rows
        shaping = recipe.document()
        media: Document = {}
        if processor is not None:
            shaping["processor"] = processor.key
            media = {"processor": processor.identity, "images": self.images.digest()}
        self._keys = SliceKeys(shaping, card.key)
        self.limit = self._keys.limit
        self.slices = 0
        sources = source_documents(self._counted(rows.blocks()))
        documents = [document for _, document in sources]
        self.document: Document = {
            "format": FORMAT,
            "recipe": shaping,
            "tokenizer": card.identity,
            "sources": documents,
            **media,
        }
        self.key = fingerprint.key(self.document)
        self.rows = sum(document["rows"] for document in documents)
        self.bytes = sum(document["bytes"] for document in documents)
        # The source files of this call that have rows, in order.
        files = rows.files
        self.paths = [str(files[file].path) for file, _ in sources]
        self._source_of_file = {file: n for n, (file, _) in enumerate(sources)}

    def _counted(self, blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            self.slices += 1
            yield block

    def check_columns(self) -> None:
        """Raise if the first rows lack a column of the recipe; log missing optional columns."""
        # A rollout may also keep what its check found, which is in no column.
        is_rollout = self.recipe.format in ROLLOUTS
        named = dict.fromkeys(() if is_rollout else self.recipe.keep_columns, "")
        named |= {name: role for role, name in (self.recipe.columns or {}).items() if name}
        missing, columns = missing_columns(self.source, named)
        for name in sorted(missing):
            role = named[name]
            error = UsageError(
                ("columns" if role else "keep_columns",),
                f" names {name!r}{f' for the role {role!r}' if role else ''}, but the first rows "
                f"have no such column; their columns are {columns}",
                path=self.paths[0],
            )
            if role and role not in OPTIONAL_ROLES:
                raise error
            log.warning("%s", error)

    @property
    def tokenizer(self) -> dict[str, Any]:
        """The manifest's entry about the tokenizer."""
        card = self.card
        return {
            "identity": card.key,
            "pad_token_id": card.pad_token_id,
            "eos_token_id": card.eos_token_id,
            "bos_token_id": card.bos_token_id,
        }

    def blocks(self) -> Iterator[Block]:
        return self.source.blocks()

    def key_of(self, block: Block) -> str:
        return self._keys.of(block, self.images.of(block))

    def walk(self) -> Iterator[tuple[str, Block]]:
        return ((self.key_of(block), block) for block in self.blocks())

    def size_of(self, partition: Partition) -> tuple[int, int]:
        if partition.is_whole:
            return self.rows, self.bytes
        rows = size = 0
        for number, block in enumerate(self.blocks()):
            if partition.has(number):
                rows, size = rows + block.rows, size + block.length
        return rows, size

    def placement(self, block: Block, key: str) -> Placement:
        return Placement(
            key=key,
            source=self._source_of_file[block.file],
            source_row=block.first_row,
            line=block.first_line,
            offset=block.offset,
        )


def explain(plan: Plan, cache: CacheLayout) -> dict[str, Any]:
    """Compare a plan with the nearest store of a cache: the object of ``tokenmill why --json``."""
    cached = sum(1 for key, _ in plan.walk() if cache.has_slice(key))
    nearest, differs = _nearest(plan, cache)
    return {
        "hit": nearest == plan.key,
        "key": plan.key,
        "nearest": nearest,
        "nearest_path": None if nearest is None else str(cache.store(nearest).directory),
        "differs": differs,
        "slices": plan.slices,
        "slices_there": cached,
    }


def _nearest(plan: Plan, cache: CacheLayout) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the key of the newest store with the fewest differing fields, and these fields."""
    if cache.store(plan.key).manifest.exists():
        return plan.key, []
    nearest, differs = None, []
    manifests = sorted(cache.stores.glob("*/manifest.json"), key=_modified, reverse=True)
    for path in manifests:
        try:
            manifest = read_manifest(cache.store(path.parent.name))
        except TokenmillError:
            continue
        fields = differences(plan.document, manifest["document"])
        if nearest is None or len(fields) < len(differs):
            nearest, differs = manifest["key"], fields
    return nearest, differs


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # deleted a moment ago


def differences(ours: Any, theirs: Any, name: str = "") -> list[dict[str, Any]]:
    """Return all values in which two documents differ, by dotted name."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        fields = []
        for member in sorted({*ours, *theirs}):
            dotted = f"{name}.{member}" if name else member
            fields += differences(ours.get(member), theirs.get(member), dotted)
        return fields
    if isinstance(ours, list) and isinstance(theirs, list) and name == "sources":
        if len(ours) != len(theirs):
            return [{"field": "sources", "ours": len(ours), "theirs": len(theirs)}]
        fields = []
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            fields += differences(one, other, f"sources[{number}]")
        return fields
    if ours == theirs:
        return []
    return [{"field": name, "ours": ours, "theirs": theirs}]
