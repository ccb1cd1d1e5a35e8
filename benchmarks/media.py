"""Image tokens from an image's header and the computed expansion, compared with the processor.

Ours reads the file and its header and expands the image token in a text. The peer opens the file
with transformers and runs the processor on the same text, as trainers do for every row and step.
Images are JPEG and PNG files of about a megapixel.

- *Known sizes*: images of four sizes that were seen before. *A new size each*: no size was.
- *Prepared*: `prepare` of JPEG files in this process, compared with rendering some of the same rows
  and running the processor on them. Texts of 20 words, the engine of large preparations, CPU time
  without start-up, audits included. Files of known sizes are 64 drawings with different comments.
- *A million rows*: one worker, a thousand small images; and 100,000 rows with an image each.
- *Serving*: a batch of four rows with one image each, compared with TRL's collator, which also
  renders and encodes. Both run the image processor, which takes most of the time.
- *Memory*: growth of a prefetching loader between its tenth and its hundredth batch.

Processors are built from their classes with the bundled tokenizer. Llama 4's needs torchvision,
which the tests replace by a stub, so its ratios have no bound. ``TOKENMILL_BENCH_IMAGE_ROWS`` sets
the number of rows.
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
IMAGES = 24  # the slow peer runs only a few
PEER_IMAGES = 4
PREPARED = {"known sizes": 4096, "a new size each": 1024}  # rows
DRAWN = 64  # of known sizes; the others differ by a comment
COMMAND_MIB = 200  # resident, as for rows of text
ROWS = int(os.environ.get("TOKENMILL_BENCH_IMAGE_ROWS", 1_000_000))
WORDS = 20  # of a question and of an answer
STAND_IN = ("llama4",)


def _draw(path: Path, rng: random.Random, size: tuple[int, int]) -> Path:
    from PIL import Image

    coarse = Image.frombytes("RGB", (40, 30), rng.randbytes(40 * 30 * 3))
    coarse.resize(size, Image.Resampling.BICUBIC).save(path)
    return path


def run(report: Report) -> None:
    from tests.media import processors

    rng = random.Random(16)
    with tempfile.TemporaryDirectory() as directory, one_core():
        known = [
            _draw(Path(directory, f"known{at}.{('jpg', 'png')[at % 2]}"), rng, KNOWN[at % 4])
            for at in range(IMAGES)
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
    from tokenmill.media import Images, reference_of

    images = Images("/")
    references = [reference_of(str(path)) for path in files]

    def headers() -> None:
        for reference in references:
            images.facts(images.read(reference))

    report.figure(
        "an image's file read and its header", seconds(headers, 5) / len(files) * 1e6, "µs"
    )


def _measure(report: Report, name: str, known: list[Path], new: list[Path]) -> None:
    from tests.media import processors
    from transformers.image_utils import load_image

    from tokenmill.media import Images, Processor, reference_of

    options = processors.OPTIONS.get(name, {})
    hf_processor = processors.make(name)
    processor = Processor(hf_processor, options)
    text = f"Look at this: {processor.image_token} What is it?\n"
    images = Images("/")

    def ours(files: list[Path]) -> None:
        for path in files:
            facts = images.facts(images.read(reference_of(str(path))))
            processor.expand(text, [(facts.width, facts.height)])

    def peer(files: list[Path]) -> Any:
        for path in files:
            hf_processor(
                text=[text],
                images=[[load_image(str(path))]],
                text_kwargs={"add_special_tokens": False},
                images_kwargs={"return_tensors": "pt"},
                **options,
            )

    ours(known)  # learn the sizes
    peer(known[:1])
    peer_s = min(seconds(lambda: peer(known[:PEER_IMAGES])) for _ in range(2)) / PEER_IMAGES
    ours_s = seconds(lambda: ours(known), 5) / len(known)
    report.ratio(
        f"{name}: known sizes",
        ours=ours_s,
        peer=peer_s,
        at_least=None if name in STAND_IN else 100,
        note=f"{ours_s * 1e6:.0f} µs, the processor {peer_s * 1e3:.0f} ms",
    )
    thirds = [new[at::3] for at in range(3)]  # a size is new once
    ours_s = min(seconds(lambda files=files: ours(files)) / len(files) for files in thirds)
    peer_s = min(seconds(lambda: peer(new[:PEER_IMAGES])) for _ in range(2)) / PEER_IMAGES
    report.ratio(
        f"{name}: a new size each",
        ours=ours_s,
        peer=peer_s,
        at_least=None if name in STAND_IN else 20,
        note=f"{ours_s * 1e3:.2f} ms, the processor {peer_s * 1e3:.0f} ms",
    )


def _prepare(report: Report, name: str, directory: Path) -> None:
    """Measure whole preparations with known sizes and with a new size in every row."""
    from transformers.image_utils import load_image

    processor = _processor(name)
    messages = _messages({"type": "image"}, WORDS)

    def peer(files: list[Path]) -> None:
        for path in files:
            text = processor.apply_chat_template(messages, tokenize=False)
            processor(text=[text], images=[[load_image(str(path))]])

    for kind, bound in (("known sizes", 100), ("a new size each", 20)):
        files = _drawn(directory / kind.replace(" ", "_"), kind)
        sample = files[:16]  # equally many of all four sizes
        peer(sample[:1])
        before = time.process_time()
        peer(sample)
        peer_s = (time.process_time() - before) / len(sample)
        _prepared(processor, files[:4])
        start = min(_prepared(processor, files[at : at + 4])[0] for at in (4, 8, 12))
        spent, store = _prepared(processor, files)
        ours_s = (spent - start) / (len(files) - 4)
        audits = (store.proof["audited_rows"]["expansion"] - 1) * peer_s / (len(files) - 4)
        report.ratio(
            f"{name}: prepared, {kind}",
            ours=ours_s,
            peer=peer_s,
            at_least=bound,
            note=f"{ours_s * 1e3:.2f} ms a row, of which audits {audits * 1e3:.2f}; the processor"
            f" {peer_s * 1e3:.0f} ms; without audits {peer_s / (ours_s - audits):.0f}x",
        )


def _drawn(directory: Path, kind: str) -> list[Path]:
    """Return distinct image files, drawn once."""
    count = PREPARED[kind]
    files = [directory / f"{at}.jpg" for at in range(count)]
    if directory.exists():
        return files
    directory.mkdir()
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
    """Return the same image with a comment."""
    comment = f"number {number}".encode()
    return jpeg[:2] + b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment + jpeg[2:]


def _prepared(processor: Any, files: list[Path]) -> tuple[float, Any]:
    """Prepare rows with one image each from scratch; return the CPU time and the store."""
    for part in ("rows", "slices", "stores"):  # but not the computed expansion
        shutil.rmtree(files[0].parent / "cache" / part, ignore_errors=True)
    source = _write_rows(files, WORDS)
    before = time.process_time()
    store = _store_of(processor, source, "fastokens")
    return time.process_time() - before, store


def _write_rows(files: list[Path], words: int = 200) -> Path:
    """Write rows with one image each."""
    source = files[0].parent / "rows.jsonl"
    with source.open("w") as file:
        for path in files:
            messages = _messages({"type": "image", "image": path.name}, words)
            file.write(json.dumps({"messages": messages}) + "\n")
    return source


def _store_of(processor: Any, source: Path, engine: str = "auto") -> Any:
    from tokenmill.build.calls import run_recipe

    options = {
        "executor": "inline",
        "progress": False,
        "raise_for_rejections": False,
        "engine": engine,
    }
    return run_recipe(
        str(source), processor=processor, cache_dir=source.parent / "cache", **options
    ).store


def _processor(name: str) -> Any:
    from tests.media import processors

    processor = processors.make(name)
    processor.tokenizer.pad_token = "<|im_end|>"
    return processor


def _messages(image: dict[str, Any], words: int = 200) -> list[dict[str, Any]]:
    text = " ".join(f"word {number}" for number in range(words))
    content = [image, {"type": "text", "text": f"What is it? {text}"}]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": text}]


def _serve(report: Report, name: str, files: list[Path]) -> None:
    from transformers.image_utils import load_image
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from tokenmill.integrations.hf import VisionCollator

    processor = _processor(name)
    store = _store_of(processor, _write_rows(files))
    collator = VisionCollator(store, pad_token_id=processor.tokenizer.pad_token_id)
    peer_collator = DataCollatorForVisionLanguageModeling(processor)
    batches = [range(first, first + 4) for first in range(0, len(files), 4)]

    def ours() -> None:
        for rows in batches:
            collator([{"row": row} for row in rows])

    def peer() -> None:
        for rows in batches:
            peer_collator(
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
    times = [
        (seconds(ours), seconds(peer)) for _ in range(5)
    ]  # alternating, because they differ by little
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
        batches = iter(Loader(rows, batch_size=8, media="pixels", prefetch=2, pad_token_id=0))
        for _ in range(10):
            next(batches)
        before = private(os.getpid())
        for _ in range(90):
            next(batches)
        gained = (private(os.getpid()) - before) / 2**20
        report.figure(f"memory gained by 90 batches of {count:,} rows", gained, "MiB", at_most=64)


def _many(report: Report, directory: Path) -> None:
    """Measure many rows with small images and few tokens."""
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
    for rows, images in ((ROWS // 10, ROWS // 10), (ROWS // 5, few), (ROWS, few)):
        folder = directory / str(rows)
        folder.mkdir()
        for number in range(images):
            (folder / f"{number}.jpg").write_bytes(_commented(jpeg, number))
        with (folder / "rows.jsonl").open("w") as file:
            for number in range(rows):
                content = [{"type": "image", "image": f"{number * 7919 % images}.jpg"}]
                content.append({"type": "text", "text": f"What is number {number}?"})
                answer = {"role": "assistant", "content": f"A cat, {number % 97}."}
                messages = [{"role": "user", "content": content}, answer]
                file.write(json.dumps({"messages": messages}) + "\n")
        cache = folder / "cache"
        result = watched(
            tokenmill(
                "prepare", str(folder / "rows.jsonl"), "--processor", str(directory / "processor"),
                "--cache-dir", str(cache), "--num-workers", "1", "--json",
            )
        )  # fmt: skip
        files = [path for path in cache.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        if any(b"JFIF" in path.read_bytes() for path in files):
            raise RuntimeError("The cache contains an image.")
        label = f"{rows:,} rows, {images:,} images"
        peaks[rows] = result.worker_private_peak / 2**20
        note = f"{result.seconds:.0f} s; no image in {size / 2**20:.0f} MiB of cache"
        report.figure(f"{label}: a row in the cache", size / rows, "bytes", note=note)
        resident = result.parent_peak / 2**20
        report.figure(f"{label}: the command's memory", resident, "MiB", at_most=COMMAND_MIB)
        report.figure(f"{label}: the worker's private memory", peaks[rows], "MiB")
    # Fewer rows have too few slices for the worker to reach its peak.
    gained = peaks[ROWS] - peaks[ROWS // 5]
    report.figure(f"memory that {ROWS:,} rows take more", gained, "MiB", at_most=64)
