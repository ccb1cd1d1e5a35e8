"""tokenmill: raw post-training data to the exact tokens and loss masks a trainer should see.

    import tokenmill as tm

    store = tm.prepare("chat.jsonl", tokenizer="path/to/tokenizer")
    for batch in tm.Loader(store, batch_size=8): ...

Names are loaded on first use (PEP 562): a trainer's worker that only opens a store and iterates a
loader imports numpy, msgspec and xxhash, and neither pyarrow nor a tokenizer nor a template engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import (
    BridgeError,
    CacheError,
    CorruptionError,
    NonDeterminismError,
    RowError,
    SourceChanged,
    SourceError,
    SourceMissing,
    StateError,
    TemplateError,
    TokenizerError,
    TokenmillError,
    UsageError,
    WorkerError,
)
from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.bridge import Bridge
    from tokenmill.build.calls import prepare, prepare_part
    from tokenmill.build.recipe import Recipe
    from tokenmill.build.recorded import from_rollouts
    from tokenmill.dataset import Mixture, View, as_view, concat, filtered, mix, split
    from tokenmill.formats import export
    from tokenmill.integrations.hf import to_hf
    from tokenmill.loader import LengthGrouped, Loader
    from tokenmill.origin import Origin
    from tokenmill.packing import Align, MicroBatches, Pack
    from tokenmill.prompts import Prompt, PromptDataset
    from tokenmill.report.drift import check_rollouts
    from tokenmill.report.lint.run import lint
    from tokenmill.source import open_rows
    from tokenmill.store import Media, Row, Sidecar, Store, open_store
    from tokenmill.store.sidecar_writer import attach
    from tokenmill.store.transfer import pull, push

__version__ = "0.1.0"

__all__ = [
    "Align",
    "Bridge",
    "BridgeError",
    "CacheError",
    "CorruptionError",
    "LengthGrouped",
    "Loader",
    "Media",
    "MicroBatches",
    "Mixture",
    "NonDeterminismError",
    "Origin",
    "Pack",
    "Prompt",
    "PromptDataset",
    "Recipe",
    "Row",
    "RowError",
    "Sidecar",
    "SourceChanged",
    "SourceError",
    "SourceMissing",
    "StateError",
    "Store",
    "TemplateError",
    "TokenizerError",
    "TokenmillError",
    "UsageError",
    "View",
    "WorkerError",
    "as_view",
    "attach",
    "check_rollouts",
    "concat",
    "export",
    "filtered",
    "from_rollouts",
    "lint",
    "mix",
    "open_rows",
    "open_store",
    "prepare",
    "prepare_part",
    "pull",
    "push",
    "split",
    "to_hf",
]

__getattr__ = first_use(
    __name__,
    bridge="Bridge",
    formats="export",
    dataset="Mixture View as_view concat filtered mix split",
    loader="LengthGrouped Loader",
    origin="Origin",
    packing="Align MicroBatches Pack",
    prompts="Prompt PromptDataset",
    source="open_rows",
    store="Media Row Sidecar Store open_store",
    **{
        "build.calls": "prepare prepare_part",
        "build.recipe": "Recipe",
        "build.recorded": "from_rollouts",
        "integrations.hf": "to_hf",
        "report.drift": "check_rollouts",
        "report.lint.run": "lint",
        "store.sidecar_writer": "attach",
        "store.transfer": "pull push",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
