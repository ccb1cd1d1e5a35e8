"""The work of a lint worker: render and encode a block as a build would, and check everything.

Workers return findings by rule, and for every row that would be accepted a digest of its rendered
text and a sketch of its body, from which the parent finds duplicates. Candidates for
near-duplicates go to workers again, which open the rows and compare them exactly.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.build.externals import base_of
from tokenmill.build.pipeline import Pipeline
from tokenmill.build.recipe import Recipe
from tokenmill.build.slices import expander_of
from tokenmill.chat import Renderer, Rendering
from tokenmill.chat.render import digest_of
from tokenmill.chat.shapes import AnswerGroup, Conversation, Plain
from tokenmill.chat.thinking import THINKING
from tokenmill.collector import without_collector
from tokenmill.errors import RowError
from tokenmill.report.lint import minhash
from tokenmill.report.lint.checks import (
    ControlText,
    Side,
    argument_texts,
    balance,
    check_images,
    comparisons,
    empty_turns,
    odd_characters,
    side_of,
    sides_of,
    texts_of,
)
from tokenmill.report.lint.rules import Collector, excerpt
from tokenmill.report.lint.template import TemplateCritic
from tokenmill.source import Block, open_rows, read_block
from tokenmill.tokenizer import Encoded
from tokenmill.work.blocks import block_of
from tokenmill.work.identity import load_copy

LINT = "tokenmill.report.lint.linter:open_linter"
COMPARE = "tokenmill.report.lint.linter:open_comparer"
RAW_SHOWN = 200  # bytes of a row that could not be parsed


def open_linter(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that lints one block."""
    linter = Linter(options)

    def lint(payload: dict[str, Any]) -> dict[str, Any]:
        with without_collector():
            return linter.lint(block_of(payload), payload["rows"])

    return lint


def packed(array: np.ndarray[Any, Any]) -> str:
    """Return an array as text."""
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def unpacked(text: str, kind: Any) -> np.ndarray[Any, Any]:
    """Return the array of a text."""
    return np.frombuffer(base64.b64decode(text), kind)


class Linter:
    """Checks rows, which go through the pipeline of a build."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.recipe = Recipe(**options["recipe"])
        self.spec = self.recipe.chat_spec()
        self.rules = frozenset(options["rules"])
        self.tokenizer = load_copy(Path(options["tokenizer"]), options["card"])
        expander = expander_of(options, self.tokenizer, hashed=False)
        engines = options["engine"], options["renderer"]
        self.pipeline = Pipeline(self.recipe, self.tokenizer, *engines, expander)
        self._expander = expander
        self.critic = TemplateCritic(self.renderer)
        # The copy of the tokenizer may flag other tokens as special than the one that was given.
        self._control = ControlText(self._control_tokens(options["card"]["control_tokens"]))
        self._about_tokenizer = self._look_at_tokenizer()

    @property
    def renderer(self) -> Renderer:
        """The current renderer; the pipeline replaces one that failed an audit."""
        return self.pipeline.renderer

    def _control_tokens(self, control_tokens: Sequence[str]) -> set[str]:
        # Thinking tags are the assistant's own words, whatever the tokenizer calls them.
        glue = self.critic.glue()
        tokens = {*control_tokens, *(t for t in self.tokenizer.added_contents if t in glue)}
        return {token for token in tokens if token.strip() and not THINKING.search(token)}

    def _look_at_tokenizer(self) -> dict[str, str]:
        """Return what is wrong with the tokenizer itself, by rule."""
        found, tokenizer = {}, self.tokenizer
        pad, eos, bos = tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id
        name = tokenizer.special_tokens.get("eos_token")
        if pad is not None and pad == eos:
            found["pad_is_eos"] = f"both are {name!r} ({eos})"
        if pad is None and eos is not None:
            found["no_pad_token"] = f"a loader pads with eos, {name!r} ({eos})"
        start = tokenizer.special_tokens.get("bos_token")
        if start and self.critic.glue().startswith(start) and self._adds(bos):
            found["bos_elsewhere"] = f"the template prints {start!r}, and encoding adds it again"
        return {rule: detail for rule, detail in found.items() if rule in self.rules}

    def _adds(self, bos: int | None) -> bool:
        """Return whether the tokenizer itself adds a begin-of-sequence token."""
        import tokenizers

        encoder = tokenizers.Tokenizer.from_buffer(self.tokenizer.data)
        ids = encoder.encode("x", add_special_tokens=True).ids
        return bos is not None and bool(ids) and ids[0] == bos

    def lint(self, block: Block, chosen: list[int] | None) -> dict[str, Any]:
        """Check the rows of one block, or the chosen ones."""
        rows, base = read_block(block), base_of(block)
        self.pipeline.begin(block, "")
        seen = Collector(self.rules)
        numbers = list(range(len(rows.values))) if chosen is None else chosen
        values = {number: rows.values[number] for number in numbers}
        good: list[int] = []
        parsed_rows: dict[int, list[Side]] = {}
        shown: list[tuple[int, int, int]] = []
        for number in numbers:
            value = values[number]
            if isinstance(value, RowError):
                raw = rows.raw[number][:RAW_SHOWN].decode("utf-8", "replace")
                seen.add(number, value.reason, value.message, excerpt(raw))
                continue
            good.append(number)
            if self._expander is not None and isinstance(value, dict):
                images, tokens = self._expander.pictures, self._expander.tokens
                checked = check_images(value, base, images, self.spec, tokens)
                shown += [(number, *digests) for digests in checked.digests]
                for sighting in checked.sightings:
                    seen.add(number, *sighting)
            try:
                parsed = self.renderer.read(value)
            except RowError:
                continue  # rendering reports it below
            parsed_rows[number] = sides_of(parsed)
            self._look_at_content(seen, number, value, parsed)
        rendering = self.renderer.render([values[number] for number in good])
        for place, _, error in rendering.rejected:
            sides = parsed_rows.get(good[place])
            one = sides[0] if sides is not None and len(sides) == 1 else None
            self._look_at_rejected(seen, good[place], one, error)
        sources = [good[place] for place in rendering.source]
        parts = zip(sources, rendering.part, strict=True)
        parsed_texts = [side_of(parsed_rows[number], part) for number, part in parts]
        encoded = self.encode(rendering, parsed_texts)
        self._look_at_accepted(seen, rendering, encoded, sources, parsed_texts)
        return {
            "rows": len(numbers),
            "findings": seen.document(),
            "tokenizer": self._about_tokenizer,
            "balance": balance(rendering, encoded),
            "pictures": packed(np.array(shown, np.uint64).reshape(-1, 3)),
            **self._digests(rendering, encoded, sources, shown),
        }

    def _look_at_content(
        self, seen: Collector, number: int, row: Any, parsed: Side | AnswerGroup
    ) -> None:
        sightings = [*comparisons(parsed)]
        for side in sides_of(parsed):
            sightings += [*odd_characters(texts_of(side)), *empty_turns(side)]
            if isinstance(side, Conversation):
                # Texts and pairs of strings may be rendered already, control tokens and all.
                sightings += self._control.sightings(texts_of(side))
        if isinstance(parsed, Conversation):
            sightings += argument_texts(row, self.spec.messages_key)
        for sighting in dict.fromkeys(sightings):  # a prompt is part of every side
            seen.add(number, *sighting)

    def _look_at_rejected(
        self, seen: Collector, number: int, parsed: Conversation | Plain | None, error: RowError
    ) -> None:
        if error.reason == "bad_media" and seen.has("missing_picture", number):
            return
        sighting = error.reason, error.message, ""
        if isinstance(parsed, Conversation):
            if error.reason == "template_error":
                sighting = self.critic.refusal(parsed, error)
            elif error.reason == "template_drops_content":
                sighting = self.critic.dropped(parsed, error)
            else:
                said = next((text for _, text in texts_of(parsed) if text), "")
                sighting = error.reason, error.message, excerpt(said)
        seen.add(number, *sighting)

    def encode(self, rendering: Rendering, parsed_rows: list[Conversation | Plain]) -> Encoded:
        """Encode texts; the only "turn end" of each is the start of its body."""
        bodies = [
            [_body_start(text, parsed)]
            for text, parsed in zip(rendering.texts, parsed_rows, strict=True)
        ]
        digests = np.fromiter(map(digest_of, rendering.texts), np.uint64, len(bodies))
        return self.pipeline.encoded(replace(rendering, ends=bodies), digests)[0]

    def _look_at_accepted(
        self,
        seen: Collector,
        rendering: Rendering,
        encoded: Encoded,
        sources: list[int],
        parsed_texts: list[Side],
    ) -> None:
        for place, error in encoded.rejected:
            if error.reason != "bad_media" or not seen.has("missing_picture", sources[place]):
                text = rendering.texts[place]
                seen.add(sources[place], error.reason, error.message, excerpt(text))
        unclosed = set(rendering.unclosed)
        trained = encoded.trained
        for place in encoded.kept.tolist():
            number, text = sources[place], rendering.texts[place]
            parsed = parsed_texts[place]
            ids, mask, _ = encoded.row(place)
            if not trained[place]:
                detail = "no token of this row would be trained"
                seen.add(number, "no_trained_tokens", detail, excerpt(text))
            limit = self.recipe.max_length
            if limit is not None and len(ids) > limit:
                detail = f"{len(ids):,} tokens, {len(ids) - limit:,} more than {limit:,}"
                seen.add(number, "overlong", detail, excerpt(text))
            bos = self.tokenizer.bos_id
            if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
                detail = "the first two tokens are begin-of-sequence"
                seen.add(number, "double_bos", detail, excerpt(text))
            if place in unclosed or (trained[place] and self._left_open(parsed, ids, mask)):
                end = rendering.spans[place]
                at = end[-1][1] if end else len(text)
                seen.add(number, "missing_closer", "what is trained just ends", excerpt(text, at))
            if isinstance(parsed, Conversation):
                self._look_at_render(seen, number, parsed, text)

    def _left_open(self, parsed: Conversation | Plain, ids: Any, mask: Any) -> bool:
        """Return whether the last trained token is no control token, unless rendering checks it."""
        if isinstance(parsed, Plain):
            if parsed.shape == "text" or self.recipe.append_eos:
                return False
        elif not self.renderer.reference(parsed.tools).has_generation:
            return False  # the renderer finds each end-of-turn token
        last = int(ids[np.flatnonzero(mask)[-1]])
        return not bool(self.tokenizer.table.is_added[last])

    def _look_at_render(
        self, seen: Collector, number: int, conversation: Conversation, text: str
    ) -> None:
        sightings = [
            self.critic.dropped_tools(conversation, text),
            self.critic.dropped_context(conversation, text),
        ]
        train_on = self.spec.trained(conversation.shape)
        if train_on == "everything" or self.renderer.reference(conversation.tools).has_generation:
            sightings.append(self.critic.dropped_calls(conversation, text))
        if conversation.tools is not None or not conversation.simple:
            sightings.append(self.critic.nulls(conversation))
        if self.spec.expand == "none" and train_on == "all_assistant_messages":
            lost = self.critic.lost_thinking(conversation, text)
            if lost is None and sum(m["role"] == "assistant" for m in conversation.messages) > 1:
                lost = self.critic.differing_history(conversation)
            sightings.append(lost)
        for sighting in sightings:
            if sighting is not None:
                seen.add(number, *sighting)

    def _digests(
        self,
        rendering: Rendering,
        encoded: Encoded,
        sources: list[int],
        shown: list[tuple[int, int, int]],
    ) -> dict[str, Any]:
        """Return numbers, digests and sketches of the accepted rows; of parts, the last counts.

        Groups are equal where all texts are, rows with images where their images are, too. Rows
        with images are no near-duplicates of anything.
        """
        places = {sources[place]: place for place in encoded.kept.tolist()}
        numbers = sorted(places)
        texts = {number: rendering.texts[place] for number, place in places.items()}
        for first, facts in rendering.groups.items():
            members = rendering.texts[first : first + len(facts.labels)]
            texts[sources[first]] = "\0".join(members)
        seen_in: dict[int, str] = {}
        for number, content, _ in shown:
            seen_in[number] = f"{seen_in.get(number, '')}\0{content:x}"
        digests = [digest_of(texts[number] + seen_in.get(number, "")) for number in numbers]
        sketched, hashed = [], []
        if "near_duplicate" in self.rules:
            for number in numbers:
                if number in seen_in:
                    continue
                found = minhash.shingles(body(encoded, places[number]))
                if len(found) >= minhash.MIN_SHINGLES:
                    sketched.append(number)
                    hashed.append(found)
        return {
            "numbers": packed(np.array(numbers, np.int32)),
            "digests": packed(np.array(digests, np.uint64)),
            "sketched": packed(np.array(sketched, np.int32)),
            "sketches": packed(minhash.sketches(hashed)),
        }


def body(encoded: Encoded, place: int) -> np.ndarray[Any, Any]:
    """Return the tokens of a row from its first turn that is no system turn."""
    ids, _, ends = encoded.row(place)
    return ids[int(ends[0]) :]


def _body_start(text: str, parsed: Conversation | Plain) -> int:
    """Return where the content of the first turn that is no system turn begins."""
    if isinstance(parsed, Conversation):
        for message in parsed.messages:
            content = message.get("content")
            if message["role"] in ("system", "developer") or not isinstance(content, str):
                continue
            return max(0, text.find(content.strip())) if content.strip() else 0
    return 0


ROWS_PER_TASK = 256  # rows, each with up to `minhash.ANCHORS` others


def open_comparer(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that compares rows with candidates for their near-duplicates."""
    linter = Linter(options)
    rows = open_rows(list(options["sources"]), cache_dir=options["cache"])

    def compare(payload: dict[str, Any]) -> dict[str, Any]:
        pairs: list[tuple[int, list[int]]] = payload["pairs"]
        wanted = sorted({number for row, others in pairs for number in (row, *others)})
        sets = shingle_sets(linter, rows.batch(wanted))
        known = dict(zip(wanted, sets, strict=True))
        return {"near": [list(found) for found in near_duplicates(pairs, known)]}

    return compare


def near_duplicates(
    pairs: Sequence[tuple[int, list[int]]], known: dict[int, minhash.Hashes]
) -> Iterator[tuple[int, int, float]]:
    """Yield row, its first near-duplicate, and their Jaccard index."""
    for row, others in pairs:
        for other in others:
            index = minhash.jaccard(known[row], known[other])
            if index >= minhash.THRESHOLD:
                yield row, other, round(index, 4)
                break


def shingle_sets(linter: Linter, values: Sequence[dict[str, Any]]) -> list[minhash.Hashes]:
    """Return each row's distinct shingles; rejected rows have none."""
    rendering = linter.renderer.render(values)
    parsed_rows = [
        side_of(sides_of(linter.renderer.read(values[place])), part)
        for place, part in zip(rendering.source, rendering.part, strict=True)
    ]
    encoded = linter.encode(rendering, parsed_rows)
    sets = [np.zeros(0, np.uint64)] * len(values)
    for place in encoded.kept.tolist():  # of a row's parts the last counts, as before
        sets[rendering.source[place]] = np.unique(minhash.shingles(body(encoded, place)))
    return sets
