"""The fast engine: minijinja, trusted only where it was seen to equal the reference.

`FastTemplate.of` tries a template on a battery of conversations and returns None where minijinja
cannot render it or prints anything else than jinja2; then the template is simply rendered by the
reference. While running, every text it makes is compared with glue that the reference printed
(`layout`), and `audited` picks rows, the first of every batch and a sample by content, that are
rendered by both. One difference, and the whole batch is made again by the reference.

Conversations go in by the hundred: one call renders them all, a separator between them, because
the way into the engine costs as much as a short conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import minijinja
import xxhash

from tokenmill.chat.tame import is_tame
from tokenmill.chat.template import ReferenceTemplate, alias_reasoning, pinned_strftime, tojson
from tokenmill.errors import RowError, TemplateError

BATCH = 64  # conversations per call; more gain nothing and hold more text at once
FIRST_AUDITED = 4  # rows at the start of every batch that both engines render
AUDIT_ONE_IN = 128  # of the other rows, by content
LONGEST = 1 << 18  # characters of a conversation; longer ones spend their time elsewhere anyway
BASE_FUEL = 20_000  # instructions per call
FUEL_PER_MESSAGE = 2_000  # plus this many per message: real templates take a tenth
SEPARATOR = "\x00\x1e\x00"
MANY = (
    "{% for messages in tokenmill_many %}{% include 'one' %}{{ tokenmill_separator }}{% endfor %}"
)

_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


def audited(position: int, text: str) -> bool:
    """Whether both engines must agree on this row: a function of its place and content alone."""
    if position < FIRST_AUDITED:
        return True
    return xxhash.xxh3_64_intdigest(text[-64:].encode("utf-8", "replace")) % AUDIT_ONE_IN == 0


def _raise(message: Any) -> None:
    raise ValueError(str(message))


class FastTemplate:
    """One template in minijinja.

    Args:
        reference: The same template in jinja2, with its variables.
        date: The pinned day.
        add_generation_prompt: Whether every render ends with it, as the reference's then must.
    """

    def __init__(
        self, reference: ReferenceTemplate, date: str | None, *, add_generation_prompt: bool = False
    ) -> None:
        source = _GENERATION.sub(r"{%\1 \2with \3%}", reference.source)
        self._environment = minijinja.Environment(
            templates={"one": source, "many": MANY},
            filters={"tojson": tojson},
            tests={"iterable": lambda value: isinstance(value, (list, tuple, dict, str))},
            globals={"raise_exception": _raise, "strftime_now": pinned_strftime(date)},
            trim_blocks=True,
            lstrip_blocks=True,
            pycompat=True,
            debug=False,
            auto_escape_callback=lambda _: False,
        )
        self._variables = {
            **reference.variables,
            "tools": None,
            "add_generation_prompt": add_generation_prompt,
        }

    @classmethod
    def of(
        cls, reference: ReferenceTemplate, date: str | None, *, add_generation_prompt: bool = False
    ) -> FastTemplate | None:
        """A template that passed the battery, None where it did not."""
        if not is_tame(reference.tree):
            return None
        fast = cls(reference, date, add_generation_prompt=add_generation_prompt)
        return fast if fast._passes(reference) else None

    def _passes(self, reference: ReferenceTemplate) -> bool:
        """Compare with the reference on small conversations of every simple kind."""
        tried = 0
        for messages in BATTERY:
            try:
                wanted = reference.render(messages)
            except (RowError, TemplateError):
                continue
            if self.render(messages) != wanted:
                return False
            tried += 1
        return tried > 0

    def render(self, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str | None:
        """One conversation; None where the engine fails, for whatever reason."""
        self._environment.fuel = BASE_FUEL + FUEL_PER_MESSAGE * (len(messages) + len(tools or ()))
        variables = self._variables if tools is None else {**self._variables, "tools": tools}
        try:
            text: str = self._environment.render_template(
                "one", messages=alias_reasoning(messages), **variables
            )
        except Exception:  # the reference will word it
            return None
        return text

    def render_many(self, talks: Sequence[list[dict[str, Any]]]) -> list[str | None]:
        """Many conversations, a hundred or so per call."""
        made: list[str | None] = []
        for first in range(0, len(talks), BATCH):
            some = talks[first : first + BATCH]
            made += self._call(some) or [self.render(messages) for messages in some]
        return made

    def _call(self, talks: Sequence[list[dict[str, Any]]]) -> list[str | None] | None:
        count = sum(map(len, talks))
        self._environment.fuel = BASE_FUEL * len(talks) + FUEL_PER_MESSAGE * count
        try:
            text: str = self._environment.render_template(
                "many",
                tokenmill_many=talks,
                tokenmill_separator=SEPARATOR,
                **self._variables,
            )
        except Exception:  # one refused row: each on its own
            return None
        parts: list[str | None] = [*text.split(SEPARATOR)]
        parts.pop()
        return parts if len(parts) == len(talks) else None


def _talk(*turns: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


BATTERY = [
    _talk("uHi", "aHello."),
    _talk("sBe brief.", "uHi", "aHello."),
    _talk("uHi", "aHello.", "uMore?", "aSure.", "uAnd?", "aThat is all."),
    _talk("u  Hi \n", "a\n Hello. \n\n", "u\tMore?", "a Sure. "),
    _talk("uHi", "a<think>\nhm\n</think>\n\nHello.", "uMore?", "a<think>\nhm\n</think>\n\nSure."),
    _talk("u你好 👋🏽", "a你好！ 🎉\n\n1. 一\n2. é <b>&amp;</b> \"quoted\" 'too'"),
    _talk("sBe brief.", "uHi", "a", "u", "aSure."),
    _talk("uHi", "aHello.", "uMore?"),
]
