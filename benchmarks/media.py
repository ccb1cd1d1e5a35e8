"""A picture's tokens from its header and the learned expansion, beside running the processor.

Ours: the file is read, its header looked at, and a text with its image token expanded. The peer
opens the file as transformers does and runs the processor on the same text, which is what trainers
do for every row at every step. Pictures are JPEG and PNG files of about a megapixel, as photos and
screenshots are. *Known sizes*: pictures of four sizes that were seen before. *A new size each*: no
size was seen before. *Prepared*: a whole `prepare` of JPEG files in this process, from the rows to
the published store, beside rendering some of the same rows and running the processor on them; texts
of 20 words, by the engine of large preparations, in processor time, without what a preparation of a
few rows takes. Files of known sizes are 64 drawings, each with a comment of its own, so that no two
are equal. The audits, which run the processor on one row in 1,024, are part of it; what it would be
without them is told beside it. *A million rows*: prepared by the command in one worker, over a
thousand small pictures; and a hundred thousand rows with a picture each of their own. *Serving*: a
batch of four rows, one picture each, from a store, beside TRL's collator on the same rows, which
renders and encodes them as well; both run the image processor, which is most of it. Memory is what
a loader with prefetching gains between its tenth and its hundredth batch, of 1,000 and of a million
rows. Processors are made from their classes over the bundled tokenizer. Llama 4's needs
torchvision, for whose functions the tests have a stand-in: its ratios carry no bound.

``TOKENMILL_BENCH_PICTURE_ROWS`` makes the million smaller.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import one_core, private, tokenmill, watched
from benchmarks.report import Report, seconds

KNOWN = ((640, 480), (1024, 768), (768, 1024), (1280, 720))
PICTURES = 24  # of which the peer, which is slow, runs a few
PEER_PICTURES = 4
PREPARED = {"known sizes": 4096, "a new size each": 1024}  # rows
DRAWN = 64  # of those of known sizes; the others differ by a comment
COMMAND_MIB = 200  # resident, as for rows of text
ROWS = int(os.environ.get("TOKENMILL_BENCH_PICTURE_ROWS", 1_000_000))
WORDS = 20  # of a question, and of an answer, of those
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
        for name in ("qwen2_vl", "gemma3", "llava_next"):
            _prepare(report, name, Path(directory))
        for name in ("qwen2_vl", "llava"):
            _serve(report, name, known[:8])
        _memory(report, Path(directory))
    with tempfile.TemporaryDirectory() as directory:
        _many(report, Path(directory))


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


def _prepare(report: Report, name: str, directory: Path) -> None:
    """A whole preparation, of known sizes and of a new one in every row."""
    from transformers.image_utils import load_image

    made = _processor(name)
    messages = _messages({"type": "image"}, WORDS)

    def peer(files: list[Path]) -> None:
        for path in files:
            text = made.apply_chat_template(messages, tokenize=False)
            made(text=[text], images=[[load_image(str(path))]])

    for kind, bound in (("known sizes", 100), ("a new size each", 20)):
        files = _drawn(directory / kind.replace(" ", "_"), kind)
        some = files[:16]  # of all four sizes alike
        peer(some[:1])
        before = time.process_time()
        peer(some)
        their = (time.process_time() - before) / len(some)
        _prepared(made, files[:4])
        start = min(_prepared(made, files[at : at + 4])[0] for at in (4, 8, 12))
        spent, store = _prepared(made, files)
        our = (spent - start) / (len(files) - 4)
        audits = (store.proof["audited_rows"]["expansion"] - 1) * their / (len(files) - 4)
        report.ratio(
            f"{name}: prepared, {kind}",
            ours=our,
            peer=their,
            at_least=bound,
            note=f"{our * 1e3:.2f} ms a row, of which audits {audits * 1e3:.2f}; the processor"
            f" {their * 1e3:.0f} ms; without audits {their / (our - audits):.0f}x",
        )


def _drawn(there: Path, kind: str) -> list[Path]:
    """Files of which no two are equal, drawn once."""
    count = PREPARED[kind]
    files = [there / f"{at}.jpg" for at in range(count)]
    if there.exists():
        return files
    there.mkdir()
    rng = random.Random(17)
    sizes = [KNOWN[at % 4] for at in range(DRAWN)]
    if kind != "known sizes":
        sizes = rng.sample([(w, h) for w in range(600, 1300) for h in range(500, 1000)], count)
    for path, size in zip(files, sizes, strict=False):
        _draw(path, rng, size)
    for at, path in enumerate(files[len(sizes) :], len(sizes)):
        path.write_bytes(_commented(files[at % DRAWN].read_bytes(), at))
    return files


def _commented(jpeg: bytes, number: int) -> bytes:
    """The same picture as another file."""
    said = f"number {number}".encode()
    return jpeg[:2] + b"\xff\xfe" + (len(said) + 2).to_bytes(2, "big") + said + jpeg[2:]


def _prepared(made: Any, files: list[Path]) -> tuple[float, Any]:
    """Processor time of a preparation of rows with one picture each that was never made before."""
    for kept in ("rows", "slices", "stores"):  # but not what is known of the processor
        shutil.rmtree(files[0].parent / "cache" / kept, ignore_errors=True)
    source = _write_rows(files, WORDS)
    before = time.process_time()
    store = _store_of(made, source, "fastokens")
    return time.process_time() - before, store


def _write_rows(files: list[Path], words: int = 200) -> Path:
    """Rows with one picture each."""
    source = files[0].parent / "rows.jsonl"
    with source.open("w") as file:
        for path in files:
            messages = _messages({"type": "image", "image": path.name}, words)
            file.write(json.dumps({"messages": messages}) + "\n")
    return source


def _store_of(made: Any, source: Path, engine: str = "auto") -> Any:
    from tokenmill.build.calls import run_recipe

    given = {"executor": "inline", "progress": False, "judge": False, "engine": engine}
    return run_recipe(str(source), processor=made, cache_dir=source.parent / "cache", **given).store


def _processor(name: str) -> Any:
    from tests.media import processors

    made = processors.make(name)
    made.tokenizer.pad_token = "<|im_end|>"
    return made


def _messages(picture: dict[str, Any], words: int = 200) -> list[dict[str, Any]]:
    said = " ".join(f"word {number}" for number in range(words))
    asked = [picture, {"type": "text", "text": f"What is it? {said}"}]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def _serve(report: Report, name: str, files: list[Path]) -> None:
    from transformers.image_utils import load_image
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from tokenmill.integrations.hf import VisionCollator

    made = _processor(name)
    store = _store_of(made, _write_rows(files))
    collator = VisionCollator(store, pad_id=made.tokenizer.pad_token_id)
    theirs = DataCollatorForVisionLanguageModeling(made)
    batches = [range(first, first + 4) for first in range(0, len(files), 4)]

    def ours() -> None:
        for rows in batches:
            collator([{"row": row} for row in rows])

    def peer() -> None:
        for rows in batches:
            theirs(
                [
                    {
                        "messages": _messages({"type": "image"}),
                        "images": [load_image(str(files[row]))],
                    }
                    for row in rows
                ]
            )

    ours()
    peer()
    times = [(seconds(ours), seconds(peer)) for _ in range(5)]  # in turns: they differ by little
    our, their = (min(each) / len(files) for each in zip(*times, strict=True))
    note = f"{our * 1e3:.0f} ms a row, TRL's collator {their * 1e3:.0f} ms"
    report.ratio(f"{name}: batches with pixels", ours=our, peer=their, note=note)


def _memory(report: Report, directory: Path) -> None:
    import numpy as np
    from PIL import Image

    from tokenmill import Loader

    small = []
    for number in range(8):
        small.append(directory / f"small{number}.png")
        Image.new("RGB", (280, 280), (number, 0, 0)).save(small[-1])
    store = _store_of(_processor("qwen2_vl"), _write_rows(small))
    for count in (1000, 1_000_000):
        rows = store.select(np.arange(count) % len(store))
        batches = iter(Loader(rows, batch_size=8, media="pixels", prefetch=2, pad_id=0))
        for _ in range(10):
            next(batches)
        before = private(os.getpid())
        for _ in range(90):
            next(batches)
        gained = (private(os.getpid()) - before) / 2**20
        report.figure(f"memory gained by 90 batches of {count:,} rows", gained, "MiB", at_most=64)


def _many(report: Report, directory: Path) -> None:
    """Rows by the hundred thousand and by the million, with small pictures and few tokens."""
    from PIL import Image
    from tests.media import processors

    processor = processors.make("llava")
    processor.image_processor.size = {"shortest_edge": 28}
    processor.image_processor.crop_size = {"height": 28, "width": 28}
    processor.save_pretrained(directory / "processor")
    Image.new("RGB", (40, 30), "teal").save(directory / "one.jpg")
    jpeg = (directory / "one.jpg").read_bytes()
    peaks = {}
    few = min(ROWS, 1000)
    for rows, pictures in ((ROWS // 10, ROWS // 10), (ROWS // 5, few), (ROWS, few)):
        there = directory / str(rows)
        there.mkdir()
        for number in range(pictures):
            (there / f"{number}.jpg").write_bytes(_commented(jpeg, number))
        with (there / "rows.jsonl").open("w") as file:
            for number in range(rows):
                asked = [{"type": "image", "image": f"{number * 7919 % pictures}.jpg"}]
                asked.append({"type": "text", "text": f"What is number {number}?"})
                answer = {"role": "assistant", "content": f"A cat, {number % 97}."}
                messages = [{"role": "user", "content": asked}, answer]
                file.write(json.dumps({"messages": messages}) + "\n")
        cache = there / "cache"
        found = watched(
            tokenmill(
                "prepare", str(there / "rows.jsonl"), "--processor", str(directory / "processor"),
                "--cache-dir", str(cache), "--num-workers", "1", "--json",
            )
        )  # fmt: skip
        files = [path for path in cache.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        if any(b"JFIF" in path.read_bytes() for path in files):
            raise RuntimeError("there is a picture in the cache")
        said = f"{rows:,} rows, {pictures:,} pictures"
        peaks[rows] = found.worker_private_peak / 2**20
        note = f"{found.seconds:.0f} s; no picture in {size / 2**20:.0f} MiB of cache"
        report.figure(f"{said}: a row in the cache", size / rows, "bytes", note=note)
        resident = found.parent_peak / 2**20
        report.figure(f"{said}: the command's memory", resident, "MiB", at_most=COMMAND_MIB)
        report.figure(f"{said}: the worker's private memory", peaks[rows], "MiB")
    # Of fewer rows there are too few slices for a worker to have met its largest.
    gained = peaks[ROWS] - peaks[ROWS // 5]
    report.figure(f"memory that {ROWS:,} rows take more", gained, "MiB", at_most=64)
