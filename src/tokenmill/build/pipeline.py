"""Turn the rows of one block into the columns of one slice, without a length limit.

Rows in = rows served + rows rejected, each with a reason.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tokenmill.build.expansion import Expander, TextMedia, media_columns
from tokenmill.build.recipe import Recipe
from tokenmill.chat import GROUPED, Renderer, Rendering
from tokenmill.chat.images import restore_null_images
from tokenmill.chat.render import GroupFacts
from tokenmill.chat.shapes import row_weight
from tokenmill.errors import RowError
from tokenmill.media import ExpansionMismatch
from tokenmill.sources.block import Block, BlockRows
from tokenmill.store.columns import GroupColumns, SliceColumns, weights_or_none
from tokenmill.store.record import RejectedRow, role_type
from tokenmill.tokenizers.encoded import Encoded, read_tokenized
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.tokenizer import Tokenizer

_DETAIL_CHARS = 300  # a rejection's detail is for a person; a template can raise a whole document
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # parts of one row are not all audited, or none
_UNKNOWN = -1  # label or number of prompt tokens
_json = msgspec.json.Encoder()

Bad = tuple[int, int, RowError]  # a rejected row: number within the block, part, why


class Pipeline:
    """What a worker loads once; `seconds` adds up the time per stage.

    `engine` and `renderer` never change the result. An `expander` is for rows with images.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        engine: str = "auto",
        renderer: str = "auto",
        expander: Expander | None = None,
        *,
        as_text: bool = False,
    ) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.expander = expander
        self.renderer = Renderer(
            recipe.chat_spec(),
            tokenizer.template,
            tokenizer.special_tokens,
            renderer=renderer,
            media=None if expander is None else expander.tokens,
            tokenizer=tokenizer,
            as_text=as_text,
        )
        self.encoder = Encoder(tokenizer, engine)
        self.seconds: dict[str, float] = defaultdict(float)

    def audit_sparsely(self) -> None:
        """Audit no minimum of rows in each call from now on, only those chosen by content."""
        self.renderer.first_audited = self.encoder.min_audit_bytes = 0

    def begin(self, block: Block, rows: BlockRows, images: str) -> None:
        if self.expander is not None:
            restore_null_images(rows.values, rows.columns, self.renderer.spec)
            self.expander.begin(block, images)

    def run(self, rows: BlockRows) -> tuple[SliceColumns, dict[str, Any]]:
        """Render, encode and mask one block; return its columns and each stage's notes."""
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
        return columns, notes

    def encoded(
        self, rendering: Rendering, digests: NDArray[np.uint64]
    ) -> tuple[Encoded, dict[int, TextMedia], dict[str, Any]]:
        if self.expander is None:
            with self._stage("encode", "mask", self.encoder):
                texts = rendering.texts, rendering.spans, rendering.ends
                return self.encoder.encode(*texts, digests, rendering.coded), {}, {}
        notes: Counter[str] = Counter()
        try:
            encoded, media = self._expanded(self.expander, rendering, digests, notes)
        except ExpansionMismatch:
            self.expander.use_reference()
            encoded, media = self._expanded(self.expander, rendering, digests, notes)
        return encoded, media, {"expand": {"expansion": self.expander.engine, **notes}}

    def _expanded(
        self,
        expander: Expander,
        rendering: Rendering,
        digests: NDArray[np.uint64],
        notes: Counter[str],
    ) -> tuple[Encoded, dict[int, TextMedia]]:
        with self._stage("images", "images", expander):
            expansions = expander.expand(rendering)
        with self._stage("encode", "mask", self.encoder):
            encoded = self.encoder.encode(
                expansions.texts, expansions.spans, expansions.marks, digests
            )
        with self._stage("images", "images", expander):
            return expander.resolve_spans(expansions, encoded, digests, notes)

    @contextmanager
    def _stage(self, engine: str, rest: str, step: Renderer | Encoder | Expander) -> Iterator[None]:
        """Add the time of the step's engine to one stage and the remaining time to another."""
        start, before, parsed = time.perf_counter(), step.engine_seconds, self.seconds["parse"]
        try:
            yield
        finally:
            spent = step.engine_seconds - before
            self.seconds[engine] += spent
            counted = spent + self.seconds["parse"] - parsed
            self.seconds[rest] += time.perf_counter() - start - counted

    def _columns(
        self,
        rows: BlockRows,
        digests: NDArray[np.uint64],
        rendering: Rendering,
        encoded: Encoded,
        media: Mapping[int, TextMedia] | None = None,
    ) -> SliceColumns:
        encoded = _whole_groups(_reject_untrained(encoded), rendering.groups)
        bad: list[Bad] = [*rendering.rejected, *_rejections(rendering, encoded)]
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
            extra=self._extra(rows, kept, served),
            source_rows=len(rows.values),
            rows_in=len(rows.values) if has_groups else rows_in,
            rejected=[_rejected_row(rows, entry) for entry in sorted(bad, key=lambda b: b[:2])],
            groups=group_columns(encoded, rendering.groups) if has_groups else None,
            weights=_weights(rendering, encoded),
            media=media_columns(media or {}, kept),
        )

    def _extra(
        self, rows: BlockRows, kept: NDArray[np.int64], served: NDArray[np.int32]
    ) -> dict[str, list[str]]:
        """Extra columns as JSON text; absent is null."""
        extra: dict[str, list[str]] = {name: [] for name in self.recipe.keep_columns}
        for number in served.tolist() if extra else ():
            row = rows.values[number]
            assert isinstance(row, dict)
            for name, texts in extra.items():
                texts.append(_json.encode(row.get(name)).decode())
        return extra


class TokenizedPipeline(Pipeline):
    """The pipeline of ``format="tokens"``: ids and masks are read and checked, nothing is encoded.

    The tokenizer gives the size of the vocabulary. Such rows have no turns.
    """

    def __init__(self, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer
        self.expander = None
        self.seconds = defaultdict(float)

    def audit_sparsely(self) -> None:
        pass  # nothing is rendered or encoded

    def run(self, rows: BlockRows) -> tuple[SliceColumns, dict[str, Any]]:
        start = time.perf_counter()
        values = list(rows.values)
        parsed = time.perf_counter()
        read = Rendering()
        good: list[dict[str, Any]] = []
        for i, row in enumerate(values):
            try:
                if isinstance(row, RowError):
                    raise row
                if (weight := row_weight(row, self.recipe)) != 1:
                    if row.get("loss_weights") is not None:
                        column = self.recipe.column("weight")
                        raise RowError(
                            f"the row has the columns {column!r} and 'loss_weights', of which"
                            " only one may be used"
                        )
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
    if recipe.format == "tokens":
        return TokenizedPipeline(recipe, tokenizer)
    if recipe.format.startswith("rollouts"):
        from tokenmill.build.recorded import RolloutPipeline

        return RolloutPipeline(recipe, tokenizer, engine, renderer)
    return Pipeline(recipe, tokenizer, engine, renderer, expander)


def digests_of(rows: BlockRows) -> NDArray[np.uint64]:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, rows.raw), np.uint64, len(rows.raw))


def _reject_untrained(encoded: Encoded) -> Encoded:
    refused = dict(encoded.rejected)
    for row in np.flatnonzero(encoded.trained == 0).tolist():
        error = RowError("no token of this row would be trained", reason="no_trained_tokens")
        refused.setdefault(row, error)
    return encoded if len(refused) == len(encoded.rejected) else encoded.with_rejected(refused)


def _whole_groups(encoded: Encoded, groups: Mapping[int, GroupFacts]) -> Encoded:
    """Reject the other texts of every group that lost one, all for the first one's reason."""
    refused = dict(encoded.rejected)
    if not refused or not groups:
        return encoded
    for first, facts in groups.items():
        members = range(first, first + len(facts.labels))
        if reason := next((refused[number] for number in members if number in refused), None):
            refused.update(dict.fromkeys(members, reason))
    return encoded.with_rejected(refused)


def _rejections(rendering: Rendering, encoded: Encoded) -> list[Bad]:
    """Return the rejected texts; a group counts once, as its first text."""
    others = {
        number
        for first, facts in rendering.groups.items()
        for number in range(first + 1, first + len(facts.labels))
    }
    return [
        (rendering.source[number], rendering.part[number], error)
        for number, error in encoded.rejected
        if number not in others
    ]


def group_columns(encoded: Encoded, groups: Mapping[int, GroupFacts]) -> GroupColumns:
    """Return the columns of the kept texts; a text of no group is a group of its own."""
    count = len(encoded)
    label = np.full(count, _UNKNOWN, np.int8)
    score = np.full(count, np.nan)
    margin = np.full(count, np.nan)
    prompt_tokens = np.full(count, _UNKNOWN, np.int32)
    gone = {number for number, _ in encoded.rejected}
    for first, facts in groups.items():
        if first in gone:
            continue
        members = slice(first, first + len(facts.labels))
        label[members] = facts.labels
        if facts.scores is not None:
            score[members] = facts.scores
        if facts.margin is not None:
            margin[members] = facts.margin
        if facts.one_prompt:
            prompt_tokens[members] = _shared_prefix(encoded, members.start, members.stop)
    return GroupColumns(label, score, margin, prompt_tokens).take(encoded.kept)


def _shared_prefix(encoded: Encoded, first: int, stop: int) -> int:
    """Return how many tokens all these texts begin with and none trains."""
    base, mask, _ = encoded.row(first)
    shared = int(mask.argmax())
    for number in range(first + 1, stop):
        ids, mask, _ = encoded.row(number)
        shared = min(shared, int(mask.argmax()))
        differs = base[:shared] != ids[:shared]
        if differs.any():
            shared = int(differs.argmax())
    return shared


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
    """Return each token's weight, that of the turn that it begins in; None where all are 1.

    Tokens after the last turn, or in a row without turns, have the last weight.
    """
    if not rendering.weights and not encoded.weights:
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
    for number, of_tokens in encoded.weights.items():
        if number not in gone:
            weights[encoded.row_starts[number] : encoded.row_starts[number + 1]] *= of_tokens
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
