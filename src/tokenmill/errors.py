"""The exceptions of tokenmill and the reasons for rejecting a row.

An error says what is wrong, where (path, row, line, byte offset, as far as known) and what to do.
Each leaf has a builtin second parent, so ``except FileNotFoundError`` works. A package that calls
another library (msgspec, jinja2, pyarrow) translates its exceptions with ``from``.

::

    TokenmillError
    ├── UsageError (ValueError)              the call is wrong: an argument, a flag, a recipe field
    ├── SourceError (OSError)                the data cannot be read
    │   ├── SourceMissing (FileNotFoundError)    no such file, or nothing in it
    │   ├── SourceChanged (RuntimeError)         the file changed while it was being read
    │   └── RowError (ValueError)                one row is bad; carries a reason of REASONS
    ├── TokenizerError (ValueError)          a tokenizer cannot be loaded, or is ambiguous
    ├── TemplateError (ValueError)           a chat template cannot be compiled or must be pinned
    │   └── BridgeError (ValueError)             a template would rewrite what a rollout holds
    ├── CacheError (OSError)                 the cache cannot be used: full, read-only, forbidden
    ├── CorruptionError (ValueError)         stored bytes are not what was written
    ├── NonDeterminismError (RuntimeError)   two builders made different bytes for one key
    ├── WorkerError (RuntimeError)           a worker process died, hung or ran out of memory
    └── StateError (ValueError)              a saved cursor does not fit this data or order
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

REASONS = (
    "bad_json",  # the bytes are not one JSON object
    "bad_shape",  # JSON, but not a conversation, text or pair that the format describes
    "bad_media",  # a picture is missing, out of bounds, unreadable or nothing for the processor
    "media_mismatch",  # as many pictures as places for them were expected, and there are not
    "bad_group",  # answers that cannot be compared: one is empty, none differs, a label is none
    "template_error",  # the chat template itself refused the row
    "template_drops_content",  # the template prints an assistant's text or tool call nowhere
    "mask_unproven",  # no method could show which characters are the assistant's
    "trailing_user",  # the conversation ends with a user turn
    "no_trained_tokens",  # nothing in the row would be trained
    "overlong",  # longer than max_length
    "limit",  # a bound on line length, nesting, or a template's work or output
)
"""Why a row can be rejected. Every rejected row is counted under exactly one of these."""


class TokenmillError(Exception):
    """Root of the tree: a message and the place it is about.

    Args:
        message: What is wrong and what to do, without the place.
        path: File (or directory) concerned.
        row: Row number within the file, from 0.
        line: Physical line within the file, from 1.
        offset: Byte offset within the (decompressed) file.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | os.PathLike[str] | None = None,
        row: int | None = None,
        line: int | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.path = None if path is None else os.fspath(path)
        self.row = row
        self.line = line
        self.offset = offset

    @property
    def place(self) -> str:
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
        return f"{self.place}: {self.message}" if self.place else self.message

    def __reduce__(self) -> Any:
        # OSError's own reduce would lose the keyword arguments on the way to another process.
        return _rebuild, (type(self), self.message, dict(self.__dict__))

    def as_dict(self) -> dict[str, Any]:
        """The ``error`` object of the command line's ``--json`` output."""
        names = ("message", "path", "row", "line", "offset")
        return {"type": type(self).__name__, **{name: getattr(self, name) for name in names}}


def _rebuild(cls: type[TokenmillError], message: str, state: dict[str, Any]) -> TokenmillError:
    error = cls.__new__(cls, message)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    return error


class UsageError(TokenmillError, ValueError):
    """The call is wrong: an argument, a flag or a field of a recipe.

    Args:
        parts: The message. A tuple in it is an argument: its name, and values where the message
            gives them. ``("trailing", "trim")`` reads ``trailing='trim'`` in Python and
            ``--trailing trim`` on the command line.
        place: As in `TokenmillError`.
    """

    def __init__(self, *parts: str | tuple[Any, ...], **place: Any) -> None:
        self.parts = parts
        super().__init__(self.worded(), **place)

    def worded(self, flags: Collection[str] = ()) -> str:
        """Return the message; the arguments in ``flags`` are written as flags."""
        return "".join(
            part if isinstance(part, str) else _worded_argument(*part, as_flag=part[0] in flags)
            for part in self.parts
        )


def _worded_argument(name: str, *values: Any, as_flag: bool) -> str:
    given = " | ".join(map(str if as_flag else repr, values))
    if as_flag:
        return f"--{name.replace('_', '-')}{given and ' '}{given}"
    return f"{name}={given}" if given else name


def check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError((name,), f" is {value!r}; it is a positive whole number")


def check_one_of(name: str, value: object, known: Collection[str]) -> None:
    if value not in known:
        raise UsageError((name,), f" is {value!r}; it is one of {', '.join(known)}")


class SourceError(TokenmillError, OSError):
    """The data cannot be read."""


class SourceMissing(SourceError, FileNotFoundError):
    """No such file, or a location without data."""


class SourceChanged(SourceError, RuntimeError):
    """The file changed while it was being read."""


class RowError(SourceError, ValueError):
    """One row is bad.

    Args:
        message: What is wrong with the row.
        reason: One of `REASONS`.
        place: As in `TokenmillError`.
    """

    def __init__(self, message: str, *, reason: str = "bad_shape", **place: Any) -> None:
        super().__init__(message, **place)
        if reason not in REASONS:
            raise AssertionError(f"unknown reason of rejection: {reason!r}")
        self.reason = reason


class TokenizerError(TokenmillError, ValueError):
    """A tokenizer cannot be loaded, or it is ambiguous which one would encode."""


class TemplateError(TokenmillError, ValueError):
    """A chat template cannot be compiled, or needs something that the recipe must pin."""


class BridgeError(TemplateError, ValueError):
    """A rollout cannot be continued: the template would rewrite a turn of it.

    Args:
        message: What would be rewritten.
        turn: Number of the turn's message; None where it is unknown.
        before: The turn's text.
        after: What the template would print instead.
        place: As in `TokenmillError`.
    """

    def __init__(
        self,
        message: str,
        *,
        turn: int | None = None,
        before: str = "",
        after: str = "",
        **place: Any,
    ) -> None:
        super().__init__(message, **place)
        self.turn = turn
        self.before = before
        self.after = after


class CacheError(TokenmillError, OSError):
    """The cache cannot be written or read: full, read-only or forbidden; nothing was published."""


class CorruptionError(TokenmillError, ValueError):
    """Stored bytes are not what was written."""


class NonDeterminismError(TokenmillError, RuntimeError):
    """Two builders made different bytes for one key."""


class WorkerError(TokenmillError, RuntimeError):
    """A worker process died, hung or ran out of memory more often than it may."""


class StateError(TokenmillError, ValueError):
    """A saved cursor does not fit this data, seed or order."""
