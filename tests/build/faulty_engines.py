"""Fast engines that give wrong results, for tests of what a build does about them.

`open_builder` is the builder's entry with such a renderer or encoder; only a comparison with the
reference shows that it is wrong. The `Fault` is read from the environment, or from the setup's
options where workers do not inherit it.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tests.build.entries import once
from tokenmill.build import pipeline, slices
from tokenmill.build.tasks import Completion, Work, finish
from tokenmill.chat import Renderer, Rendering
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.tokenizer import Tokenizer

ENTRY = f"{__name__}:open_builder"
VARIABLE = "TOKENMILL_TEST_FAULT"
MAX_WAIT_S = 60.0


@dataclass
class Fault:
    stage: str  # "render" or "encode"
    about: str = "amber"  # texts that contain this come out wrong
    audited: str = "audit me"  # texts that contain this are audited; empty: none
    after: int = 0  # slices that a process builds before it compares anything
    # The process that creates this file is the only faulty one; empty: all are. The others wait,
    # after as many slices, until it has compared one.
    marker: str = ""
    dies: str = ""  # a file that marks the death of a process, right after it published a slice

    def __post_init__(self) -> None:
        self.built = 0
        self.is_active = False

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    def chosen(self, texts: Sequence[str]) -> list[int]:
        if self.built < self.after or not self.audited:
            return []
        return [row for row, text in enumerate(texts) if self.audited in text]


def open_builder(options: dict[str, Any]) -> Work:
    mock.patch.object(os, "fsync").start()  # in a worker too
    fault = Fault(**json.loads(options.get("fault") or os.environ[VARIABLE]))
    fault.is_active = not fault.marker or once(fault.marker)
    fakes = {"render": ("Renderer", FaultyRenderer), "encode": ("Encoder", FaultyEncoder)}
    name, fake = fakes[fault.stage]
    with mock.patch.object(pipeline, name, lambda *given, **more: fake(fault, *given, **more)):
        build = slices.open_builder(options)

    compared = Path(f"{fault.marker}.compared")

    def work(payload: dict[str, Any]) -> Completion:
        if fault.marker and not fault.is_active and fault.built >= fault.after:
            wait_for(compared)
        outcome = build(payload)
        fault.built += 1
        if fault.marker and fault.is_active and fault.built > fault.after:
            compared.touch()

        def rest() -> dict[str, Any]:
            result = finish(outcome)
            if fault.dies and once(fault.dies):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return rest

    return work


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + MAX_WAIT_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


class FaultyRenderer(Renderer):
    """Writes a word of the row in capitals, of the same length: every span still fits."""

    def __init__(self, fault: Fault, *given: Any, renderer: str = "auto", **more: Any) -> None:
        super().__init__(*given, renderer="jinja2", **more)
        self.fault, self.is_fast = fault, renderer == "auto"

    def render(self, rows: Sequence[Any], *digests: Any) -> Rendering:
        result = super().render(rows, *digests)
        if not self.is_fast:
            return result
        about = self.fault.about if self.fault.is_active else ""
        detail = [text.replace(about, about.upper()) if about else text for text in result.texts]
        chosen = self.fault.chosen(result.texts)
        differ = sum(detail[row] != result.texts[row] for row in chosen)
        result.notes.update(audited=len(chosen), mismatches=differ)
        if not differ:
            result.texts = detail
            result.notes["renderer"] = "traced"
        return result


class FaultyEncoder(Encoder):
    """Spells a token byte by byte: the bytes, joined, are still the text."""

    def __init__(self, fault: Fault, tokenizer: Tokenizer, engine: str = "auto") -> None:
        super().__init__(tokenizer, "hf")
        self.fault = fault
        if engine != "hf":
            self.engine = _Speller(fault, self)

    def _audit(self, batch: Any, *given: Any) -> None:
        chosen = np.array(self.fault.chosen(batch.texts), np.int64)
        with mock.patch.object(type(batch), "audit_sample", return_value=chosen):
            super()._audit(batch, *given)


class _Speller:
    name = "fastokens"

    def __init__(self, fault: Fault, encoder: Encoder) -> None:
        self.fault, self.reference, self.table = fault, encoder.reference, encoder.table
        pieces = [self.table.piece(number) for number in range(len(self.table))]
        self.bytes = {piece: number for number, piece in enumerate(pieces) if len(piece) == 1}

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, starts = self.reference.encode(texts)
        rows = [ids[a:b].tolist() for a, b in itertools.pairwise(starts)]
        for row, text in enumerate(texts):
            if self.fault.is_active and self.fault.about in text:
                rows[row] = self.spelled(rows[row])
        flat = list(itertools.chain.from_iterable(rows))
        return np.array(flat, np.int32), np.cumsum([0, *map(len, rows)], dtype=np.int64)

    def spelled(self, row: list[int]) -> list[int]:
        for place, number in enumerate(row):
            piece = self.table.piece(number)
            if len(piece) > 1 and not self.table.is_added[number]:
                return [*row[:place], *(self.bytes[bytes([b])] for b in piece), *row[place + 1 :]]
        return row
