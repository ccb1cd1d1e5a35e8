"""Token counts of RL prompts: one number per source row, measured once and mapped.

Each block of the source has its own length index, keyed by its content; the index of the source is
assembled from these. So only new blocks of an appended file are measured, a killed run continues,
processes share the work, and a damaged block is measured again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill._core import fingerprint
from tokenmill._core.artifact import ArtifactKind
from tokenmill._core.collector import without_collector
from tokenmill._core.process import PrivateDirectory
from tokenmill._core.publish import Staging
from tokenmill.build.blocks import (
    BlockJob,
    BlockTask,
    MissingBlocks,
    block_of,
    missing_columns,
    size_of,
    source_documents,
)
from tokenmill.build.executors import wait_for_first_rank_s
from tokenmill.build.identity import identify_tokenizer
from tokenmill.build.processor import TokenizerOf
from tokenmill.build.progress import Progress
from tokenmill.build.tasks import Executor
from tokenmill.data.prompt_rows import PromptMaker, PromptSpec, Shaped, shape_row
from tokenmill.errors import CacheError, CorruptionError, NonDeterminismError, RowError, UsageError
from tokenmill.media import ExpansionMismatch
from tokenmill.sources.block import Block, read_block
from tokenmill.sources.rows import Rows
from tokenmill.tokenizers.cache import load_copy
from tokenmill.tokenizers.identity import TokenizerFingerprint

if TYPE_CHECKING:
    from tokenmill.data.prompt_media import ProcessorMedia

logger = logging.getLogger(__name__)

LENGTHS, REJECTIONS = "lengths.bin", "rejected.jsonl"
REJECTED = -1  # the row is not a prompt
NO_LENGTH = -2  # not counted and never filtered: no template, or no tokenizer
VERSION = 2
PAGE = 4096  # rows per running count of `Kept`
MEASURE = "tokenmill.data.prompt_lengths:open_measurer"

_DETAIL_CHARS = 300  # a template can raise a long message
_NOT_SERVED: Mapping[str, Any] = {"template": None, "special_tokens": {}}
_KIND = ArtifactKind("length index", "prompts.json", (LENGTHS, REJECTIONS))

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Rejection(NamedTuple):
    row: int  # number in the source or block
    reason: str
    detail: str


Measured = tuple[Int32Array, Iterable[Rejection]]  # of consecutive rows


class _Record(msgspec.Struct, frozen=True):
    document: dict[str, Any]
    rows: int
    rejected: dict[str, int]
    checksums: dict[str, str]
    template: str | dict[str, str] | None
    special_tokens: dict[str, str]


class LengthIndex:
    """An opened and verified length index of a source or of one block.

    It is the checksummed directory ``rows/<key>/``: ``lengths.bin`` (little-endian int32 per row of
    the source: a number of tokens, `REJECTED`, or `NO_LENGTH`), ``rejected.jsonl`` (every row that
    is not a prompt) and ``prompts.json`` (the key document, counts, checksums, and the chat
    template, so that serving needs no tokenizer). Without ``document``, the expected key document
    is that of the directory's name.
    """

    hit = True  # False where this process has built it
    measured = 0  # rows that were rendered and encoded
    private: PrivateDirectory | None = None  # its directory, if the cache cannot be written

    def __init__(self, directory: Path, document: Any = None) -> None:
        self.directory = directory
        self._artifact = artifact = _KIND.open(directory)
        record = artifact.convert(_Record)
        if document is not None:
            artifact.require_document(document)
        elif fingerprint.key(record.document) != directory.name:
            raise artifact.corruption_error("this is the index of other rows")
        checksums = record.checksums
        self.lengths: Int32Array = artifact.array(
            LENGTHS, "<i4", record.rows, checksums.get(LENGTHS, "")
        )
        artifact.require(REJECTIONS, checksum=checksums.get(REJECTIONS, ""))
        self.rows = record.rows
        self.rejected = record.rejected  # counts by reason
        self.template = record.template
        self.special_tokens = record.special_tokens

    def rejections(self) -> Iterator[Rejection]:
        try:
            with open(self.directory / REJECTIONS, "rb") as lines:
                for line in lines:
                    yield Rejection(*msgspec.json.decode(line))
        except (OSError, msgspec.MsgspecError, TypeError) as error:
            raise self._artifact.corruption_error(
                f"cannot be read ({error})", REJECTIONS
            ) from error


def publish_lengths(
    root: Path, document: Any, parts: Iterable[Measured], serving: Mapping[str, Any] = _NOT_SERVED
) -> Path:
    """Publish the length index of a document, unless an equal one exists; return its path."""
    place = root / "rows" / fingerprint.key(document)
    counts: dict[str, int] = {}
    rows = 0
    with _KIND.stage(root) as draft:
        with draft.open(LENGTHS) as lengths, draft.open(REJECTIONS) as rejected:
            for part, rejections in parts:
                for rejection in rejections:
                    counts[rejection.reason] = counts.get(rejection.reason, 0) + 1
                    numbered = rejection._replace(row=rows + rejection.row)
                    rejected.write(fingerprint.canonical(list(numbered)) + b"\n")
                rows += len(part)
                lengths.write(part.astype("<i4").data)
        record = {
            "document": document,
            "rows": rows,
            "rejected": dict(sorted(counts.items())),
            "checksums": draft.checksums,
            **serving,
        }
        if not draft.publish(place, record, is_intact=lambda: not _is_damaged(place, document)):
            try:
                theirs = _KIND.open(place).convert(_Record).checksums
            except CacheError:  # not readable by this user
                return place
            if theirs != draft.checksums:
                raise NonDeterminismError(
                    "another process measured different lengths for the same prompts", path=place
                )
    return place


def _is_damaged(place: Path, document: Any) -> bool:
    try:
        LengthIndex(place, document)
    except CorruptionError:
        return True
    except CacheError:
        return False
    return False


# Measuring


class Measurer:
    """Measures prompts; without a tokenizer it only finds rows that are not prompts."""

    def __init__(
        self,
        spec: PromptSpec,
        tokenizer: Any,
        engine: str = "auto",
        media: ProcessorMedia | None = None,
    ) -> None:
        from tokenmill.tokenizers.encoder import Encoder

        self.spec = spec
        self._media = media
        template, special_tokens = None, None
        self._encoder: Encoder | None = None
        if tokenizer is not None:
            template, special_tokens = tokenizer.template, tokenizer.special_tokens
            self._encoder = Encoder(tokenizer, engine)
            if media is not None:
                media.require_own_tokenizer(tokenizer)
        self._maker = PromptMaker(spec, template, special_tokens, tokenizer)

    def measure(self, values: Sequence[dict[str, Any] | RowError]) -> Measured:
        """Measure parsed rows; rejections are numbered within them."""
        lengths = np.full(len(values), REJECTED, np.int32)
        errors: dict[int, RowError] = {}
        shaped: dict[int, Shaped] = {}
        for number, value in enumerate(values):
            try:
                if isinstance(value, RowError):
                    raise value
                shaped[number] = shape_row(value, self.spec)
            except RowError as error:
                errors[number] = error
        texts: dict[int, str] = {}
        with_media: dict[int, tuple[str, Shaped]] = {}
        rendered = self._maker.texts(list(shaped.values()))
        for (number, row), text in zip(shaped.items(), rendered, strict=True):
            has_media = self._media is not None and self._media.is_in(row)
            if isinstance(text, RowError):
                errors[number] = text
            elif isinstance(text, str) and has_media:
                with_media[number] = text, row
            elif isinstance(text, str) and self._encoder is not None:
                texts[number] = text
            else:
                lengths[number] = NO_LENGTH
                if self._media is not None and has_media:
                    try:  # reject the row now, not while a trainer runs
                        self._media.inputs(row)
                    except RowError as error:
                        errors[number] = error
        if self._encoder is not None and texts:
            encoded = self._encoder.encode(list(texts.values()))
            numbers = list(texts)
            lengths[numbers] = encoded.lengths
            errors.update((numbers[place], error) for place, error in encoded.rejected)
        if self._media is not None and with_media:
            found = self._media.measure(list(with_media.values()), self._encoder)
            for number, length in zip(with_media, found, strict=True):
                if isinstance(length, RowError):
                    errors[number] = length
                else:
                    lengths[number] = length
        lengths[list(errors)] = REJECTED
        return lengths, [
            Rejection(number, error.reason, error.message[:_DETAIL_CHARS])
            for number, error in sorted(errors.items())
        ]


def open_measurer(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    card = options["card"]
    tokenizer = None if card is None else load_copy(Path(options["tokenizer"]), card)
    measurer = Measurer(PromptSpec(**options["spec"]), tokenizer, options["engine"])
    root = Path(options["cache"])

    def measure(payload: dict[str, Any]) -> dict[str, Any]:
        block = block_of(payload)
        document = _block_document(options["shape"], block)
        if _open_block(root, document) is not None:
            return {"measured": 0}  # another process has published it
        with without_collector():
            part = measurer.measure(read_block(block).values)
        publish_lengths(root, document, [part])
        return {"measured": block.rows}

    return measure


def _block_document(shape: str, block: Block, images: str = "") -> dict[str, Any]:
    content = {"kind": block.kind, "digest": block.digest, "rows": block.rows}
    return {"block": content, "shape": shape, "images": images}


def _open_block(root: Path, document: dict[str, Any]) -> LengthIndex | None:
    place = root / "rows" / fingerprint.key(document)
    if not place.is_dir():
        return None
    try:
        return LengthIndex(place, document)
    except (CorruptionError, CacheError):
        return None


# Finding


@dataclass(frozen=True)
class LengthRequest:
    """What determines a length index, and its progress. Without a tokenizer nothing is counted."""

    rows: Rows
    spec: PromptSpec
    choice: TokenizerOf
    media: ProcessorMedia | None
    shown: Progress

    def shape(self, card: TokenizerFingerprint | None) -> dict[str, Any]:
        """Return everything except the rows that can change a length."""
        identity = None if card is None else dict(card.identity)
        if identity is not None and not self.spec.apply_chat_template:
            # Plain text needs no template, so the template must not change the key.
            identity |= {"template": {}, "special_tokens": {}}
        shape = {"prompts": VERSION, "spec": self.spec.document(), "tokenizer": identity}
        return shape if self.media is None else {**shape, "processor": self.media.key}


def find_lengths(request: LengthRequest, root: Path, executor: Executor) -> LengthIndex:
    """Open the length index of a request; build it if it is missing.

    A hit writes nothing and loads neither a tokenizer nor a template engine. If the cache cannot be
    written, the index is built in a temporary directory that is removed with it.
    """
    has_key = request.media is None or request.media.key is not None
    try:
        if has_key:  # otherwise no other process could find the index
            return _find_or_build(request, root, executor)
    except CacheError:
        if _is_writable(root):
            raise
    private = PrivateDirectory("tokenmill-prompts-")
    index = _find_or_build(request, private.path, executor)
    index.private = private
    return index


def _is_writable(root: Path) -> bool:
    try:
        with Staging(root):
            return True
    except CacheError:
        return False


def _check_columns(request: LengthRequest) -> None:
    """Check that the first rows have the named columns; a missing optional one is only logged."""
    spec = request.spec
    named = dict.fromkeys((spec.multimodal_keys or {}).values(), "multimodal_keys")
    if not spec.convention:  # trainers name a column of tools by default
        named[spec.tool_key or ""] = "tool_key"
    named |= {spec.label_key or "": "label_key", spec.prompt_key: "prompt_key"}
    missing, columns = missing_columns(request.rows, filter(None, named))
    for name in sorted(missing):
        error = UsageError(
            (named[name], name),
            f" names a column that the first rows do not have; their columns are {columns}",
            path=request.rows.origin(0).path,
        )
        if named[name] in ("prompt_key", "label_key"):
            raise error
        logger.warning("%s", error)


def _find_or_build(request: LengthRequest, root: Path, executor: Executor) -> LengthIndex:
    choice = request.choice
    request.shown.phase("loading the tokenizer")
    card = None if choice.tokenizer is None else identify_tokenizer(choice, root, executor)
    shape = request.shape(card)
    blocks, media = request.rows.blocks, request.media
    document = {**shape, "sources": [one for _, one in source_documents(blocks())]}
    if media is not None:
        document["images"] = fingerprint.key_of_pieces(
            media.digest(block).encode() for block in blocks()
        )
    place = root / "rows" / fingerprint.key(document)
    if place.is_dir():
        return LengthIndex(place, document)
    _check_columns(request)
    request.shown.phase("measuring", total_rows=len(request.rows))
    serving = _NOT_SERVED
    if card is not None and request.spec.apply_chat_template:
        template = None if choice.encoder is not None else card.template
        serving = {"template": template, "special_tokens": card.special_tokens}
    build = _Build(request, root, card, fingerprint.key(shape))
    if media is None:  # else the processor is an object of this process
        build.run(BlockJob(executor, root, card))
    try:
        publish_lengths(root, document, build.parts(), serving)
    except ExpansionMismatch as difference:
        assert media is not None
        logger.warning("prompts are measured with the processor: %s", difference)
        media.by_processor = True
        build = _Build(request, root, card, fingerprint.key({**shape, "expansion": "processor"}))
        publish_lengths(root, document, build.parts(), serving)
    index = LengthIndex(place, document)
    index.hit, index.measured = False, build.measured
    return index


class _Build:
    """Measures the blocks of a request."""

    def __init__(
        self, request: LengthRequest, root: Path, card: TokenizerFingerprint | None, shape: str
    ) -> None:
        self._request = request
        self._root = root
        self._card = card
        self._shape = shape
        self.measured = 0

    def run(self, job: BlockJob) -> None:
        """Measure the missing blocks on an executor."""
        with Staging(self._root):
            pass  # raise CacheError before anything is loaded
        blocks, root = self._request.rows.blocks, self._root
        missing = MissingBlocks(
            blocks,
            sum(1 for _ in blocks()),
            lambda block: fingerprint.key(_block_document(self._shape, block)),
            lambda task: (root / "rows" / task.key).is_dir(),
            wait_s=wait_for_first_rank_s(job.executor),
        )
        spec = self._request.spec.as_dict()
        setup = job.setup(MEASURE, size_of(missing), spec=spec, shape=self._shape)

        def take(task: BlockTask, result: dict[str, Any]) -> None:
            self.measured += result["measured"]
            self._request.shown.add(rows=task.block.rows)

        job.run(setup, missing, take)

    def parts(self) -> Iterator[Measured]:
        """Lengths of every block in order; a missing or damaged one is measured here."""
        media = self._request.media
        for block in self._request.rows.blocks():
            images = "" if media is None else media.digest(block)
            document = _block_document(self._shape, block, images)
            index = _open_block(self._root, document)
            if index is not None:
                yield index.lengths, index.rejections()
                continue
            if media is not None:
                media.begin(block, images)
            part = self._measurer.measure(read_block(block).values)
            self.measured += block.rows
            self._request.shown.add(rows=block.rows)
            publish_lengths(self._root, document, [part])
            yield part

    @cached_property
    def _measurer(self) -> Measurer:
        request, card = self._request, self._card
        tokenizer = None
        if card is not None:
            tokenizer = load_copy(self._root / "tokenizers" / card.key, card.as_dict())
        return Measurer(request.spec, tokenizer, media=request.media)


# Selecting


class Kept:
    """The rows within a limit, found in the mapped lengths without memory per row.

    As in the eager datasets a prompt without a length is never left out, and if the first prompt
    has none, no prompt is.
    """

    def __init__(self, lengths: Int32Array, max_length: int | None) -> None:
        self._lengths = lengths
        self._limit = max_length
        pages = range(0, len(lengths), PAGE)
        if max_length is not None and self._first_length(pages) == NO_LENGTH:
            self._limit = None
        counts = [int(self._within(lengths[at : at + PAGE]).sum()) for at in pages]
        self._before = np.cumsum([0, *counts], dtype=np.int64)
        prompts = sum(int((lengths[at : at + PAGE] != REJECTED).sum()) for at in pages)
        self.overlong = prompts - len(self)

    def _first_length(self, pages: range) -> int:
        for at in pages:
            page = self._lengths[at : at + PAGE]
            if (page != REJECTED).any():
                return int(page[(page != REJECTED).argmax()])
        return REJECTED

    def _within(self, lengths: Int32Array) -> npt.NDArray[np.bool_]:
        within: npt.NDArray[np.bool_] = lengths != REJECTED
        return within if self._limit is None else within & (lengths <= self._limit)

    def __len__(self) -> int:
        return int(self._before[-1])

    def rows(self, numbers: Int64Array) -> Int64Array:
        pages = np.searchsorted(self._before, numbers, side="right") - 1
        found = np.empty(numbers.shape, dtype=np.int64)
        for page in np.unique(pages).tolist():
            here, start = pages == page, page * PAGE
            within = np.flatnonzero(self._within(self._lengths[start : start + PAGE]))
            found[here] = start + within[numbers[here] - self._before[page]]
        return found

    def count_before(self, row: int) -> int:
        row = min(row, len(self._lengths))
        page = row // PAGE
        rest = self._within(self._lengths[page * PAGE : row])
        return int(self._before[page]) + int(np.count_nonzero(rest))

    def overlong_rows(self) -> Int64Array:
        if self._limit is None:
            return np.zeros(0, dtype=np.int64)
        return np.flatnonzero(self._lengths > self._limit)
