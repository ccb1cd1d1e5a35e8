"""Pictures outside of rows: found and hashed block by block, before there are keys.

A slice is made of its rows and of the pictures that they refer to in files, archives and at
addresses, so those belong to its key: by content, in order, so that a changed picture makes another
slice and a moved one the same. `Externals.of` finds them for one block and gives a digest for each,
or what is wrong with it; that goes into the key as well, so a picture that was missing and is there
now makes a new slice, too.

Two notes on the shelf save the work the next time: which pictures a block refers to, by the block's
content; and their digests, by the state of their files (path, size, times), as with sources. What
is at addresses is fetched again, since nothing else would tell that it changed. Rows whose bytes
name no picture are not even parsed.

`open_hasher` is the entry for executors: it does this for one block and sends one digest back. A
builder does it again before it makes a slice: what it finds must be what the key was made of.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
_REFUSED = "!"
"""Opens what is said of a picture that cannot be used, where else its digest stands."""

Digests = dict[str, str]
"""Text of a reference → digest of the picture's bytes, or `_REFUSED` and what is wrong."""


class Finder(Protocol):
    """What finds the pictures of a row."""

    @property
    def document(self) -> dict[str, Any]:
        """Plain values that decide which pictures are found."""

    def values(self, row: dict[str, Any]) -> Iterable[Any]:
        """What a row says of its pictures, in order.

        Raises:
            RowError: It will be rejected in any case.
        """


@dataclass(frozen=True)
class ConversationPictures:
    """Finds the images of rows that are prepared."""

    spec: ChatSpec
    tokens: MediaTokens

    @property
    def document(self) -> dict[str, Any]:
        """Columns, and whether frames of videos are pictures."""
        spec = self.spec
        columns = [spec.messages_key, spec.prompt_key, spec.completion_key]
        return {"columns": columns, "frames": self.tokens.video is None}

    def values(self, row: dict[str, Any]) -> Iterable[Any]:
        """Those of parts and of the column."""
        _, found = take_pictures(row, self.spec, self.tokens)
        return [picture.value for picture in (*found.own.values(), *(found.column or ()))]


class Externals:
    """Finds and hashes the images that the rows of blocks refer to."""

    def __init__(
        self, finder: Finder, pictures: Pictures, shelf: Shelf, *, rehash: bool = False
    ) -> None:
        self._finder = finder
        self.pictures = pictures
        self._shelf = shelf
        self._rehash = rehash

    def of(self, block: Block) -> Digests:
        """The digests of the pictures that a block refers to, in the order of first mention."""
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
        """The bytes of a picture, which must be those that the key was made of.

        Raises:
            RowError: It cannot be used.
            SourceChanged: It is another one by now.
        """
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
                **self._finder.document,
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
                values = self._finder.values(row)
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
        """What names the digests of files in their present state; None where that proves none."""
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


class Unhashed:
    """Reads pictures for whoever makes no slice of the rows, and so needs no digest of them.

    Args:
        pictures: Opens them.
    """

    def __init__(self, pictures: Pictures) -> None:
        self.pictures = pictures

    def of(self, block: Block) -> Digests:
        """None is known."""
        return {}

    def read(self, reference: Reference, block: Block, digests: Digests) -> bytes:
        """The bytes of a picture.

        Raises:
            RowError: It cannot be used.
        """
        return self.pictures.read(reference, base_of(block))


def base_of(block: Block) -> str | None:
    """The directory that relative paths of a block's rows start from."""
    return None if block.is_remote else os.path.dirname(block.location)


def digest_of(digests: Digests) -> str:
    """One name for all of them; empty where there are none."""
    return fingerprint.key({"pictures": list(digests.values())}) if digests else ""


def _signature(roots: list[str], path: str) -> Signature | None:
    for root in roots:
        try:
            return Signature.of(os.stat(os.path.join(root, path)))
        except OSError:
            continue
    return None


def externals_of(options: dict[str, Any]) -> Externals:
    """As the options of a worker say."""
    media = options["media"]
    return Externals(
        ConversationPictures(ChatSpec(**media["spec"]), MediaTokens(*media["tokens"])),
        Pictures(media["root"], urls=media["urls"]),
        Shelf(Path(options["cache"])),
        rehash=media["rehash"],
    )


def open_hasher(options: dict[str, Any]) -> Work:
    """Entry for executors: returns the function that hashes the pictures of one block."""
    externals = externals_of(options)

    def digest(payload: dict[str, Any]) -> dict[str, Any]:
        with without_collector():
            return {"digest": digest_of(externals.of(block_of(payload)))}

    return digest
