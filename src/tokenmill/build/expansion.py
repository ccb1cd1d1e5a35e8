"""Pictures between the renderer and the slice: read, expanded, audited, and found again in tokens.

An `Expander` stands between the two rooms of a pipeline. `expand` looks at the pictures of every
rendered text (headers only), has the processor's expansion put in for each image token, runs of one
token in it folded (`Folding`), and moves the trained spans and turn ends behind it;
`settle` finds in the encoded tokens where each picture lies, takes those tokens out of training,
and has some rows done by the processor itself.

The reference is the user's processor with real pixels. The *learned* expansion is the fast engine
that may stand in for it, and is treated as any other: the first row of each slice with pictures and
some others, by content, must have exactly the ids that the processor gives. Where the processor
computed an expansion from the sizes alone, that is its proof, and the comparison is made besides,
for one row in `AUDIT_COMPUTED_ONE_IN`; an answer for blank pictures is compared for one in
`AUDIT_ASKED_ONE_IN`. One difference, and no text of the run is expanded by what was learned: each
is by the processor, with its own pictures, and rejected where even then the ids are others.

Pictures are read one at a time and let go; nothing of their pixels is kept.
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

from tokenmill.build.externals import Digests, Externals, Unhashed, digest_of
from tokenmill.chat import Rendering
from tokenmill.chat.pictures import MediaTokens, Picture, Place
from tokenmill.errors import RowError, SourceChanged
from tokenmill.media import (
    Answer,
    Answers,
    Expanded,
    ExpansionDiffers,
    PictureFacts,
    Processor,
    Reference,
    Size,
    reference_of,
)
from tokenmill.sources.block import Block
from tokenmill.store.columns import MediaColumns
from tokenmill.tokenizers.encoded import Encoded, starts_of

LEARNED, BY_PROCESSOR = "learned", "processor"
AUDIT_ASKED_ONE_IN = 128  # rows whose expansion was asked with blank pictures, by content
AUDIT_COMPUTED_ONE_IN = 1024
"""Rows whose expansion was computed from sizes, by content. A row of the processor costs as much as
a hundred others and more, so that one in 128 would be half of a preparation's time."""
_MAX_FOLDED = 128  # expansions; one of a large picture has 200 kB
_json = msgspec.json.Encoder()


class FoldedRun(NamedTuple):
    """A run of one token in a folded text."""

    at: int  # the character where its one token begins
    token: int
    length: int  # tokens


class Folding:
    """Leaves one token of each run in a text.

    An expansion is mostly one token, thousands of times over. Where that token is split off before
    a tokenizer looks at the rest of a text (`Processor.repeatable`), the text around it is encoded
    alike however often it occurs.

    Args:
        tokens: Text and id of those that may be folded.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = dict(tokens)
        self._pattern = re.compile(rf"({'|'.join(map(re.escape, tokens))})\1+")
        self._known = functools.lru_cache(_MAX_FOLDED)(self._fold)

    def fold(self, text: str) -> tuple[str, list[FoldedRun]]:
        """A text with one token of each run, and the runs."""
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
    """The batch with its runs at their full length; None where one is not what it should be.

    Args:
        encoded: What the folded texts gave.
        folded: Per run its row, the number of the row's turn end that is where it begins, and it.
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
    """What is known of the images of one text."""

    told: str  # JSON text of `tokenmill.store.record.Media`
    pictures: int
    patches: int  # what they cost a vision model


_NONE = TextMedia("[]", 0, 0)


@dataclass(slots=True)
class _Shown:
    """A text with images on its way."""

    rendered: str  # before expansion
    pictures: Sequence[Picture]
    references: list[Reference]
    facts: list[PictureFacts]
    answers: Answers  # the processor's
    computed: bool  # whether it computed them from the sizes
    starts: list[int]  # of expansions, as indices into the marks that were encoded
    stops: list[int]
    runs: Sequence[FoldedRun]
    run_starts: list[int]


@dataclass(slots=True)
class Expansion:
    """What the encoder is given in place of a rendering's own texts, spans and turn ends."""

    texts: list[str]
    spans: list[Any]
    marks: list[Sequence[int]]
    shown: dict[int, _Shown] = field(default_factory=dict)
    rejected: dict[int, RowError] = field(default_factory=dict)


class Expander:
    """Expands the texts of blocks, by `LEARNED` answers or `BY_PROCESSOR`, the reference."""

    def __init__(
        self,
        processor: Processor,
        tokens: MediaTokens,
        media_token_ids: Sequence[int],
        externals: Externals | Unhashed,
        engine: str = LEARNED,
    ) -> None:
        self._processor = processor
        self.tokens = tokens
        self._media_ids = np.asarray(sorted(media_token_ids), np.int32)
        self.pictures = externals.pictures
        self._externals = externals
        self.engine = engine
        self._block: Block | None = None
        self._digests: Digests = {}
        self.engine_seconds = 0.0

    @functools.cached_property
    def _folding(self) -> Folding:  # the processor is asked when there is a picture
        return Folding(self._processor.repeatable if self.engine == LEARNED else {})

    def by_reference(self) -> Expander:
        """The same by the processor alone."""
        self._processor.distrust()
        ids = self._media_ids.tolist()
        made = Expander(self._processor, self.tokens, ids, self._externals, BY_PROCESSOR)
        made._block, made._digests = self._block, self._digests
        return made

    def begin(self, block: Block, expected: str) -> None:
        """Take up a block, whose pictures must still be those that its key was made of.

        Raises:
            SourceChanged: They are not.
        """
        self._block, self._digests = block, self._externals.of(block)
        if digest_of(self._digests) != expected:
            raise SourceChanged(
                "a picture that its rows refer to changed since the key was made; start again",
                path=block.path,
                row=block.first_row,
            )

    # Before encoding

    def expand(self, rendering: Rendering) -> Expansion:
        """Texts as the processor hands them to its tokenizer, with what moves along."""
        made = Expansion(list(rendering.texts), list(rendering.spans), list(rendering.ends))
        for number, text in enumerate(rendering.texts):
            pictures = rendering.pictures.get(number, ())
            if not pictures and self._processor.image_token not in text:
                continue
            try:
                self._expand(made, number, text, pictures)
            except RowError as error:
                made.rejected[number] = error
                made.texts[number] = ""
                made.spans[number] = []
                made.marks[number] = [0] * len(made.marks[number])
        return made

    def _expand(self, made: Expansion, number: int, text: str, pictures: Sequence[Picture]) -> None:
        references = [reference_of(picture.value) for picture in pictures]
        facts = [self._facts(reference) for reference in references]
        sizes = self._sizes(number, references, facts)
        answers, computed = Answers(), False
        if self.engine == BY_PROCESSOR and pictures:
            answers = self._processor.ask(self._images(number, references))
        elif pictures:
            answers, computed = self._processor.learned(sizes)
        folded = [self._folding.fold(answer.text) for answer in answers.pictures]
        shorter = Answers(tuple(Answer(short) for short, _ in folded))
        expanded = self._processor.expand(text, sizes, shorter)
        runs = [
            run._replace(at=start + run.at)
            for (start, _), (_, own) in zip(expanded.pieces, folded, strict=True)
            for run in own
        ]
        move = _Move(text, self._processor.image_token, expanded)
        spans, ends = made.spans[number], made.marks[number]
        made.texts[number] = expanded.text
        if spans is not None:
            made.spans[number] = [(move(start), move(stop)) for start, stop in spans]
        marks, (_, starts, stops, run_starts) = _merged(
            [move(end) for end in ends],
            [start for start, _ in expanded.pieces],
            [stop for _, stop in expanded.pieces],
            [run.at for run in runs],
        )
        made.marks[number] = marks
        made.shown[number] = _Shown(
            text, pictures, references, facts, answers, computed, starts, stops, runs, run_starts
        )

    def _read(self, reference: Reference) -> bytes:
        if reference.kind == "inline":
            return self.pictures.read(reference)
        assert self._block is not None
        return self._externals.read(reference, self._block, self._digests)

    def _facts(self, reference: Reference) -> PictureFacts:
        # Of a picture outside of the row, reading it has compared the digest.
        digest = None if reference.kind == "inline" else self._digests.get(reference.text())
        return self.pictures.facts(self._read(reference), reference.name, digest)

    def open(self, reference: Reference) -> Any:
        return self.pictures.open(self._read(reference), reference.name)

    # The images of a text as they reach the processor.

    def _sizes(
        self, number: int, references: Sequence[Reference], facts: Sequence[PictureFacts]
    ) -> list[Size]:
        return [(one.width, one.height) for one in facts]

    def _images(self, number: int, references: Sequence[Reference]) -> list[Any]:
        return [self.open(reference) for reference in references]

    # After encoding

    def settle(
        self, made: Expansion, encoded: Encoded, digests: NDArray[np.uint64], notes: Counter[str]
    ) -> tuple[Encoded, dict[int, TextMedia]]:
        """Return the batch with its own turn ends and no image trained, and each text's images.

        The turn ends of `encoded` are the marks of `made`. Some rows, chosen by `digests`, are
        compared with the processor.

        Raises:
            ExpansionDiffers: A learned expansion gave other ids than the processor.
        """
        gone = {number for number, _ in encoded.rejected} | set(made.rejected)
        encoded.mask[np.isin(encoded.ids, self._media_ids)] = 0  # while runs are short
        encoded = self._unfolded(made, encoded, gone, notes)
        refused = dict(made.rejected)
        kept_marks = np.ones(len(encoded.turn_ends), bool)
        mask = encoded.mask
        media: dict[int, TextMedia] = {}
        first = True
        first_marks, first_tokens = encoded.turn_starts.tolist(), encoded.row_starts.tolist()
        not_ends: list[int] = []
        for number, shown in made.shown.items():
            if number in gone:
                continue
            at = first_marks[number]
            marks = encoded.turn_ends[at : first_marks[number + 1]].tolist()
            not_ends += [at + mark for mark in (*shown.starts, *shown.stops, *shown.run_starts)]
            if first or self._is_audited(shown, int(digests[number])):
                first = False
                notes["audited"] += 1
                try:
                    pictures = self._images(number, shown.references)
                except RowError as error:  # whole by its structure, and broken inside
                    refused[number] = error
                    continue
                difference = self._difference(shown, pictures, encoded.row(number)[0])
                if difference and self.engine == LEARNED:
                    notes["mismatches"] += 1
                    raise ExpansionDiffers(difference)
                if difference:
                    refused[number] = RowError(difference, reason="mask_unproven")
                    continue
            starts = [marks[mark] for mark in shown.starts]
            stops = [marks[mark] for mark in shown.stops]
            row = first_tokens[number]
            for start, stop in zip(starts, stops, strict=True):
                mask[row + start : row + stop] = 0
            media[number] = self._columns(shown, starts, stops)
            notes["pictures"] += len(shown.pictures)
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
            encoded = encoded.rejecting({**refused, **dict(encoded.rejected)})
        return encoded, media

    def _unfolded(
        self, made: Expansion, encoded: Encoded, gone: set[int], notes: Counter[str]
    ) -> Encoded:
        whole = unfolded(
            encoded,
            (
                (number, mark, run)
                for number, shown in made.shown.items()
                if number not in gone
                for mark, run in zip(shown.run_starts, shown.runs, strict=True)
            ),
        )
        if whole is None:
            notes["mismatches"] += 1
            raise ExpansionDiffers("a run of one token was encoded as something else")
        return whole

    def _is_audited(self, shown: _Shown, digest: int) -> bool:
        one_in = AUDIT_COMPUTED_ONE_IN if shown.computed else AUDIT_ASKED_ONE_IN
        return self.engine != LEARNED or digest % one_in == 0

    def _difference(self, shown: _Shown, pictures: list[Any], ids: NDArray[np.int32]) -> str:
        """What the processor says otherwise of a row with its real pictures; empty: nothing."""
        try:
            wanted = np.asarray(self._processor.reference(shown.rendered, pictures).ids, np.int64)
        except RowError as error:
            return error.message
        if np.array_equal(wanted, ids):
            return ""
        return f"the processor gives {len(wanted)} tokens for its pictures, these are {len(ids)}"

    def _columns(self, shown: _Shown, starts: list[int], stops: list[int]) -> TextMedia:
        told = [
            [
                "image",
                _stored(reference, picture.place),
                facts.digest,
                facts.width,
                facts.height,
                start,
                stop - start,
                answer.grid,
            ]
            for picture, reference, facts, start, stop, answer in zip(
                shown.pictures,
                shown.references,
                shown.facts,
                starts,
                stops,
                shown.answers.pictures,
                strict=True,
            )
        ]
        return TextMedia(_json.encode(told).decode(), len(told), shown.answers.patches)


def media_columns(media: Mapping[int, TextMedia], kept: NDArray[np.int64]) -> MediaColumns | None:
    """The columns of the kept texts; None where none of them has a picture."""
    found = [media.get(number, _NONE) for number in kept.tolist()]
    if not any(one.pictures for one in found):
        return None
    return MediaColumns(
        [one.told for one in found],
        np.array([one.pictures for one in found], np.int32),
        np.array([one.patches for one in found], np.int32),
    )


class _Move:
    """Where a character of a rendered text is in the expanded one.

    Raises:
        RowError: The expansion changed something else than the image tokens.
    """

    def __init__(self, text: str, token: str, expanded: Expanded) -> None:
        self._ends: list[int] = []
        self._gains: list[int] = [0]
        at = gained = 0
        for start, stop in expanded.pieces:
            at = text.index(token, at)
            if start != at + gained:
                raise RowError("its expansion moved the text around it", reason="mask_unproven")
            at += len(token)
            gained += stop - start - len(token)
            self._ends.append(at)
            self._gains.append(gained)

    def __call__(self, place: int) -> int:
        passed = bisect.bisect_right(self._ends, place)
        return place + self._gains[passed]


def _merged(*lists: list[int]) -> tuple[list[int], list[list[int]]]:
    """Rising places of several lists as one, and where those of each list are in it."""
    flat = [(place, owner) for owner, places in enumerate(lists) for place in places]
    flat.sort(key=operator.itemgetter(0))  # stable: those of one place stay in the lists' order
    where: list[list[int]] = [[] for _ in lists]
    for number, (_, owner) in enumerate(flat):
        where[owner].append(number)
    return [place for place, _ in flat], where


def _stored(reference: Reference, place: Place) -> str:
    """What a store keeps of a reference: as the row says it, or where in the row it is."""
    if reference.kind == "inline":
        return "#/" + "/".join(str(step).replace("~", "~0").replace("/", "~1") for step in place)
    told = reference.url or reference.path
    if reference.member:
        told = f"{reference.path}::{reference.member}"
    try:
        if not told.startswith(("#/", "{")) and reference_of(told) == reference:
            return told
    except RowError:
        pass
    return reference.text()
