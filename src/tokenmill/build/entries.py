"""Names of what workers run, and how a block travels to them.

An *entry* is ``module:function`` of a worker's half, by name: what it imports (template engines,
Arrow) is for the worker and not for the process that hands out work. A block travels as plain
values. Both stand here, in a module that imports nothing heavy, so that planning stays light.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenmill.source import Block

BUILD = "tokenmill.build.slices:open_builder"
DERIVE = "tokenmill.build.derive:open_deriver"


def from_block(block: Block) -> dict[str, Any]:
    """A block as plain values, to travel."""
    document: dict[str, Any] = msgspec.to_builtins(block)
    return document


def to_block(document: dict[str, Any]) -> Block:
    """A block that travelled as plain values."""
    return msgspec.convert(document, Block)
