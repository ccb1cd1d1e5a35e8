"""Keys: every byte that can change the output, and nothing else.

A *slice key* is the fingerprint of (format, row-shaping fields, tokenizer identity, kind and digest
of the slice's bytes). A *store key* is the fingerprint of (format, row-shaping fields, tokenizer
identity, the sources by content, in order). Neither holds a path, a time, a worker count, an engine
or a library's version (promise P5). The source documents are computed here from the digests of the
blocks that are really used, so ``path@[a:b]`` is a content of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

from tokenmill import fingerprint
from tokenmill.store import FORMAT

Document = dict[str, Any]


class BlockLike(Protocol):
    """What a key needs to know of a source's block."""

    @property
    def file(self) -> int: ...  # noqa: D102
    @property
    def kind(self) -> str: ...  # noqa: D102
    @property
    def rows(self) -> int: ...  # noqa: D102
    @property
    def length(self) -> int: ...  # noqa: D102
    @property
    def digest(self) -> str: ...  # noqa: D102


def shape_key(recipe: Document, identity: str) -> str:
    """Fingerprint of everything that shapes a row: computed once, shared by all slices."""
    return fingerprint.key({"format": FORMAT, "recipe": recipe, "tokenizer": identity})


def slice_key(shape: str, block: BlockLike) -> str:
    """The key of the slice that a block becomes."""
    return fingerprint.key({"shape": shape, "kind": block.kind, "digest": block.digest})


def source_documents(blocks: Iterable[BlockLike]) -> list[Document]:
    """The sources by content: one document per file that has rows, in order of the blocks.

    Also says through ``file`` which of the caller's files it was; `store_document` leaves that out.
    """
    documents: list[Document] = []
    hasher = hashlib.blake2b(digest_size=fingerprint.KEY_HEX // 2)
    for block in blocks:
        if not documents or documents[-1]["file"] != block.file:
            _finish(documents, hasher)
            hasher = hashlib.blake2b(digest_size=fingerprint.KEY_HEX // 2)
            documents.append({"file": block.file, "kind": block.kind, "rows": 0, "bytes": 0})
        hasher.update(f"{block.kind}:{block.digest}\n".encode())
        documents[-1]["rows"] += block.rows
        documents[-1]["bytes"] += block.length
    _finish(documents, hasher)
    return documents


def _finish(documents: list[Document], hasher: hashlib.blake2b) -> None:
    if documents:
        documents[-1]["digest"] = hasher.hexdigest()


def store_document(recipe: Document, identity: Document, sources: list[Document]) -> Document:
    """The whole key document of a store: what its key is the fingerprint of."""
    return {
        "format": FORMAT,
        "recipe": recipe,
        "tokenizer": identity,
        "sources": [
            {name: value for name, value in source.items() if name != "file"} for source in sources
        ],
    }
