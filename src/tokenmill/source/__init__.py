"""Find files, index rows, return the bytes and origin of any row or block.

`open_rows` turns files into `Rows`, a lazy sequence of dicts; ``rows.blocks()`` cuts it into
`Block` values, and `read_block` reads one of them in any process. `Origin` says where a row is,
`SourceFile` what a file holds. Everything heavier than numpy, msgspec and xxhash (pyarrow,
zstandard, isal) is imported when a file needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenmill.origin import Origin

if TYPE_CHECKING:
    from tokenmill.source.block import Block, BlockRows, read_block
    from tokenmill.source.entry import SourceFile
    from tokenmill.source.open import open_rows
    from tokenmill.source.rows import Rows

_HOMES = {
    "Block": "block",
    "BlockRows": "block",
    "Rows": "rows",
    "SourceFile": "entry",
    "open_rows": "open",
    "read_block": "block",
}

__all__ = ["Block", "BlockRows", "Origin", "Rows", "SourceFile", "open_rows", "read_block"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
