"""Build slices in a worker: load once, then turn each block into a published slice.

Publishing waits for a disk and needs hardly any CPU, so it is the *completion* of the task: it may
run while the worker builds the next slice.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from tokenmill._core.collector import without_collector
from tokenmill.build.blocks import block_of
from tokenmill.build.expansion import Expander
from tokenmill.build.limit import limit_columns
from tokenmill.build.outcome import write_notes
from tokenmill.build.pipeline import Pipeline, pipeline_of
from tokenmill.build.plan import Limit
from tokenmill.build.processor import ProcessorInfo, load_processor
from tokenmill.build.recipe import Recipe
from tokenmill.build.referenced import referenced_files_of
from tokenmill.build.tasks import Completion, Work
from tokenmill.chat.images import MediaTokens
from tokenmill.errors import UsageError
from tokenmill.media import Processor
from tokenmill.sources.block import Block, read_block
from tokenmill.store import CacheLayout
from tokenmill.store.columns import SliceColumns
from tokenmill.store.slice_writer import encode_slice, publish_slice, replace_slice
from tokenmill.store.slices import quarantine_slice, slice_is_intact
from tokenmill.tokenizers.cache import load_copy
from tokenmill.tokenizers.tokenizer import Tokenizer

_PROBE = "\nHow large is it? Größe 3.14 × 17, 中文 🙂"  # differs among tokenizers


def open_builder(options: dict[str, Any]) -> Work:
    """Load tokenizer, template and processor; return the function that builds one slice.

    With ``rebuild``, published slices are built again and compared. With ``replace``, a published
    slice with other content goes to quarantine.
    """
    recipe = Recipe(**options["recipe"])
    tokenizer = load_copy(Path(options["tokenizer"]), options["card"])
    expander = expander_of(options, tokenizer)
    pipeline = pipeline_of(recipe, tokenizer, options["engine"], options["renderer"], expander)
    layout = CacheLayout(Path(options["cache"]))
    limit = None if options["limit"] is None else Limit(*options["limit"])
    rebuild, replace = bool(options["rebuild"]), bool(options["replace"])

    def build(payload: dict[str, Any]) -> dict[str, Any] | Completion:
        key, block = payload["key"], block_of(payload)
        files = layout.slice(key)
        if files.record.exists():
            if not rebuild:
                return {"built": False}  # another builder was faster
            if not slice_is_intact(files):
                quarantine_slice(layout, key)
        with without_collector():
            columns, counters = _make_columns(pipeline, block, payload.get("images", ""))
            if any(notes.get("mismatches") for notes in counters["notes"].values()):
                return {**counters, "replaced": False}  # the build starts again
            start = time.perf_counter()
            encoded = [encode_slice(key, columns)]
            if limit is not None and columns.longest > limit.max_length:
                limited = limit_columns(columns, limit)
                encoded.append(encode_slice(limit.key_of(key), limited))
            counters["seconds"]["write"] = time.perf_counter() - start

        def publish() -> dict[str, Any]:
            start = time.perf_counter()
            replaced = False
            write_notes(layout, key, counters["notes"])  # first: a published slice has notes
            for one in encoded:
                if replace:
                    replaced |= replace_slice(layout, one)[1]
                else:
                    publish_slice(layout, one)
            counters["seconds"]["publish"] = time.perf_counter() - start
            return {**counters, "replaced": replaced}

        return publish

    return build


def expander_of(
    options: dict[str, Any], tokenizer: Tokenizer, *, hashed: bool = True
) -> Expander | None:
    """Return the expander of a pipeline, with the processor's tokenizer; None without one."""
    media = options.get("media")
    if media is None:
        return None
    card = msgspec.convert(media["processor"], ProcessorInfo)
    copy = CacheLayout(Path(options["cache"])).processor(card.key)
    processor = load_processor(copy, card.identity, trust_remote_code=media["trust_remote_code"])
    require_own_tokenizer(processor, tokenizer)
    expander = Expander(
        processor,
        MediaTokens(*media["tokens"]),
        card.media_token_ids,
        referenced_files_of(options, hashed=hashed),
    )
    if options["reference"]:
        expander.use_reference()
    return expander


def require_own_tokenizer(processor: Processor, tokenizer: Tokenizer) -> None:
    """Raise `UsageError` for a tokenizer that gives other ids: audits would reject every row."""
    text = f"{processor.image_token}{_PROBE}"
    own = list(processor.tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokenizer.reference.encode(text, add_special_tokens=False).ids != own:
        raise UsageError(
            ("tokenizer",),
            f" is not the processor's own: it gives other ids for {text!r}; leave it out, or give"
            " the processor's own",
        )


def _make_columns(
    pipeline: Pipeline, block: Block, images: str
) -> tuple[SliceColumns, dict[str, Any]]:
    before = dict(pipeline.seconds)
    start = time.perf_counter()
    rows = read_block(block)
    parsed = time.perf_counter()
    pipeline.begin(block, rows, images)
    columns, notes = pipeline.run(rows)
    stages = {name: total - before.get(name, 0.0) for name, total in pipeline.seconds.items()}
    stages["parse"] = stages.get("parse", 0.0) + parsed - start
    return columns, {"built": True, "seconds": stages, "notes": notes}
