"""Turn post-training data into the exact tokens and loss masks that a trainer should see.

    import tokenmill as tm

    store = tm.prepare("chat.jsonl", tokenizer="path/to/tokenizer")
    for batch in tm.Loader(store, batch_size=8): ...

Names are imported on first use (PEP 562): a process that opens a store and iterates over a loader
imports numpy, msgspec and xxhash, but neither pyarrow nor a tokenizer nor a template engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._core.optional import lazy_exports

if TYPE_CHECKING:
    from tokenmill import errors as errors
    from tokenmill._core.origin import Origin as Origin
    from tokenmill.build.calls import prepare as prepare
    from tokenmill.build.recipe import Recipe as Recipe
    from tokenmill.build.recorded import from_rollouts as from_rollouts
    from tokenmill.data.loader import Loader as Loader
    from tokenmill.data.micro import Align as Align
    from tokenmill.data.micro import MicroBatches as MicroBatches
    from tokenmill.data.mixture import Mixture as Mixture
    from tokenmill.data.mixture import mix as mix
    from tokenmill.data.packs import Pack as Pack
    from tokenmill.data.prompt_rows import Prompt as Prompt
    from tokenmill.data.prompts import PromptDataset as PromptDataset
    from tokenmill.data.view import View as View
    from tokenmill.data.view import concat as concat
    from tokenmill.errors import TokenmillError as TokenmillError
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
    from tokenmill.store.transfer import pull as pull
    from tokenmill.store.transfer import push as push

__version__ = "0.2.0"

_EXPORTS = {
    "_core.origin": "Origin",
    "build.calls": "prepare",
    "build.recipe": "Recipe",
    "build.recorded": "from_rollouts",
    "data.loader": "Loader",
    "data.micro": "Align MicroBatches",
    "data.mixture": "Mixture mix",
    "data.packs": "Pack",
    "data.prompt_rows": "Prompt",
    "data.prompts": "PromptDataset",
    "data.view": "View concat",
    "errors": "TokenmillError",
    "exports.export_files": "export",
    "inspect.drift": "check_rollouts",
    "inspect.lint.run": "lint",
    "integrations.hf": "to_hf",
    "rl.bridge": "Bridge",
    "sources.rows": "open_rows",
    "store": "Media Row Sidecar Store open_store",
    "store.transfer": "pull push",
}

__all__ = sorted([*" ".join(_EXPORTS.values()).split(), "errors"])
__getattr__ = lazy_exports(__name__, **_EXPORTS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
