"""Finding a length index, or having it made.

`find_index` computes the key of what the caller asks for (source by content, tokenizer by what it
does, every row-shaping argument) and opens ``rows/<key>`` if it is there: a *hit*, which writes
nothing and loads neither a tokenizer nor a template engine. Otherwise the blocks of the source
whose parts are missing are measured wherever the executor likes, and the index is assembled from
the parts and published by one rename. Builders that run at the same time share the blocks by
claims; claims are a courtesy, and the worst without them is a block measured twice.

A cache that cannot be written is no reason to refuse: the index is then made in a temporary
directory that lives as long as the dataset.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import fingerprint
from tokenmill.build.keys import source_documents
from tokenmill.errors import CacheError
from tokenmill.files import PrivateDirectory, Staging
from tokenmill.prompts import media
from tokenmill.prompts.lengths import LengthIndex, publish_index
from tokenmill.prompts.spec import PromptSpec
from tokenmill.source import Rows
from tokenmill.tokenizer import IdentityCard, recall

if TYPE_CHECKING:
    from tokenmill.build.executors import Executor
    from tokenmill.build.identify import Comparison

INDEX_VERSION = 1


@dataclass(frozen=True)
class Wanted:
    """What is asked for: arguments that lead to one index.

    Attributes:
        rows: The opened source.
        spec: The row-shaping arguments.
        tokenizer: As for `tokenmill.prepare`.
        tokenizer_backend: See there.
        chat_template: See there.
        trust_remote_code: See there.
        processor: Measures prompts with media, where there is one.
        engine: Which engine may encode; never changes the result.
    """

    rows: Rows
    spec: PromptSpec
    tokenizer: Any
    tokenizer_backend: Any = "auto"
    chat_template: Any = None
    trust_remote_code: bool = False
    processor: Any = None
    engine: str = "auto"

    def card(self, root: Path, executor: Executor) -> tuple[IdentityCard, Comparison | None]:
        """The tokenizer's identity card; its copy is then in the cache."""
        if isinstance(self.tokenizer, str | os.PathLike):
            known = recall(
                self.tokenizer,
                cache_dir=root,
                backend=self.tokenizer_backend,
                chat_template=self.chat_template,
                trust_remote_code=self.trust_remote_code,
            )
            if known is not None and (root / "tokenizers" / known.key).is_dir():
                return known, None
        from tokenmill.build.identify import identity_card  # here: a hit must not pay for it
        from tokenmill.build.recipe import Recipe

        recipe = Recipe(
            sources=("-",),
            tokenizer=self.tokenizer,
            tokenizer_backend=self.tokenizer_backend,
            chat_template=self.chat_template,
            trust_remote_code=self.trust_remote_code,
        )
        return identity_card(recipe, root, executor)

    def shape(self, card: IdentityCard) -> dict[str, Any]:
        """Everything but the source that can change a length."""
        identity = dict(card.identity)
        if not self.spec.apply_chat_template:
            # Plain text meets no template, so another template must not make another key.
            identity |= {"template": {}, "special_tokens": {}}
        shape = {"prompts": INDEX_VERSION, "spec": self.spec.document(), "tokenizer": identity}
        if self.processor is not None:
            shape["processor"] = media.identity(self.processor)
        return shape


@dataclass
class Found:
    """An index and how it came to be.

    Attributes:
        index: The index, open.
        hit: Whether it was there already.
        measured: Rows whose prompts were rendered and encoded in this call.
        home: A temporary directory that must outlive the index, if there is one.
    """

    index: LengthIndex
    hit: bool
    measured: int = 0
    home: PrivateDirectory | None = None


def find_index(wanted: Wanted, root: Path, executor: Executor) -> Found:
    """Open the index of what is wanted, having it made where it is not there."""
    nameless = wanted.processor is not None and media.identity(wanted.processor) is None
    try:
        if not nameless:  # lengths by a processor that cannot say what it is are nobody else's
            return _find_or_make(wanted, root, executor)
    except CacheError:
        if _writable(root):
            raise
    home = PrivateDirectory("tokenmill-prompts-")
    found = _find_or_make(wanted, home.path, executor)
    found.home = home
    return found


def _writable(root: Path) -> bool:
    try:
        with Staging(root):
            return True
    except CacheError:
        return False


def _find_or_make(wanted: Wanted, root: Path, executor: Executor) -> Found:
    card, comparison = wanted.card(root, executor)
    shape = wanted.shape(card)
    sources = [
        {name: value for name, value in source.items() if name != "file"}
        for source in source_documents(wanted.rows.blocks())
    ]
    document = {**shape, "sources": sources}
    place = root / "rows" / fingerprint.key(document)
    if place.is_dir():
        if comparison is not None:
            comparison.agree(card, root)
        return Found(LengthIndex(place, document), hit=True)
    from tokenmill.prompts.working import Work  # here: a hit must not pay for it

    work = Work(wanted, root, executor, card, fingerprint.key(shape))
    if wanted.processor is None:
        work.measure_all()
    if comparison is not None:
        comparison.agree(card, root)
    serving: dict[str, Any] = {"template": None, "special_tokens": {}}
    if wanted.spec.apply_chat_template:
        serving = {"template": card.template, "special_tokens": card.special_tokens}
    publish_index(root, place, document, serving, work.parts())
    return Found(LengthIndex(place, document), hit=False, measured=work.measured)
