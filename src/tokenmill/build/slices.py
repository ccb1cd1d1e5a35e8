"""What a worker does: load once, then one block after another becomes a published slice.

`open_builder` is the entry that executors import by name where the work happens; it loads the
tokenizer's copy and the template once and returns the function that builds one slice. A payload is
a block (a file, a byte span, a digest) and a key; a result is a handful of counters. Rows never
travel.

Publishing waits for a disk and needs hardly any core, so it is the *rest* of the task: an executor
may do it while the next slice is made.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.build.expansion import Expander
from tokenmill.build.externals import Unhashed, externals_of
from tokenmill.build.pipeline import Pipeline, pipeline_of
from tokenmill.build.recipe import Recipe
from tokenmill.chat.pictures import MediaTokens
from tokenmill.collector import without_collector
from tokenmill.errors import NonDeterminismError, UsageError
from tokenmill.media import Processor
from tokenmill.source import Block, read_block
from tokenmill.store import CacheLayout
from tokenmill.store.slice_writer import EncodedSlice, encode_slice, publish_slice, replace_slice
from tokenmill.store.slices import quarantine_slice, slice_is_intact
from tokenmill.tokenizer import Tokenizer
from tokenmill.work.blocks import block_of
from tokenmill.work.identity import load_copy
from tokenmill.work.processor import ProcessorCard, load_processor
from tokenmill.work.tasks import Rest, Work

_PROBE = "\nHow large is it? Größe 3.14 × 17, 中文 🙂"
"""Text that tells tokenizers apart."""


def open_builder(options: dict[str, Any]) -> Work:
    """Load what building needs and return the function that builds one slice."""
    recipe = Recipe(**options["recipe"])
    tokenizer = load_copy(Path(options["tokenizer"]), options["card"])
    expander = expander_of(options, tokenizer)
    pipeline = pipeline_of(recipe, tokenizer, options["engine"], options["renderer"], expander)
    layout = CacheLayout(Path(options["cache"]))
    rebuild = bool(options["rebuild"])
    turn = threading.Lock()  # the rest of a slice may need the engines while the next is made

    def build(payload: dict[str, Any]) -> dict[str, Any] | Rest:
        pipeline.distrust(payload["distrusted"])
        key, block = payload["key"], block_of(payload)
        files = layout.slice(key)
        if files.record.exists():
            if not (rebuild or payload["again"]):
                return {"built": False}  # another builder was quicker
            if not slice_is_intact(files):
                quarantine_slice(layout, key)
        with turn:
            encoded, counters = make_slice(pipeline, key, block, payload.get("pictures", ""))

        def publish() -> dict[str, Any]:
            start = time.perf_counter()
            replaced = False
            try:
                record = publish_slice(layout, encoded)
            except NonDeterminismError:
                if not pipeline.distrusted:
                    raise
                # An engine lied in this run, so what is published may be its work. The references
                # decide, and they alone.
                with turn:
                    by_reference, _ = make_slice(
                        pipeline.by_reference, key, block, payload.get("pictures", "")
                    )
                record, replaced = replace_slice(layout, by_reference)
            counters["seconds"]["publish"] = time.perf_counter() - start
            return {**counters, "replaced": replaced, "rows": record.rows, "tokens": record.tokens}

        return publish

    return build


def expander_of(
    options: dict[str, Any], tokenizer: Tokenizer, *, hashed: bool = True
) -> Expander | None:
    """What a pipeline needs for rows with pictures; None where they may have none.

    Args:
        options: Of a worker.
        tokenizer: What texts are encoded with.
        hashed: Whether pictures must be those of the digests in the key.

    Raises:
        UsageError: The tokenizer is another one than the processor's.
    """
    told = options.get("media")
    if told is None:
        return None
    card = msgspec.convert(told["processor"], ProcessorCard)
    copy = CacheLayout(Path(options["cache"])).processor(card.key)
    externals = externals_of(options)
    processor = load_processor(copy, card.identity, trust_remote_code=told["trust_remote_code"])
    _require_own_tokenizer(processor, tokenizer)
    return Expander(
        processor,
        MediaTokens(*told["tokens"]),
        card.media_token_ids,
        externals if hashed else Unhashed(externals.pictures),
    )


def _require_own_tokenizer(processor: Processor, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that gives other ids: audits would have every row rejected."""
    text = f"{processor.image_token}{_PROBE}"
    own = list(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokenizer.reference.encode(text, add_special_tokens=False).ids != own:
        raise UsageError(
            f"the tokenizer is not the processor's own: it gives other ids for {text!r}; leave "
            "tokenizer= out, or give the one that belongs to the processor"
        )


@without_collector()
def make_slice(
    pipeline: Pipeline, key: str, block: Block, pictures: str = ""
) -> tuple[EncodedSlice, dict[str, Any]]:
    """Read and tokenize one slice; its files' bytes and its counters.

    What its rows refer to must still be that of the digest in ``pictures``.
    """
    before = dict(pipeline.seconds)
    start = time.perf_counter()
    rows = read_block(block)
    parsed = time.perf_counter()
    pipeline.begin(block, pictures)
    columns, notes = pipeline.run(rows)
    writing = time.perf_counter()
    encoded = encode_slice(key, columns)
    done = time.perf_counter()
    stages = {name: total - before.get(name, 0.0) for name, total in pipeline.seconds.items()}
    stages["parse"] = stages.get("parse", 0.0) + parsed - start
    return encoded, {
        "built": True,
        "bytes": block.length,
        "seconds": {**stages, "write": done - writing},
        "notes": notes,
    }
