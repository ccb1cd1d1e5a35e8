"""Parallel preparation, cache hits, random rows and memory, compared with the peers.

Rows: 800 MB of distinct conversations (see `benchmarks.text`), Qwen3, two workers, masks, audits
and fsync included. The peers work on a stratified sample of 30 MB with two processes: SkyRL's slice
path (rendered and encoded twice per row, sent back, saved) and `datasets.map(num_proc=2)`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.data import shared, stratified
from benchmarks.measure import tokenmill, watched
from benchmarks.peers import datasets_map, load_auto, skyrl_slices
from benchmarks.report import Report, seconds
from benchmarks.text import write_rows

SIZE = 800_000_000  # bytes of distinct rows: about all that the corpora and packages give
SMALL, LARGE = 200_000_000, 1_000_000_000  # bytes for the memory figures
SAMPLE = 30_000_000  # bytes for the peers
STARTS = 3  # measured starts of a process
FEW, MANY = 2, 16  # workers whose memory and CPU time are compared
COMPARED = 170_000_000  # bytes for this comparison
SLICED = 24_000_000  # bytes in small slices, to measure the parent
RANDOM_ROWS = 20_000
MIB = 1 << 20


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        home = Path(directory)
        source = home / "rows.jsonl"
        write_rows(source, SIZE)
        store, ours = _prepare(report, source, home)
        peer = _peers(report, source, home, ours)
        _hits(report, source, home)
        _random_rows(report, store)
        _memory(report, home, peer)
        _many_workers(report, home)
        _parent(report, source, home)


def _flags(source: Path, home: Path, *more: str, name: str = "qwen3") -> list[str]:
    tokenizer = str(shared() / "tokenizers" / name)
    return ["prepare", str(source), "--tokenizer", tokenizer, "--json",
            "--cache-dir", str(home / "cache"), *more]  # fmt: skip


def _prepare(report: Report, source: Path, home: Path) -> tuple[str, float]:
    """Return the store's path, and our seconds per byte with two workers."""
    megabytes = source.stat().st_size / 1e6
    two = watched(tokenmill(*_flags(source, home, "--num-workers", "2")))
    one = watched(tokenmill(*_flags(source, home / "one", "--num-workers", "1")))
    summary = json.loads(two.stdout)
    report.figure("prepare, 2 workers, start-up included", megabytes / two.seconds, "MB/s",
                  note=f"{summary['rows_out']:,} rows, {summary['slices']} slices")  # fmt: skip
    report.figure("prepare, 1 worker, start-up included", megabytes / one.seconds, "MB/s")
    report.figure("start-up of prepare", startup := _startup(home), "s")
    report.figure("start-up of prepare, 250k vocabulary", _startup(home, "gemma3"), "s")
    ratio = (one.seconds - startup) / (two.seconds - startup)
    report.figure("2 workers / 1 worker, start-up aside", ratio, "x", at_least=1.5)
    report.figure("parent, peak resident (800 MB)", two.parent_peak / MIB, "MiB", at_most=200)
    peak = two.worker_private_peak / MIB
    report.figure("worker, peak private (800 MB)", peak, "MiB", at_most=900)
    return str(summary["path"]), two.seconds / source.stat().st_size


def _startup(home: Path, name: str = "qwen3") -> float:
    """Return the seconds for a source of one row: imports, worker, tokenizer, template, engine.

    The tokenizer is known. The worker and the engine of a large source are forced; one row alone
    would start neither.
    """
    program = (
        "from tokenmill.tokenizers import cache; cache.SMALL_JOB_BYTES = 0\n"
        "from tokenmill.cli import main; main()"
    )
    seconds = []
    for number in range(STARTS + 1):  # the first one identifies the tokenizer
        tiny = home / f"tiny-{number}.jsonl"
        tiny.write_text(json.dumps({"text": f"row {number} for {name}"}) + "\n")
        flags = _flags(tiny, home / "tiny", "--num-workers", "1", name=name)
        seconds.append(watched([sys.executable, "-c", program, *flags]).seconds)
    return min(seconds[1:])


def _peers(report: Report, source: Path, home: Path, ours: float) -> float:
    """Run both peers on one sample file; return the seconds per byte of SkyRL's path."""
    import datasets

    datasets.disable_progress_bars()
    directory = str(shared() / "tokenizers" / "qwen3")
    rows = stratified([source], max(1, source.stat().st_size // SAMPLE))
    sample = home / "sample.jsonl"
    with open(sample, "w") as file:
        for row in rows:
            messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    size = sample.stat().st_size
    skyrl = seconds(lambda: skyrl_slices(sample, directory, home / "skyrl")) / size
    report.figure("SkyRL's slice path, 2 workers", 1 / skyrl / 1e6, "MB/s")
    report.ratio("prepare / SkyRL's slice path", ours=ours, peer=skyrl, at_least=30)
    tokenizer = load_auto(directory)
    peer = seconds(lambda: datasets_map(tokenizer, rows, num_proc=2))
    report.figure("datasets.map, num_proc=2", size / peer / 1e6, "MB/s")
    report.ratio("prepare / datasets.map", ours=ours, peer=peer / size, at_least=25)
    return skyrl


def _hits(report: Report, source: Path, home: Path) -> None:
    import tokenmill as tm

    cold = watched(tokenmill(*_flags(source, home)))
    if not json.loads(cold.stdout)["hit"]:
        raise RuntimeError("expected a hit")
    report.figure("prepare as a hit, new process", cold.seconds, "s", at_most=1)
    tokenizer = _bundled_tokenizer()
    for rows in (10_000, 1_000_000):
        many = home / f"{rows}.jsonl"
        with open(many, "w") as file:
            for number in range(rows):
                file.write(f'{{"text": "row {number}"}}\n')
        os.utime(many, (1_000_000_000, 1_000_000_000))
        arguments = {"tokenizer": tokenizer, "cache_dir": home / "cache", "num_workers": 2}
        tm.prepare(many, **arguments)  # type: ignore[arg-type]
        tm.prepare(many, **arguments)  # type: ignore[arg-type]
        spent = seconds(lambda: tm.prepare(many, **arguments), repeat=3)  # type: ignore[arg-type] # noqa: B023
        report.figure(f"hit in a warm process, {rows:,} rows", 1000 * spent, "ms", at_most=100)


def _bundled_tokenizer() -> str:
    import tokenmill

    return str(Path(tokenmill.__file__).parent / "examples" / "tokenizer")


def _random_rows(report: Report, path: str) -> None:
    import datasets

    from tokenmill import open_store

    store = open_store(path)
    peer = datasets.load_from_disk(path)
    generator = random.Random(0)
    indices = [generator.randrange(len(store)) for _ in range(RANDOM_ROWS)]

    def ours() -> None:
        for index in indices:
            row = store[index]
            row.input_ids[-1], row.loss_mask[-1]

    def theirs(data: Any, chosen: list[int]) -> None:
        for index in chosen:
            row = data[index]
            row["input_ids"][-1], row["loss_mask"][-1]

    ours()
    our_seconds = seconds(ours, repeat=3) / len(indices)
    report.figure("store[i], both arrays touched", 1e6 * our_seconds, "us")
    few = indices[:4000]
    spent = seconds(lambda: theirs(peer, few), repeat=2) / len(few)
    report.ratio("store[i] / datasets row", ours=our_seconds, peer=spent, at_least=20)
    arrays = peer.with_format("numpy")
    spent = seconds(lambda: theirs(arrays, few), repeat=2) / len(few)
    # Ours is bound by memory, theirs by Python: 60 and more with an unoptimized Python.
    report.ratio("store[i] / datasets row as numpy", ours=our_seconds, peer=spent, at_least=50)


def _memory(report: Report, home: Path, peer: float) -> None:
    one = home / "one.jsonl"
    one.write_text('{"text": "makes the tokenizer known"}\n')
    for name, size in (("200 MB", SMALL), ("1 GB", LARGE)):
        watched(tokenmill(*_flags(one, home / name)))
        rows = home / f"{size}.jsonl"
        write_rows(rows, size)
        run = watched(tokenmill(*_flags(rows, home / name, "--num-workers", "2")))
        report.figure(f"parent, peak resident ({name})", run.parent_peak / MIB, "MiB", at_most=200)
        peak = run.worker_private_peak / MIB
        report.figure(f"worker, peak private ({name})", peak, "MiB", at_most=900)
        report.figure(f"prepare, {name}, 2 workers", size / run.seconds / 1e6, "MB/s")
        if size == SMALL:
            ours = run.seconds / size
            report.ratio("prepare, 200 MB / SkyRL's slice path", ours=ours, peer=peer, at_least=22)


def _many_workers(report: Report, home: Path) -> None:
    """Memory and CPU time of many workers with a vocabulary of 250k tokens."""
    rows = home / "compared.jsonl"
    write_rows(rows, COMPARED)
    runs = {}
    for workers in (FEW, FEW, MANY):  # the first run identifies the tokenizer
        flags = [*_flags(rows, home / "many", "--num-workers", str(workers), name="gemma3")]
        runs[workers] = watched(tokenmill(*flags, "--force-recache"), measure_pss=True)
    pss = runs[MANY].workers_pss_peak / 1e9
    report.figure(f"{MANY} workers, 250k vocabulary, peak PSS", pss, "GB", at_most=2.2)
    cpu = runs[MANY].cpu_seconds / runs[FEW].cpu_seconds
    report.figure(f"CPU time, {MANY} workers / {FEW} workers, 250k vocabulary", cpu, "x",
                  at_most=1.3)  # fmt: skip


_SMALL_SLICES = """
import sys, time
from tokenmill.build.calls import run_recipe
from tokenmill.sources import scan
scan.CUT_MIN, scan.CUT_MEAN, scan.CUT_MAX = 6 << 10, 2 << 10, 16 << 10
scan._SHARE = type(scan._SHARE)((1 << 64) // scan.CUT_MEAN)
source, tokenizer, executor, cache = sys.argv[1:]
call = dict(tokenizer=tokenizer, executor=executor, num_workers=2, cache_dir=cache, progress=False)
run_recipe(source, turn_end="turn", **call)  # starts Ray
start = time.process_time()
done = run_recipe(source, **call)
print((time.process_time() - start) / done.summary()["slices"])
"""


def _parent(report: Report, source: Path, home: Path) -> None:
    """CPU time of the parent per slice, with a thousandth of the bytes in a slice."""
    rows = home / "sliced.jsonl"
    with open(source, "rb") as file:
        rows.write_bytes(file.read(SLICED).rpartition(b"\n")[0])
    tokenizer = str(shared() / "tokenizers" / "qwen3")
    for executor in ("local", "ray"):
        arguments = [str(rows), tokenizer, executor, str(home / f"sliced-{executor}")]
        spent = float(watched([sys.executable, "-c", _SMALL_SLICES, *arguments]).stdout)
        report.figure(f"parent, CPU time per slice, {executor}", 1000 * spent, "ms", at_most=0.5)
