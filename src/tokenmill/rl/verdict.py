"""Compare recorded trajectories with the text and mask that the template implies.

docs/guides/rollouts.md describes `CLASSES` and the kinds of findings. If the template rewrites
history, the nearer of the two expected texts counts. Text that the reference would have given a
sampler turn by turn is correct. A trajectory that ends inside a turn was truncated, which is not a
finding. Texts are compared in bytes; masks wherever both texts agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokenmill.chat import ChatSpec
from tokenmill.chat.calls import TOOL_ROLES
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.chat.thinking import REASONING, any_of, cut, thinking_tags
from tokenmill.errors import RowError
from tokenmill.rl.align import Divergence, divergences, same_until
from tokenmill.rl.expected import DecodedIds, Expectations, Expected, Turn, decode_ids
from tokenmill.rl.trajectory import Bits, Trajectory
from tokenmill.tokenizers.tokenizer import Tokenizer

CLASSES = ("equal", "retokenized", "text", "structure")  # from least to most severe
MAX_SHOWN = 60  # bytes of either side that a finding shows
MIN_MARKER = 3  # bytes of a text that is counted to compare turns
MAX_DATE = 16  # bytes of a date that a template prints
_LOST = ("observation_lost", "turn_missing")
_UNKNOWN = 2  # in an expected mask: the texts differ here


class Note(NamedTuple):
    drift: str  # one of `CLASSES`
    kind: str
    turn: int | None  # number of the message
    token: int | None  # the first recorded token concerned
    expected: str
    found: str
    detail: str = ""


@dataclass(slots=True)
class Verdict:
    """Result of checking one trajectory."""

    drift: str | None = None  # the most severe class; None if nothing could be compared
    notes: list[Note] = field(default_factory=list)
    # Role and end in recorded tokens; from the mask if messages are missing or do not match.
    turns: list[tuple[str, int]] = field(default_factory=list)
    truncated: bool = False  # whether it ends inside a turn
    unchecked: str = ""  # why something could not be compared
    differing_bytes: int = 0  # in the texts

    @property
    def is_severe(self) -> bool:
        return self.drift in ("text", "structure")

    @property
    def distance(self) -> tuple[bool, int, int]:
        return self.is_severe, self.differing_bytes, len(self.notes)


class RolloutChecker:
    """Compares trajectories with expected texts; engine and renderer do not change the result."""

    def __init__(
        self, tokenizer: Tokenizer, spec: ChatSpec, engine: str = "auto", renderer: str = "auto"
    ) -> None:
        self.tokenizer = tokenizer
        self.expectations = Expectations(tokenizer, spec, engine, renderer)

    def check(self, trajectories: Sequence[Trajectory]) -> list[Verdict | RowError]:
        """Return a verdict or an error for each trajectory."""
        size = len(self.tokenizer.table)
        with_ids = [trajectory for trajectory in trajectories if _has_known_ids(trajectory, size)]
        with_messages = [trajectory for trajectory in with_ids if trajectory.messages is not None]
        expected = iter(self.expectations.of(with_messages) if with_messages else ())
        canonical = iter(
            self._encode_again(
                [trajectory for trajectory in with_ids if trajectory.messages is None]
            )
        )
        verdicts: list[Verdict | RowError] = []
        for trajectory in trajectories:
            if not _has_known_ids(trajectory, size):
                verdicts.append(self._check_without_ids(trajectory))
            elif trajectory.messages is None:
                verdicts.append(self._check_without_messages(trajectory, next(canonical)))
            else:
                verdicts.append(self._check_with_messages(trajectory, next(expected)))
        return verdicts

    # With messages

    def _check_with_messages(
        self, trajectory: Trajectory, expected: list[Expected] | RowError
    ) -> Verdict | RowError:
        faults = list(_fault_notes(trajectory))
        best: Verdict | None = None
        candidates = () if isinstance(expected, RowError) else expected
        for candidate in itertools.chain(candidates, self._by_reference(trajectory)):
            verdict = self._against(trajectory, candidate)
            if best is None or verdict.distance < best.distance:
                best = verdict
            if not best.is_severe:
                break
        if best is None:
            assert isinstance(expected, RowError)
            return _verdict(faults, trajectory, []) if faults else expected
        if faults:
            masks = {note.kind for note in best.notes}
            best.notes += [note for note in faults if note.kind not in masks]
            best.drift = _worst(best.notes)
        return best

    def _by_reference(self, trajectory: Trajectory) -> Iterator[Expected]:
        """Yield the reference's texts, with and without the last messages that have no answer."""
        messages = list(trajectory.messages or ())
        while messages:
            expected = self.expectations.render_by_reference(
                replace(trajectory, messages=list(messages))
            )
            if expected is not None:
                yield expected
            if messages[-1]["role"] == "assistant":
                break
            messages.pop()

    def _against(self, trajectory: Trajectory, expected: Expected) -> Verdict:
        ids, target = trajectory.ids, expected.decoded
        assert ids is not None
        size = len(ids)
        if np.array_equal(ids, target.ids[:size]):  # nearly always
            starts = target.starts[: size + 1]
            recorded = DecodedIds(ids, starts, target.data[: int(starts[-1])])
        else:
            recorded = decode_ids(self.tokenizer.table, ids)
        return _compare(trajectory, recorded, expected)

    # Without messages: compare with recorded texts and the tokenizer

    def _encode_again(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        decoded = [
            decode_ids(self.tokenizer.table, one.ids) for one in trajectories if one.ids is not None
        ]
        texts = [one.data.decode("utf-8", "replace") for one in decoded]
        encoded = self.expectations.encoder.encode(texts)
        return [(one, encoded.row(number)[0]) for number, one in enumerate(decoded)]

    def _check_without_messages(
        self, trajectory: Trajectory, encoded: tuple[DecodedIds, Any]
    ) -> Verdict:
        recorded, ids = encoded
        notes = list(_fault_notes(trajectory))
        encoded_again = decode_ids(self.tokenizer.table, ids)
        if encoded_again.data == recorded.data:
            whole = Turn("all", 0, len(ids))
            plain = Expected(encoded_again, (whole,), open=True)
            notes += _retokenized(recorded, plain, detail=False)
        notes += self._against_texts(trajectory, recorded)
        verdict = _verdict(notes, trajectory, [])
        verdict.unchecked = "no messages: turns, reasoning and observations cannot be compared"
        return verdict

    def _against_texts(self, trajectory: Trajectory, recorded: DecodedIds) -> Iterator[Note]:
        size = trajectory.prompt_length
        if size is None or not 0 <= size <= len(recorded.ids):
            return
        ids = recorded.ids
        pieces = (("prompt", trajectory.prompt, ids[:size], 0),
                  ("response", trajectory.response, ids[size:], size))  # fmt: skip
        for name, text, part, start in pieces:
            if text is None:
                continue
            forms = [
                self.tokenizer.decode(part, skip_special_tokens=skip) for skip in (False, True)
            ]
            if not any(text.strip() == form.strip() for form in forms):
                form = max(forms, key=lambda form: same_until(text, 0, form, 0))
                shared = same_until(text, 0, form, 0)
                offset = recorded.starts[start] + len(form[:shared].encode())
                yield Note(
                    "text", f"{name}_text", None, recorded.token_at(int(offset)),
                    _shown(text.encode(), len(text[:shared].encode())),
                    _shown(form.encode(), len(form[:shared].encode())),
                    f"the ids of the {name} differ from its text",
                )  # fmt: skip
        yield from self._doubled_prompt(recorded.data[: int(recorded.starts[size])], size)

    def _doubled_prompt(self, prompt: bytes, size: int | None) -> Iterator[Note]:
        text = prompt.decode("utf-8", "replace").rstrip()
        prompt_text = self._generation_prompt()
        ids = self.tokenizer.reference.encode(prompt_text, add_special_tokens=False).ids
        decoded = self.tokenizer.decode(ids, skip_special_tokens=True)
        for form in dict.fromkeys((prompt_text.strip(), decoded.strip())):
            if form and text.endswith(form) and text.removesuffix(form).rstrip().endswith(form):
                token = None if size is None else size - 1
                yield Note("structure", "generation_prompt_doubled", None, token, form, 2 * form)
                return

    def _generation_prompt(self) -> str:
        try:
            reference = self.expectations.renderer.reference()
            messages = [{"role": "user", "content": "Hello."}]
            with_prompt = reference.render(messages, None, add_generation_prompt=True)
            without = reference.render(messages, None)
        except (RowError, ValueError):
            return ""
        return with_prompt[len(without) :] if with_prompt.startswith(without) else ""

    # Without ids

    def _check_without_ids(self, trajectory: Trajectory) -> Verdict | RowError:
        if trajectory.ids is not None:
            table = len(self.tokenizer.table)
            ids = trajectory.ids
            index = int(np.flatnonzero(ids >= table)[0]) if len(ids) else None
            found = "no ids at all" if index is None else str(int(ids[index]))
            note = Note("structure", "id_outside_vocabulary", None, index, f"below {table}", found)
            return Verdict("structure", [note])
        notes = list(self._doubled_prompt((trajectory.prompt or "").encode(), None))
        drift = _worst(notes) if notes else None
        return Verdict(drift, notes, unchecked="no token ids: only texts were recorded")


def _has_known_ids(trajectory: Trajectory, vocabulary: int) -> bool:
    ids = trajectory.ids
    return ids is not None and len(ids) > 0 and int(ids.max()) < vocabulary


def _fault_notes(trajectory: Trajectory) -> Iterator[Note]:
    faults = list(trajectory.faults())
    if not faults:
        faults += trajectory.doubts()
    for fault in faults:
        yield Note("structure", fault.kind, None, fault.token, fault.expected, fault.found)


def _worst(notes: Sequence[Note]) -> str:
    return max((note.drift for note in notes), key=CLASSES.index, default="equal")


def _verdict(notes: list[Note], trajectory: Trajectory, turns: list[tuple[str, int]]) -> Verdict:
    return Verdict(_worst(notes), notes, turns or turns_by_mask(trajectory))


def turns_by_mask(trajectory: Trajectory) -> list[tuple[str, int]]:
    """Return turns from the mask: sampled tokens, and the context around them."""
    if trajectory.ids is None or trajectory.mask is None:
        return []
    if len(trajectory.mask) != len(trajectory.ids) or not len(trajectory.ids):
        return []
    mask = trajectory.mask == 1
    cuts = [*(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [("assistant" if mask[end - 1] else "context", end) for end in cuts]


def _ends(trajectory: Trajectory, expected: Expected, size: int, last: int) -> Iterator[Note]:
    """Yield a note if the last turns are missing from a recording of `size` expected tokens.

    A recording that ends inside a turn was truncated, which is not a finding.
    """
    for turn in expected.turns:
        if turn.sampled is None or not turn.sampled[0] < size < turn.sampled[1]:
            continue
        if not expected.decoded.between(size, turn.sampled[1]).strip():
            size = turn.sampled[1]  # the sampler stopped before the whitespace that ends it
    if size >= expected.required or trajectory.truncated:
        return
    closed = [turn.sampled[1] for turn in expected.turns if turn.sampled is not None]
    before = max((end for end in closed if end <= size), default=0)
    begins = {turn.start for turn in expected.turns}
    begins |= {turn.sampled[0] for turn in expected.turns if turn.sampled is not None}
    # Some templates print whitespace between two turns.
    if size not in begins and expected.decoded.between(before, size).strip():
        if trajectory.stopped:
            shown = _shown(expected.decoded.data, int(expected.decoded.starts[size]))
            yield Note(
                "structure", "turn_cut", expected.turn_at(size), last, shown,
                "the end of the recording", f"finish_reason is {trajectory.finish!r}",
            )  # fmt: skip
        return
    missing_turn = next(
        number
        for number, turn in enumerate(expected.turns)
        if (turn.end if turn.sampled is None else turn.sampled[1]) > size
    )
    role = expected.turns[missing_turn].role
    shown = _shown(expected.decoded.data, int(expected.decoded.starts[size]))
    yield Note("structure", _lost_kind(role), missing_turn, last, shown, "the end of the recording",
               f"the turn of {role}")  # fmt: skip


def _compare(trajectory: Trajectory, recorded: DecodedIds, expected: Expected) -> Verdict:
    target = expected.decoded
    required = int(target.starts[expected.required])
    text = target.data
    if len(recorded.data) <= len(text) and text.startswith(recorded.data):
        differing: list[Divergence] = []
    else:
        if not recorded.data.endswith(text[required:]):
            text = text[:required]
        differing = divergences(text, recorded.data, _turn_starts(trajectory, expected))
    notes: list[Note] = []
    size = len(recorded.data)
    last = len(recorded.ids) - 1
    for diff in differing:
        extra = recorded.data[diff.found_start : diff.found_end]
        rest = recorded.data[diff.found_start :]
        if diff.start >= required and target.data.startswith(rest, diff.start):
            continue  # text after the last turn is optional
        if not extra and diff.found_start == size and diff.end == len(text):
            notes += _ends(trajectory, expected, target.token_at(diff.start), last)
        else:
            notes.append(_divergence_note(trajectory, recorded, expected, diff))
    if notes:
        notes += _order_notes(trajectory, recorded, expected, last)
    if any(note.drift == "structure" for note in notes):
        notes = [*_lost_notes(trajectory, recorded, expected, notes), *notes]
    if not differing and size < required and (trajectory.stopped or size in target.starts):
        notes += _ends(trajectory, expected, target.token_at(size), last)
    same_ids = np.array_equal(recorded.ids, target.ids[: len(recorded.ids)])
    if not differing and not same_ids:
        notes += _retokenized(recorded, expected)
    flags, spans = _expected_mask(recorded, expected, differing, len(text))
    notes += _mask_notes(trajectory, expected, flags, spans)
    verdict = _verdict(notes, trajectory, _recorded_turns(recorded, expected, differing))
    verdict.truncated = size < required and (same_ids or not notes)
    verdict.differing_bytes = sum(
        diff.end - diff.start + diff.found_end - diff.found_start for diff in differing
    )
    return verdict


def _lost_notes(
    trajectory: Trajectory, recorded: DecodedIds, expected: Expected, notes: Sequence[Note]
) -> Iterator[Note]:
    """Yield notes for contents of other roles that are missing and not in a note yet."""
    named = {note.turn for note in notes if note.kind in (*_LOST, "context_text")}
    pairs = zip(trajectory.messages or (), expected.turns, strict=False)
    for number, (message, turn) in enumerate(pairs):
        content = _content(message)
        if number in named or turn.sampled is not None or not content:
            continue
        offset = expected.decoded.data.find(content)
        if offset >= 0 and content not in recorded.data:
            token = next((note.token for note in notes if note.token is not None), None)
            shown = _shown(expected.decoded.data, offset, content)
            kind = _lost_kind(message["role"])
            yield Note("structure", kind, number, token, shown, "not in the recording")


def _lost_kind(role: str) -> str:
    return _LOST[role not in TOOL_ROLES]


def _turn_starts(trajectory: Trajectory, expected: Expected) -> list[int]:
    starts = expected.decoded.starts
    offsets = {0, *(end for _, end in _frames(trajectory.messages or (), expected))}
    for turn in expected.turns:
        offsets |= {int(starts[turn.start]), int(starts[turn.end])}
        if turn.sampled_bytes is not None:
            offsets |= set(turn.sampled_bytes)
    return sorted(offsets)


def _divergence_note(
    trajectory: Trajectory, recorded: DecodedIds, expected: Expected, diff: Divergence
) -> Note:
    target = expected.decoded
    missing = target.data[diff.start : diff.end]
    extra = recorded.data[diff.found_start : diff.found_end]
    token = min(recorded.token_at(diff.found_start), len(recorded.ids) - 1)
    drift, kind, number = _classify(trajectory, recorded, expected, diff)
    role = expected.turns[number].role
    detail = f"{len(missing)} bytes of {role}, {len(extra)} in their place"
    return Note(
        drift, kind, number, token,
        _shown(target.data, diff.start, missing),
        _shown(recorded.data, diff.found_start, extra),
        detail,
    )  # fmt: skip


def _classify(
    trajectory: Trajectory, recorded: DecodedIds, expected: Expected, diff: Divergence
) -> tuple[str, str, int]:
    """Return class, kind and turn of a divergence.

    Only other words inside a message are other text. If text that the template prints around the
    messages is missing, doubled or changed, turns or tools differ.
    """
    starts, data = expected.decoded.starts, expected.decoded.data
    missing = data[diff.start : diff.end]
    extra = recorded.data[diff.found_start : diff.found_end]
    number = expected.turn_at(expected.decoded.token_at(min(diff.start, len(data) - 1)))
    messages = trajectory.messages or []

    def span(turn: Turn) -> tuple[int, int]:
        return int(starts[turn.start]), int(starts[turn.end])

    missing_turns = [
        k
        for k, turn in enumerate(expected.turns)
        if turn.end > turn.start
        and diff.start <= span(turn)[0]
        and data[diff.end : span(turn)[1]].strip() == b""
        and span(turn)[0] < diff.end
    ]
    if missing_turns:
        return "structure", _lost_kind(expected.turns[missing_turns[0]].role), missing_turns[0]
    if not missing.strip():
        sampled = {k: t.sampled_bytes for k, t in enumerate(expected.turns) if t.sampled_bytes}
        for k, (begin, _) in sampled.items():
            header = data[span(expected.turns[k])[0] : begin]
            if header.strip() and header.strip() == extra.strip():
                later = (n for n, (_, end) in sampled.items() if end >= diff.start)
                return "structure", "generation_prompt_doubled", min(later, default=k)
    turn = expected.turns[number]
    message = messages[number] if number < len(messages) else {}
    frames = list(_frames(messages, expected))
    for marker in dict.fromkeys(data[a:b].strip() for a, b in frames if a > 0):
        margin = len(marker) - 1
        around = data[max(0, diff.start - margin) : diff.end + margin]
        found = recorded.data[max(0, diff.found_start - margin) : diff.found_end + margin]
        change = found.count(marker) - around.count(marker)
        if len(marker) >= MIN_MARKER and change:
            return "structure", "turn_unexpected" if change > 0 else "template_text", number
    if extra.strip() or missing.strip():
        is_short = 0 < len(missing) <= MAX_DATE and 0 < len(extra) <= MAX_DATE
        is_sampled = turn.sampled_bytes is not None and (
            0 < span(turn)[0] < diff.end == turn.sampled_bytes[0]  # an opener of the prompt
            or (not missing and turn.sampled_bytes[0] < diff.start < turn.sampled_bytes[1])
        )
        inside = any(a <= diff.start and diff.end <= b for a, b in frames)
        if inside and not is_sampled and not (is_short and number == 0):  # a date is text
            return "structure", "template_text", number
        less, more = sorted((missing.strip(), extra.strip()), key=len)
        if turn.sampled_bytes is None and len(less) > MAX_DATE and less in more:
            return "structure", "template_text", number
    if turn.sampled_bytes is None:
        content = _content(message)
        at = data.find(content, *span(turn)) if content else -1
        lost = min(diff.end, at + len(content)) - max(diff.start, at)
        # Another message in its place may begin or end with the same words.
        is_replaced = content not in extra and lost <= 2 * len(extra.strip())
        is_dropped = _is_inside(content, missing) and 4 * len(extra) < len(content)
        if at >= 0 and 2 * lost >= len(content) and (is_replaced or is_dropped):
            return "structure", _lost_kind(turn.role), number
        return "text", "context_text", number
    begin, end = turn.sampled_bytes
    if diff.end <= begin or (diff.start < begin and diff.end > begin):
        header = data[span(turn)[0] : begin].strip()
        if header and diff.end >= begin and header in data[diff.start : diff.end + 1].strip():
            return "structure", "generation_prompt_missing", number
        return "text", "context_text", number
    if diff.start >= end and extra.strip():
        return "structure", "turn_unexpected", number
    if diff.start >= end:
        return "text", "context_text", number
    if any(_is_inside(thought, missing) and thought not in extra for thought in _thoughts(message)):
        return "structure", "thought_dropped", number
    return "text", "sampled_text", number


def _frames(messages: Sequence[dict[str, Any]], expected: Expected) -> Iterator[tuple[int, int]]:
    """Yield the spans that a template prints around contents; after calls, none is known."""
    data, starts = expected.decoded.data, expected.decoded.starts
    for message, turn in zip(messages, expected.turns, strict=False):
        begin, end = int(starts[turn.start]), int(starts[turn.end])
        content = _content(message)
        at = data.find(content, begin, end) if content else -1
        if turn.sampled_bytes is not None:
            yield begin or -1, turn.sampled_bytes[0]
        elif at >= 0:
            yield begin or -1, at
        if at >= 0 and not message.get("tool_calls"):
            yield at + len(content), end


def _order_notes(
    trajectory: Trajectory, recorded: DecodedIds, expected: Expected, token: int
) -> Iterator[Note]:
    """Yield a note for each content that comes before the one that it should follow."""
    texts = expected.decoded.data, recorded.data
    found = [
        (texts[0].find(content), texts[1].find(content), number, content)
        for number, message in enumerate(trajectory.messages or ())
        if message["role"] != "assistant" and len(content := _content(message)) >= MIN_MARKER
        if all(text.count(content) == 1 for text in texts)
    ]
    for (_, before, _, _), (_, after, number, content) in itertools.pairwise(sorted(found)):
        if after < before:
            shown = _shown(texts[1], after, content)
            yield Note("structure", "turn_order", number, recorded.token_at(after), shown, shown,
                       "the recording has it before the message that it follows")  # fmt: skip


def _is_inside(words: bytes, missing: bytes) -> bool:
    """Whether words are missing, except for a few bytes at either end."""
    if words in missing:
        return True
    margin = max(4, len(words) // 8)
    return len(words) > 2 * margin and words[margin:-margin] in missing


def _content(message: dict[str, Any]) -> bytes:
    content = message.get("content")
    return content.strip().encode() if isinstance(content, str) else b""


def _thoughts(message: dict[str, Any]) -> list[bytes]:
    thoughts = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    content = message.get("content")
    if isinstance(content, str):
        tags = any_of(thinking_tags([content]))
        thoughts += [words for kind, words in cut(content, tags) if kind == REASONING]
    return [thought.strip().encode() for thought in thoughts if thought.strip()]


def _retokenized(
    recorded: DecodedIds, expected: Expected, *, detail: bool = True
) -> Iterator[Note]:
    """Yield a note for each turn with other ids for the same text; `detail`: turns are known."""
    size = len(recorded.data)
    ours, theirs = recorded, expected.decoded
    aligned = np.isin(ours.starts[:-1], theirs.starts[:-1])
    same = aligned.copy()
    at = np.searchsorted(theirs.starts[:-1], ours.starts[:-1][aligned])
    same[aligned] = (theirs.ids[at] == ours.ids[aligned]) & (
        theirs.starts[at + 1] == ours.starts[1:][aligned]
    )
    if len(ours.ids) and not same[-1] and size < len(theirs.data):
        # The last token of a truncated recording may be the prefix of another.
        last = int(np.flatnonzero(same)[-1]) + 1 if same.any() else 0
        if theirs.starts[theirs.token_at(int(ours.starts[last])) + 1] >= size:
            same[last:] = True
    others = np.flatnonzero(~same)
    if not len(others):
        return
    firsts = others[np.concatenate(([True], np.diff(others) > 1))]
    turns = [expected.turn_at(theirs.token_at(int(ours.starts[i]))) for i in firsts.tolist()]
    for number, group in itertools.groupby(
        zip(turns, firsts.tolist(), strict=True), key=lambda pair: pair[0]
    ):
        tokens = [token for _, token in group]
        first = tokens[0]
        stop = first
        while stop < len(same) and not same[stop]:
            stop += 1
        begin, end = int(ours.starts[first]), int(ours.starts[stop])
        expected_tokens = slice(
            theirs.token_at(begin), int(np.searchsorted(theirs.starts, end, side="left"))
        )
        turn = expected.turns[number]
        sampled = (
            turn.sampled is not None and turn.sampled[0] <= expected_tokens.start < turn.sampled[1]
        )
        where = "the sampled text" if sampled else "the context"
        yield Note(
            "retokenized", "retokenized_context" if detail and not sampled else "retokenized",
            number if detail else None, first,
            _describe_tokens(theirs, expected_tokens), _describe_tokens(ours, slice(first, stop)),
            f"in {len(tokens)} places" + (f" of {where} ({turn.role})" if detail else ""),
        )  # fmt: skip


def _describe_tokens(decoded: DecodedIds, tokens: slice, limit: int = 8) -> str:
    pieces = [
        f"{int(decoded.ids[i])} {decoded.between(i, i + 1).decode('utf-8', 'replace')!r}"
        for i in range(tokens.start, min(tokens.stop, tokens.start + limit))
    ]
    return ", ".join(pieces) + (", …" if tokens.stop - tokens.start > limit else "")


# The mask

Span = tuple[int, int] | None


def _expected_mask(
    recorded: DecodedIds, expected: Expected, differing: Sequence[Divergence], end: int
) -> tuple[Bits, list[Span]]:
    """Return 1 for each sampled token, 0 or `_UNKNOWN` for others, and the spans by turn."""
    flags = np.full(len(recorded.ids), _UNKNOWN, np.uint8)
    starts = expected.decoded.starts
    opens, closes = recorded.starts[:-1], recorded.starts[1:]

    def touched(begin: int, stop: int) -> slice:
        """Return the tokens with a byte in a range."""
        return slice(int(closes.searchsorted(begin, "right")), int(opens.searchsorted(stop)))

    def inside(begin: int, stop: int) -> slice:
        """Return the tokens with all bytes in a range."""
        return slice(int(opens.searchsorted(begin)), int(closes.searchsorted(stop, "right")))

    spans: list[Span] = [None] * len(expected.turns)
    e = r = 0
    for diff in [*differing, Divergence(end, end, len(recorded.data), len(recorded.data))]:
        shift = r - e
        flags[inside(r, diff.found_start)] = 0
        for number, turn in enumerate(expected.turns):
            if turn.sampled_bytes is None:
                continue
            begin, stop = (
                max(turn.sampled_bytes[0], e) + shift,
                min(turn.sampled_bytes[1], diff.start) + shift,
            )
            if begin >= stop:
                continue
            flags[touched(begin, stop)] = _UNKNOWN
            covered = inside(begin, stop)
            if covered.start < covered.stop:
                flags[covered] = 1
                earlier = spans[number]
                spans[number] = (covered.start if earlier is None else earlier[0], covered.stop)
        for first, last in expected.ambiguous:
            begin = max(int(starts[first]), e) + shift
            stop = min(int(starts[last]), diff.start) + shift
            flags[touched(begin, stop)] = _UNKNOWN
        e, r = diff.end, diff.found_end
    return flags, spans


def _mask_notes(
    trajectory: Trajectory, expected: Expected, flags: Bits, spans: Sequence[Span]
) -> Iterator[Note]:
    mask = trajectory.mask
    if mask is None or len(mask) != len(flags):
        return  # _fault_notes reports it
    flags = flags.copy()
    masked = [k for k, span in enumerate(spans) if span is not None and mask[slice(*span)].any()]
    first = masked[0] if masked else len(spans)
    for k, span in enumerate(spans):
        if span is None or k in masked:
            continue
        if masked and _is_context(trajectory, expected, k, first, span):
            flags[span[0] : span[1]] = 0
    for k in masked:
        turn = expected.turns[k]
        if turn.rewritten:
            span = spans[k]
            assert span is not None
            message = (trajectory.messages or [])[k]
            kind = "thought_dropped" if _thoughts(message) else "history_rewritten"
            yield Note(
                "structure", kind, k, span[0], "the text that the model sampled",
                "the text that the template prints in a later turn",
                "the mask marks it as sampled",
            )  # fmt: skip
    wrong = (mask != flags) & (flags != _UNKNOWN) & (mask <= 1)
    if not wrong.any():
        return
    index = int(np.flatnonzero(wrong)[0])
    if not masked and not mask.any():
        yield Note("structure", "mask_misses_sampled", _turn_of(index, spans), index, "1", "0",
                   "nothing is marked as sampled")  # fmt: skip
        return
    both = bool((wrong & (mask == 1)).any() and (wrong & (mask == 0)).any())
    late, early = np.roll(flags, 1), np.roll(flags, -1)
    late[0] = early[-1] = 0
    for shifted, word in ((late, "late"), (early, "early")):
        if both and np.array_equal(mask[shifted <= 1], shifted[shifted <= 1]):
            yield Note(
                "structure", "mask_shifted", _turn_of(index, spans, near=1), index,
                str(int(flags[index])), str(int(mask[index])), f"by one, too {word}",
            )  # fmt: skip
            return
    for kind, value in (("mask_covers_unsampled", 1), ("mask_misses_sampled", 0)):
        indices = np.flatnonzero(wrong & (mask == value))
        if len(indices):
            index = int(indices[0])
            turn_number = (
                _turn_of(index, spans) if value == 0 else _turn_before(expected, spans, index)
            )
            yield Note(
                "structure", kind, turn_number, index, str(1 - value), str(value),
                f"{len(indices)} token{'s' * (len(indices) > 1)}",
            )  # fmt: skip


def _is_context(
    trajectory: Trajectory, expected: Expected, turn: int, first: int, span: tuple[int, int]
) -> bool:
    """Whether an assistant's turn without any mask was part of the prompt.

    True if the turn is within the recorded prompt. If the prompt length is unknown, true if the
    turn precedes all sampled turns and a user message follows it: a turn followed only by tool
    messages was sampled.
    """
    if trajectory.prompt_length is not None:
        return span[1] <= trajectory.prompt_length
    if trajectory.has_siblings:
        return True
    between = expected.turns[turn + 1 : first] if turn < first else ()
    return any(other.role == "user" for other in between)


def _turn_of(index: int, spans: Sequence[Span], near: int = 0) -> int | None:
    for k, span in enumerate(spans):
        if span is not None and span[0] - near <= index < span[1] + near:
            return k
    return None


def _turn_before(expected: Expected, spans: Sequence[Span], index: int) -> int | None:
    """Return the turn of a token that was not sampled: the one after the last sampled turn."""
    before = [k for k, span in enumerate(spans) if span is not None and span[1] <= index]
    if not before:
        return 0 if expected.turns else None
    span = spans[before[-1]]
    assert span is not None
    return before[-1] if index == span[1] else min(before[-1] + 1, len(expected.turns) - 1)


def _recorded_turns(
    recorded: DecodedIds, expected: Expected, differing: Sequence[Divergence]
) -> list[tuple[str, int]]:
    """Return the ends of turns in recorded tokens; empty if turns are missing or unexpected."""
    starts: NDArray[np.int64] = expected.decoded.starts
    turns: list[tuple[str, int]] = []
    for turn in expected.turns:
        offset = int(starts[turn.end])
        shift = 0
        for diff in differing:
            if diff.end <= offset:
                shift = diff.found_end - diff.end
            elif diff.start < offset:
                return []
        token = int(np.searchsorted(recorded.starts, offset + shift, side="left"))
        token = min(token, len(recorded.ids))
        if turns and token < turns[-1][1]:
            return []
        turns.append((turn.role, token))
        if token == len(recorded.ids):
            break
    if turns:
        turns[-1] = (turns[-1][0], len(recorded.ids))
    return turns


def _shown(data: bytes, offset: int, words: bytes | None = None) -> str:
    if words is not None and 0 < len(words) <= MAX_SHOWN:
        return words.decode("utf-8", "replace")
    end = offset + MAX_SHOWN if words is None or words else offset + MAX_SHOWN // 2
    text = data[offset:end].decode("utf-8", "replace")
    return text + ("…" if end < len(data) else "")
