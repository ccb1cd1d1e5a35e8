"""Rollouts by whole renders and encodes, to compare the bridge and ``expand="append"`` with.

The oracle shares nothing with the product: jinja2 renders, `turn_oracle` finds the end of a turn,
`tokenizers` gives ids and offsets. Each assistant's turn is sampled in the tokens of the whole
render.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

import tokenizers
import tokenmill
from tests.chat.conversations import DATE, SPECIAL, VARIABLES
from tests.chat.loop_oracle import OracleTemplate, TemplateRaised
from tests.chat.scoring import oracle
from tests.chat.turn_oracle import Conversation, spoken
from tokenmill.chat import ChatSpec, Renderer, Rendering
from tokenmill.chat.shapes import Plain, read
from tokenmill.chat.thinking import TAG
from tokenmill.errors import BridgeError, RowError, UsageError
from tokenmill.rl.bridge import Bridge
from tokenmill.tokenizers.tokenizer import Tokenizer

Message = dict[str, Any]
TOKENIZER = Path(tokenmill.__file__).parent / "examples" / "tokenizer" / "tokenizer.json"


@dataclass(slots=True)
class Step:
    turn: int
    answer: list[Message]
    prompt: str
    stands: str  # prompt and turn up to its end, as the template prints it when it is the last
    following: str | None  # the next prompt; None where nothing answers

    @property
    def opens(self) -> bool:
        return self.stands.startswith(self.prompt)

    @property
    def continues(self) -> bool:
        """Whether the template does not rewrite earlier text."""
        return self.opens and self.following is not None and self.following.startswith(self.stands)


def steps(template: OracleTemplate, messages: list[Message], tools: Any) -> Iterator[Step]:
    """Yield every assistant's turn after the first message.

    Raises:
        Refused: The template refuses a part of the conversation, or a turn cannot be seen.
    """
    turns = [k for k, message in enumerate(messages) if k and message["role"] == "assistant"]
    for k, end in zip(turns, [*turns[1:], len(messages)], strict=False):
        prompt = template.plain(messages[:k], tools, add_generation_prompt=True)
        found = Conversation(template, messages[: k + 1], tools).found
        if found is None or k not in found.owner:
            raise TemplateRaised(f"the turn {k} cannot be seen")
        end_of_turn = len(found.owner) - found.owner[::-1].index(k)
        stands = found.text[:end_of_turn]
        if not any(stands.rstrip().endswith(words) for words in _words(messages[k])):
            # White space after its end-of-turn token is not sampled, unless the prompt has it.
            whole, stands = stands, stands.rstrip()
            if whole.startswith(prompt) and len(stands) < len(prompt):
                stands = prompt
        following = None
        if end > k + 1 or end < len(messages):
            following = template.plain(messages[:end], tools, add_generation_prompt=True)
        yield Step(k, messages[k + 1 : end], prompt, stands, following)


def _words(message: Message) -> Iterator[str]:
    """Yield the possible ends of a turn without an end-of-turn token."""
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        yield content.strip()
    for fragments in spoken(message):
        yield from filter(None, fragments)


@lru_cache(maxsize=256)
def tokenizer_of(template: str) -> Tokenizer:
    """The bundled tokenizer with every tag of a template as a special token, as real ones have."""
    made = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    tags = sorted({tag for tag in TAG.findall(template) if "think" not in tag.lower()})
    made.add_special_tokens(tags)
    return Tokenizer(made.to_str().encode(), template=template, special_tokens=SPECIAL)


def talk_of(row: dict[str, Any]) -> tuple[list[Message], Any] | None:
    """The conversation of a row; None where it has none, or not in one form alone."""
    try:
        found = read(row, ChatSpec())
    except RowError:
        return None
    if isinstance(found, Plain) or found.without_content:
        return None
    if any(message.get("content") is None for message in found.messages):
        return None
    return found.messages, found.tools


class Play:
    """Rollouts under one template; without a tokenizer, with the bundled one and its tags."""

    def __init__(self, name: str, source: str, tokenizer: Tokenizer | None = None) -> None:
        variables = VARIABLES.get(name)
        self.template = oracle(name, source)
        if tokenizer is not None:
            self.template = OracleTemplate(source, tokenizer.special_tokens, DATE)
        tokenizer = tokenizer or tokenizer_of(source)
        self.bridge = Bridge(tokenizer, date=DATE, chat_template_kwargs=variables)
        self.tokenizer = self.bridge.tokenizer.reference
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.name = name

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def boundary(self, text: str, place: int) -> int | None:
        """Return the number of tokens before a position; None if a token spans it."""
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        count = sum(start < place for start, _ in offsets)
        return count if all(end <= place for _, end in offsets[:count]) else None

    def rows(self, rows: dict[str, Any]) -> None:
        for case, row in rows.items():
            found = talk_of(row)
            if found is not None:
                self.conversation(case, *found)

    def conversation(self, case: str, messages: list[Message], tools: Any) -> None:
        """Play one conversation as far as the template renders it, by message and by text."""
        where = f"{self.name} × {case}"
        found: list[Step] = []
        try:
            found.extend(steps(self.template, messages, tools))
            self._whole(where, found, messages, tools)
        except TemplateRaised:
            self.counts["refused by the template"] += 1
        for by_text in (False, True):
            self.bridge.clear_cache()  # without a generation prompt, two rollouts may share ids
            ids: list[int] | None = None
            for step in found:
                ids = self._step(where, step, ids, messages, tools, by_text)

    def _whole(self, where: str, found: list[Step], messages: list[Message], tools: Any) -> None:
        if not found:
            return
        expected = all(step.opens and (step.following is None or step.continues) for step in found)
        try:
            if self.bridge.is_append_only(messages, tools) is not expected:
                self.wrong.append(f"{where}: append-only is {expected}")
            self.counts[f"append-only {expected}"] += 1
        except BridgeError:  # the ends of its turns are unknown
            self.counts["append-only unknown"] += 1

    def _step(
        self,
        where: str,
        step: Step,
        ids: list[int] | None,
        messages: list[Message],
        tools: Any,
        by_text: bool,
    ) -> list[int] | None:
        """Play one turn; return the ids after it, or None if a new prompt is needed."""
        how = "text" if by_text else "message"
        where = f"{where}: turn {step.turn} by {how}"
        if ids is None:
            ids = self.bridge.prompt(messages[: step.turn], tools)
        if ids != self.encode(step.prompt):
            self.wrong.append(f"{where}: another prompt")
            return None
        if not step.answer or step.following is None:
            return None
        own = None if by_text else messages[step.turn]
        if not step.continues:
            if by_text and not step.opens:
                return None  # nobody would have sampled that
            sampled = self.encode(step.stands[len(step.prompt) :] if step.opens else "x")
            try:
                self.bridge.extend(ids + sampled, step.answer, sampled=own)
                if step.opens or not step.following.startswith(step.prompt):
                    self.wrong.append(f"{where}: is not refused")
            except (BridgeError, UsageError, RowError):
                self.counts[f"{how} refused"] += 1
            return None
        whole = self.encode(step.following)
        place = self.boundary(step.following, len(step.stands))
        if place is None or whole[: len(ids)] != ids:
            self.counts["a token across the seam"] += 1
            return None
        if place == len(ids) and by_text:
            return None  # nothing was sampled
        try:
            found = self.bridge.extend(whole[:place], step.answer, sampled=own)
        except (BridgeError, UsageError, RowError) as error:
            if not by_text or "sampled=" not in str(error):
                self.wrong.append(f"{where}: is refused: {error}")
            self.counts[f"{how} asked for"] += 1
            return None
        self.counts[f"{how} equal"] += 1
        if found != whole:
            theirs, ours = (
                self.tokenizer.decode(x[place:], skip_special_tokens=False) for x in (whole, found)
            )
            self.wrong.append(f"{where}: {ours!r} for {theirs!r}")
        return found


# Turns that are not trained, and end-of-turn texts that are words, which the oracle ignores.
UNJUDGED = ("untrained turn", "weights", "literal in a result", "literal at the ends")


def renderer_of(name: str, source: str, renderer: str = "auto") -> Renderer:
    spec = ChatSpec(date=DATE, expand="append", chat_template_kwargs=VARIABLES.get(name))
    return Renderer(spec, source, SPECIAL, renderer=renderer)


def joined_turns(turns: list[Step]) -> list[list[Step]]:
    """Return the turns that share one text, by the plain renders."""
    held: list[list[Step]] = []
    for step in turns:
        if held and step.prompt.startswith(held[-1][-1].stands):
            held[-1].append(step)
        else:
            held.append([step])
    return held


def trained(made: Rendering) -> list[str]:
    pairs = zip(made.texts, made.spans, strict=True)
    return [text[start:end] for text, spans in pairs for start, end in spans or ()]


def check_rows(play: Play, renderer: Renderer, rows: dict[str, Any]) -> int:
    """Check every row of every conversation in both ways; return the number of rows."""
    judged = 0
    turns_spec = msgspec.structs.replace(renderer.spec, expand="turns")
    by_turns = Renderer(turns_spec, play.template.source, SPECIAL)
    for case, row in rows.items():
        found = talk_of(row)
        if found is None or found[0][-1]["role"] != "assistant" or case in UNJUDGED:
            continue
        try:
            turns = list(steps(play.template, *found))
        except TemplateRaised:
            continue
        made = renderer.render([row])
        if made.rejected or found[0][0]["role"] == "assistant":
            continue  # what is lost or unproven is judged in tests/chat
        where = f"{play.name} × {case}: the rows"
        if not all(step.opens for step in turns):
            play.wrong.append(f"{where} are none: a turn does not go on from its prompt")
            continue
        held = joined_turns(turns)
        if trained(made) != trained(by_turns.render([row])):
            play.wrong.append(f"{where} train something else than those of expand=turns")
        if play.template.has_generation_blocks:
            continue  # its author says where a turn ends
        if made.texts != [members[-1].stands for members in held]:
            play.wrong.append(f"{where} have other texts")
            continue
        spans = [[(len(step.prompt), len(step.stands)) for step in members] for members in held]
        if made.spans != spans and all(_prompted(play, step, *found) for step in turns):
            play.wrong.append(f"{where} train {made.spans}, not {spans}")
        for text, members in zip(made.texts, held, strict=True):
            roll(play, where, text, members, *found)
            judged += 1
    return judged


def _prompted(play: Play, step: Step, messages: list[Message], tools: Any) -> bool:
    """Whether a turn is asked for with its header: not after an assistant, or after a system alone.

    Some templates print none there; a header is nothing that a row trains.
    """
    before = messages[: step.turn]
    unasked = play.template.plain(before, tools, add_generation_prompt=False)
    return before[-1]["role"] != "assistant" and step.prompt != unasked


def roll(
    play: Play, where: str, text: str, members: list[Step], messages: list[Any], tools: Any
) -> None:
    """Run the bridge on a row's turns, with the row's own tokens as samples."""
    whole = play.encode(text)
    play.bridge.clear_cache()
    ids = play.bridge.prompt(messages[: members[0].turn], tools)
    for step, following in pairwise(members):
        place = play.boundary(text, len(step.stands))
        if place is None or whole[: len(ids)] != ids:
            return  # a token lies across the seam
        answer = messages[step.turn + 1 : following.turn]
        if not answer:
            return  # nothing answers the turn
        ids = play.bridge.extend(whole[:place], answer, sampled=messages[step.turn])
        if whole[: len(ids)] != ids and play.boundary(text, len(following.prompt)) is not None:
            play.wrong.append(f"{where} have other ids than the bridge at turn {step.turn}")
            return
