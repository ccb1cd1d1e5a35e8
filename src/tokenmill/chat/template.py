"""The reference renderer: jinja2 set up as transformers sets it up, with limits.

`ReferenceTemplate` compiles one chat template and renders conversations. The environment is the
one `apply_chat_template` uses: the immutable sandbox, trimmed blocks, loop controls, a `tojson`
that does not escape HTML, `raise_exception`, `strftime_now`, and `{% generation %}` blocks. Ours
differs in three ways that no honest template notices: work and output are bounded (`limits`), the
date is pinned by the recipe instead of read from a clock, and what depends on chance (`random`,
`lipsum`) is refused. Generation blocks print what they hold; where they stand in the text is for
the tracer to say.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.utils

from tokenmill.chat import limits
from tokenmill.chat.expressions import Names
from tokenmill.chat.sandbox import BoundedEnvironment, TemplateRaised
from tokenmill.errors import RowError, TemplateError

GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
REMEDY = 'the template prints the date: pin it with date="2026-11-15" (--date 2026-11-15)'
SOURCES_KNOWN = 16  # templates that stay compiled, whatever is asked of them
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip


class DateAsked(Exception):
    """A template called strftime_now and no date is pinned."""


class GenerationBlocks(jinja2.ext.Extension):
    """Parses ``{% generation %}``, which prints its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own spelling

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        """Turn the block into a call block, which is what transformers does."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_wrap")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _wrap(self, caller: Any) -> str:
        text: str = caller()
        return text


class GuardedNamespace(jinja2.utils.Namespace):
    """`namespace()` that keeps underscore names out, as transformers' does."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace attribute {name!r} is not allowed")


class TemplateDict:
    """The `dict` that templates may call."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """As the builtin."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As the builtin's class method."""
        return dict.fromkeys(*args)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as transformers gives it to templates."""
    if _encode_plainly and (ensure_ascii, indent, separators, sort_keys) == _PLAIN:
        try:
            return "".join(_encode_plainly(value, 0))
        except Exception:  # the encoder below says it in the usual words
            pass
    options = (ensure_ascii, indent, separators, sort_keys)
    try:
        return _encoder(*options).encode(value)
    except TypeError:  # options that cannot be remembered
        return _encoder.__wrapped__(*options).encode(value)


@functools.lru_cache(maxsize=64)
def _encoder(
    ensure_ascii: bool,
    indent: int | None,
    separators: tuple[str, str] | None,
    sort_keys: bool,
) -> json.JSONEncoder:
    """What `json.dumps` makes anew at every call."""
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _plain_encoder() -> Callable[[Any, int], Iterable[str]] | None:
    """What `json.dumps` of most templates comes down to in CPython; it makes one at every call."""
    make: Any = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return None
    usual = _encoder(False, None, None, False)
    quote = json.encoder.encode_basestring
    encode: Callable[[Any, int], Iterable[str]] = make(
        None, usual.default, quote, None, ": ", ", ", False, False, True
    )
    return encode


_encode_plainly = _plain_encoder()
_PLAIN = (False, None, None, False)


def pinned_strftime(date: str | None) -> Any:
    """`strftime_now` of a day that does not move, in the C locale and UTC whatever the host's are.

    What the C library would take from the locale (names, ``%c``, ``%x``, ``%X``, ``%r``) or from
    the time zone (``%s``, ``%Z``) is written here; the rest are numbers, the same everywhere.
    """
    day = None if date is None else datetime.strptime(date, "%Y-%m-%d")

    def strftime_now(format: str) -> str:  # noqa: A002 - the name templates may use
        if day is None:
            raise DateAsked
        limits.widths(format)  # which refuses those that are too large
        weekday, month = DAYS[day.weekday()], MONTHS[day.month - 1]
        words = {
            "a": weekday[:3],
            "A": weekday,
            "b": month[:3],
            "h": month[:3],
            "B": month,
            "p": "AM",
            "P": "am",
            "c": f"{weekday[:3]} {month[:3]} {day.day:2} 00:00:00 {day.year}",
            "x": day.strftime("%m/%d/%y"),
            "X": "00:00:00",
            "r": "12:00:00 AM",
            "s": str((day - datetime(1970, 1, 1)).days * 86400),
            "Z": "",
            "z": "",
        }

        def word(found: re.Match[str]) -> str:
            flags, width, modifier, conversion = found.groups()
            modified = {"": conversion, "E": "cCpPrsxXyYzZ", "O": "bBdehHImMpPrsSuUVwWyzZ"}
            if conversion not in modified[modifier]:
                return found[0]  # not a conversion: printed as it stands
            if conversion not in words:
                return f"%{flags}{width}{conversion}"  # eras and other digits are the locale's
            text = words[conversion]
            if "#" in flags and conversion in "pZ":
                text = text.lower()
            elif conversion != "P" and ("^" in flags or ("#" in flags and conversion in "aAbBh")):
                text = text.upper()
            padding = re.sub("[^-_0]", "", flags)[-1:]
            return (
                ""
                if conversion == "z"
                else text.rjust(int(width or 0), "0" if padding == "0" else " ")
            )

        return day.strftime(re.sub(r"%([-_0^#]*)(\d*)([EO]?)([A-Za-z%])", word, format))

    return strftime_now


def _raise(message: Any) -> None:
    raise TemplateRaised(str(message))


def alias_reasoning(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reasoning under the names that templates read, as transformers fills them in."""
    aliased = messages
    for index, message in enumerate(messages):
        if len(message) == 2 and "content" in message:
            continue
        for key in REASONING_KEYS:
            reasoning = message.get(key)
            if reasoning is not None:
                if aliased is messages:
                    aliased = list(messages)
                aliased[index] = {"thinking": reasoning, **message, "reasoning_content": reasoning}
                break
    return aliased


def characters(value: Any) -> int:
    """How much text (and how many values) a template is given."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, dict):
        return 1 + sum(characters(key) + characters(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(characters, value))
    return 1


def _environment(date: str | None) -> BoundedEnvironment:
    environment = BoundedEnvironment([GenerationBlocks, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = environment.bounded("tojson", tojson)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = pinned_strftime(date)
    environment.globals["dict"] = TemplateDict()
    environment.globals["namespace"] = GuardedNamespace
    return environment


class Compiled:
    """What a template's source alone decides: it is the same for all variables and dates."""

    def __init__(self, source: str) -> None:
        environment = _environment(None)
        self.tree = environment.parse(source)
        self.code = environment.compile(self.tree)

    @cached_property
    def names(self) -> Names:
        """Which names its parts read."""
        return Names(self.tree)


compiled = functools.lru_cache(maxsize=SOURCES_KNOWN)(Compiled)


class ReferenceTemplate:
    """One compiled chat template.

    Args:
        source: Jinja source.
        variables: Special tokens and template_kwargs: what every render of it sees.
        date: The pinned day, None where the recipe pins none.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], date: str | None) -> None:
        self.source = source
        self.variables = {"documents": None, **variables}
        self.environment = _environment(date)
        self.has_generation = bool(GENERATION_TAG.search(source))
        try:
            self._compiled = compiled(source)
            self._template = jinja2.Template.from_code(
                self.environment, self._compiled.code, self.environment.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno} of the template: {error.message}") from error
        except (jinja2.TemplateError, RecursionError, ValueError, OverflowError) as error:
            raise TemplateError(f"the template cannot be compiled: {error}") from error

    @property
    def tree(self) -> jinja2.nodes.Template:
        """The template as jinja2 parsed it."""
        return self._compiled.tree

    @property
    def names(self) -> Names:
        """Which names its parts read."""
        return self._compiled.names

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        """The text of one conversation.

        Args:
            messages: The conversation.
            tools: Tool descriptions.
            add_generation_prompt: Whether to open an assistant turn at the end.

        Raises:
            RowError: The template refuses the conversation (template_error) or takes too much of
                the machine (limit).
            TemplateError: It asks for a date that is not pinned.
        """
        # What was made of a refused row must not live on in the refusal's traceback.
        try:
            return self._print(messages, tools, add_generation_prompt)
        except DateAsked:
            raise TemplateError(REMEDY) from None
        except limits.LimitReached as error:
            raise RowError(f"{error}", reason="limit") from error.with_traceback(None)
        except (RecursionError, MemoryError, OverflowError) as error:
            # Python's own words for too deep a recursion depend on who called us.
            what = "it calls itself too often" if isinstance(error, RecursionError) else error
            raise RowError(
                f"the template goes too deep or too far: {what}", reason="limit"
            ) from error.with_traceback(None)
        except TemplateRaised as error:
            raise RowError(
                f"the template refuses: {error}", reason="template_error"
            ) from error.with_traceback(None)
        except Exception as error:  # a template can raise whatever Python can
            kind = type(error).__name__
            raise RowError(
                f"the template fails ({kind}: {error})", reason="template_error"
            ) from error.with_traceback(None)

    def _print(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool
    ) -> str:
        budget = self.environment.budget
        budget.refill(characters(messages) + (characters(tools) if tools else 0))
        pieces: list[str] = []
        for piece in self._template.generate(
            messages=alias_reasoning(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **self.variables,
        ):
            budget.make(len(piece))
            pieces.append(piece)
        return "".join(pieces)
