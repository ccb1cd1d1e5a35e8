"""Keys and checksums.

A *key* identifies a document: canonical JSON (sorted members, no spaces, UTF-8), hashed with
BLAKE2b to 160 bits. A *checksum* (xxh3) detects damaged bytes. Neither depends on hash seeds,
locale, insertion order or library versions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import xxhash

from tokenmill.errors import UsageError

KEY_HEX = 40  # hex digits of a key: 160 bits, so that 2**40 documents do not collide

MAX_NESTED = 64  # levels of a value in a recipe

_encoder = msgspec.json.Encoder(order="sorted")
_unsorted = msgspec.json.Encoder()


def canonical(document: Any) -> bytes:
    """Encode plain values, and structs as the dict of their fields, as canonical JSON.

    Raises:
        ValueError: A value would be encoded like a different one: NaN and infinities (``null``),
            bytes (base64), keys that are numbers.
    """
    _require_plain(document)
    return _encoder.encode(document)


def _require_plain(value: Any) -> None:
    if value is None or isinstance(value, str | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} has no canonical form")
    elif isinstance(value, dict):
        for name, member in value.items():
            if not isinstance(name, str):
                raise ValueError(f"the key {name!r} has no canonical form; use a string")
            _require_plain(member)
    elif isinstance(value, list | tuple):
        for member in value:
            _require_plain(member)
    elif isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            _require_plain(getattr(value, field))
    else:
        raise ValueError(f"a {type(value).__name__} has no canonical form")


def plain(value: Any, name: str, depth: int = 0) -> Any:
    """Check a value from the caller and return it with tuples as lists.

    Raises:
        UsageError: The value has no canonical form, or a template would print it differently: NaN,
            bytes, keys that are not strings, lone surrogates, integers beyond 64 bits, subclasses
            of str, int or float.
    """
    if depth > MAX_NESTED:
        raise UsageError(f"{name} is nested deeper than {MAX_NESTED} levels")
    if isinstance(value, Mapping):
        for member in value:
            if type(member) is not str:
                raise UsageError(f"{name} has the key {member!r}; keys must be strings")
            plain(member, f"a key of {name}")
        return {
            member: plain(item, f"{name}[{member!r}]", depth + 1) for member, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}[{at}]", depth + 1) for at, item in enumerate(value)]
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{name} is {value!r}, which is not valid Unicode: {error}") from error
    elif type(value) is int:
        if not -(1 << 63) <= value < 1 << 64:
            raise UsageError(f"{name} is {value}, which does not fit into 64 bits; pass a string")
    elif type(value) is float:
        if not math.isfinite(value):
            raise UsageError(f"{name} must be finite, got {value!r}")
    elif value is not None and type(value) is not bool:
        raise UsageError(
            f"{name} is {value!r}, a {type(value).__name__}; pass a string, a number, true, false, "
            "null, a list or a mapping"
        )
    return value


def own_order(document: Mapping[str, Any]) -> str | None:
    """Return a document as unsorted JSON if sorting its nested mappings changes it, else None.

    The canonical encoding sorts every mapping, but a template prints mappings in their own order.
    """
    top = {name: document[name] for name in sorted(document)}
    unsorted = _unsorted.encode(top)
    return None if unsorted == canonical(top) else unsorted.decode()


def key(document: Any) -> str:
    return key_of_pieces((canonical(document),))


def canonical_of_parsed(document: Any) -> bytes:
    """Encode parsed JSON without checks, which take half a second for a large vocabulary."""
    return _encoder.encode(document)


def key_of_parsed(document: Any) -> str:
    return key_of_pieces((canonical_of_parsed(document),))


def key_of_pieces(pieces: Iterable[bytes]) -> str:
    """Return the key of a document whose canonical JSON comes in pieces."""
    hashed = hashlib.blake2b(digest_size=KEY_HEX // 2)
    for piece in pieces:
        hashed.update(piece)
    return hashed.hexdigest()


def checksum(data: bytes | bytearray | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def checksum64(data: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(data)


def block_checksums(data: bytes | bytearray | memoryview, block_bytes: int) -> list[str]:
    view = memoryview(data).cast("B")
    return [
        xxhash.xxh3_64_hexdigest(view[start : start + block_bytes])
        for start in range(0, len(view), block_bytes)
    ]
