"""Messages between a parent and its worker: four bytes of length, then a tagged msgspec message.

Errors are sent as the name of their class in `tokenmill.errors` and their attributes, never as
pickles: a worker can send a wrong value, but no code.
"""

from __future__ import annotations

import struct
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from tokenmill import errors
from tokenmill.errors import TokenmillError, WorkerError

_LENGTH = struct.Struct(">I")
MAX_FRAME = 1 << 30  # bytes; a larger one means a damaged stream


class Begin(msgspec.Struct, tag=True):
    entry: str
    options: dict[str, Any]


class Assign(msgspec.Struct, tag=True):
    number: int
    payload: dict[str, Any]
    label: str = ""


class Started(msgspec.Struct, tag=True):
    pid: int  # the server's own: it cannot fork and becomes the worker


class Exited(msgspec.Struct, tag=True):
    pid: int
    code: int


class Beat(msgspec.Struct, tag=True):
    """The worker is alive."""


class Finishing(msgspec.Struct, tag=True):
    """Only the completion of a task is left; another task can begin."""

    number: int


class Finished(msgspec.Struct, tag=True):
    number: int
    result: dict[str, Any]
    seconds: float


class Failure(msgspec.Struct):
    type: str  # class of `tokenmill.errors`
    message: str
    attributes: dict[str, Any]
    notes: list[str]


class Failed(msgspec.Struct, tag=True):
    number: int | None  # None: while the worker set up
    failure: Failure


Down = Begin | Assign
Up = Started | Exited | Beat | Finishing | Finished | Failed

_encoder = msgspec.msgpack.Encoder()
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_plain: msgspec.msgpack.Decoder[dict[str, Any]] = msgspec.msgpack.Decoder(dict[str, Any])


def frame(message: Down | Up) -> bytes:
    body = _encode(message)
    if len(body) > MAX_FRAME:
        raise WorkerError(f"a message has {len(body)} bytes, the limit is {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


def deserialize(value: dict[str, Any]) -> dict[str, Any]:
    """Encode and decode a value, as if it was sent to a worker."""
    try:
        return _plain.decode(_encode(value))
    except msgspec.MsgspecError as error:
        raise WorkerError(f"{_NOT_SERIALIZABLE}: {error}") from error


_NOT_SERIALIZABLE = "a payload, result or option is not JSON-serializable"


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WorkerError(f"{_NOT_SERIALIZABLE}: {error}") from error


class Frames:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def _bodies(self) -> Iterator[bytes]:
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise WorkerError(f"a worker sent a damaged message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield body

    def downs(self) -> Iterator[Down]:
        for body in self._bodies():
            yield _down.decode(body)

    def ups(self) -> Iterator[Up]:
        for body in self._bodies():
            try:
                yield _up.decode(body)
            except msgspec.MsgspecError as error:
                raise WorkerError(f"a worker's message cannot be read: {error}") from error


def pack_error(error: TokenmillError) -> Failure:
    """Return an error as plain values; attributes that have no encoding are left out."""
    known = next(c for c in type(error).__mro__ if c.__module__ == errors.__name__)
    attributes = {}
    for name, value in error.__dict__.items():
        if name.startswith("__"):
            continue
        try:
            _encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            continue
        attributes[name] = value
    notes = list(getattr(error, "__notes__", ()))
    if error.__cause__ is not None:
        # The exception chain cannot be encoded, but its text can.
        notes.append("".join(traceback.format_exception(error.__cause__)).rstrip())
    return Failure(known.__name__, error.message, attributes, notes)


def unpack_error(failure: Failure) -> TokenmillError:
    known = getattr(errors, failure.type, None)
    if not (isinstance(known, type) and issubclass(known, TokenmillError)):
        raise WorkerError(f"a worker reported an error of unknown type {failure.type!r}")
    error = known(failure.message)
    error.__dict__.update(failure.attributes)
    for note in failure.notes:
        error.add_note(note)
    return error
