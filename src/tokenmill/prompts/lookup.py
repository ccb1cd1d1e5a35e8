"""Finding a length index, or having it made.

`find_index` computes the key of what the caller asks for (source by content, tokenizer by what it
does, every row-shaping argument) and opens ``rows/<key>`` if it is there: a *hit*, which writes
nothing and loads neither a tokenizer nor a template engine. Otherwise the blocks of the source
whose parts are missing are measured wherever the executor likes, and the index is assembled from
the parts and published by one rename; `tokenmill.work.blocks` is the engine of that, and lets
processes that measure the same prompts share the blocks.

A cache that cannot be written is no reason to refuse: the index is then made in a temporary
directory that lives as long as the dataset.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import fingerprint
from tokenmill.build.externals import Externals, digest_of
from tokenmill.errors import CacheError, CorruptionError
from tokenmill.files import PrivateDirectory, Staging
from tokenmill.media import ExpansionDiffers
from tokenmill.prompts.lengths import (
    Int32Array,
    LengthIndex,
    Rejection,
    part_key,
    publish_index,
    read_part,
    write_part,
)
from tokenmill.prompts.media import AskedMedia, PromptPictures
from tokenmill.prompts.spec import PromptSpec
from tokenmill.source import Block, Rows
from tokenmill.source.index import Shelf
from tokenmill.tokenizer import IdentityCard, load_copy
from tokenmill.work import Executor
from tokenmill.work.blocks import BlockJob, BlockTask, MissingBlocks, size_of, source_documents
from tokenmill.work.identity import identity_card

if TYPE_CHECKING:
    from tokenmill.prompts.measure import Measurer  # a hit must not pay for engines

logger = logging.getLogger(__name__)

MEASURE = "tokenmill.prompts.measure:open_measurer"
INDEX_VERSION = 1


@dataclass(frozen=True)
class Wanted:
    """What is asked for: arguments that lead to one index, named as in `tokenmill.prepare`.

    Without a tokenizer no token is counted. ``media`` measures prompts with media.
    """

    rows: Rows
    spec: PromptSpec
    tokenizer: Any
    tokenizer_backend: Any = "auto"
    chat_template: Any = None
    trust_remote_code: bool = False
    media: AskedMedia | PromptPictures | None = None

    def shape(self, card: IdentityCard | None) -> dict[str, Any]:
        """Everything but the source that can change a length."""
        identity = None if card is None else dict(card.identity)
        if identity is not None and not self.spec.apply_chat_template:
            # Plain text meets no template, so another template must not make another key.
            identity |= {"template": {}, "special_tokens": {}}
        shape = {"prompts": INDEX_VERSION, "spec": self.spec.document(), "tokenizer": identity}
        if self.media is not None:
            shape["processor"] = self.media.key
        return shape

    def externals(self, root: Path) -> Externals | None:
        """What knows the pictures outside of the rows; None where none are looked at."""
        if not isinstance(self.media, PromptPictures):
            return None
        return Externals(self.media, self.media.pictures, Shelf(root))


@dataclass
class OpenedIndex:
    """An index and how it came to be.

    Attributes:
        index: The index, open.
        hit: Whether it was there already.
        measured: Rows whose prompts were rendered and encoded in this call.
        home: A temporary directory that must outlive the index, if there is one.
    """

    index: LengthIndex
    hit: bool
    measured: int = 0
    home: PrivateDirectory | None = None


def find_index(wanted: Wanted, root: Path, executor: Executor) -> OpenedIndex:
    """Open the index of what is wanted, having it made where it is not there."""
    nameless = wanted.media is not None and wanted.media.key is None
    try:
        if not nameless:  # lengths by a processor that cannot say what it is are nobody else's
            return _find_or_make(wanted, root, executor)
    except CacheError:
        if _writable(root):
            raise
    home = PrivateDirectory("tokenmill-prompts-")
    found = _find_or_make(wanted, home.path, executor)
    found.home = home
    return found


def _writable(root: Path) -> bool:
    try:
        with Staging(root):
            return True
    except CacheError:
        return False


def _find_or_make(wanted: Wanted, root: Path, executor: Executor) -> OpenedIndex:
    card = None
    if wanted.tokenizer is not None:
        card = identity_card(wanted, root, executor)
    shape = wanted.shape(card)
    blocks = wanted.rows.blocks
    document = {**shape, "sources": [one for _, one in source_documents(blocks())]}
    externals = wanted.externals(root)
    if externals is not None:
        digests = (digest_of(externals.of(block)) for block in blocks())
        document["pictures"] = fingerprint.key_of_pieces(digest.encode() for digest in digests)
    place = root / "rows" / fingerprint.key(document)
    if place.is_dir():
        return OpenedIndex(LengthIndex(place, document), hit=True)
    making = _Making(wanted, root, card, shape, externals)
    if wanted.media is None:  # else blocks are measured here: it is an object of this process
        making.measure_missing(BlockJob(executor, root, card))
    serving: dict[str, Any] = {"template": None, "special_tokens": {}}
    if card is not None and wanted.spec.apply_chat_template:
        serving = {"template": card.template, "special_tokens": card.special_tokens}
    try:
        publish_index(root, place, document, serving, making.parts())
    except ExpansionDiffers as difference:
        logger.warning("prompts are measured by the processor itself: %s", difference)
        making.by_processor()
        publish_index(root, place, document, serving, making.parts())
    return OpenedIndex(LengthIndex(place, document), hit=False, measured=making.measured)


class _Making:
    """An index that is being made: the parts of its blocks, then the whole."""

    def __init__(
        self,
        wanted: Wanted,
        root: Path,
        card: IdentityCard | None,
        shape: dict[str, Any],
        externals: Externals | None,
    ) -> None:
        self._wanted = wanted
        self._root = root
        self._card = card
        self._shape = shape
        self._shape_key = fingerprint.key(shape)
        self._externals = externals
        self.measured = 0

    def by_processor(self) -> None:
        """Begin anew, believing nothing that was learned of the processor."""
        assert isinstance(self._wanted.media, PromptPictures)
        self._wanted.media.by_processor = True
        self._shape_key = fingerprint.key({**self._shape, "expansion": "processor"})
        self.measured = 0

    def _key_of(self, block: Block) -> str:
        shape = self._shape_key
        if self._externals is not None:
            digests = self._externals.of(block)
            if digests:
                shape = fingerprint.key([shape, digest_of(digests)])
        return part_key(shape, block.kind, block.digest)

    def _place(self, key: str) -> Path:
        return self._root / "rows" / key

    def measure_missing(self, job: BlockJob) -> None:
        """Return when every block has a part."""
        with Staging(self._root):
            pass  # say that the cache cannot be written before anything is loaded for it
        blocks = self._wanted.rows.blocks
        missing = MissingBlocks(
            blocks,
            sum(1 for _ in blocks()),
            self._key_of,
            lambda task: self._place(task.key).is_dir(),
        )
        setup = job.setup(MEASURE, size_of(missing), spec=self._wanted.spec.travelling())
        job.run(setup, missing, self._take)

    def _take(self, _: BlockTask, result: dict[str, Any]) -> None:
        self.measured += result["measured"]

    def parts(self) -> Iterator[tuple[Int32Array, list[Rejection]]]:
        """Every part in order; one that is not there or cannot be read is measured here."""
        from tokenmill.prompts.measure import measure_block

        before = 0
        for block in self._wanted.rows.blocks():
            place = self._place(self._key_of(block))
            part = read_part(place, block.rows)
            if part is None:
                part = measure_block(self._measurer, block)
                self.measured += block.rows
                write_part(self._root, place, part)
            lengths, said = part
            if len(lengths) != block.rows:
                raise CorruptionError(f"{len(lengths)} lengths for {block.rows} rows", path=place)
            yield lengths, [one._replace(row=one.row + before) for one in said]
            before += block.rows

    @cached_property
    def _measurer(self) -> Measurer:
        from tokenmill.prompts.measure import Measurer

        wanted, card, tokenizer = self._wanted, self._card, None
        if card is not None:
            tokenizer = load_copy(self._root / "tokenizers" / card.key, card.as_dict())
        return Measurer(wanted.spec, tokenizer, media=wanted.media, externals=self._externals)
