"""tokenmill: raw post-training data to the exact tokens and loss masks a trainer should see.

    import tokenmill as tm

    store = tm.prepare("chat.jsonl", tokenizer="path/to/tokenizer")
    for batch in tm.Loader(store, batch_size=8): ...

Names are loaded on first use (PEP 562): a trainer's worker that only opens a store and iterates a
loader imports numpy, msgspec and xxhash, and neither pyarrow nor a tokenizer nor a template engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from tokenmill.api import (
        PromptDataset,
        check_rollouts,
        export,
        from_rollouts,
        lint,
        open_rows,
        prepare,
        prepare_part,
        pull,
        push,
        to_hf,
    )
    from tokenmill.bridge import Bridge
    from tokenmill.build.recipe import Recipe
    from tokenmill.dataset import Mixture, View, as_view, concat, filtered, mix, split
    from tokenmill.loader import LengthGrouped, Loader, OrderedView
    from tokenmill.origin import Origin
    from tokenmill.packing import Align, MicroBatches, Pack
    from tokenmill.prompts import Prompt
    from tokenmill.store import Media, Row, Sidecar, Store, open_store
    from tokenmill.store.sidecar_writer import attach

__version__ = "0.1.0"

_HOMES = {
    "Align": "tokenmill.packing",
    "Bridge": "tokenmill.bridge",
    "LengthGrouped": "tokenmill.loader",
    "Loader": "tokenmill.loader",
    "MicroBatches": "tokenmill.packing",
    "Mixture": "tokenmill.dataset",
    "OrderedView": "tokenmill.loader",
    "Origin": "tokenmill.origin",
    "Pack": "tokenmill.packing",
    "Prompt": "tokenmill.prompts",
    "PromptDataset": "tokenmill.api",
    "Recipe": "tokenmill.build.recipe",
    "Media": "tokenmill.store",
    "Row": "tokenmill.store",
    "Sidecar": "tokenmill.store",
    "Store": "tokenmill.store",
    "View": "tokenmill.dataset",
    "as_view": "tokenmill.dataset",
    "attach": "tokenmill.store.sidecar_writer",
    "check_rollouts": "tokenmill.api",
    "concat": "tokenmill.dataset",
    "export": "tokenmill.api",
    "filtered": "tokenmill.dataset",
    "from_rollouts": "tokenmill.api",
    "lint": "tokenmill.api",
    "mix": "tokenmill.dataset",
    "open_rows": "tokenmill.api",
    "open_store": "tokenmill.store",
    "prepare": "tokenmill.api",
    "prepare_part": "tokenmill.api",
    "pull": "tokenmill.api",
    "push": "tokenmill.api",
    "split": "tokenmill.dataset",
    "to_hf": "tokenmill.api",
}
"""Public name → the module it lives in."""

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
    "OrderedView",
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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
