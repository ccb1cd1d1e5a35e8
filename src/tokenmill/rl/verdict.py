"""Compare recorded trajectories with the text and mask that the template implies.

`CLASSES` and the kinds of findings are described in docs/rollouts.md. Where the template rewrites
history, the nearer of the two expected texts counts; and nothing is wrong that the reference,
rendered turn by turn, would have given a sampler. A trajectory that ends inside a turn was cut off,
which is no finding. Texts are compared in bytes; masks wherever both texts agree.
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
from tokenmill.rl.expected import Expectations, Expected, Spelled, Turn, spell
from tokenmill.rl.trajectory import Bits, Trajectory
from tokenmill.tokenizers.tokenizer import Tokenizer

CLASSES = ("equal", "retokenized", "text", "structure")  # from harmless to grave
SHOWN = 60  # bytes of either side that a finding shows
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
    """What is known of one trajectory."""

    drift: str | None = None  # the gravest class; None where nothing could be compared
    notes: list[Note] = field(default_factory=list)
    # Role and end in recorded tokens; from the mask where messages are unknown or do not fit.
    turns: list[tuple[str, int]] = field(default_factory=list)
    truncated: bool = False  # whether it ends inside a turn
    unchecked: str = ""  # what could not be compared, and why
    apart: int = 0  # bytes in which texts differ

    @property
    def is_grave(self) -> bool:
        return self.drift in ("text", "structure")

    @property
    def distance(self) -> tuple[bool, int, int]:
        return self.is_grave, self.apart, len(self.notes)


class Judge:
    """Compares trajectories with what is expected; engine and renderer never change the result."""

    def __init__(
        self, tokenizer: Tokenizer, spec: ChatSpec, engine: str = "auto", renderer: str = "auto"
    ) -> None:
        self.tokenizer = tokenizer
        self.expectations = Expectations(tokenizer, spec, engine, renderer)

    def judge(self, trajectories: Sequence[Trajectory]) -> list[Verdict | RowError]:
        """Return a verdict per trajectory, or why there is none."""
        size = len(self.tokenizer.table)
        with_ids = [one for one in trajectories if _has_known_ids(one, size)]
        told = [one for one in with_ids if one.messages is not None]
        expected = iter(self.expectations.of(told) if told else ())
        canonical = iter(self._encode_again([one for one in with_ids if one.messages is None]))
        answers: list[Verdict | RowError] = []
        for trajectory in trajectories:
            if not _has_known_ids(trajectory, size):
                answers.append(self._without_ids(trajectory))
            elif trajectory.messages is None:
                answers.append(self._untold(trajectory, next(canonical)))
            else:
                answers.append(self._told(trajectory, next(expected)))
        return answers

    # With messages

    def _told(
        self, trajectory: Trajectory, expected: list[Expected] | RowError
    ) -> Verdict | RowError:
        faults = list(_own_faults(trajectory))
        best: Verdict | None = None
        known = () if isinstance(expected, RowError) else expected
        for one in itertools.chain(known, self._by_reference(trajectory)):
            verdict = self._against(trajectory, one)
            if best is None or verdict.distance < best.distance:
                best = verdict
            if not best.is_grave:
                break
        if best is None:
            assert isinstance(expected, RowError)
            return _verdict(faults, trajectory, []) if faults else expected
        if faults:
            masks = {note.kind for note in best.notes}
            best.notes += [note for note in faults if note.kind not in masks]
            best.drift = _gravest(best.notes)
        return best

    def _by_reference(self, trajectory: Trajectory) -> Iterator[Expected]:
        """What the reference expects, with and without the last messages that have no answer."""
        messages = list(trajectory.messages or ())
        while messages:
            asked = self.expectations.by_reference(replace(trajectory, messages=list(messages)))
            if asked is not None:
                yield asked
            if messages[-1]["role"] == "assistant":
                break
            messages.pop()

    def _against(self, trajectory: Trajectory, expected: Expected) -> Verdict:
        ids, wanted = trajectory.ids, expected.spelled
        assert ids is not None
        size = len(ids)
        if np.array_equal(ids, wanted.ids[:size]):  # nearly always
            starts = wanted.starts[: size + 1]
            recorded = Spelled(ids, starts, wanted.data[: int(starts[-1])])
        else:
            recorded = spell(self.tokenizer.table, ids)
        return _compare(trajectory, recorded, expected)

    # Without messages: texts, if there are any, and the tokenizer alone

    def _encode_again(self, trajectories: Sequence[Trajectory]) -> list[Any]:
        spelled = [
            spell(self.tokenizer.table, one.ids) for one in trajectories if one.ids is not None
        ]
        texts = [one.data.decode("utf-8", "replace") for one in spelled]
        encoded = self.expectations.encoder.encode(texts)
        return [(one, encoded.row(number)[0]) for number, one in enumerate(spelled)]

    def _untold(self, trajectory: Trajectory, encoded: tuple[Spelled, Any]) -> Verdict:
        recorded, ids = encoded
        notes = list(_own_faults(trajectory))
        again = spell(self.tokenizer.table, ids)
        if again.data == recorded.data:
            whole = Turn("all", 0, len(ids))
            plain = Expected(again, (whole,), open=True)
            notes += _retokenized(recorded, plain, told=False)
        notes += self._against_texts(trajectory, recorded)
        verdict = _verdict(notes, trajectory, [])
        verdict.unchecked = "no messages: turns, thoughts and observations cannot be compared"
        return verdict

    def _against_texts(self, trajectory: Trajectory, recorded: Spelled) -> Iterator[Note]:
        size = trajectory.prompt_length
        if size is None:
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
                at = same_until(text, 0, form, 0)
                place = recorded.starts[start] + len(form[:at].encode())
                yield Note(
                    "text", f"{name}_text", None, recorded.token_at(int(place)),
                    _shown(text.encode(), len(text[:at].encode())),
                    _shown(form.encode(), len(form[:at].encode())),
                    f"the ids of the {name} are not those of its text",
                )  # fmt: skip
        yield from self._doubled_prompt(recorded.data[: int(recorded.starts[size])], size)

    def _doubled_prompt(self, prompt: bytes, size: int | None) -> Iterator[Note]:
        text = prompt.decode("utf-8", "replace").rstrip()
        opening = self._generation_prompt()
        ids = self.tokenizer.reference.encode(opening, add_special_tokens=False).ids
        decoded = self.tokenizer.decode(ids, skip_special_tokens=True)
        for form in dict.fromkeys((opening.strip(), decoded.strip())):
            if form and text.endswith(form) and text.removesuffix(form).rstrip().endswith(form):
                token = None if size is None else size - 1
                yield Note("structure", "generation_prompt_doubled", None, token, form, 2 * form)
                return

    def _generation_prompt(self) -> str:
        try:
            reference = self.expectations.renderer.reference()
            asking = [{"role": "user", "content": "Hello."}]
            asked = reference.render(asking, None, add_generation_prompt=True)
            unasked = reference.render(asking, None)
        except (RowError, ValueError):
            return ""
        return asked[len(unasked) :] if asked.startswith(unasked) else ""

    # Texts alone

    def _without_ids(self, trajectory: Trajectory) -> Verdict | RowError:
        if trajectory.ids is not None:
            table = len(self.tokenizer.table)
            ids = trajectory.ids
            place = int(np.flatnonzero(ids >= table)[0]) if len(ids) else None
            found = "no ids at all" if place is None else str(int(ids[place]))
            note = Note("structure", "id_outside_vocabulary", None, place, f"below {table}", found)
            return Verdict("structure", [note])
        notes = list(self._doubled_prompt((trajectory.prompt or "").encode(), None))
        drift = _gravest(notes) if notes else None
        return Verdict(drift, notes, unchecked="no token ids: only texts were recorded")


def _has_known_ids(trajectory: Trajectory, vocabulary: int) -> bool:
    ids = trajectory.ids
    return ids is not None and len(ids) > 0 and int(ids.max()) < vocabulary


def _own_faults(trajectory: Trajectory) -> Iterator[Note]:
    faults = list(trajectory.faults())
    if not faults and (unmasked := trajectory.unmasked()) is not None:
        faults.append(unmasked)
    for fault in faults:
        yield Note("structure", fault.kind, None, fault.token, fault.expected, fault.found)


def _gravest(notes: Sequence[Note]) -> str:
    return max((note.drift for note in notes), key=CLASSES.index, default="equal")


def _verdict(notes: list[Note], trajectory: Trajectory, turns: list[tuple[str, int]]) -> Verdict:
    return Verdict(_gravest(notes), notes, turns or turns_by_mask(trajectory))


def turns_by_mask(trajectory: Trajectory) -> list[tuple[str, int]]:
    """Return turns without messages: what was sampled, and the context around it."""
    if trajectory.ids is None or trajectory.mask is None:
        return []
    if len(trajectory.mask) != len(trajectory.ids) or not len(trajectory.ids):
        return []
    mask = trajectory.mask == 1
    cuts = [*(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [("assistant" if mask[end - 1] else "context", end) for end in cuts]


def _ends(trajectory: Trajectory, expected: Expected, size: int, last: int) -> Iterator[Note]:
    """Note the last turns if they are missing from a recording of `size` expected tokens.

    A recording that ends inside a turn was cut off, which is no finding.
    """
    for turn in expected.turns:
        if turn.sampled is None or not turn.sampled[0] < size < turn.sampled[1]:
            continue
        if not expected.spelled.between(size, turn.sampled[1]).strip():
            size = turn.sampled[1]  # only whitespace ends it, and the sampler stopped before
    if size >= expected.required or trajectory.truncated:
        return
    closed = [turn.sampled[1] for turn in expected.turns if turn.sampled is not None]
    before = max((end for end in closed if end <= size), default=0)
    begins = {turn.start for turn in expected.turns}
    begins |= {turn.sampled[0] for turn in expected.turns if turn.sampled is not None}
    # Between a turn's last token and the next turn's first some templates print whitespace.
    if size not in begins and expected.spelled.between(before, size).strip():
        return
    lost = next(
        number
        for number, turn in enumerate(expected.turns)
        if (turn.end if turn.sampled is None else turn.sampled[1]) > size
    )
    role = expected.turns[lost].role
    shown = _shown(expected.spelled.data, int(expected.spelled.starts[size]))
    yield Note("structure", _lost_kind(role), lost, last, shown, "the end of the recording",
               f"the turn of {role}")  # fmt: skip


def _compare(trajectory: Trajectory, recorded: Spelled, expected: Expected) -> Verdict:
    wanted = expected.spelled
    required = int(wanted.starts[expected.required])
    text = wanted.data
    if len(recorded.data) <= len(text) and text.startswith(recorded.data):
        differing: list[Divergence] = []
    else:
        if not recorded.data.endswith(text[required:]):
            text = text[:required]
        differing = divergences(text, recorded.data, _places(expected))
    notes: list[Note] = []
    size = len(recorded.data)
    last = len(recorded.ids) - 1
    for one in differing:
        extra = recorded.data[one.found_start : one.found_end]
        if one.start >= required and wanted.data.startswith(extra, required):
            continue  # what the template prints behind the last turn may be there, or some of it
        if not extra and one.found_start == size and one.end == len(text):
            notes += _ends(trajectory, expected, wanted.token_at(one.start), last)
        else:
            notes.append(_differs(trajectory, recorded, expected, one))
    if any(note.drift == "structure" for note in notes):
        notes = [*_lost(trajectory, recorded, expected, notes), *notes]
    if not differing and size < required and size in wanted.starts:
        notes += _ends(trajectory, expected, wanted.token_at(size), last)
    same_ids = np.array_equal(recorded.ids, wanted.ids[: len(recorded.ids)])
    if not differing and not same_ids:
        notes += _retokenized(recorded, expected)
    flags, spans = _expected_mask(recorded, expected, differing, len(text))
    notes += _mask_notes(trajectory, expected, flags, spans)
    verdict = _verdict(notes, trajectory, _recorded_turns(recorded, expected, differing))
    verdict.truncated = size < required and (same_ids or not notes)
    verdict.apart = sum(one.end - one.start + one.found_end - one.found_start for one in differing)
    return verdict


def _lost(
    trajectory: Trajectory, recorded: Spelled, expected: Expected, notes: Sequence[Note]
) -> Iterator[Note]:
    """Contents of other roles that are missing from the recording and that no finding names yet."""
    named = {note.turn for note in notes if note.kind in (*_LOST, "context_text")}
    pairs = zip(trajectory.messages or (), expected.turns, strict=False)
    for number, (message, turn) in enumerate(pairs):
        content = _content(message)
        if number in named or turn.sampled is not None or not content:
            continue
        place = expected.spelled.data.find(content)
        if place >= 0 and content not in recorded.data:
            token = next((note.token for note in notes if note.token is not None), None)
            shown = _shown(expected.spelled.data, place, content)
            kind = _lost_kind(message["role"])
            yield Note("structure", kind, number, token, shown, "nowhere in the recording")


def _lost_kind(role: str) -> str:
    return _LOST[role not in TOOL_ROLES]


def _places(expected: Expected) -> list[int]:
    starts = expected.spelled.starts
    places = {0}
    for turn in expected.turns:
        places |= {int(starts[turn.start]), int(starts[turn.end])}
        if turn.wrote is not None:
            places |= set(turn.wrote)
    return sorted(places)


def _differs(
    trajectory: Trajectory, recorded: Spelled, expected: Expected, one: Divergence
) -> Note:
    wanted = expected.spelled
    missing = wanted.data[one.start : one.end]
    extra = recorded.data[one.found_start : one.found_end]
    token = min(recorded.token_at(one.found_start), len(recorded.ids) - 1)
    drift, kind, number = _named(trajectory, expected, one, extra)
    role = expected.turns[number].role
    detail = f"{len(missing)} bytes of {role}, {len(extra)} in their place"
    return Note(
        drift, kind, number, token,
        _shown(wanted.data, one.start, missing), _shown(recorded.data, one.found_start, extra),
        detail,
    )  # fmt: skip


def _named(
    trajectory: Trajectory, expected: Expected, one: Divergence, extra: bytes
) -> tuple[str, str, int]:
    """Return class, kind and turn of a divergence."""
    starts, data = expected.spelled.starts, expected.spelled.data
    missing = data[one.start : one.end]
    number = expected.turn_at(expected.spelled.token_at(min(one.start, len(data) - 1)))
    messages = trajectory.messages or []

    def span(turn: Turn) -> tuple[int, int]:
        return int(starts[turn.start]), int(starts[turn.end])

    gone = [
        k
        for k, turn in enumerate(expected.turns)
        if turn.end > turn.start
        and one.start <= span(turn)[0]
        and data[one.end : span(turn)[1]].strip() == b""
        and span(turn)[0] < one.end
    ]
    if gone:
        return "structure", _lost_kind(expected.turns[gone[0]].role), gone[0]
    if not missing.strip():
        for k, turn in enumerate(expected.turns):
            if turn.sampled is None:
                continue
            assert turn.wrote is not None
            opening = data[span(turn)[0] : turn.wrote[0]]
            if opening.strip() and opening.strip() in extra:
                if opening.strip() == extra.strip():
                    at = min(
                        (k for k, t in enumerate(expected.turns)
                         if t.wrote is not None and t.wrote[1] >= one.start),
                        default=k,
                    )  # fmt: skip
                    return "structure", "generation_prompt_doubled", at
                return "structure", "turn_unexpected", number
        for turn in expected.turns:
            body = data[slice(*span(turn))].strip()
            if body and body in extra:
                return "structure", "turn_doubled", number
    turn = expected.turns[number]
    message = messages[number] if number < len(messages) else {}
    if turn.wrote is None:
        content = _content(message)
        lost = content and content in data[slice(*span(turn))]
        if lost and _inside(content, missing) and 4 * len(extra) < len(content):
            return "structure", _lost_kind(turn.role), number
        return "text", "context_text", number
    begin, end = turn.wrote
    if one.end <= begin or (one.start < begin and one.end > begin):
        opening = data[span(turn)[0] : begin].strip()
        if opening and one.end >= begin and opening in data[one.start : one.end + 1].strip():
            return "structure", "generation_prompt_missing", number
        return "text", "context_text", number
    if one.start >= end:
        return "text", "context_text", number
    if any(_inside(thought, missing) and thought not in extra for thought in _thoughts(message)):
        return "structure", "thought_dropped", number
    return "text", "sampled_text", number


def _inside(words: bytes, missing: bytes) -> bool:
    """Whether words are missing, except for a few bytes that both sides share at the ends."""
    if words in missing:
        return True
    kept = max(4, len(words) // 8)
    return len(words) > 2 * kept and words[kept:-kept] in missing


def _content(message: dict[str, Any]) -> bytes:
    content = message.get("content")
    return content.strip().encode() if isinstance(content, str) else b""


def _thoughts(message: dict[str, Any]) -> list[bytes]:
    found = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    content = message.get("content")
    if isinstance(content, str):
        tags = any_of(thinking_tags([content]))
        found += [words for kind, words in cut(content, tags) if kind == REASONING]
    return [thought.strip().encode() for thought in found if thought.strip()]


def _retokenized(recorded: Spelled, expected: Expected, *, told: bool = True) -> Iterator[Note]:
    """One note for each turn with other ids for the same text; not `told`: turns are unknown."""
    size = len(recorded.data)
    ours, theirs = recorded, expected.spelled
    known = np.isin(ours.starts[:-1], theirs.starts[:-1])
    same = known.copy()
    at = np.searchsorted(theirs.starts[:-1], ours.starts[:-1][known])
    same[known] = (theirs.ids[at] == ours.ids[known]) & (
        theirs.starts[at + 1] == ours.starts[1:][known]
    )
    if len(ours.ids) and not same[-1] and size < len(theirs.data):
        # The last token of a recording that was cut off may be the prefix of another.
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
        places = [place for _, place in group]
        first = places[0]
        stop = first
        while stop < len(same) and not same[stop]:
            stop += 1
        begin, end = int(ours.starts[first]), int(ours.starts[stop])
        wanted = slice(
            theirs.token_at(begin), int(np.searchsorted(theirs.starts, end, side="left"))
        )
        turn = expected.turns[number]
        sampled = turn.sampled is not None and turn.sampled[0] <= wanted.start < turn.sampled[1]
        where = "what was sampled" if sampled else "the context"
        yield Note(
            "retokenized", "retokenized_context" if told and not sampled else "retokenized",
            number if told else None, first,
            _spelled_out(theirs, wanted), _spelled_out(ours, slice(first, stop)),
            f"in {len(places)} places" + (f" of {where} ({turn.role})" if told else ""),
        )  # fmt: skip


def _spelled_out(spelled: Spelled, tokens: slice, most: int = 8) -> str:
    told = [
        f"{int(spelled.ids[i])} {spelled.between(i, i + 1).decode('utf-8', 'replace')!r}"
        for i in range(tokens.start, min(tokens.stop, tokens.start + most))
    ]
    return ", ".join(told) + (", …" if tokens.stop - tokens.start > most else "")


# The mask

Span = tuple[int, int] | None


def _expected_mask(
    recorded: Spelled, expected: Expected, differing: Sequence[Divergence], end: int
) -> tuple[Bits, list[Span]]:
    """Return per recorded token whether it was sampled, or `_UNKNOWN`, and the spans by turn."""
    flags = np.full(len(recorded.ids), _UNKNOWN, np.uint8)
    starts = expected.spelled.starts
    opens, closes = recorded.starts[:-1], recorded.starts[1:]

    def touched(begin: int, stop: int) -> slice:
        """Tokens with a byte in a range."""
        return slice(int(closes.searchsorted(begin, "right")), int(opens.searchsorted(stop)))

    def inside(begin: int, stop: int) -> slice:
        """Tokens with no byte outside a range."""
        return slice(int(opens.searchsorted(begin)), int(closes.searchsorted(stop, "right")))

    spans: list[Span] = [None] * len(expected.turns)
    e = r = 0
    for one in [*differing, Divergence(end, end, len(recorded.data), len(recorded.data))]:
        shift = r - e
        flags[inside(r, one.found_start)] = 0
        for number, turn in enumerate(expected.turns):
            if turn.wrote is None:
                continue
            begin, stop = max(turn.wrote[0], e) + shift, min(turn.wrote[1], one.start) + shift
            if begin >= stop:
                continue
            flags[touched(begin, stop)] = _UNKNOWN
            sure = inside(begin, stop)
            if sure.start < sure.stop:
                flags[sure] = 1
                known = spans[number]
                spans[number] = (sure.start if known is None else known[0], sure.stop)
        for first, last in expected.doubtful:
            begin = max(int(starts[first]), e) + shift
            stop = min(int(starts[last]), one.start) + shift
            flags[touched(begin, stop)] = _UNKNOWN
        e, r = one.end, one.found_end
    return flags, spans


def _mask_notes(
    trajectory: Trajectory, expected: Expected, flags: Bits, spans: Sequence[Span]
) -> Iterator[Note]:
    mask = trajectory.mask
    if mask is None or len(mask) != len(flags):
        return  # _own_faults has it
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
                "structure", kind, k, span[0], "what the model wrote at its time",
                "what the template makes of it in a later turn",
                "the mask says that it was sampled",
            )  # fmt: skip
    wrong = (mask != flags) & (flags != _UNKNOWN) & (mask <= 1)
    if not wrong.any():
        return
    place = int(np.flatnonzero(wrong)[0])
    if not masked and not mask.any():
        yield Note("structure", "mask_misses_sampled", _turn_of(place, spans), place, "1", "0",
                   "nothing is marked as sampled")  # fmt: skip
        return
    both = bool((wrong & (mask == 1)).any() and (wrong & (mask == 0)).any())
    late, early = np.roll(flags, 1), np.roll(flags, -1)
    late[0] = early[-1] = 0
    for shifted, word in ((late, "late"), (early, "early")):
        if both and np.array_equal(mask[shifted <= 1], shifted[shifted <= 1]):
            yield Note(
                "structure", "mask_shifted", _turn_of(place, spans, near=1), place,
                str(int(flags[place])), str(int(mask[place])), f"by one, too {word}",
            )  # fmt: skip
            return
    for kind, value in (("mask_covers_unsampled", 1), ("mask_misses_sampled", 0)):
        places = np.flatnonzero(wrong & (mask == value))
        if len(places):
            place = int(places[0])
            turn_number = _turn_of(place, spans) if value == 0 else _owner(expected, spans, place)
            yield Note(
                "structure", kind, turn_number, place, str(1 - value), str(value),
                f"{len(places)} tokens",
            )  # fmt: skip


def _is_context(
    trajectory: Trajectory, expected: Expected, turn: int, first: int, span: tuple[int, int]
) -> bool:
    """Whether an assistant's turn without any mask was part of the prompt.

    It was if it lies within the recorded prompt length. If that is unknown, it was if it precedes
    everything sampled and a user spoke in between: a turn that leads to the next one by tools
    alone was sampled.
    """
    if trajectory.prompt_length is not None:
        return span[1] <= trajectory.prompt_length
    if trajectory.among:
        return True
    between = expected.turns[turn + 1 : first] if turn < first else ()
    return any(other.role == "user" for other in between)


def _turn_of(place: int, spans: Sequence[Span], near: int = 0) -> int | None:
    for k, span in enumerate(spans):
        if span is not None and span[0] - near <= place < span[1] + near:
            return k
    return None


def _owner(expected: Expected, spans: Sequence[Span], place: int) -> int | None:
    """Return the turn of a token that was not sampled: the one after the last sampled before it."""
    before = [k for k, span in enumerate(spans) if span is not None and span[1] <= place]
    if not before:
        return 0 if expected.turns else None
    span = spans[before[-1]]
    assert span is not None
    return before[-1] if place == span[1] else min(before[-1] + 1, len(expected.turns) - 1)


def _recorded_turns(
    recorded: Spelled, expected: Expected, differing: Sequence[Divergence]
) -> list[tuple[str, int]]:
    """Return where turns end in recorded tokens; empty if turns are missing or unexpected."""
    starts: NDArray[np.int64] = expected.spelled.starts
    turns: list[tuple[str, int]] = []
    for turn in expected.turns:
        place = int(starts[turn.end])
        shift = 0
        for one in differing:
            if one.end <= place:
                shift = one.found_end - one.end
            elif one.start < place:
                return []
        token = int(np.searchsorted(recorded.starts, place + shift, side="left"))
        token = min(token, len(recorded.ids))
        if turns and token < turns[-1][1]:
            return []
        turns.append((turn.role, token))
        if token == len(recorded.ids):
            break
    if turns:
        turns[-1] = (turns[-1][0], len(recorded.ids))
    return turns


def _shown(data: bytes, place: int, words: bytes | None = None) -> str:
    if words is not None and 0 < len(words) <= SHOWN:
        return words.decode("utf-8", "replace")
    end = place + SHOWN if words is None or words else place + SHOWN // 2
    text = data[place:end].decode("utf-8", "replace")
    return text + ("…" if end < len(data) else "")
