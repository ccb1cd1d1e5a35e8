"""Chat to tokens in one process: render, encode, mask, audit.

Measured on alpaca_eval_en + smilechat_zh (72 MB) with Qwen3's tokenizer and template, loaded in
advance, in megabytes of accepted rows per second. The peers run on a stratified sample of the same
rows. Stage shares show the next bottleneck.

*The engine alone* is the upper limit of any pipeline: a second, equally new engine encodes the same
rendered texts, block by block in turn with tokenmill. This ratio uses CPU time, because nothing
here waits for a disk.
"""

from __future__ import annotations

import os
import time

from benchmarks.data import corpora, raw_bytes, shared, stratified
from benchmarks.measure import one_core
from benchmarks.peers import datasets_map, load_auto, skyrl_rows
from benchmarks.report import Report, seconds

SAMPLE_EVERY = 40  # rows; about 1.8 MB for the slow peers
# Minimum per cent of the engine's own throughput. 60 would leave 9.6 ns per byte beside the
# engine's 14; reading, parsing and the byte proof alone take 7.
SHARE_OF_ENGINE = 35


def run(report: Report) -> None:
    with one_core():
        _measure(report)


def _measure(report: Report) -> None:
    import datasets

    from tokenmill._core.collector import without_collector
    from tokenmill.build.pipeline import Pipeline
    from tokenmill.build.recipe import Recipe
    from tokenmill.errors import RowError
    from tokenmill.sources.block import read_block
    from tokenmill.sources.rows import open_rows
    from tokenmill.tokenizers import cache
    from tokenmill.tokenizers.loading import load

    datasets.disable_progress_bars()
    directory = str(shared() / "tokenizers" / "qwen3")
    paths = corpora()
    recipe = Recipe(sources=tuple(map(str, paths)), tokenizer=directory)
    pipeline, other = (Pipeline(recipe, load(directory, backend="file")) for _ in range(2))
    cache.clear_cache()  # a separate engine with its own word cache
    engine = type(pipeline.encoder.engine)(load(directory, backend="file"))
    rows = open_rows(list(recipe.sources), cache_dir=os.environ.get("TOKENMILL_CACHE_DIR"))
    kept_bytes, parse, ours, busy, alone = 0, 0.0, 0.0, 0.0, 0.0
    notes: dict[str, int] = {}
    for block in rows.blocks():
        start, processor = time.perf_counter(), time.process_time()
        with without_collector():  # as a worker does
            content = read_block(block)
            parse += time.perf_counter() - start
            columns, detail = pipeline.run(content)
        ours += time.perf_counter() - start
        busy += time.process_time() - processor
        kept_bytes += int(columns.raw_length.sum())
        for name, value in {**detail["render"], **detail["encode"]}.items():
            if isinstance(value, int):
                notes[name] = notes.get(name, 0) + value
        values = [value for value in content.values if not isinstance(value, RowError)]
        texts = other.renderer.render(values).texts
        processor = time.process_time()
        engine.encode(texts)
        alone += time.process_time() - processor
    report.figure("ours, one process", kept_bytes / ours / 1e6, "MB/s", note=str(notes))
    pipeline.seconds["parse"] += parse  # reading, splitting and parsing lines
    for stage, spent in pipeline.seconds.items():
        report.figure(f"share of {stage}", 100 * spent / ours, "%")
    report.figure("the engine alone on the same texts", kept_bytes / alone / 1e6, "MB/s")
    report.figure("ours / the engine alone", 100 * alone / busy, "%", at_least=SHARE_OF_ENGINE)

    tokenizer = load_auto(directory)
    sample = stratified(paths, SAMPLE_EVERY)
    size = raw_bytes(sample)
    peer = seconds(lambda: skyrl_rows(tokenizer, sample))
    report.figure("SkyRL's tokenization, last assistant, one process", size / peer / 1e6, "MB/s")
    report.ratio(
        "ours / SkyRL's tokenization", ours=ours / kept_bytes, peer=peer / size, at_least=15
    )
    peer = seconds(lambda: datasets_map(tokenizer, sample))
    report.figure("datasets.map(apply_chat_template), one process", size / peer / 1e6, "MB/s")
    report.ratio("ours / datasets.map", ours=ours / kept_bytes, peer=peer / size, at_least=12)
