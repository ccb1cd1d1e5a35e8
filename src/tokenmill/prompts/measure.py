"""What a worker does: the rows of one block become lengths, published as a part.

`open_measurer` is the entry that executors import by name; it loads the tokenizer's copy and the
template once and returns the function that measures one block. Without a tokenizer nothing is
counted: rows are only told from those that are no prompts. `lookup` hands out the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill.build.externals import Externals
from tokenmill.collector import without_collector
from tokenmill.errors import RowError
from tokenmill.media import Reference
from tokenmill.prompts.lengths import (
    NO_LENGTH,
    REJECTED,
    Measured,
    Rejection,
    read_part,
    write_part,
)
from tokenmill.prompts.media import AskedMedia, PromptPictures, Read, has_media
from tokenmill.prompts.rendering import PromptMaker
from tokenmill.prompts.shaping import Messages, Shaped, shape_row
from tokenmill.prompts.spec import PromptSpec
from tokenmill.source import Block, read_block
from tokenmill.tokenizer import Encoder, load_copy
from tokenmill.work.blocks import block_of

_DETAIL_CHARS = 300  # a rejection's detail is for a person; a template can raise a whole document


class Measurer:
    """Measures prompts; loaded once per worker, without a tokenizer where no token is counted."""

    def __init__(
        self,
        spec: PromptSpec,
        tokenizer: Any,
        engine: str = "auto",
        media: AskedMedia | PromptPictures | None = None,
        externals: Externals | None = None,
    ) -> None:
        self.spec = spec
        self._media = media
        self._externals = externals
        self._read: Read = _nothing_to_read
        self._encoder: Encoder | None = None
        if tokenizer is None:
            self._maker = PromptMaker(spec, None, None)
        else:
            self._maker = PromptMaker(spec, tokenizer.template, tokenizer.special_tokens)
            self._encoder = Encoder(tokenizer, engine)

    def measure(self, values: Sequence[dict[str, Any] | RowError]) -> Measured:
        """Lengths of parsed rows, and what became of the others."""
        lengths = np.full(len(values), REJECTED, np.int32)
        bad: dict[int, RowError] = {}
        numbers: list[int] = []
        shaped: list[Shaped] = []
        for number, value in enumerate(values):
            try:
                if isinstance(value, RowError):
                    raise value
                shaped.append(shape_row(value, self.spec))
                numbers.append(number)
            except RowError as error:
                bad[number] = error
        texts: list[str] = []
        places: list[int] = []
        first = True  # of the rows with media: audited
        for number, row, made in zip(numbers, shaped, self._maker.texts(shaped), strict=True):
            if isinstance(made, RowError):
                bad[number] = made
            elif self._media is not None and has_media(row.prompt):
                try:
                    lengths[number] = self._with_media(row, made, audited=first)
                    first = False
                except RowError as error:
                    bad[number] = error
            elif isinstance(made, str) and self._encoder is not None:
                texts.append(made)
                places.append(number)
            else:
                lengths[number] = NO_LENGTH
        if self._encoder is not None and texts:
            encoded = self._encoder.encode(texts)
            lengths[places] = encoded.lengths
            for place, refusal in encoded.rejected:
                bad[places[place]] = refusal
                lengths[places[place]] = REJECTED
        said = [
            Rejection(number, error.reason, error.message[:_DETAIL_CHARS])
            for number, error in sorted(bad.items())
        ]
        return lengths, said

    def begin(self, block: Block) -> None:
        """Take up a block: where the pictures of its rows are, and which ones they must be."""
        if self._externals is None:
            return
        externals, digests = self._externals, self._externals.of(block)

        def read(reference: Reference) -> bytes:
            if reference.kind == "inline":
                return externals.pictures.read(reference)
            return externals.read(reference, block, digests)

        self._read = read

    def _with_media(self, row: Shaped, made: str | Messages, *, audited: bool) -> int:
        assert self._media is not None
        if not isinstance(made, str):
            self._media.inputs(row, self._read)  # refused here, not in the middle of a run
            return NO_LENGTH
        return self._media.length(made, row, self._read, audited=audited)


def _nothing_to_read(reference: Reference) -> bytes:
    raise AssertionError(f"{reference.name}: no block was taken up")


def open_measurer(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load what measuring needs and return the function that measures one block."""
    spec = PromptSpec(**options["spec"])
    card = options["card"]
    tokenizer = None if card is None else load_copy(Path(options["tokenizer"]), card)
    measurer = Measurer(spec, tokenizer, options["engine"])
    root = Path(options["cache"])

    def measure(payload: dict[str, Any]) -> dict[str, Any]:
        place = root / "rows" / payload["key"]
        block = block_of(payload)
        if read_part(place, block.rows) is not None:
            return {"measured": 0}  # another builder was quicker
        with without_collector():
            part = measure_block(measurer, block)
        write_part(root, place, part)
        return {"measured": len(part[0])}

    return measure


def measure_block(measurer: Measurer, block: Block) -> Measured:
    """Read and measure one block."""
    measurer.begin(block)
    return measurer.measure(read_block(block).values)
