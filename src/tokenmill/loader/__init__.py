"""The loader: data × order × packing → numpy batches, with a small JSON-serializable state.

`Loader` is the public class. Beneath it a `Stream` gives the samples that follow a `Cursor`.
`WholeRun` is a whole run as one list, for trainers that own the sampler.
"""

from __future__ import annotations

from tokenmill.loader.cursor import Cursor, StreamSpec
from tokenmill.loader.loader import Loader, LoaderIterator
from tokenmill.loader.media import PlacedMedia
from tokenmill.loader.samples import PackSamples, Step, Units
from tokenmill.loader.stream import LengthGrouped, Stream, WholeRun

__all__ = [
    "Cursor",
    "LengthGrouped",
    "Loader",
    "LoaderIterator",
    "PackSamples",
    "PlacedMedia",
    "Step",
    "Stream",
    "StreamSpec",
    "Units",
    "WholeRun",
]
