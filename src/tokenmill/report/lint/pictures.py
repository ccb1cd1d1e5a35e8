"""What can be seen of pictures: missing, broken, repeated, larger than anybody looks at.

Comes in: a row and the directory of its file. `PictureCritic.look` opens every picture of the row,
whole, and yields sightings; it also tells digests of bytes and names, from which `copies` finds the
same picture under several names among all rows that were looked at. More or fewer pictures than
places for them is the renderer's to say.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tokenmill.chat import ChatSpec
from tokenmill.chat.pictures import MediaTokens, take_pictures
from tokenmill.errors import RowError
from tokenmill.media import Pictures, Reference, reference_of
from tokenmill.media.reference import MissingPicture
from tokenmill.report.lint.content import Sighting

LARGE_PIXELS = 1 << 24  # 4096 × 4096; Qwen 2 VL looks at 12.8 million at most, others at less

Named = npt.NDArray[np.uint64]
"""Of every picture, digest of its bytes and digest of its name; 0 for one inside a row."""


class Look(NamedTuple):
    """What was seen of one row's pictures."""

    sightings: list[Sighting]
    named: list[tuple[int, int]]


class PictureCritic:
    """Looks at the pictures of rows."""

    def __init__(self, pictures: Pictures, spec: ChatSpec, tokens: MediaTokens) -> None:
        self._pictures = pictures
        self._spec = spec
        self._tokens = tokens

    def look(self, row: dict[str, Any], base: str | None) -> Look:
        """Open every picture of a row."""
        seen = Look([], [])
        try:
            _, found = take_pictures(row, self._spec, self._tokens)
        except RowError:
            return seen  # the renderer says the same, and is asked as well
        names: dict[int, str] = {}
        for picture in (*found.own.values(), *(found.column or ())):
            try:
                reference = reference_of(picture.value)
                data = self._pictures.read(reference, base)
                image = self._pictures.open(data, reference.name)
            except RowError as error:
                missing = isinstance(error, MissingPicture)
                rule = "missing_picture" if missing else error.reason
                seen.sightings.append((rule, error.message, ""))
                continue
            digest = xxhash.xxh3_64_intdigest(data)
            seen.named.append((digest, _name_digest(reference)))
            if digest in names:
                same = reference.name if reference.name == names[digest] else (
                    f"{names[digest]} and {reference.name}"
                )  # fmt: skip
                seen.sightings.append(("repeated_picture", f"{same}: the same picture twice", ""))
            names.setdefault(digest, reference.name)
            width, height = image.size
            if width * height > LARGE_PIXELS:
                detail = f"{reference.name} has {width:,} × {height:,} pixels"
                seen.sightings.append(("large_picture", detail, ""))
        return seen


def _name_digest(reference: Reference) -> int:
    if reference.kind == "inline":
        return 0
    return xxhash.xxh3_64_intdigest(reference.text().encode()) or 1


def copies(rows: npt.NDArray[np.int64], named: Named) -> list[tuple[int, int]]:
    """Rows that show a picture which an earlier row has under another name, each with that row.

    Args:
        rows: Position of each picture's row, rising.
        named: The pictures.
    """
    known = named[:, 1] != 0
    rows, contents, names = rows[known], named[known, 0], named[known, 1]
    first = first_equal(contents)
    other = names != names[first]
    return sorted(zip(rows[other].tolist(), rows[first[other]].tolist(), strict=True))


def first_equal(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Of each value, the place of the first that equals it."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    places: npt.NDArray[np.int64] = first[inverse]
    return places
