"""Find files, index rows, return the bytes and origin of any row or block.

`open_rows` turns files into `Rows`, a lazy sequence of dicts; ``rows.blocks()`` cuts it into
`Block` values, and `read_block` reads one of them in any process. `Origin` says where a row is,
`SourceFile` what a file holds. Everything heavier than numpy, msgspec and xxhash (pyarrow,
zstandard, isal) is imported when a file needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optional import first_use
from tokenmill.origin import Origin

if TYPE_CHECKING:
    from tokenmill.source.block import Block, BlockRows, read_block
    from tokenmill.source.bytefile import SourceFile
    from tokenmill.source.rows import Rows, open_rows

__all__ = ["Block", "BlockRows", "Origin", "Rows", "SourceFile", "open_rows", "read_block"]

__getattr__ = first_use(
    __name__,
    block="Block BlockRows read_block",
    bytefile="SourceFile",
    rows="Rows open_rows",
)
