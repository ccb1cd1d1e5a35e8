"""tokenmill: raw post-training data to the exact tokens and loss masks a trainer should see.

    import tokenmill as tm

    store = tm.prepare("chat.jsonl", tokenizer="path/to/tokenizer")
    for batch in tm.Loader(store, batch_size=8): ...

Names are loaded on first use (PEP 562): a trainer's worker that only opens a store and iterates a
loader imports numpy, msgspec and xxhash, and neither pyarrow nor a tokenizer nor a template engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._core.optional import first_use
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
    from tokenmill._core.origin import Origin
    from tokenmill.build.calls import prepare, prepare_part
    from tokenmill.build.recipe import Recipe
    from tokenmill.build.recorded import from_rollouts
    from tokenmill.data.choices import filtered, split
    from tokenmill.data.loader import Loader
    from tokenmill.data.micro import Align, MicroBatches
    from tokenmill.data.mixture import Mixture, mix
    from tokenmill.data.packs import Pack
    from tokenmill.data.prompt_rows import Prompt
    from tokenmill.data.prompts import PromptDataset
    from tokenmill.data.stream import LengthGrouped
    from tokenmill.data.view import View, as_view, concat
    from tokenmill.exports.export_files import export
    from tokenmill.inspect.drift import check_rollouts
    from tokenmill.inspect.lint.run import lint
    from tokenmill.integrations.hf import to_hf
    from tokenmill.rl.bridge import Bridge
    from tokenmill.sources.rows import open_rows
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
    **{
        "_core.origin": "Origin",
        "build.calls": "prepare prepare_part",
        "build.recipe": "Recipe",
        "build.recorded": "from_rollouts",
        "data.choices": "filtered split",
        "data.loader": "Loader",
        "data.micro": "Align MicroBatches",
        "data.mixture": "Mixture mix",
        "data.packs": "Pack",
        "data.prompt_rows": "Prompt",
        "data.prompts": "PromptDataset",
        "data.stream": "LengthGrouped",
        "data.view": "View as_view concat",
        "exports.export_files": "export",
        "inspect.drift": "check_rollouts",
        "inspect.lint.run": "lint",
        "integrations.hf": "to_hf",
        "rl.bridge": "Bridge",
        "sources.rows": "open_rows",
        "store": "Media Row Sidecar Store open_store",
        "store.sidecar_writer": "attach",
        "store.transfer": "pull push",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
