"""Find and hash the images that rows refer to; their digests are part of slice keys.

The cache stores the references of a block by the block's content, and the digests by the state of
the files (path, size, times). Images at URLs are always fetched. A builder hashes the images again
before it makes a slice, and compares the digests with the key.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenmill._core import fingerprint
from tokenmill._core.artifact import quarantine
from tokenmill._core.collector import without_collector
from tokenmill.build.blocks import block_of
from tokenmill.build.tasks import Work
from tokenmill.chat import ChatSpec
from tokenmill.chat.images import MediaTokens, take_images
from tokenmill.errors import CacheError, RowError, SourceChanged
from tokenmill.media import Images, Reference, reference_from_text, reference_of
from tokenmill.sources.block import Block, read_block
from tokenmill.sources.bytefile import Signature
from tokenmill.sources.index import IndexCache

VERSION = 1  # incremented when the same rows give other images
_WORDS = (b"image", b"video")  # one of them is in the bytes of every row with an image
_REFUSED = "!"  # prefix of the message that replaces the digest of an unusable image

Digests = dict[str, str]
"""Text of a reference → digest of the image's bytes, or `_REFUSED` and an error message."""

Values = Callable[[dict[str, Any]], Iterable[Any]]
"""Returns the image values of a row, in order; raises `RowError` for a row to be rejected."""


class ReferencedFiles:
    """Finds and hashes the images that the rows of blocks refer to.

    ``document`` identifies ``values``. Without ``hashed`` (for lint) digests are not compared.
    """

    def __init__(
        self,
        document: dict[str, Any],
        values: Values,
        images: Images,
        index_cache: IndexCache,
        *,
        reread: bool = False,
        hashed: bool = True,
    ) -> None:
        self._document = document
        self._values = values
        self.images = images
        self._index_cache = index_cache
        self._reread = reread
        self._hashed = hashed

    def of(self, block: Block) -> Digests:
        """Return the digests of a block's images, in the order of first mention."""
        if not self._hashed:
            return {}
        name = self._list_key(block)
        note = self._index_cache.note(name)
        if note is None:
            note = {"images": list(dict.fromkeys(self._references(block)))}
            self._write(name, note)
        texts: list[str] = note["images"]
        if not texts:
            return {}
        base = base_of(block)
        references = {text: reference_from_text(text) for text in texts}
        now = time.time_ns()
        seen = self._digests_key(name, base, references.values(), now)
        known = None if seen is None or self._reread else self._index_cache.note(seen)
        if known is not None and len(known["digests"]) == len(texts):
            return dict(zip(texts, known["digests"], strict=True))
        digests = {text: self._digest(one, base) for text, one in references.items()}
        again = self._digests_key(name, base, references.values(), now)
        if seen is not None and seen == again:
            note = {"digests": list(digests.values())}
            if self._reread and self._index_cache.note(seen) not in (None, note):
                # The file changed without a change of its times.
                quarantine(self._index_cache.root, self._index_cache.path(seen))
            self._write(seen, note)
        return digests

    def _write(self, name: str, note: dict[str, Any]) -> None:
        with contextlib.suppress(CacheError):  # a read-only cache; the metadata only saves time
            self._index_cache.write_note(name, note)

    def read(self, reference: Reference, block: Block, digests: Digests) -> bytes:
        """Return the bytes of an image; `SourceChanged` if its digest is not the one in the key."""
        if not self._hashed:
            return self.images.read(reference, base_of(block))
        expected = digests[reference.text()]
        if expected.startswith(_REFUSED):
            raise RowError(expected.removeprefix(_REFUSED), reason="bad_media")
        data = self.images.read(reference, base_of(block))
        actual = fingerprint.checksum(data)
        if actual != expected:
            raise SourceChanged(
                f"the image {reference.name} changed while it was prepared: its digest is "
                f"{actual}, expected {expected}; run the command again",
                path=block.path,
            )
        return data

    def _list_key(self, block: Block) -> str:
        return fingerprint.key(
            {
                "what": "images of a block",
                "version": VERSION,
                **self._document,
                "kind": block.kind,
                "digest": block.digest,
            }
        )

    def _references(self, block: Block) -> Iterator[str]:
        rows = read_block(block)
        for number, raw in enumerate(rows.raw):
            if raw and not any(word in raw for word in _WORDS):
                continue
            row = rows.values[number]
            if not isinstance(row, dict):
                continue
            try:
                values = self._values(row)
            except RowError:
                continue  # the row is rejected later, when it is rendered
            for value in values:
                try:
                    reference = reference_of(value)
                except RowError:
                    continue
                if reference.kind != "inline":
                    yield reference.text()

    def _digests_key(self, name: str, base: str | None, references: Any, now: int) -> str | None:
        """Return the key of files' digests in their present state; None if it proves nothing."""
        roots = [str(root) for root in self.images.roots] or [base or ""]
        states = []
        for reference in references:
            if reference.kind == "url":
                return None
            signature = _signature(roots, reference.path)
            if signature is None or not signature.is_stable(now):
                return None
            states.append(" ".join(map(str, signature)))
        return fingerprint.key(
            {"what": "digests of images", "of": name, "roots": roots, "states": states}
        )

    def _digest(self, reference: Reference, base: str | None) -> str:
        try:
            return fingerprint.checksum(self.images.read(reference, base))
        except RowError as error:
            message = error.message  # must not contain a path of this machine
            for root in (*map(str, self.images.roots), base):
                if root:
                    message = message.replace(root, "the media root")
            return _REFUSED + message


def base_of(block: Block) -> str | None:
    """Return the directory of relative paths in a block's rows."""
    return None if block.is_remote else os.path.dirname(block.location)


def digest_of(digests: Digests) -> str:
    """Return one digest of all digests; an empty string if there are none."""
    return fingerprint.key({"images": list(digests.values())}) if digests else ""


def _signature(roots: list[str], path: str) -> Signature | None:
    for root in roots:
        try:
            return Signature.of(os.stat(os.path.join(root, path)))
        except OSError:
            continue
    return None


def referenced_files_of(options: dict[str, Any], *, hashed: bool = True) -> ReferencedFiles:
    """Return the referenced images of conversations, from a worker's options."""
    media = options["media"]
    spec, tokens = ChatSpec(**media["spec"]), MediaTokens(*media["tokens"])

    def values(row: dict[str, Any]) -> Iterable[Any]:
        _, found = take_images(row, spec, tokens)
        return [image.value for image in (*found.own.values(), *(found.column or ()))]

    return ReferencedFiles(
        {
            "columns": spec.columns,
            "frames": tokens.video is None,  # frames of videos are images
        },
        values,
        Images(media["root"], urls=media["urls"]),
        IndexCache(Path(options["cache"])),
        reread=media["reread"],
        hashed=hashed,
    )


def open_hasher(options: dict[str, Any]) -> Work:
    """Return the function that hashes the images of one block (an executor's entry)."""
    referenced = referenced_files_of(options)

    def digest(payload: dict[str, Any]) -> dict[str, Any]:
        with without_collector():
            return {"digest": digest_of(referenced.of(block_of(payload)))}

    return digest
