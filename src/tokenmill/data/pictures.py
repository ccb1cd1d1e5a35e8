"""Read the images of a store's rows again: the bytes that the tokens were made of.

An image is the copy that the store may hold, the file, archive or URL that its row names, or a
value within the row, which is then read from its source.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

from tokenmill._core import fingerprint
from tokenmill._core.remote import is_remote
from tokenmill.errors import RowError, SourceChanged, SourceMissing, TokenmillError, UsageError
from tokenmill.media import Pictures, Reference, reference_from_text, reference_of
from tokenmill.sources.rows import Rows, open_rows
from tokenmill.store import Media, Store


class StoredPictures:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, Rows] = {}

    @cached_property
    def _pictures(self) -> Pictures:
        """Made on first use: the root may be gone while the store has copies."""
        return Pictures(self._store.media_root, urls=self._store.media_urls)

    def read(self, media: Media) -> bytes:
        """The bytes of an image.

        Raises:
            SourceMissing: It is not where it was, or may not be read.
            SourceChanged: Its digest is not the one that the row was prepared from.
        """
        data = self._store.embedded_picture(media.digest)
        if data is None:
            data = self._found(media)
        found = fingerprint.checksum(data)
        if found != media.digest:
            raise SourceChanged(
                f"the picture {media.reference} is not what its row was prepared from: its digest "
                f"is {found}, expected {media.digest}; put it back, or prepare the rows again",
                **_place(media),
            )
        return data

    def _found(self, media: Media) -> bytes:
        path = None if media.origin is None else media.origin.path
        base = None if path is None or is_remote(path) else os.path.dirname(os.path.abspath(path))
        try:
            return self._pictures.read(self._reference(media), base)
        except (RowError, UsageError) as error:  # the latter: the root itself is gone
            raise SourceMissing(
                f"the picture {media.reference} (digest {media.digest}) cannot be read: "
                f"{error.message}; open_store(media_root=) says where pictures are now",
                **_place(media),
            ) from error

    def _reference(self, media: Media) -> Reference:
        if media.reference.startswith("#/"):
            return reference_of(self._in_row(media))
        if media.reference.startswith("{"):
            return reference_from_text(media.reference)
        return reference_of(media.reference)

    def _in_row(self, media: Media) -> Any:
        origin = media.origin
        if origin is None or origin.path is None:
            raise SourceMissing(
                f"the picture {media.reference} is in its source row, and where that is is not "
                "known any more"
            )
        try:
            rows = self._rows.get(origin.path)
            if rows is None:
                root = self._store.cache_root
                rows = self._rows[origin.path] = open_rows(origin.path, cache_dir=root)
            value: Any = rows[origin.row]
        except (TokenmillError, IndexError) as error:
            raise SourceMissing(
                f"the picture {media.reference} is in its source row, which cannot be read: "
                f"{error}",
                **_place(media),
            ) from error
        for step in media.reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(name)] if isinstance(value, list) else value[name]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise SourceChanged(
                    f"the source row holds no picture at {media.reference} any more",
                    **_place(media),
                ) from error
        return value


def pictures_of(store: Store) -> StoredPictures:
    """The reader of a store's images; raises `UsageError` where its rows have none."""
    if not store.has_media:
        raise UsageError("no row of this store has a picture", path=store.path)
    return StoredPictures(store)


def _place(media: Media) -> dict[str, Any]:
    return {} if media.origin is None else media.origin.location
