"""Chat to tokens in one process: rendered, encoded, masked, audited.

Measured on alpaca_eval_en + smilechat_zh (72 MB) with Qwen3's tokenizer and template, loaded before
the clock starts; megabytes of kept rows per second. The peers run on a stratified sample of the
same rows. Stage shares show where the next bottleneck is.
"""

from __future__ import annotations

import os
import time

from benchmarks.data import corpora, raw_bytes, shared, stratified
from benchmarks.peers import datasets_map, load_auto, skyrl_rows
from benchmarks.report import Report, seconds

SAMPLE_EVERY = 40  # rows; about 1.8 MB for the slow peers


def run(report: Report) -> None:
    """Measure ours and the peers."""
    import datasets

    from tokenmill.build.pipeline import Pipeline
    from tokenmill.build.recipe import Recipe
    from tokenmill.build.slices import without_collector
    from tokenmill.source import open_rows, read_block
    from tokenmill.tokenizer import load

    datasets.disable_progress_bars()
    directory = str(shared() / "tokenizers" / "qwen3")
    if hasattr(os, "sched_setaffinity"):  # one process, one core: as a worker runs
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[0]})
    paths = corpora()
    recipe = Recipe(sources=tuple(map(str, paths)), tokenizer=directory)
    pipeline = Pipeline(recipe, load(directory, backend="file"))
    rows = open_rows(list(recipe.sources), cache_dir=os.environ.get("TOKENMILL_CACHE_DIR"))
    kept_bytes, parse, start = 0, 0.0, time.perf_counter()
    notes: dict[str, int] = {}
    for block in rows.blocks():
        with without_collector():  # as a worker does
            began = time.perf_counter()
            content = read_block(block)
            parse += time.perf_counter() - began
            columns, told = pipeline.run(content)
        kept_bytes += int(columns.raw_length.sum())
        for name, value in {**told["render"], **told["encode"]}.items():
            if isinstance(value, int):
                notes[name] = notes.get(name, 0) + value
    ours = time.perf_counter() - start
    report.figure("ours, one process", kept_bytes / ours / 1e6, "MB/s", note=str(notes))
    for stage, spent in {"parse": parse, **pipeline.seconds}.items():
        report.figure(f"share of {stage}", 100 * spent / ours, "%")

    tokenizer = load_auto(directory)
    sample = stratified(paths, SAMPLE_EVERY)
    size = raw_bytes(sample)
    peer = seconds(lambda: skyrl_rows(tokenizer, sample))
    report.figure("SkyRL's way, last assistant, one process", size / peer / 1e6, "MB/s")
    report.ratio("ours / SkyRL's way", ours=ours / kept_bytes, peer=peer / size, at_least=15)
    peer = seconds(lambda: datasets_map(tokenizer, sample))
    report.figure("datasets.map(apply_chat_template), one process", size / peer / 1e6, "MB/s")
    report.ratio("ours / datasets.map", ours=ours / kept_bytes, peer=peer / size, at_least=12)
