"""What every job begins with: the cache, the rows of its sources, and what these are by content.

`cache_of` and `open_sources` turn what a caller wrote into a cache and opened rows.
`source_documents` describes the rows by content, for the keys of stores and length indexes: from
the digests of the blocks that are really used, so ``path@[a:b]`` is a content of its own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from tokenmill import fingerprint
from tokenmill.errors import CorruptionError
from tokenmill.files import default_cache_dir
from tokenmill.source import Block, Rows, open_rows
from tokenmill.store import CacheLayout

Source = str | os.PathLike[str]


def cache_of(directory: Source | None) -> CacheLayout:
    """The cache at a directory; None is the user's own."""
    return CacheLayout(Path(directory or default_cache_dir()).absolute())


def open_sources(
    sources: Source | Sequence[Source], cache: CacheLayout, *, rehash: bool = False
) -> Rows:
    """Open rows; a damaged index of rows is made again: it only repeats what the source says."""
    try:
        return open_rows(sources, cache_dir=cache.root, rehash=rehash)
    except CorruptionError as error:
        if rehash or cache.rows not in Path(error.path or "").parents:
            raise
        return open_rows(sources, cache_dir=cache.root, rehash=True)


def source_documents(blocks: Iterable[Block]) -> list[tuple[int, dict[str, Any]]]:
    """The sources by content, in order of the blocks: (number of a file, document of its rows).

    A file that is named again after another one is a source again.
    """
    documents = []
    for file, run in groupby(blocks, key=lambda block: block.file):
        hasher = hashlib.blake2b(digest_size=fingerprint.KEY_HEX // 2)
        rows = size = 0
        for block in run:
            hasher.update(f"{block.kind}:{block.digest}\n".encode())
            rows += block.rows
            size += block.length
        document = {"kind": block.kind, "rows": rows, "bytes": size, "digest": hasher.hexdigest()}
        documents.append((file, document))
    return documents
