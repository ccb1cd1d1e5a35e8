"""Find and hash the images that rows refer to, block by block: their content is in slice keys.

Cached metadata says which images a block refers to, by the block's content, and their digests, by
the state of their files (path, size, times). Images at URLs are fetched again. A builder hashes
them again before it makes a slice: the digests must be those of the key.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenmill._core import fingerprint
from tokenmill._core.collector import without_collector
from tokenmill._core.sealed import quarantine
from tokenmill.build.blocks import block_of
from tokenmill.build.tasks import Work
from tokenmill.chat import ChatSpec
from tokenmill.chat.pictures import MediaTokens, take_pictures
from tokenmill.errors import CacheError, RowError, SourceChanged
from tokenmill.media import Pictures, Reference, reference_from_text, reference_of
from tokenmill.sources.block import Block, read_block
from tokenmill.sources.bytefile import Signature
from tokenmill.sources.index import Shelf

VERSION = 1  # raised when other pictures are found in the same rows
_WORDS = (b"image", b"video")  # one of them is in the bytes of every row with a picture
_REFUSED = "!"  # begins the message that replaces the digest of an unusable image

Digests = dict[str, str]
"""Text of a reference → digest of the image's bytes, or `_REFUSED` and what is wrong."""

Values = Callable[[dict[str, Any]], Iterable[Any]]
"""Returns a row's values for its images, in order; a `RowError` means that it will be rejected."""


class Externals:
    """Finds and hashes the images that the rows of blocks refer to.

    ``document`` identifies ``values``. Without ``hashed`` (for lint, which makes no slice) images
    are read and not compared.
    """

    def __init__(
        self,
        document: dict[str, Any],
        values: Values,
        pictures: Pictures,
        shelf: Shelf,
        *,
        rehash: bool = False,
        hashed: bool = True,
    ) -> None:
        self._document = document
        self._values = values
        self.pictures = pictures
        self._shelf = shelf
        self._rehash = rehash
        self._hashed = hashed

    def of(self, block: Block) -> Digests:
        """Return the digests of a block's images, in the order of first mention."""
        if not self._hashed:
            return {}
        name = self._list_key(block)
        note = self._shelf.note(name)
        if note is None:
            note = {"pictures": list(dict.fromkeys(self._references(block)))}
            self._write(name, note)
        texts: list[str] = note["pictures"]
        if not texts:
            return {}
        base = base_of(block)
        references = {text: reference_from_text(text) for text in texts}
        now = time.time_ns()
        seen = self._digests_key(name, base, references.values(), now)
        known = None if seen is None or self._rehash else self._shelf.note(seen)
        if known is not None and len(known["digests"]) == len(texts):
            return dict(zip(texts, known["digests"], strict=True))
        digests = {text: self._digest(one, base) for text, one in references.items()}
        again = self._digests_key(name, base, references.values(), now)
        if seen is not None and seen == again:
            note = {"digests": list(digests.values())}
            if self._rehash and self._shelf.note(seen) not in (None, note):
                quarantine(self._shelf.root, self._shelf.place(seen))  # it believed a clock
            self._write(seen, note)
        return digests

    def _write(self, name: str, note: dict[str, Any]) -> None:
        with contextlib.suppress(CacheError):  # of a cache that cannot be written; it saves time
            self._shelf.write_note(name, note)

    def read(self, reference: Reference, block: Block, digests: Digests) -> bytes:
        """Return the bytes of an image.

        Raises:
            RowError: It cannot be used.
            SourceChanged: Its digest is not the one in the key.
        """
        if not self._hashed:
            return self.pictures.read(reference, base_of(block))
        expected = digests[reference.text()]
        if expected.startswith(_REFUSED):
            raise RowError(expected.removeprefix(_REFUSED), reason="bad_media")
        data = self.pictures.read(reference, base_of(block))
        found = fingerprint.checksum(data)
        if found != expected:
            raise SourceChanged(
                f"the picture {reference.name} changed while it was prepared: its digest is "
                f"{found}, expected {expected}; start again",
                path=block.path,
            )
        return data

    def _list_key(self, block: Block) -> str:
        return fingerprint.key(
            {
                "what": "pictures of a block",
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
                continue  # it will be rejected when it is rendered
            for value in values:
                try:
                    reference = reference_of(value)
                except RowError:
                    continue
                if reference.kind != "inline":
                    yield reference.text()

    def _digests_key(self, name: str, base: str | None, references: Any, now: int) -> str | None:
        """Return the key of files' digests in their present state; None if it proves nothing."""
        roots = [str(root) for root in self.pictures.roots] or [base or ""]
        states = []
        for reference in references:
            if reference.kind == "url":
                return None
            signature = _signature(roots, reference.path)
            if signature is None or not signature.settled(now):
                return None
            states.append(" ".join(map(str, signature)))
        return fingerprint.key(
            {"what": "digests of pictures", "of": name, "roots": roots, "states": states}
        )

    def _digest(self, reference: Reference, base: str | None) -> str:
        try:
            return fingerprint.checksum(self.pictures.read(reference, base))
        except RowError as error:
            message = error.message  # of which no path of this machine may become part
            for root in (*map(str, self.pictures.roots), base):
                if root:
                    message = message.replace(root, "the media root")
            return _REFUSED + message


def base_of(block: Block) -> str | None:
    """Return the directory that relative paths of a block's rows start from."""
    return None if block.is_remote else os.path.dirname(block.location)


def digest_of(digests: Digests) -> str:
    """Return one digest of all; empty where there are none."""
    return fingerprint.key({"pictures": list(digests.values())}) if digests else ""


def _signature(roots: list[str], path: str) -> Signature | None:
    for root in roots:
        try:
            return Signature.of(os.stat(os.path.join(root, path)))
        except OSError:
            continue
    return None


def externals_of(options: dict[str, Any], *, hashed: bool = True) -> Externals:
    """Return the images of conversations, from a worker's options."""
    media = options["media"]
    spec, tokens = ChatSpec(**media["spec"]), MediaTokens(*media["tokens"])

    def values(row: dict[str, Any]) -> Iterable[Any]:
        _, found = take_pictures(row, spec, tokens)
        return [picture.value for picture in (*found.own.values(), *(found.column or ()))]

    return Externals(
        {
            "columns": [spec.messages_key, spec.prompt_key, spec.completion_key],
            "frames": tokens.video is None,  # frames of videos are images
        },
        values,
        Pictures(media["root"], urls=media["urls"]),
        Shelf(Path(options["cache"])),
        rehash=media["rehash"],
        hashed=hashed,
    )


def open_hasher(options: dict[str, Any]) -> Work:
    """Return the function that hashes the images of one block (an executor's entry)."""
    externals = externals_of(options)

    def digest(payload: dict[str, Any]) -> dict[str, Any]:
        with without_collector():
            return {"digest": digest_of(externals.of(block_of(payload)))}

    return digest
