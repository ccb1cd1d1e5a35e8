"""Text and trained spans in; ids and proven masks out.

`load` makes a `Tokenizer` of whatever names one (directory, tokenizer.json, hub id, object) and
refuses where it would be ambiguous who encodes. Its `IdentityCard` names it by what it does;
`identify` gives the card without loading an engine when it was seen before. An `Encoder` encodes
batches with the fastest engine that is shown to equal the reference, proves for every row where
its tokens lie, and answers with `Encoded`; `apply_length` is the length policy.

Importing this package loads no engine, no transformers and no pyarrow: names resolve on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.tokenizer.encoded import Encoded, apply_length, overlong_message
    from tokenmill.tokenizer.encoder import Encoder
    from tokenmill.tokenizer.engine_cache import LITTLE_WORK, engine_for
    from tokenmill.tokenizer.engines import ENGINES, choose_engine, pin_to_one_core
    from tokenmill.tokenizer.identity import IdentityCard
    from tokenmill.tokenizer.loading import BACKENDS, load
    from tokenmill.tokenizer.location import is_installed, locate
    from tokenmill.tokenizer.memo import (
        answer_key,
        identify,
        memo_key,
        recall,
        recall_answer,
        reload,
        remember,
        remember_card,
        share_table,
    )
    from tokenmill.tokenizer.tokenizer import Tokenizer

_HOMES = {
    "BACKENDS": "loading",
    "ENGINES": "engines",
    "Encoded": "encoded",
    "Encoder": "encoder",
    "IdentityCard": "identity",
    "LITTLE_WORK": "engine_cache",
    "Tokenizer": "tokenizer",
    "answer_key": "memo",
    "apply_length": "encoded",
    "choose_engine": "engines",
    "engine_for": "engine_cache",
    "locate": "location",
    "identify": "memo",
    "is_installed": "location",
    "load": "loading",
    "memo_key": "memo",
    "overlong_message": "encoded",
    "pin_to_one_core": "engines",
    "recall": "memo",
    "recall_answer": "memo",
    "reload": "memo",
    "remember": "memo",
    "remember_card": "memo",
    "share_table": "memo",
}

__all__ = [
    "BACKENDS",
    "ENGINES",
    "LITTLE_WORK",
    "Encoded",
    "Encoder",
    "IdentityCard",
    "Tokenizer",
    "answer_key",
    "apply_length",
    "choose_engine",
    "engine_for",
    "identify",
    "is_installed",
    "load",
    "locate",
    "memo_key",
    "overlong_message",
    "pin_to_one_core",
    "recall",
    "recall_answer",
    "reload",
    "remember",
    "remember_card",
    "share_table",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
