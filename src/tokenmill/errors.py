"""The exceptions of tokenmill and the reasons for rejecting a row.

A message states what is wrong, where (path, row, line, byte offset, as far as known) and what to
do. Most classes also derive from a builtin exception, so ``except FileNotFoundError`` works.
Packages translate the exceptions of msgspec, jinja2 and pyarrow with ``raise ... from``.

::

    TokenmillError
    ├── UsageError (ValueError)              the call is wrong: an argument, a flag, a recipe field
    ├── SourceError (OSError)                the data cannot be read
    │   ├── SourceMissing (FileNotFoundError)    no such file, or it has no rows
    │   ├── SourceChanged (RuntimeError)         the file changed while it was being read
    │   └── RowError (ValueError)                one row is bad; has a reason of REASONS
    ├── TokenizerError (ValueError)          a tokenizer cannot be loaded, or is ambiguous
    ├── TemplateError (ValueError)           a chat template is invalid or needs a fixed date
    │   └── BridgeError (ValueError)             a template would rewrite a turn of a rollout
    ├── CacheError (OSError)                 the cache is full, read-only or forbidden
    ├── CorruptionError (ValueError)         stored bytes differ from what was written
    │   └── MissingFileError (ValueError)        a file is missing, e.g. removed by ``cache gc``
    ├── NonDeterminismError (RuntimeError)   two builders wrote different bytes for one key
    ├── WorkerError (RuntimeError)           a worker process died, hung or ran out of memory
    └── StateError (ValueError)              a saved state does not match this data, seed or order
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from numbers import Integral
from typing import Any

REASONS = (
    "bad_json",  # the bytes are not one JSON object
    "bad_shape",  # JSON, but no conversation, text or pair in a supported format
    "bad_media",  # an image is missing, too large, unreadable or unsupported by the processor
    "media_mismatch",  # the number of images differs from the number of image placeholders
    "bad_group",  # answers that cannot be compared: one is empty, all are equal, a label is missing
    "template_error",  # the chat template raised an error
    "template_drops_content",  # the template omits an assistant's text or tool call
    "mask_unproven",  # no method could prove which characters are the assistant's
    "trailing_user",  # the conversation ends with a user turn
    "no_trained_tokens",  # the row has no token to train
    "overlong",  # longer than max_length
    "limit",  # over a limit on line length, nesting, or a template's work or output
)
"""Why a row can be rejected. Every rejected row has exactly one reason."""


IN_MEMORY = "in-memory data"  # path of rows without a file, in messages
IN_MEMORY_DIRECTORY = "in-memory"  # of a cache
_IN_MEMORY = re.compile(rf".*/{IN_MEMORY_DIRECTORY}/[0-9a-f]{{40}}\.jsonl", re.S)

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*):/+(?=[^\s/])")
_USER = re.compile(  # "/" may be in a password, also after digits that look like a port
    r"[^/?#]*@|[^/?#:\[@]*:(?!\d+(?:[/?#]|$)).*@|(?!localhost:)[^/?#:\[@.]+:.*@(?=[^/?#@]+/)", re.S
)
_URL = re.compile(_SCHEME.pattern + r"""\S*?(?=['")\]>,.:;]*(?:\s|$))""")  # without punctuation
_SIGNED = ("abfs", "abfss", "adl", "az", "wasb", "wasbs")  # a query is a signature
_QUERY = re.compile(r"\?[^\s?]*=\S*")


def shown(url: str) -> str:
    """Return a URL of any scheme without user, password and query, and a path unchanged."""
    match = _SCHEME.search(url)
    if match is None:
        return url
    is_http = match[1].lower() in ("http", "https")
    rest = url[match.end() :]
    head, _, query = rest.partition("?")
    if is_http or match[1].lower() in _SIGNED or "=" in query:  # otherwise "?" may be of a glob
        rest = head
    if is_http:
        rest = rest.partition("#")[0]
    user = _USER.match(rest)
    return url[: match.end()] + rest[user.end() if user else 0 :]


def hide_secrets(text: str, url: str = "") -> str:
    """Return a text with its URLs as `shown`, and without the secrets of one more URL."""
    if ":/" in text:
        text = _QUERY.sub("", _URL.sub(lambda match: shown(match[0]), text))
    public = set(re.findall(r"[\w%+-]+", shown(url)))
    for word in sorted(set(re.findall(r"[\w%+-]{3,}", url)) - public, key=len, reverse=True):
        text = text.replace(word, "…")
    return text


def public_path(path: str) -> str:
    """Return a path or URL for messages; files of in-memory rows have no path there."""
    return IN_MEMORY if _IN_MEMORY.fullmatch(path) else shown(path)


class TokenmillError(Exception):
    """Base class of all errors of tokenmill: a message and the location of the problem.

    Args:
        parts: What is wrong and what to do, without the location. A tuple is an argument: its name
            and, optionally, values. ``("trailing", "trim")`` becomes ``trailing='trim'`` in Python
            and ``--trailing trim`` on the command line.
        path: File (or directory) concerned.
        row: Row number within the file, from 0.
        line: Physical line within the file, from 1.
        offset: Byte offset within the (decompressed) file.
    """

    def __init__(
        self,
        *parts: str | tuple[Any, ...],
        path: str | os.PathLike[str] | None = None,
        row: int | None = None,
        line: int | None = None,
        offset: int | None = None,
    ) -> None:
        self.parts = parts
        self.message = self.render()
        super().__init__(self.message)
        self.path = None if path is None else public_path(os.fsdecode(path))
        self.row = row
        self.line = line
        self.offset = offset

    @property
    def location(self) -> str:
        """``file:line (row r, byte o)`` as far as known, else the empty string."""
        where = self.path or ""
        if self.line is not None:
            where += f":{self.line}" if where else f"line {self.line}"
        details = []
        if self.row is not None:
            details.append(f"row {self.row}")
        if self.offset is not None:
            details.append(f"byte {self.offset}")
        if details:
            where += f" ({', '.join(details)})" if where else ", ".join(details)
        return where

    def __str__(self) -> str:
        return f"{self.location}: {self.message}" if self.location else self.message

    def render(self, flags: Mapping[str, str] | None = None) -> str:
        """Return the message with arguments as the flags of a command, by name."""
        flags = flags or {}
        text = "".join(
            part if isinstance(part, str) else _render_argument(*part, flag=flags.get(part[0]))
            for part in self.parts
        )
        return hide_secrets(text)

    def __reduce__(self) -> Any:
        # OSError.__reduce__ would lose the keyword arguments when the error is pickled.
        return _rebuild, (type(self), self.message, dict(self.__dict__))

    def add_note(self, note: str) -> None:  # Python 3.10 has none
        self.__notes__ = [*getattr(self, "__notes__", ()), note]

    def as_dict(self) -> dict[str, Any]:
        """Return the ``error`` object of the command line's ``--json`` output."""
        names = ("message", "path", "row", "line", "offset")
        return {"type": type(self).__name__, **{name: getattr(self, name) for name in names}}


def _rebuild(cls: type[TokenmillError], message: str, state: dict[str, Any]) -> TokenmillError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class UsageError(TokenmillError, ValueError):
    """The call is wrong: an argument, a flag or a field of a recipe."""


def _render_argument(name: str, *values: Any, flag: str | None) -> str:
    text = " | ".join(map(repr if flag is None else str, values))
    if flag is not None:
        return f"{flag} {text}" if text else flag
    return f"{name}={text}" if text else name


MAX_INT32 = (1 << 31) - 1  # token ids and lengths of stores and batches


def check_integer(name: str, value: object, minimum: int, maximum: int | None = None) -> int:
    """Return a Python or numpy integer that is from ``minimum`` to ``maximum``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        kind = {0: "a non-negative integer", 1: "a positive integer"}.get(minimum, "an integer")
        raise UsageError((name,), f" must be {kind}, got {value!r}")
    number = int(value)
    if maximum is not None and number > maximum:
        raise UsageError((name,), f" must be at most {maximum}, got {number}")
    return number


def check_positive(name: str, value: object) -> int:
    return check_integer(name, value, 1)


def check_one_of(name: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise UsageError((name,), f" must be one of {', '.join(choices)}, got {value!r}")


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise UsageError((name,), f" must be True or False, got {value!r}")
    return value


def check_strings(name: str, values: object) -> list[str]:
    """Return the strings of an iterable that is no string itself."""
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    members = list(values) if is_list else []  # type: ignore[call-overload]
    if not is_list or not all(isinstance(member, str) for member in members):
        raise UsageError((name,), f" must be a list of strings, got {values!r:.200}")
    return members


class SourceError(TokenmillError, OSError):
    """The data cannot be read."""


class SourceMissing(SourceError, FileNotFoundError):
    """No such file, or a location without data."""


class SourceChanged(SourceError, RuntimeError):
    """The file changed while it was being read."""


class RowError(SourceError, ValueError):
    """One row is bad; ``reason`` is one of `REASONS`, ``location`` as in `TokenmillError`."""

    def __init__(
        self, *parts: str | tuple[Any, ...], reason: str = "bad_shape", **location: Any
    ) -> None:
        super().__init__(*parts, **location)
        if reason not in REASONS:
            raise AssertionError(f"unknown rejection reason: {reason!r}")
        self.reason = reason


class TokenizerError(TokenmillError, ValueError):
    """A tokenizer cannot be loaded, or it is ambiguous which one would encode."""


class TemplateError(TokenmillError, ValueError):
    """A chat template cannot be compiled, or needs a fixed date."""


class BridgeError(TemplateError, ValueError):
    """A rollout cannot be continued: the template would rewrite a turn of it.

    Args:
        message: What would be rewritten.
        turn: Number of the turn's message; None where it is unknown.
        before: The turn's text.
        after: The text that the template would print instead.
        location: As in `TokenmillError`.
    """

    def __init__(
        self,
        message: str,
        *,
        turn: int | None = None,
        before: str = "",
        after: str = "",
        **location: Any,
    ) -> None:
        super().__init__(message, **location)
        self.turn = turn
        self.before = before
        self.after = after


class CacheError(TokenmillError, OSError):
    """The cache is full, read-only or forbidden. Nothing was published."""


class CorruptionError(TokenmillError, ValueError):
    """Stored bytes differ from what was written."""


class MissingFileError(CorruptionError, ValueError):
    """A file of a store or cache is missing, for example because ``cache gc`` removed it."""


class NonDeterminismError(TokenmillError, RuntimeError):
    """Two builders wrote different bytes for one key."""


class WorkerError(TokenmillError, RuntimeError):
    """A worker process died, hung or ran out of memory too often."""


class StateError(TokenmillError, ValueError):
    """A saved state does not match this data, seed or order."""
