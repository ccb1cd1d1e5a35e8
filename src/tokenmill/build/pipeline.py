"""From the rows of one block to the columns of one slice.

A `Pipeline` holds what a worker loads once: the renderer and the encoder. `run` takes the rows of a
block through them: parsed values → rendered texts with trained spans → ids and mask → length policy
→ `SliceColumns`. Each text is rendered once and encoded once. Whatever a room rejects on the way
keeps its place in the account: rows in = rows served + rows rejected, each with a reason.

`Pipeline.seconds` adds up the time per stage, so that the next bottleneck is visible.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill.build.expansion import (
    Expander,
    TextMedia,
    media_columns,
    whole_media,
)
from tokenmill.build.grouping import group_columns, rejections, whole_groups
from tokenmill.build.proof import ROOMS
from tokenmill.build.recipe import Recipe
from tokenmill.chat import GROUPED, Renderer, Rendering
from tokenmill.chat.shapes import row_weight
from tokenmill.errors import RowError
from tokenmill.media import ExpansionDiffers
from tokenmill.source import Block, BlockRows
from tokenmill.store.columns import SliceColumns, weights_or_none
from tokenmill.store.record import RejectedRow, role_type
from tokenmill.tokenizer import Encoded, Encoder, Tokenizer, apply_length
from tokenmill.tokenizer.tokenized import read_tokenized

_DETAIL_CHARS = 300  # a rejection's detail is for a person; a template can raise a whole document
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # parts of one row are not all audited, or none
_json = msgspec.json.Encoder()

Bad = tuple[int, int, RowError]
"""A rejected row: number within the block, part, why."""


class Pipeline:
    """Everything a worker needs to turn rows into tokens, loaded once.

    Args:
        recipe: What is to be made.
        tokenizer: The tokenizer, loaded.
        engine: Which engine may encode; never changes the result.
        renderer: Which engine may render; never changes the result.
        expander: Puts the processor's expansions in for pictures, where rows may have some.

    Attributes:
        distrusted: Rooms that are left to their reference, because their fast engine differed.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        engine: str = "auto",
        renderer: str = "auto",
        expander: Expander | None = None,
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.expander = expander
        self.renderer = self._new_renderer(renderer)
        self.encoder = Encoder(tokenizer, engine)
        self.distrusted: set[str] = set()
        self.seconds: dict[str, float] = defaultdict(float)

    def _new_renderer(self, renderer: str) -> Renderer:
        template, special_tokens = self.tokenizer.template, self.tokenizer.special_tokens
        media = None if self.expander is None else self.expander.tokens
        return Renderer(
            self.recipe.chat_spec(), template, special_tokens, renderer=renderer, media=media
        )

    def distrust(self, rooms: Iterable[str]) -> None:
        """Leave these rooms to their references from now on."""
        for room in set(rooms) - self.distrusted:
            self.distrusted.add(room)
            if room == "render":
                self.renderer = self._new_renderer(ROOMS[room].reference)
            elif room == "expand":
                if self.expander is not None:
                    self.expander = self.expander.by_reference()
            else:
                self.encoder.engine = self.encoder.reference

    @cached_property
    def by_reference(self) -> Pipeline:
        """The same by the references alone."""
        references = ROOMS["encode"].reference, ROOMS["render"].reference
        expander = None if self.expander is None else self.expander.by_reference()
        return Pipeline(self.recipe, self.tokenizer, *references, expander)

    def begin(self, block: Block, pictures: str) -> None:
        """Take up a block whose rows refer to these pictures."""
        if self.expander is not None:
            self.expander.begin(block, pictures)

    def run(self, rows: BlockRows) -> tuple[SliceColumns, dict[str, Any]]:
        """Render, encode and mask one block; also what the rooms noted on the way."""
        digests = digests_of(rows)
        with self._stage("render", "prove", self.renderer):
            parsed = getattr(rows.values, "seconds", 0.0)  # some are parsed as they are needed
            rendering = self.renderer.render(rows.values, digests.tolist())
            self.seconds["parse"] += getattr(rows.values, "seconds", 0.0) - parsed
        source, part = np.array(rendering.source, np.int32), np.array(rendering.part, np.uint64)
        chosen_by = digests[source] ^ (part * _SPREAD)
        encoded, media, notes = self.encoded(rendering, chosen_by)
        with self._stage("encode", "mask", self.encoder):
            columns = self._columns(rows, digests, rendering, encoded, media)
        notes = {"render": dict(rendering.notes), "encode": dict(encoded.notes), **notes}
        self.distrust(room for room, noted in notes.items() if noted.get("mismatches"))
        return columns, notes

    def encoded(
        self, rendering: Rendering, digests: NDArray[np.uint64]
    ) -> tuple[Encoded, dict[int, TextMedia], dict[str, Any]]:
        """Tokens and masks of a rendering, and what is known of its pictures."""
        if self.expander is None:
            with self._stage("encode", "mask", self.encoder):
                texts = rendering.texts, rendering.spans, rendering.ends
                return self.encoder.encode(*texts, digests), {}, {}
        notes: Counter[str] = Counter()
        try:
            encoded, media = self._expanded(self.expander, rendering, digests, notes)
        except ExpansionDiffers:
            # Out for good: each text of this batch and of every later one is compared.
            self.expander = self.expander.by_reference()
            encoded, media = self._expanded(self.expander, rendering, digests, notes)
        return encoded, media, {"expand": {"expansion": self.expander.engine, **notes}}

    def _expanded(
        self,
        expander: Expander,
        rendering: Rendering,
        digests: NDArray[np.uint64],
        notes: Counter[str],
    ) -> tuple[Encoded, dict[int, TextMedia]]:
        with self._stage("pictures", "pictures", expander):
            made = expander.expand(rendering)
        with self._stage("encode", "mask", self.encoder):
            encoded = self.encoder.encode(made.texts, made.spans, made.marks, digests)
        with self._stage("pictures", "pictures", expander):
            return expander.settle(made, encoded, digests, notes)

    @contextmanager
    def _stage(self, engine: str, rest: str, room: Renderer | Encoder | Expander) -> Iterator[None]:
        """Add the room's own engine's time to one stage and what is around it to another."""
        start, before, parsed = time.perf_counter(), room.engine_seconds, self.seconds["parse"]
        try:
            yield
        finally:
            spent = room.engine_seconds - before
            self.seconds[engine] += spent
            elsewhere = spent + self.seconds["parse"] - parsed
            self.seconds[rest] += time.perf_counter() - start - elsewhere

    def _columns(
        self,
        rows: BlockRows,
        digests: NDArray[np.uint64],
        rendering: Rendering,
        encoded: Encoded,
        media: Mapping[int, TextMedia] | None = None,
    ) -> SliceColumns:
        """Apply the length policy to the texts of a block; the columns of what is kept."""
        media = media or {}
        if self.recipe.overlong == "truncate":
            encoded = whole_media(encoded, media, self.recipe.max_length)
        encoded = apply_length(encoded, self.recipe.max_length, self.recipe.overlong)
        encoded = whole_groups(encoded, rendering.groups)
        bad: list[Bad] = [*rendering.rejected, *rejections(rendering, encoded)]
        kept = encoded.kept
        served = np.array(rendering.source, np.int32)[kept]
        roles, turn_roles = _role_numbers(map(rendering.roles.__getitem__, kept.tolist()))
        has_groups = bool(rendering.groups) or self.recipe.format in GROUPED
        # A row gives one group, kept or rejected; without groups it may give several rows.
        rows_in = len(rendering.source) + len(bad) - len(encoded.rejected)
        return SliceColumns(
            ids=encoded.ids,
            mask=encoded.mask,
            starts=_starts(encoded.row_starts, kept),
            row=served,
            part=np.array(rendering.part, np.int32)[kept],
            line=np.asarray(rows.line, np.int64)[served],
            offset=np.asarray(rows.offset, np.int64)[served],
            raw_length=np.asarray(rows.length, np.int64)[served],
            digest=digests[served],
            turn_ends=encoded.turn_ends,
            turn_roles=turn_roles,
            turn_starts=_starts(encoded.turn_starts, kept),
            roles=roles,
            carried=self._carried(rows, kept, served),
            source_rows=len(rows.values),
            rows_in=len(rows.values) if has_groups else rows_in,
            rejected=[_rejected_row(rows, entry) for entry in sorted(bad, key=lambda b: b[:2])],
            groups=group_columns(encoded, rendering.groups) if has_groups else None,
            weights=_weights(rendering, encoded),
            media=media_columns(media, kept),
        )

    def _carried(
        self, rows: BlockRows, kept: NDArray[np.int64], served: NDArray[np.int32]
    ) -> dict[str, list[str]]:
        """Carried columns as JSON text; absent is null."""
        carried: dict[str, list[str]] = {name: [] for name in self.recipe.carry}
        for number in served.tolist() if carried else ():
            row = rows.values[number]
            assert isinstance(row, dict)
            for name, texts in carried.items():
                texts.append(_json.encode(row.get(name)).decode())
        return carried


class TokenizedPipeline(Pipeline):
    """The pipeline of rows that come as tokens: nothing is rendered, nothing is encoded.

    ``format="tokens"`` is a row format of the ordinary build; only the middle of the pipeline is
    replaced by reading and checking what is there. No engine has a part in it, so there is none to
    distrust. The tokenizer says how large its vocabulary is and how to pad, and shows the tokens to
    people. Which turn a token belongs to is not known, so such rows have no turns.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.expander = None
        self.distrusted = set()
        self.seconds = defaultdict(float)

    @cached_property
    def by_reference(self) -> Pipeline:
        """Reading columns is its own reference."""
        return self

    def run(self, rows: BlockRows) -> tuple[SliceColumns, dict[str, Any]]:
        """Check the ids and masks of one block."""
        start = time.perf_counter()
        values = list(rows.values)
        parsed = time.perf_counter()
        read = Rendering()
        good: list[dict[str, Any]] = []
        for i, row in enumerate(values):
            try:
                if isinstance(row, RowError):
                    raise row
                if (weight := row_weight(row)) != 1:
                    read.weights[len(good)] = [weight]
                read.source.append(i)
                good.append(row)
            except RowError as error:
                read.rejected.append((i, 0, error))
        read.part, read.roles = [0] * len(good), [()] * len(good)
        encoded = read_tokenized(
            good, len(self.tokenizer.table), everything=self.recipe.train_on == "everything"
        )
        columns = self._columns(rows, digests_of(rows), read, encoded)
        self.seconds["parse"] += parsed - start
        self.seconds["check"] += time.perf_counter() - parsed
        return columns, {}


def pipeline_of(
    recipe: Recipe, tokenizer: Tokenizer, engine: str, renderer: str, expander: Expander | None
) -> Pipeline:
    """The pipeline that a recipe's rows need."""
    if recipe.format == "tokens":
        return TokenizedPipeline(recipe, tokenizer)
    if recipe.format == "rollouts":
        from tokenmill.build.recorded import RolloutPipeline

        return RolloutPipeline(recipe, tokenizer, engine, renderer)
    return Pipeline(recipe, tokenizer, engine, renderer, expander)


def digests_of(rows: BlockRows) -> NDArray[np.uint64]:
    """One number per row, made of its bytes."""
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rows.raw), np.uint64, len(rows.raw))


def _starts(starts: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Starts of the kept rows; rejected ones are empty, so dropping theirs moves nothing."""
    return np.append(starts[:-1][kept], starts[-1])


def _role_numbers(
    roles: Iterable[Sequence[str]],
) -> tuple[tuple[str, ...], NDArray[np.signedinteger[Any]]]:
    flat = list(itertools.chain.from_iterable(roles))
    numbers = {role: number for number, role in enumerate(dict.fromkeys(flat))}
    found = np.fromiter(map(numbers.__getitem__, flat), role_type(len(numbers)), len(flat))
    return tuple(numbers), found


def _weights(rendering: Rendering, encoded: Encoded) -> NDArray[np.float32] | None:
    """What each token counts: as much as the turn that it begins in; None where all count 1.

    What stands behind the last turn, or in a row without turns, counts as the last.
    """
    if not rendering.weights:
        return None
    weights = encoded.mask.astype(np.float32)
    gone = {number for number, _ in encoded.rejected}
    for number, of_turns in rendering.weights.items():
        if number in gone:
            continue
        _, _, ends = encoded.row(number)
        own = weights[encoded.row_starts[number] : encoded.row_starts[number + 1]]
        turn = np.searchsorted(ends, np.arange(len(own)), side="right")
        own *= np.asarray(of_turns, np.float32)[np.minimum(turn, len(of_turns) - 1)]
    return weights_or_none(weights, encoded.mask)


def _rejected_row(rows: BlockRows, entry: Bad) -> RejectedRow:
    number, part, error = entry
    return RejectedRow(
        row=number,
        part=part,
        line=int(rows.line[number]),
        offset=int(rows.offset[number]),
        length=int(rows.length[number]),
        reason=error.reason,
        detail=error.message[:_DETAIL_CHARS],
    )
