"""What AutoTokenizer would encode with: the only module of this room that imports transformers.

The reference is what the user's trainer does by itself, and most trainers call
``AutoTokenizer.from_pretrained``. Some classes of transformers rebuild a tokenizer from its parts
and then give other ids than the tokenizer.json beside them. `difference` finds out; `load_auto`
loads what a caller who asked for ``backend="transformers"`` gets. Nothing else in the library
imports transformers, and nobody's remote code runs unless the caller said so.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenmill.errors import TokenizerError
from tokenmill.optional import transformers_muted
from tokenmill.tokenizer.identity import ALWAYS_COUNTED, Template
from tokenmill.tokenizer.location import INSTALL
from tokenmill.tokenizer.location import is_installed as is_installed
from tokenmill.tokenizer.parity_texts import parity_texts, vocabulary_texts
from tokenmill.tokenizer.tokenizer import Tokenizer


class AutoTokenizerError(Exception):
    """AutoTokenizer itself cannot load this directory; the message says why."""


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Import and use transformers as if torch were not installed; tokenizers need none of it.

    Importing torch is half of what asking AutoTokenizer costs. Only for a process of our own that
    ends afterwards: elsewhere somebody may want torch later.
    """
    if "torch" in sys.modules or "transformers" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # "not found", for every import
    try:
        yield
    finally:
        del sys.modules["torch"]


def load_auto(directory: Path, *, trust_remote_code: bool) -> Any:
    """AutoTokenizer for a directory.

    Raises:
        TokenizerError: transformers is not installed.
        AutoTokenizerError: AutoTokenizer refuses or fails, for instance because the directory asks
            for remote code and the caller did not allow it.
    """
    if not is_installed():
        raise TokenizerError(f"tokenizer_backend='transformers' needs transformers: {INSTALL}")
    with transformers_muted():
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                str(directory), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except Exception as error:
            raise AutoTokenizerError(f"{type(error).__name__}: {error}") from error


def adopt(tokenizer: Any, *, path: Path | None = None) -> Tokenizer:
    """A transformers tokenizer as ours: its backend encodes, its template renders."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        raise TokenizerError(
            f"{type(tokenizer).__name__} encodes in Python and has no fast backend, so its masks"
            " cannot be proven; use its tokenizer.json with tokenizer_backend='file'",
            path=path,
        )
    if getattr(tokenizer, "split_special_tokens", False):
        raise TokenizerError(
            "split_special_tokens=True encodes control tokens as text; switch it off", path=path
        )
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, list | tuple):
        template = {entry["name"]: entry["template"] for entry in template}
    special = {
        name: str(token)
        for name, token in tokenizer.special_tokens_map.items()
        if not isinstance(token, list | tuple)
    }
    return Tokenizer(
        backend.to_str().encode("utf-8"),
        template=template,
        special_tokens=special,
        backend="transformers",
    )


def difference(auto: Any, ours: Tokenizer, *, template_matters: bool) -> str | None:
    """How AutoTokenizer would encode differently from a tokenizer.json; None when it would not.

    The template matters where the directory's own is going to be used.
    """
    theirs = adopt(auto) if getattr(auto, "backend_tokenizer", None) is not None else None
    found = _text_encoded_differently(auto, theirs, ours)
    if found is not None:
        return f"it encodes {found[:80]!r} differently"
    if not template_matters:
        return None
    template = getattr(auto, "chat_template", None)
    if template is not None and theirs is not None and theirs.template != ours.template:
        return "it has another chat template"
    return _special_token_difference(
        theirs.special_tokens if theirs else {}, ours.special_tokens, ours.template
    )


def _text_encoded_differently(auto: Any, theirs: Tokenizer | None, ours: Tokenizer) -> str | None:
    if theirs is not None and theirs.backend_digest == ours.backend_digest:
        return None
    added = {*ours.added_contents, *ours.special_tokens.values()}
    if theirs is not None:
        added |= {*theirs.added_contents, *theirs.special_tokens.values()}
    texts = parity_texts(added)
    texts += vocabulary_texts(ours.pieces(range(len(ours.table))))
    reference = ours.reference.encode_batch(texts, add_special_tokens=False)
    with transformers_muted():
        for text, encoding in zip(texts, reference, strict=True):
            if auto.encode(text, add_special_tokens=False) != encoding.ids:
                return text
    return None


def _special_token_difference(
    theirs: dict[str, str], ours: dict[str, str], template: Template
) -> str | None:
    sources = template.values() if isinstance(template, dict) else [template or ""]
    for name in sorted({*theirs, *ours}):
        if theirs.get(name) == ours.get(name):
            continue
        if name in ALWAYS_COUNTED or any(name in source for source in sources):
            return f"its {name} is {theirs.get(name)!r}, the directory says {ours.get(name)!r}"
    return None
