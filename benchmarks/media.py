"""A picture's tokens from its header and the learned expansion, beside running the processor.

Ours: the file is read, its header looked at, and a text with its image token expanded. The peer
opens the file as transformers does and runs the processor on the same text, which is what trainers
do for every row at every step. Pictures are JPEG and PNG files of about a megapixel, as photos and
screenshots are. *Known sizes*: pictures of four sizes that were seen before. *A new size each*: no
size was seen before. Processors are made from their classes over the bundled tokenizer. Llama 4's
needs torchvision, for whose functions the tests have a stand-in: its ratios carry no bound.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import one_core
from benchmarks.report import Report, seconds

KNOWN = ((640, 480), (1024, 768), (768, 1024), (1280, 720))
PICTURES = 24  # of which the peer, which is slow, runs a few
PEER_PICTURES = 4
STAND_IN = ("llama4",)


def _draw(path: Path, rng: random.Random, size: tuple[int, int]) -> Path:
    from PIL import Image

    coarse = Image.frombytes("RGB", (40, 30), rng.randbytes(40 * 30 * 3))
    coarse.resize(size, Image.Resampling.BICUBIC).save(path)
    return path


def run(report: Report) -> None:
    """Measure every family."""
    from tests.media import processors

    rng = random.Random(16)
    with tempfile.TemporaryDirectory() as directory, one_core():
        known = [
            _draw(Path(directory, f"known{at}.{('jpg', 'png')[at % 2]}"), rng, KNOWN[at % 4])
            for at in range(PICTURES)
        ]
        sizes = rng.sample([(w, h) for w in range(600, 1300, 7) for h in range(500, 1000, 7)], 72)
        new = [
            _draw(Path(directory, f"new{at}.{('jpg', 'png')[at % 2]}"), rng, size)
            for at, size in enumerate(sizes)
        ]
        _headers(report, known)
        for name in processors.NAMES:
            _measure(report, name, known, new)


def _headers(report: Report, files: list[Path]) -> None:
    from tokenmill.media import Pictures, reference_of

    pictures = Pictures("/")
    references = [reference_of(str(path)) for path in files]

    def headers() -> None:
        for reference in references:
            pictures.facts(pictures.read(reference))

    report.figure(
        "a picture's file read and its header", seconds(headers, 5) / len(files) * 1e6, "µs"
    )


def _measure(report: Report, name: str, known: list[Path], new: list[Path]) -> None:
    from tests.media import processors
    from transformers.image_utils import load_image

    from tokenmill.media import Pictures, Processor, reference_of

    options = processors.OPTIONS.get(name, {})
    made = processors.make(name)
    processor = Processor(made, options)
    text = f"Look at this: {processor.image_token} What is it?\n"
    pictures = Pictures("/")

    def ours(files: list[Path]) -> None:
        for path in files:
            facts = pictures.facts(pictures.read(reference_of(str(path))))
            processor.expand(text, [(facts.width, facts.height)])

    def peer(files: list[Path]) -> Any:
        for path in files:
            made(
                text=[text],
                images=[[load_image(str(path))]],
                text_kwargs={"add_special_tokens": False},
                images_kwargs={"return_tensors": "pt"},
                **options,
            )

    ours(known)  # now they are
    peer(known[:1])
    their = min(seconds(lambda: peer(known[:PEER_PICTURES])) for _ in range(2)) / PEER_PICTURES
    our = seconds(lambda: ours(known), 5) / len(known)
    report.ratio(
        f"{name}: known sizes",
        ours=our,
        peer=their,
        at_least=None if name in STAND_IN else 100,
        note=f"{our * 1e6:.0f} µs, the processor {their * 1e3:.0f} ms",
    )
    thirds = [new[at::3] for at in range(3)]  # a size is new once
    our = min(seconds(lambda files=files: ours(files)) / len(files) for files in thirds)
    their = min(seconds(lambda: peer(new[:PEER_PICTURES])) for _ in range(2)) / PEER_PICTURES
    report.ratio(
        f"{name}: a new size each",
        ours=our,
        peer=their,
        at_least=None if name in STAND_IN else 20,
        note=f"{our * 1e3:.2f} ms, the processor {their * 1e3:.0f} ms",
    )
