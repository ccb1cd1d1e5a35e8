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
    from tokenmill.tokenizer.cache import (
        LITTLE_WORK,
        copy_path,
        engine_for,
        keep_copy,
        load_copy,
        recall,
    )
    from tokenmill.tokenizer.encoded import Encoded
    from tokenmill.tokenizer.encoder import Encoder
    from tokenmill.tokenizer.engines import ENGINES, choose_engine
    from tokenmill.tokenizer.identity import IdentityCard
    from tokenmill.tokenizer.loading import BACKENDS, identify, load
    from tokenmill.tokenizer.tokenizer import Tokenizer

__all__ = [
    "BACKENDS",
    "ENGINES",
    "LITTLE_WORK",
    "Encoded",
    "Encoder",
    "IdentityCard",
    "Tokenizer",
    "choose_engine",
    "copy_path",
    "engine_for",
    "identify",
    "keep_copy",
    "load",
    "load_copy",
    "recall",
]

__getattr__ = first_use(
    __name__,
    cache="LITTLE_WORK copy_path engine_for keep_copy load_copy recall",
    encoded="Encoded",
    encoder="Encoder",
    engines="ENGINES choose_engine",
    identity="IdentityCard",
    loading="BACKENDS identify load",
    tokenizer="Tokenizer",
)
