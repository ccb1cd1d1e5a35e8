"""Expand the image tokens of rendered texts, and find the images again in the encoded tokens.

The reference is the user's processor with real pixels. The fast engine is the *computed* expansion
from image headers. The first row with images of each slice and a sample of the others must have
exactly the ids that the processor gives. After one difference, the processor expands every text of
the run, and texts whose ids still differ are rejected.
"""

from __future__ import annotations

import bisect
import functools
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokenmill.build.referenced import Digests, ReferencedFiles, digest_of
from tokenmill.chat import Rendering
from tokenmill.chat.images import Image, MediaTokens, Place
from tokenmill.errors import RowError, SourceChanged
from tokenmill.media import (
    Expanded,
    ExpansionMismatch,
    ImageExpansion,
    ImageFacts,
    Processor,
    Reference,
    RowExpansion,
    Size,
    reference_of,
)
from tokenmill.sources.block import Block
from tokenmill.store.columns import MediaColumns
from tokenmill.tokenizers.encoded import Encoded, starts_of

COMPUTED, BY_PROCESSOR = "computed", "processor"
AUDIT_PROBED_ONE_IN = 128  # rows whose expansion was probed with blank images
# Rows whose expansion the processor computed from sizes, which is already proven. Running the
# processor costs as much as a hundred rows: one in 128 would take half of a build's time.
AUDIT_COMPUTED_ONE_IN = 1024
_MAX_FOLDED = 128  # expansions; one of a large image has 200 kB
_json = msgspec.json.Encoder()


class FoldedRun(NamedTuple):
    """A run of one token in a folded text."""

    at: int  # the character where its one token begins
    token: int
    length: int  # tokens


class Folding:
    """Replace each run of one token by a single token.

    An expansion is mostly one token, repeated thousands of times. If the tokenizer splits off that
    token first (`Processor.repeatable`), the text around it is encoded the same for any number of
    repetitions.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        self._pattern = re.compile(rf"({'|'.join(map(re.escape, tokens))})\1+")
        self._known = functools.lru_cache(_MAX_FOLDED)(self._fold)

    def fold(self, text: str) -> tuple[str, list[FoldedRun]]:
        return self._known(text) if self._tokens else (text, [])

    def _fold(self, text: str) -> tuple[str, list[FoldedRun]]:
        folded, runs, last = "", [], 0
        for found in self._pattern.finditer(text):
            token = found[1]
            folded += text[last : found.start()]
            runs.append(FoldedRun(len(folded), self._tokens[token], len(found[0]) // len(token)))
            folded += token
            last = found.end()
        return folded + text[last:], runs


def unfolded(encoded: Encoded, folded: Iterable[tuple[int, int, FoldedRun]]) -> Encoded | None:
    """Return the batch with runs at full length; None if another token is at a run's position.

    ``folded`` has for each run its row and the index of the turn end at its start.
    """
    found = list(folded)
    if not found:
        return encoded
    rows, marks, runs = zip(*found, strict=True)
    _, tokens, lengths = zip(*runs, strict=True)
    numbers = np.asarray(rows)
    ends = encoded.turn_ends[encoded.turn_starts[numbers] + np.asarray(marks)]
    places = encoded.row_starts[numbers] + ends
    if (places >= encoded.row_starts[numbers + 1]).any():
        return None
    if not np.array_equal(encoded.ids[places], tokens):
        return None
    repeats = np.ones(len(encoded.ids), np.int64)
    repeats[places] = lengths
    return encoded.repeated(repeats)


class TextMedia(NamedTuple):
    detail: str  # JSON text of `tokenmill.store.record.Media`
    images: int
    patches: int  # for the cost in a vision model


_NONE = TextMedia("[]", 0, 0)


@dataclass(slots=True)
class _ExpandedText:
    """A text with images, between expansion and encoding."""

    rendered: str  # before expansion
    images: Sequence[Image]
    references: list[Reference]
    facts: list[ImageFacts]
    expansion: RowExpansion
    computed: bool  # whether the processor computed it from the sizes
    starts: list[int]  # of expansions, as indices into the marks that were encoded
    stops: list[int]
    runs: Sequence[FoldedRun]
    run_starts: list[int]


@dataclass(slots=True)
class Expansion:
    """Expanded texts of a rendering, with their spans and turn ends."""

    texts: list[str]
    spans: list[Any]
    marks: list[Sequence[int]]
    shown: dict[int, _ExpandedText] = field(default_factory=dict)
    rejected: dict[int, RowError] = field(default_factory=dict)


class Expander:
    """Expands the texts of blocks, `COMPUTED` or `BY_PROCESSOR` (the reference)."""

    def __init__(
        self,
        processor: Processor,
        tokens: MediaTokens,
        media_token_ids: Sequence[int],
        referenced: ReferencedFiles,
    ) -> None:
        self._processor = processor
        self.tokens = tokens
        self._media_ids = np.asarray(sorted(media_token_ids), np.int32)
        self.images = referenced.images
        self._referenced = referenced
        self.engine = COMPUTED
        self._block: Block | None = None
        self._digests: Digests = {}
        self.engine_seconds = 0.0

    @functools.cached_property
    def _folding(self) -> Folding:  # not needed without images
        return Folding(self._processor.repeatable if self.engine == COMPUTED else {})

    def use_reference(self) -> None:
        """Expand with the processor from now on."""
        self._processor.disable_fast_path()
        self.engine, self._folding = BY_PROCESSOR, Folding({})

    def begin(self, block: Block, expected: str) -> None:
        """Begin a block whose images have the digest ``expected``; else raise `SourceChanged`."""
        self._block, self._digests = block, self._referenced.of(block)
        if digest_of(self._digests) != expected:
            raise SourceChanged(
                "an image of these rows changed during the build; run the command again",
                path=block.path,
                row=block.first_row,
            )

    # Before encoding

    def expand(self, rendering: Rendering) -> Expansion:
        """Expand texts as the processor does, and move their spans and turn ends."""
        expansions = Expansion(list(rendering.texts), list(rendering.spans), list(rendering.ends))
        for number, text in enumerate(rendering.texts):
            images = rendering.images.get(number, ())
            if not images and self._processor.image_token not in text:
                continue
            try:
                self._expand(expansions, number, text, images)
            except RowError as error:
                expansions.rejected[number] = error
                expansions.texts[number] = ""
                expansions.spans[number] = []
                expansions.marks[number] = [0] * len(expansions.marks[number])
        return expansions

    def _expand(
        self, expansions: Expansion, number: int, text: str, images: Sequence[Image]
    ) -> None:
        references = [reference_of(image.value) for image in images]
        facts = [self._facts(reference) for reference in references]
        sizes = self._sizes(number, references, facts)
        expansion, computed = RowExpansion(), False
        if self.engine == BY_PROCESSOR and images:
            expansion = self._processor.expansion_of(self._images(number, references))
        elif images:
            expansion, computed = self._processor.expansion_for(sizes)
        folded = [self._folding.fold(image.text) for image in expansion.images]
        shorter = RowExpansion(tuple(ImageExpansion(short) for short, _ in folded))
        expanded = self._processor.expand(text, sizes, shorter)
        runs = [
            run._replace(at=start + run.at)
            for (start, _), (_, own) in zip(expanded.pieces, folded, strict=True)
            for run in own
        ]
        move = _PositionMap(text, self._processor.image_token, expanded)
        spans, ends = expansions.spans[number], expansions.marks[number]
        expansions.texts[number] = expanded.text
        if spans is not None:
            expansions.spans[number] = [(move(start), move(stop)) for start, stop in spans]
        marks, (_, starts, stops, run_starts) = _merged(
            [move(end) for end in ends],
            [start for start, _ in expanded.pieces],
            [stop for _, stop in expanded.pieces],
            [run.at for run in runs],
        )
        expansions.marks[number] = marks
        expansions.shown[number] = _ExpandedText(
            text, images, references, facts, expansion, computed, starts, stops, runs, run_starts
        )

    def _read(self, reference: Reference) -> bytes:
        if reference.kind == "inline":
            return self.images.read(reference)
        assert self._block is not None
        return self._referenced.read(reference, self._block, self._digests)

    def _facts(self, reference: Reference) -> ImageFacts:
        # Reading a referenced image compares its digest.
        digest = None if reference.kind == "inline" else self._digests.get(reference.text())
        return self.images.facts(self._read(reference), reference.name, digest)

    def open(self, reference: Reference) -> Any:
        return self.images.open(self._read(reference), reference.name)

    # The images of a text as they reach the processor.

    def _sizes(
        self, number: int, references: Sequence[Reference], facts: Sequence[ImageFacts]
    ) -> list[Size]:
        return [(one.width, one.height) for one in facts]

    def _images(self, number: int, references: Sequence[Reference]) -> list[Any]:
        return [self.open(reference) for reference in references]

    # After encoding

    def resolve_spans(
        self,
        expansions: Expansion,
        encoded: Encoded,
        digests: NDArray[np.uint64],
        notes: Counter[str],
    ) -> tuple[Encoded, dict[int, TextMedia]]:
        """Return the batch with its own turn ends and no image trained, and each text's images.

        The turn ends of `encoded` are the marks of `made`. Some rows, chosen by `digests`, are
        compared with the processor, which may raise `ExpansionMismatch`.
        """
        gone = {number for number, _ in encoded.rejected} | set(expansions.rejected)
        encoded.mask[np.isin(encoded.ids, self._media_ids)] = 0  # while runs are short
        folded = (
            (number, mark, run)
            for number, shown in expansions.shown.items()
            if number not in gone
            for mark, run in zip(shown.run_starts, shown.runs, strict=True)
        )
        whole = unfolded(encoded, folded)
        if whole is None:
            notes["mismatches"] += 1
            raise ExpansionMismatch("a run of one token was encoded as something else")
        encoded, mask = whole, whole.mask
        refused = dict(expansions.rejected)
        kept_marks = np.ones(len(encoded.turn_ends), bool)
        media: dict[int, TextMedia] = {}
        first = True
        first_marks, first_tokens = encoded.turn_starts.tolist(), encoded.row_starts.tolist()
        not_ends: list[int] = []
        for number, shown in expansions.shown.items():
            if number in gone:
                continue
            at = first_marks[number]
            marks = encoded.turn_ends[at : first_marks[number + 1]].tolist()
            not_ends += [at + mark for mark in (*shown.starts, *shown.stops, *shown.run_starts)]
            if first or self._is_audited(shown, int(digests[number])):
                first = False
                notes["audited"] += 1
                try:
                    images = self._images(number, shown.references)
                except RowError as error:  # the header is valid, but the pixels are not
                    refused[number] = error
                    continue
                difference = self._difference(shown, images, encoded.row(number)[0])
                if difference and self.engine == COMPUTED:
                    notes["mismatches"] += 1
                    raise ExpansionMismatch(difference)
                if difference:
                    refused[number] = RowError(difference, reason="mask_unproven")
                    continue
            starts = [marks[mark] for mark in shown.starts]
            stops = [marks[mark] for mark in shown.stops]
            row = first_tokens[number]
            for start, stop in zip(starts, stops, strict=True):
                mask[row + start : row + stop] = 0
            media[number] = self._columns(shown, starts, stops)
            notes["images"] += len(shown.images)
        kept_marks[not_ends] = False
        rows_of_marks = np.repeat(np.arange(len(encoded)), np.diff(encoded.turn_starts))
        turns = np.bincount(rows_of_marks[kept_marks], minlength=len(encoded))
        encoded = replace(
            encoded,
            mask=mask,
            turn_ends=encoded.turn_ends[kept_marks],
            turn_starts=starts_of(turns),
        )
        if refused:
            encoded = encoded.with_rejected({**refused, **dict(encoded.rejected)})
        return encoded, media

    def _is_audited(self, shown: _ExpandedText, digest: int) -> bool:
        one_in = AUDIT_COMPUTED_ONE_IN if shown.computed else AUDIT_PROBED_ONE_IN
        return self.engine != COMPUTED or digest % one_in == 0

    def _difference(self, shown: _ExpandedText, images: list[Any], ids: NDArray[np.int32]) -> str:
        """Return how the processor's ids of a row differ; an empty string if they are equal."""
        try:
            expected = np.asarray(self._processor.reference(shown.rendered, images).ids, np.int64)
        except RowError as error:
            return error.message
        if np.array_equal(expected, ids):
            return ""
        return f"the processor gives {len(expected)} tokens for this row, expected {len(ids)}"

    def _columns(self, shown: _ExpandedText, starts: list[int], stops: list[int]) -> TextMedia:
        detail = [
            [
                "image",
                _stored(reference, image.place),
                facts.digest,
                facts.width,
                facts.height,
                start,
                stop - start,
                answer.grid,
            ]
            for image, reference, facts, start, stop, answer in zip(
                shown.images,
                shown.references,
                shown.facts,
                starts,
                stops,
                shown.expansion.images,
                strict=True,
            )
        ]
        return TextMedia(_json.encode(detail).decode(), len(detail), shown.expansion.patches)


def media_columns(media: Mapping[int, TextMedia], kept: NDArray[np.int64]) -> MediaColumns | None:
    found = [media.get(number, _NONE) for number in kept.tolist()]
    if not any(one.images for one in found):
        return None
    return MediaColumns(
        [one.detail for one in found],
        np.array([one.images for one in found], np.int32),
        np.array([one.patches for one in found], np.int32),
    )


class _PositionMap:
    """Maps positions in a rendered text to positions in the expanded one.

    `RowError` if the expansion changed more than the image tokens.
    """

    def __init__(self, text: str, token: str, expanded: Expanded) -> None:
        self._ends: list[int] = []
        self._gains: list[int] = [0]
        at = gained = 0
        for start, stop in expanded.pieces:
            at = text.index(token, at)
            if start != at + gained:
                raise RowError("the image expansion moved other text", reason="mask_unproven")
            at += len(token)
            gained += stop - start - len(token)
            self._ends.append(at)
            self._gains.append(gained)

    def __call__(self, place: int) -> int:
        return place + self._gains[bisect.bisect_right(self._ends, place)]


def _merged(*lists: list[int]) -> tuple[list[int], list[list[int]]]:
    """Merge sorted positions; also return the index of each position in the result."""
    flat = [(place, owner) for owner, places in enumerate(lists) for place in places]
    flat.sort(key=operator.itemgetter(0))  # stable: equal positions keep the order of the lists
    where: list[list[int]] = [[] for _ in lists]
    for number, (_, owner) in enumerate(flat):
        where[owner].append(number)
    return [place for place, _ in flat], where


def _stored(reference: Reference, place: Place) -> str:
    """Return a reference for the store: as in the row, or a pointer to an inline image."""
    if reference.kind == "inline":
        return "#/" + "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in place)
    detail = reference.url or reference.path
    if reference.member:
        detail = f"{reference.path}::{reference.member}"
    try:
        if not detail.startswith(("#/", "{")) and reference_of(detail) == reference:
            return detail
    except RowError:
        pass
    return reference.text()
