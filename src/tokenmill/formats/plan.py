"""What is exported: rows, format and target, validated, and cut into files and blocks.

An `ExportPlan` holds a run (`tokenmill.loader.WholeRun`: rows, groups or packs by number). It cuts
the run into *shards* (one file each, where the target is a directory) and shards into *blocks*
(what is in memory at a time), from stored lengths only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from tokenmill.dataset import Mixture, View, as_view, unweighted
from tokenmill.errors import UsageError, check_one_of
from tokenmill.loader import WholeRun
from tokenmill.loader.group_batches import group_kind
from tokenmill.packing import Packs
from tokenmill.store import Store

FORMATS = (
    "parquet", "arrow", "jsonl", "hf", "axolotl", "llama-factory", "megatron", "packed-parquet",
)  # fmt: skip
MASKS = ("loss_mask", "labels")
LAYOUTS = ("tokenmill", "megatron-bridge")
TRAINERS = ("hf", "axolotl", "llama-factory")
"""Formats with the columns of trainers. Of data with groups they hold a record per group, every
other format a record per row."""
UNWEIGHTED = ("axolotl", "llama-factory", "megatron", "packed-parquet")
"""Formats whose readers know masks only; the others have a column of weights."""
ROW_FORMATS = ("parquet", "arrow", "jsonl")
"""Formats with everything about a row: loss mask or labels, origin, images, carried columns."""
LENGTHS = ("length", "lengths")
"""Columns with the number of a row's tokens, as transformers and ms-swift name them."""

SUFFIXES = {
    "parquet": ".parquet",
    "arrow": ".arrow",
    "jsonl": ".jsonl",
    "packed-parquet": ".parquet",
}
"""A target that ends so is one file; any other is a directory, of shards where needed."""

SHARD_TOKENS = 1 << 27  # tokens per file of a directory: about 640 MB of ids and mask
BLOCK_TOKENS = 1 << 20  # tokens in memory at a time, and per row group: a few tens of MB
BLOCK_ROWS = 1000  # records in memory at a time, where they are short


@dataclass(frozen=True)
class ExportPlan:
    """What is exported; arguments are those of `tokenmill.export`."""

    run: WholeRun  # rows, groups or packs by number
    format: str
    target: Path
    mask: str = "loss_mask"
    layout: str = "tokenmill"
    also: tuple[str, ...] = ()  # more columns for a trainer
    embed_media: bool = False

    def __post_init__(self) -> None:
        for name, known in (("format", FORMATS), ("mask", MASKS), ("layout", LAYOUTS)):
            check_one_of(name, getattr(self, name), known)
        packed = self.run.spec.packing is not None
        if packed != (self.format == "packed-parquet"):
            raise UsageError(
                f"format {self.format} holds rows: it takes no pack"
                if packed
                else "format packed-parquet holds packs: say how long they are (pack, --length)"
            )
        if self.layout != "tokenmill" and not packed:
            raise UsageError(f"layout {self.layout} is for packed-parquet")
        if self.run.slots is not None and self.layout != "megatron-bridge":
            raise UsageError(
                ("pad_multiple",), " is for packed-parquet in the layout megatron-bridge"
            )
        if self.also and self.format not in TRAINERS:
            raise UsageError(("also",), f" is for {', '.join(TRAINERS)}; {self.format} has it all")
        if self.run.unit == "groups":
            self._check_groups()
        if self.format in UNWEIGHTED or self.run.unit == "groups":
            groups = " of groups" * (self.run.unit == "groups")
            unweighted(self.run.view, f"format {self.format}{groups}")
        if self.format not in ROW_FORMATS and self.run.view.has_media:
            raise UsageError(
                f"rows of this data have pictures, and format {self.format} has no place for them: "
                f"its reader would train on them as if there were none; {', '.join(ROW_FORMATS)} "
                "hold them"
            )
        if self.embed_media and not self.run.view.has_media:
            raise UsageError(("embed_media",), " is for rows with pictures, and these have none")
        if self.embed_media and self.format == "jsonl":
            raise UsageError(("embed_media",), " is for parquet and arrow: JSON holds no bytes")
        suffix = self.target.suffix
        if suffix in SUFFIXES.values() and not self.one_file:
            raise UsageError(f"{self.target.name} does not name a target of format {self.format}")
        if self.mask == "labels" and self.format not in ROW_FORMATS:
            raise UsageError(f"format {self.format} has columns of its own: it takes no mask")

    def _check_groups(self) -> None:
        if self.format == "axolotl":
            raise UsageError(
                "axolotl takes tokens of rows only: its DPO and KTO take texts and tokenize them "
                "by themselves; hf.for_trl feeds the trainers of TRL beneath them"
            )
        kind = group_kind(self.run.view)
        if kind not in ("preference", "kto"):
            raise UsageError(
                f"format {self.format} holds pairs or KTO data, and this has "
                f"{kind or 'several kinds of'} groups: parquet, arrow and jsonl hold their rows"
            )

    @property
    def rows(self) -> int:
        return len(self.run)

    @property
    def one_file(self) -> bool:
        suffix = ".parquet" if self.format == "hf" else SUFFIXES.get(self.format)
        return suffix is not None and self.target.suffix == suffix

    @property
    def suffix(self) -> str:
        return SUFFIXES.get(self.format, ".parquet" if self.one_file else ".arrow")

    @cached_property
    def shards(self) -> list[range]:
        if self.one_file:
            return [range(len(self.run))]
        return list(_cut(self._tokens(), SHARD_TOKENS))

    def _tokens(self) -> Iterator[int]:
        for start in range(0, len(self.run), 1 << 16):
            stop = min(start + (1 << 16), len(self.run))
            yield from _tokens_of(self.run.packs(range(start, stop)))

    def blocks(self, samples: range) -> Iterator[Packs]:
        """Yield the samples of a shard, a bounded number of tokens at a time."""
        for start in range(samples.start, samples.stop, BLOCK_ROWS):
            packs = self.run.packs(range(start, min(start + BLOCK_ROWS, samples.stop)))
            for part in _cut(_tokens_of(packs), BLOCK_TOKENS):
                yield packs.take(np.arange(part.start, part.stop))


@dataclass(frozen=True)
class SplitPlan:
    """One plan per split, each into a directory of the target."""

    target: Path
    splits: Mapping[str, ExportPlan]

    def __post_init__(self) -> None:
        if not self.splits:
            raise UsageError("no splits: name at least one")
        for name, plan in self.splits.items():
            if not name.isidentifier():
                raise UsageError(f"split {name!r}: a split's name is letters, digits and _")
            if plan.format not in TRAINERS or self.target.suffix in SUFFIXES.values():
                raise UsageError("splits are for a directory of format hf or llama-factory")

    @property
    def one_file(self) -> bool:
        return False

    @property
    def rows(self) -> int:
        return sum(plan.rows for plan in self.splits.values())


def _tokens_of(packs: Packs) -> list[int]:
    counts: list[int] = packs.per_pack(packs.lengths).tolist()
    return counts


def _cut(tokens: Iterable[int], most: int) -> Iterator[range]:
    """Yield ranges of consecutive samples with at most ``most`` tokens, or of a single sample."""
    first = held = number = 0
    for number, count in enumerate(tokens, 1):
        if held and held + count > most:
            yield range(first, number - 1)
            first, held = number - 1, 0
        held += count
    yield range(first, number)


def unit_of(data: Store | View | Mixture, format_name: str) -> str:
    """Return what a record of a format holds when nothing is packed: ``rows`` or ``groups``."""
    view = data.view if isinstance(data, Mixture) else as_view(data)
    return "groups" if view.has_groups and format_name in TRAINERS else "rows"


def default_name(key: str, format_name: str) -> str:
    """Return the name of an export without ``--out``."""
    packed = ".packed" if format_name == "packed-parquet" else ""
    return key[:12] + packed + SUFFIXES.get(format_name, f"-{format_name}")
