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

if TYPE_CHECKING:
    from tokenmill._core.origin import Origin as Origin
    from tokenmill.build.calls import prepare as prepare
    from tokenmill.build.calls import prepare_part as prepare_part
    from tokenmill.build.recipe import Recipe as Recipe
    from tokenmill.build.recorded import from_rollouts as from_rollouts
    from tokenmill.data.choices import filtered as filtered
    from tokenmill.data.choices import split as split
    from tokenmill.data.loader import Loader as Loader
    from tokenmill.data.micro import Align as Align
    from tokenmill.data.micro import MicroBatches as MicroBatches
    from tokenmill.data.mixture import Mixture as Mixture
    from tokenmill.data.mixture import mix as mix
    from tokenmill.data.packs import Pack as Pack
    from tokenmill.data.prompt_rows import Prompt as Prompt
    from tokenmill.data.prompts import PromptDataset as PromptDataset
    from tokenmill.data.stream import LengthGrouped as LengthGrouped
    from tokenmill.data.view import View as View
    from tokenmill.data.view import as_view as as_view
    from tokenmill.data.view import concat as concat
    from tokenmill.errors import BridgeError as BridgeError
    from tokenmill.errors import CacheError as CacheError
    from tokenmill.errors import CorruptionError as CorruptionError
    from tokenmill.errors import NonDeterminismError as NonDeterminismError
    from tokenmill.errors import RowError as RowError
    from tokenmill.errors import SourceChanged as SourceChanged
    from tokenmill.errors import SourceError as SourceError
    from tokenmill.errors import SourceMissing as SourceMissing
    from tokenmill.errors import StateError as StateError
    from tokenmill.errors import TemplateError as TemplateError
    from tokenmill.errors import TokenizerError as TokenizerError
    from tokenmill.errors import TokenmillError as TokenmillError
    from tokenmill.errors import UsageError as UsageError
    from tokenmill.errors import WorkerError as WorkerError
    from tokenmill.exports.export_files import export as export
    from tokenmill.inspect.drift import check_rollouts as check_rollouts
    from tokenmill.inspect.lint.run import lint as lint
    from tokenmill.integrations.hf import to_hf as to_hf
    from tokenmill.rl.bridge import Bridge as Bridge
    from tokenmill.sources.rows import open_rows as open_rows
    from tokenmill.store import Media as Media
    from tokenmill.store import Row as Row
    from tokenmill.store import Sidecar as Sidecar
    from tokenmill.store import Store as Store
    from tokenmill.store import open_store as open_store
    from tokenmill.store.sidecar_writer import attach as attach
    from tokenmill.store.transfer import pull as pull
    from tokenmill.store.transfer import push as push

__version__ = "0.1.0"

_HOMES = {
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
    "errors": (
        "BridgeError CacheError CorruptionError NonDeterminismError RowError SourceChanged"
        " SourceError SourceMissing StateError TemplateError TokenizerError TokenmillError"
        " UsageError WorkerError"
    ),
    "exports.export_files": "export",
    "inspect.drift": "check_rollouts",
    "inspect.lint.run": "lint",
    "integrations.hf": "to_hf",
    "rl.bridge": "Bridge",
    "sources.rows": "open_rows",
    "store": "Media Row Sidecar Store open_store",
    "store.sidecar_writer": "attach",
    "store.transfer": "pull push",
}

__all__ = sorted(" ".join(_HOMES.values()).split())
__getattr__ = first_use(__name__, **_HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
