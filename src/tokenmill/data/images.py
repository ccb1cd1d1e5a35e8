"""Read the images of a store's rows: the same bytes that the rows were prepared with.

An image is the store's copy, the file, archive or URL in its row, or a value inside the source row.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import Any

from tokenmill._core import fingerprint
from tokenmill._core.remote import is_remote
from tokenmill.errors import RowError, SourceChanged, SourceMissing, TokenmillError, UsageError
from tokenmill.media import Images, Reference, reference_from_text, reference_of
from tokenmill.sources.rows import Rows, open_rows
from tokenmill.store import Media, Store


class StoredImages:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, Rows] = {}

    @cached_property
    def _images(self) -> Images:
        # Created on first use, because the root may be missing if the store has copies.
        return Images(self._store.media_root, urls=self._store.media_urls)

    def read(self, media: Media) -> bytes:
        """Return the bytes of an image; raise if it is missing, not readable or changed."""
        data = self._store.embedded_image(media.digest)
        if data is None:
            data = self._read_source(media)
        digest = fingerprint.checksum(data)
        if digest != media.digest:
            raise SourceChanged(
                f"the image {media.reference} changed since its row was prepared: digest {digest}, "
                f"expected {media.digest}; restore it, or prepare the rows again",
                **_location(media),
            )
        return data

    def _read_source(self, media: Media) -> bytes:
        path = None if media.origin is None else media.origin.path
        base = None if path is None or is_remote(path) else os.path.dirname(os.path.abspath(path))
        try:
            return self._images.read(self._reference(media), base)
        except (RowError, UsageError) as error:  # UsageError: the root is missing
            raise SourceMissing(
                f"the image {media.reference} (digest {media.digest}) cannot be read: "
                f"{error.message}; set their directory with ",
                ("media_root",),
                **_location(media),
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
                f"the image {media.reference} is in its source row, whose path is unknown"
            )
        try:
            rows = self._rows.get(origin.path)
            if rows is None:
                root = self._store.cache_root
                rows = self._rows[origin.path] = open_rows(origin.path, cache_dir=root)
            value: Any = rows[origin.row]
        except (TokenmillError, IndexError) as error:
            raise SourceMissing(
                f"the image {media.reference} is in its source row, which cannot be read: {error}",
                **_location(media),
            ) from error
        for step in media.reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                value = value[int(name)] if isinstance(value, list) else value[name]
            except (KeyError, IndexError, ValueError, TypeError) as error:
                raise SourceChanged(
                    f"the source row has no image at {media.reference} any more",
                    **_location(media),
                ) from error
        return value


def images_of(store: Store) -> StoredImages:
    """Return the reader of a store's images; raise `UsageError` if it has none."""
    if not store.has_media:
        raise UsageError("no row of this store has an image", path=store.path)
    return StoredImages(store)


def _location(media: Media) -> dict[str, Any]:
    return {} if media.origin is None else media.origin.location
