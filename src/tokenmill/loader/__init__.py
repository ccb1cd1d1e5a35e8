"""The loader: dataset × order × packing → numpy batches; its state is a small JSON-able cursor.

`Loader` is what people use. Beneath it, `Stream` turns a `Cursor` into a batch and the next cursor
without keeping anything; `OrderedView` serves trainers that own the sampler, one epoch at a time,
and `WholeRun` those that want a whole run as one list.
"""

from __future__ import annotations

from tokenmill.loader.cursor import Cursor, Passport
from tokenmill.loader.loader import Loader, LoaderIterator
from tokenmill.loader.media import PlacedMedia
from tokenmill.loader.ordered import OrderedView
from tokenmill.loader.stream import LengthGrouped, Stream
from tokenmill.loader.whole_run import WholeRun

__all__ = [
    "Cursor",
    "LengthGrouped",
    "Loader",
    "LoaderIterator",
    "OrderedView",
    "Passport",
    "PlacedMedia",
    "Stream",
    "WholeRun",
]
