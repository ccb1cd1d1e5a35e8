"""What a worker does: load once, then one block after another becomes a published slice.

`open_builder` is the entry that executors import by name where the work happens; it loads the
tokenizer's copy and the template once and returns the function that builds one slice. A payload is
a block (a file, a byte span, a digest) and a key; a result is a handful of counters. Rows never
travel.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenmill.build.entries import to_block
from tokenmill.build.pipeline import Pipeline
from tokenmill.build.recipe import Recipe
from tokenmill.errors import (
    CacheError,
    CorruptionError,
    NonDeterminismError,
    TokenizerError,
    TokenmillError,
)
from tokenmill.source import Block, read_block
from tokenmill.store import CacheLayout
from tokenmill.store.quarantine import quarantine_slice, slice_is_intact
from tokenmill.store.write import encode_slice, publish_slice, replace_slice
from tokenmill.tokenizer import Tokenizer, load, share_table

COPY = "tokenizer.json"


def open_builder(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Load what building needs and return the function that builds one slice."""
    recipe = Recipe(**options["recipe"])
    tokenizer = load_copy(Path(options["tokenizer"]), options["card"])
    pipeline = Pipeline(recipe, tokenizer, options["engine"], options["renderer"])
    layout = CacheLayout(Path(options["cache"]))
    rebuild = bool(options["rebuild"])

    def build(payload: dict[str, Any]) -> dict[str, Any]:
        pipeline.distrust(payload["distrusted"])
        files = layout.slice(payload["key"])
        if files.record.exists():
            if not (rebuild or payload["again"]):
                return {"built": False}  # another builder was quicker
            if not slice_is_intact(files):
                quarantine_slice(layout, payload["key"])
        return build_slice(pipeline, layout, payload["key"], to_block(payload["block"]))

    return build


def load_copy(path: Path, card: dict[str, Any]) -> Tokenizer:
    """Load the cache's copy of a tokenizer, refused unless it is the one the keys were made of.

    A copy is kept by what it does, so it may be of another spelling than the card is: what
    AutoTokenizer writes of a tokenizer.json has other bytes. Such a copy has to prove its identity.

    Raises:
        CorruptionError: The copy is damaged: its tokens would be published under a wrong key.
        CacheError: The copy cannot be read.
    """
    try:
        tokenizer = load(path, backend="file")
        stated = card["checksum"], card["template"], card["special_tokens"]
        found = tokenizer.checksum, tokenizer.template, tokenizer.special_tokens
        is_the_one = found == stated or tokenizer.key == card["key"]
    except TokenizerError as error:
        raise CorruptionError(f"the tokenizer's copy: {error.message}", path=path / COPY) from error
    except TokenmillError:
        raise
    except OSError as error:  # a disk that cannot read it is the cache's trouble, not a worker's
        raise CacheError(
            f"the tokenizer's copy cannot be read: {error.strerror}; run the command again",
            path=path,
        ) from error
    if not is_the_one:
        raise CorruptionError("the tokenizer's copy is not what was written", path=path / COPY)
    share_table(tokenizer, path.parent.parent)
    return tokenizer


def build_slice(pipeline: Pipeline, layout: CacheLayout, key: str, block: Block) -> dict[str, Any]:
    """Read, tokenize and publish one slice; returns its counters."""
    before = dict(pipeline.seconds)
    start = time.perf_counter()
    with without_collector():
        rows = read_block(block)
        parsed = time.perf_counter()
        columns, notes = pipeline.run(rows)
        writing = time.perf_counter()
        replaced = False
        try:
            record = publish_slice(layout, encode_slice(key, columns))
        except NonDeterminismError:
            if not pipeline.distrusted:
                raise
            # An engine lied in this run, so what is published may be its work. The references
            # decide, and they alone.
            columns, _ = pipeline.by_reference.run(rows)
            record, replaced = replace_slice(layout, encode_slice(key, columns))
    done = time.perf_counter()
    stages = {name: total - before.get(name, 0.0) for name, total in pipeline.seconds.items()}
    return {
        "built": True,
        "replaced": replaced,
        "rows": record.rows,
        "bytes": block.length,
        "tokens": record.tokens,
        "seconds": {"parse": parsed - start, **stages, "write": done - writing},
        "notes": notes,
    }


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Pause the cycle collector: parsed JSON has no cycles, and looking for them costs a tenth."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
