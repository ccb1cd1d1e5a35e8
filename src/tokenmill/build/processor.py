"""Identify an image processor, and store the copy that workers load.

A worker identifies a processor given by name, which imports transformers and probes many sizes. A
processor object is used directly, because not every object can be loaded from files again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tokenmill._core import fingerprint
from tokenmill._core.artifact import files_below, publish_files
from tokenmill._core.paths import checked_path
from tokenmill._core.process import PrivateDirectory
from tokenmill.build.identity import absolute, run_on_worker
from tokenmill.build.tasks import Executor
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.store import CacheLayout, Store
from tokenmill.tokenizers.cache import key_of_files, read_fact, write_fact

if TYPE_CHECKING:
    from tokenmill.media import Processor

IDENTIFY = "tokenmill.build.processor:open_identifier"
VERSION = 1  # incremented when `ProcessorInfo` or its computation changes
_SUFFIXES = (".json", ".jinja", ".py", ".model", ".txt")

_given: dict[str, Processor] = {}  # by key: objects of the caller, and loaded processors


class ProcessorInfo(msgspec.Struct, frozen=True):
    """Facts about a processor that is not loaded."""

    key: str  # fingerprint of `identity`
    identity: dict[str, Any]  # everything that determines its output
    template: str | dict[str, str] | None
    image_token: str  # printed by the template for one image
    video_token: str | None
    media_token_ids: tuple[int, ...]  # never trained


class TokenizerOf(NamedTuple):
    tokenizer: Any
    tokenizer_backend: str
    chat_template: Any
    trust_remote_code: bool
    encoder: Any = None
    encoder_kwargs: Any = None


def tokenizer_choice(recipe: Any, card: ProcessorInfo | None) -> Any:
    """Return the tokenizer and template of the recipe, with those of the processor as defaults."""
    if card is None:
        return recipe
    tokenizer, template = recipe.tokenizer, recipe.chat_template
    if tokenizer is None:
        given = recipe.processor
        tokenizer = given if isinstance(given, str | os.PathLike) else _given[card.key].tokenizer
    return TokenizerOf(
        tokenizer,
        recipe.tokenizer_backend,
        card.template if template is None and recipe.encoder is None else template,
        recipe.trust_remote_code,
        recipe.encoder,
        recipe.encoder_kwargs,
    )


def processor_info(recipe: Any, cache: CacheLayout, executor: Executor) -> ProcessorInfo | None:
    where = recipe.processor
    if where is None:
        return None
    if not isinstance(where, str | os.PathLike):
        from tokenmill.media import Processor

        processor = Processor.load(where, cache_dir=cache.root)
        card = _card(processor)
        _given[card.key] = processor
        _store_copy(processor, card, cache)
        return card
    arguments = {
        "where": absolute(checked_path("processor", where)),
        "trust_remote_code": recipe.trust_remote_code,
    }
    name = _facts_key(**arguments)
    known = read_fact(cache.root, name, ProcessorInfo)
    if known is not None and cache.processor(known.key).is_dir():
        return known
    found = run_on_worker(executor, IDENTIFY, {**arguments, "cache_dir": str(cache.root)})
    card = msgspec.convert(found, ProcessorInfo)
    write_fact(cache.root, name, card)
    return card


def load_processor(
    path: Path, identity: dict[str, Any], *, trust_remote_code: bool = False
) -> Processor:
    """Return the processor with an identity: the caller's object, or the copy at `path`."""
    key = fingerprint.key(identity)
    if (known := _given.get(key)) is not None:
        return known
    processor = _load(
        path,
        "a processor that cannot be loaded from its files works only in this process, without "
        "workers",
        path,
        options=identity["options"],
        trust_remote_code=trust_remote_code,
        cache_dir=path.parent.parent if path.parent.name == "processors" else None,
    )
    if processor.key != key:
        raise CorruptionError("the copy of the processor gives other results", path=path)
    _given[key] = processor
    return processor


def processor_of(store: Store, given: Any = None) -> Processor:
    """Return the processor `given`, which must be that of the store, or the store's copy."""
    path = store.processor_path
    if path is None:
        raise UsageError("the store was prepared without a processor", path=store.path)
    known = _given.get(store.processor_key)
    if given is None and known is not None:
        return known
    identity = store.manifest["document"]["processor"]
    processor = _load(
        path if given is None else given,
        "pass the processor as an object if it cannot be loaded from the store's copy (for "
        "example, because it has its own code)",
        path,
        options=identity["options"],
        cache_dir=store.cache_root,
    )
    found = msgspec.json.decode(msgspec.json.encode(processor.identity))
    # Another version of transformers may write equal settings differently.
    settings = ["configuration"] * (identity["code"] == found["code"])
    names = ["class", "image_token", "options", *settings, "answers"]
    differ = [name for name in names if identity.get(name) != found.get(name)]
    if differ:
        raise UsageError(
            f"the rows were prepared with another processor ({' and '.join(differ)} differ), so "
            "pixels would not match the tokens; pass the same processor, or prepare the rows again",
            path=store.path,
        )
    return processor


def _load(processor: Any, advice: str, path: Path, **given: Any) -> Processor:
    from tokenmill.media import Processor

    try:
        return Processor.load(processor, **given)
    except UsageError as error:
        raise UsageError(f"{error.message}; {advice}", path=path) from error


def open_identifier(options: dict[str, Any]) -> Any:
    """Return the function that identifies a processor; workers call it by name."""

    def identify(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.media import Processor

        processor = Processor.load(payload.pop("where"), **payload)
        card = _card(processor)
        _store_copy(processor, card, CacheLayout(Path(payload["cache_dir"])))
        document: dict[str, Any] = msgspec.to_builtins(card)
        return document

    return identify


def _card(processor: Processor) -> ProcessorInfo:
    return ProcessorInfo(
        key=processor.key,
        identity=processor.identity,
        template=processor.chat_template,
        image_token=processor.image_token,
        video_token=processor.video_token,
        media_token_ids=tuple(sorted(processor.media_token_ids)),
    )


def _store_copy(processor: Processor, card: ProcessorInfo, cache: CacheLayout) -> None:
    directory = cache.processor(card.key)
    if directory.is_dir():
        return
    staged = PrivateDirectory("tokenmill-processor-")
    processor.save(staged.path)
    files = {name: path.read_bytes() for name, path in files_below(staged.path)}
    publish_files(cache.root, directory, files)


def _facts_key(where: Any, *, trust_remote_code: bool) -> str | None:
    directory = Path(where)
    if not directory.is_dir():
        return None  # a hub id may mean another revision later
    files = {name: path for name, path in files_below(directory) if path.suffix in _SUFFIXES}
    question = {"processor": VERSION, "trust_remote_code": trust_remote_code}
    return key_of_files(files, question, ("transformers", "pillow", "torch"))
