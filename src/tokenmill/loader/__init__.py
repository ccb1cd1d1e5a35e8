"""The loader: dataset × order × packing → numpy batches; its state is a small JSON-able cursor.

`Loader` is what people use. Beneath it, `Stream` turns a `Cursor` into a batch and the next cursor
without keeping anything; `WholeRun` is a whole run as one list, for trainers that own the
sampler.
"""

from __future__ import annotations

from tokenmill.loader.cursor import Cursor, StreamSpec
from tokenmill.loader.loader import Loader, LoaderIterator
from tokenmill.loader.media import PlacedMedia
from tokenmill.loader.stream import LengthGrouped, Stream
from tokenmill.loader.whole_run import WholeRun

__all__ = [
    "Cursor",
    "LengthGrouped",
    "Loader",
    "LoaderIterator",
    "PlacedMedia",
    "Stream",
    "StreamSpec",
    "WholeRun",
]
