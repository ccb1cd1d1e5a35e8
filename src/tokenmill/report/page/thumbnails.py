"""Small pictures for the page, in place of the tokens that stand for the pictures of rows.

`thumbnail` opens a picture again, as `Store.picture` does (only the very bytes that the row was
prepared from count), and gives a *thumbnail* as a data URI: bounded in pixels and in bytes. A
picture that is gone, that changed, that is elsewhere or too large gives a *note* instead, and the
page goes on. Notes are the same whatever the file holds: a store may come from anybody and name any
file of this machine, and pages are handed on. A page on disk carries those of its rows, each once,
up to a bound (`embedded_thumbnails`); a served one asks for them one by one.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable

from tokenmill.errors import SourceChanged, TokenmillError
from tokenmill.media import Limits, Pictures
from tokenmill.store import Media, Store

EDGE = 256  # pixels of the longer side
MOST_BYTES = 24 << 10  # of one thumbnail
QUALITIES = (80, 55, 30)  # of JPEG, until it fits
MOST_PIXELS = 50_000_000  # of a picture that is opened for it: 150 MB for a moment
MOST_THUMBNAILS = 800  # in one page; each costs some milliseconds of decoding
ENTRY_BYTES = 120  # of a thumbnail in a page beside its own


def thumbnail(store: Store, media: Media) -> dict[str, str]:
    """``src``, or a ``note`` that says why there is none."""
    try:
        data = store.picture(media)
        image = Pictures(limits=Limits(pixels=MOST_PIXELS)).open(data, media.reference)
    except SourceChanged:
        return {"note": "changed since: what is there now is not what the row was prepared from"}
    except (TokenmillError, OSError):
        return {"note": "gone, or it cannot be read here; open_store(media_root=) says where it is"}
    image.thumbnail((EDGE, EDGE))
    for quality in QUALITIES:
        written = io.BytesIO()
        image.save(written, "JPEG", quality=quality)
        if written.tell() <= MOST_BYTES:
            coded = base64.b64encode(written.getvalue()).decode("ascii")
            return {"src": f"data:image/jpeg;base64,{coded}"}
    return {"note": "even a small picture of it is too large for a page"}


def embedded_thumbnails(
    store: Store, rows: Iterable[int], most_bytes: int
) -> dict[str, dict[str, str]]:
    """The thumbnails of rows by digest, each once, as long as they fit."""
    found: dict[str, dict[str, str]] = {}
    left = float(most_bytes)
    for number in rows if store.has_media else ():
        for media in store[number].media:
            if media.digest in found:
                continue
            made = thumbnail(store, media)
            # Base64 in compressed JSON in base64: a little more than the first base64 alone.
            left -= 1.05 * sum(map(len, made.values())) + ENTRY_BYTES
            if left < 0 or len(found) == MOST_THUMBNAILS:
                return found
            found[media.digest] = made
    return found
