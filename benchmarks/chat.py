"""Chat to tokens in one process: rendered, encoded, masked, audited.

Measured on alpaca_eval_en + smilechat_zh (72 MB) with Qwen3's tokenizer and template, loaded before
the clock starts; megabytes of kept rows per second. The peers run on a stratified sample of the
same rows. Stage shares show where the next bottleneck is, and *the engine alone*, newly loaded and
given the same rendered texts block by block, is what no pipeline around it can exceed.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from benchmarks.data import corpora, raw_bytes, shared, stratified
from benchmarks.measure import one_core
from benchmarks.peers import datasets_map, load_auto, skyrl_rows
from benchmarks.report import Report, seconds

if TYPE_CHECKING:
    from tokenmill.build.pipeline import Pipeline
    from tokenmill.source import Rows

SAMPLE_EVERY = 40  # rows; about 1.8 MB for the slow peers
SHARE_OF_ENGINE = 60  # per cent of the engine's own throughput that is reached at least


def run(report: Report) -> None:
    """Measure ours and the peers."""
    with one_core():
        _measure(report)


def _measure(report: Report) -> None:
    import datasets

    from tokenmill.build.pipeline import Pipeline
    from tokenmill.build.recipe import Recipe
    from tokenmill.build.slices import without_collector
    from tokenmill.source import open_rows, read_block
    from tokenmill.tokenizer import load

    datasets.disable_progress_bars()
    directory = str(shared() / "tokenizers" / "qwen3")
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
    alone = _engine_alone(pipeline, rows, directory)
    report.figure("the engine alone on the same texts", kept_bytes / alone / 1e6, "MB/s")
    report.figure("ours / the engine alone", 100 * alone / ours, "%", at_least=SHARE_OF_ENGINE)

    tokenizer = load_auto(directory)
    sample = stratified(paths, SAMPLE_EVERY)
    size = raw_bytes(sample)
    peer = seconds(lambda: skyrl_rows(tokenizer, sample))
    report.figure("SkyRL's way, last assistant, one process", size / peer / 1e6, "MB/s")
    report.ratio("ours / SkyRL's way", ours=ours / kept_bytes, peer=peer / size, at_least=15)
    peer = seconds(lambda: datasets_map(tokenizer, sample))
    report.figure("datasets.map(apply_chat_template), one process", size / peer / 1e6, "MB/s")
    report.ratio("ours / datasets.map", ours=ours / kept_bytes, peer=peer / size, at_least=12)


def _engine_alone(pipeline: Pipeline, rows: Rows, directory: str) -> float:
    """Seconds that a new engine takes for the ids of the texts that the pipeline renders."""
    from tokenmill.errors import RowError
    from tokenmill.source import read_block
    from tokenmill.tokenizer import Encoder, load

    engine = Encoder(load(directory, backend="file")).engine
    spent = 0.0
    for block in rows.blocks():
        values = [value for value in read_block(block).values if not isinstance(value, RowError)]
        texts = pipeline.renderer.render(values).texts
        spent += seconds(lambda t=texts: engine.encode(t))
    return spent
