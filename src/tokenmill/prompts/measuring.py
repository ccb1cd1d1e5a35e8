"""What a worker does: the rows of one block become lengths, published as a part.

`open_measurer` is the entry that executors import by name; it loads the tokenizer's copy and the
template once and returns the function that measures one block. A *part* is the small sealed file
``rows/<part key>/part.bin``: a line of JSON (row count, rejections) and the lengths as int32. Its
key is the content: the spec, the tokenizer's identity and the digest of the block's bytes, so an
appended file measures only its new blocks, and a killed run is taken up where it was.

Parts are scaffolding of the index: one that is damaged or gone is measured again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill import fingerprint
from tokenmill.build.entries import to_block
from tokenmill.build.slices import load_copy, without_collector
from tokenmill.errors import RowError
from tokenmill.files.sealed import BytesForm, SealedKind
from tokenmill.prompts import media
from tokenmill.prompts.lengths import NO_LENGTH, REJECTED, Int32Array, Rejection
from tokenmill.prompts.rendering import PromptMaker
from tokenmill.prompts.shaping import Messages, Shaped, shape_row
from tokenmill.prompts.spec import PromptSpec
from tokenmill.source import Block, read_block
from tokenmill.tokenizer import Encoder

ENTRY = "tokenmill.prompts.measuring:open_measurer"
_PART = SealedKind("part of a length index", "part.bin", BytesForm())
PART_VERSION = 1
_DETAIL_CHARS = 300  # a rejection's detail is for a person; a template can raise a whole document

Measured = tuple[Int32Array, list[Rejection]]
"""Lengths of a block's rows, and its rejections, numbered within the block."""


def part_key(shape: str, kind: str, digest: str) -> str:
    """The key of the part that a block becomes."""
    return fingerprint.key({"part": PART_VERSION, "shape": shape, "kind": kind, "digest": digest})


class Measurer:
    """Measures prompts; loaded once per worker.

    Args:
        spec: The row-shaping arguments.
        tokenizer: A loaded tokenizer.
        engine: Which engine may encode; never changes the result.
        processor: Measures prompts with media, where there is one.
    """

    def __init__(
        self, spec: PromptSpec, tokenizer: Any, engine: str = "auto", processor: Any = None
    ) -> None:
        self.spec = spec
        self._processor = processor
        self._maker = PromptMaker(spec, tokenizer.template, tokenizer.special_tokens)
        self._encoder = Encoder(tokenizer, engine)

    def measure(self, values: list[dict[str, Any] | RowError]) -> Measured:
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
        for number, row, made in zip(numbers, shaped, self._maker.texts(shaped), strict=True):
            if isinstance(made, RowError):
                bad[number] = made
            elif self._processor is not None and media.has_media(row.prompt):
                try:
                    lengths[number] = self._with_media(row, made)
                except RowError as error:
                    bad[number] = error
            elif isinstance(made, str):
                texts.append(made)
                places.append(number)
            else:
                lengths[number] = NO_LENGTH
        if texts:
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

    def _with_media(self, row: Shaped, made: str | Messages) -> int:
        assert isinstance(row.prompt, list)
        if not isinstance(made, str):
            media.extract(row.prompt, self._processor)  # refused here, not in the middle of a run
            return NO_LENGTH
        return media.measure(made, row.prompt, self._processor)


def open_measurer(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load what measuring needs and return the function that measures one block."""
    spec = PromptSpec(**options["spec"])
    tokenizer = load_copy(Path(options["tokenizer"]), options["card"])
    measurer = Measurer(spec, tokenizer, options["engine"])
    root = Path(options["cache"])

    def measure(payload: dict[str, Any]) -> dict[str, Any]:
        place = root / "rows" / payload["key"]
        if read_part(place, payload["block"]["rows"]) is not None:
            return {"measured": 0}  # another builder was quicker
        with without_collector():
            part = measure_block(measurer, to_block(payload["block"]))
        write_part(root, place, part)
        return {"measured": len(part[0])}

    return measure


def measure_block(measurer: Measurer, block: Block) -> Measured:
    """Read and measure one block."""
    return measurer.measure(read_block(block).values)


def write_part(root: Path, place: Path, part: Measured) -> None:
    """Publish a part; one that is there and whole stays."""
    lengths, said = part
    body = lengths.astype("<i4").tobytes()
    head = {"rows": len(lengths), "rejected": [list(rejection) for rejection in said]}
    _PART.write(root, place, fingerprint.canonical(head) + b"\n" + body)


def read_part(place: Path, rows: int) -> Measured | None:
    """A part; None where it is missing or not what was written."""
    data = _PART.admit_or_none(place)
    if data is None:
        return None
    try:
        head, _, body = data.partition(b"\n")
        document = msgspec.json.decode(head)
        lengths = np.frombuffer(body, "<i4")
        if len(lengths) != rows or document["rows"] != rows:
            return None
        return lengths, [Rejection(*rejection) for rejection in document["rejected"]]
    except (ValueError, KeyError, TypeError):
        return None
