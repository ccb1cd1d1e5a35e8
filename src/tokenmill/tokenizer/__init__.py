"""Text and trained spans in; ids and proven masks out.

`load` makes a `Tokenizer` of whatever names one (directory, tokenizer.json, hub id, object) and
refuses where it would be ambiguous who encodes. Its `IdentityCard` names it by what it does;
`recall` gives the card of one that was seen before, without loading an engine. An `Encoder` encodes
batches with the fastest engine that is shown to equal the reference, proves for every row where
its tokens lie, and answers with `Encoded`.

Importing this package loads no engine, no transformers and no pyarrow: names resolve on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.tokenizer.encoded import Encoded
    from tokenmill.tokenizer.encoder import Encoder
    from tokenmill.tokenizer.engine_cache import LITTLE_WORK, engine_for
    from tokenmill.tokenizer.engines import ENGINES, choose_engine
    from tokenmill.tokenizer.identity import IdentityCard
    from tokenmill.tokenizer.loading import BACKENDS, load
    from tokenmill.tokenizer.location import is_installed, locate
    from tokenmill.tokenizer.memo import (
        answer_key,
        memo_key,
        recall,
        recall_answer,
        reload,
        remember,
        remember_card,
        share_table,
    )
    from tokenmill.tokenizer.tokenizer import Tokenizer

__all__ = [
    "BACKENDS",
    "ENGINES",
    "LITTLE_WORK",
    "Encoded",
    "Encoder",
    "IdentityCard",
    "Tokenizer",
    "answer_key",
    "choose_engine",
    "engine_for",
    "is_installed",
    "load",
    "locate",
    "memo_key",
    "recall",
    "recall_answer",
    "reload",
    "remember",
    "remember_card",
    "share_table",
]

__getattr__ = first_use(
    __name__,
    encoded="Encoded",
    encoder="Encoder",
    engine_cache="LITTLE_WORK engine_for",
    engines="ENGINES choose_engine",
    identity="IdentityCard",
    loading="BACKENDS load",
    location="is_installed locate",
    memo="answer_key memo_key recall recall_answer reload remember remember_card share_table",
    tokenizer="Tokenizer",
)
