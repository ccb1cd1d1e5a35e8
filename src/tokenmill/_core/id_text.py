"""Token ids as text, so that the functions that compare prefixes of texts also compare ids."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tokenmill.errors import RowError

FIRST = 0x10000  # id 0: above white space and surrogates, below 2**20 free code points
MAX_ID = 0x10FFFF - FIRST


class IdText(str):
    """Token ids, one character each."""

    __slots__ = ()


def id_text(ids: Iterable[int]) -> IdText:
    numbers = np.fromiter(ids, np.int64)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= MAX_ID:
        raise RowError(
            f"the encoder returned an id outside of 0 to {MAX_ID}", reason="template_error"
        )
    return IdText((numbers + FIRST).astype("<u4").tobytes().decode("utf-32-le"))


def ids_of(text: str) -> np.ndarray:
    numbers = np.frombuffer(text.encode("utf-32-le"), "<u4").astype(np.int32)
    return np.asarray(numbers - np.int32(FIRST))
