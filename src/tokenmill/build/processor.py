"""The identity of an image processor, its facts in the cache, and the copy that workers load.

A worker identifies a processor that is named: that imports transformers and probes many sizes. One
that is given as an object is used as it is, because not every one can be loaded from files again.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tokenmill._core import fingerprint
from tokenmill._core.process import PrivateDirectory
from tokenmill._core.sealed import publish_files
from tokenmill.build.identity import absolute, ask_worker
from tokenmill.build.tasks import Executor
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.store import CacheLayout, Store
from tokenmill.tokenizers.cache import key_of_files, read_fact, write_fact

if TYPE_CHECKING:
    from tokenmill.media import Processor

IDENTIFY = "tokenmill.build.processor:open_identifier"
VERSION = 1  # raised when a card's members or finding one change
_SUFFIXES = (".json", ".jinja", ".py", ".model", ".txt")

_given: dict[str, Processor] = {}  # by key: given to this process as objects, or loaded


class ProcessorCard(msgspec.Struct, frozen=True):
    """What is known of a processor without loading it."""

    key: str  # fingerprint of `identity`
    identity: dict[str, Any]  # everything that decides its answers
    template: str | dict[str, str] | None
    image_token: str  # what the template prints for one image
    video_token: str | None
    media_token_ids: tuple[int, ...]  # never trained


class TokenizerOf(NamedTuple):
    tokenizer: Any
    tokenizer_backend: str
    chat_template: Any
    trust_remote_code: bool


def tokenizer_choice(recipe: Any, card: ProcessorCard | None) -> Any:
    """Return the recipe's tokenizer and template, or else the processor's."""
    if card is None:
        return recipe
    tokenizer, template = recipe.tokenizer, recipe.chat_template
    if tokenizer is None:
        given = recipe.processor
        tokenizer = given if isinstance(given, str | os.PathLike) else _given[card.key].tokenizer
    return TokenizerOf(
        tokenizer,
        recipe.tokenizer_backend,
        card.template if template is None else template,
        recipe.trust_remote_code,
    )


def processor_card(recipe: Any, cache: CacheLayout, executor: Executor) -> ProcessorCard | None:
    where = recipe.processor
    if where is None:
        return None
    if not isinstance(where, str | os.PathLike):
        from tokenmill.media import Processor

        processor = Processor.load(where, cache_dir=cache.root)
        card = _card(processor)
        _given[card.key] = processor
        _keep(processor, card, cache)
        return card
    arguments = {"where": absolute(where), "trust_remote_code": recipe.trust_remote_code}
    name = _facts_key(**arguments)
    known = read_fact(cache.root, name, ProcessorCard)
    if known is not None and cache.processor(known.key).is_dir():
        return known
    found = ask_worker(executor, IDENTIFY, {**arguments, "cache_dir": str(cache.root)})
    card = msgspec.convert(found, ProcessorCard)
    write_fact(cache.root, name, card)
    return card


def load_processor(
    path: Path, identity: dict[str, Any], *, trust_remote_code: bool = False
) -> Processor:
    """Return the processor of an identity: the object that was given, or the copy at `path`.

    Raises:
        CorruptionError: The copy is not what was kept.
        UsageError: It cannot be loaded here.
    """
    key = fingerprint.key(identity)
    if (known := _given.get(key)) is not None:
        return known
    processor = _load(
        path,
        "a processor that cannot be loaded from its own files serves only the process that it was "
        "given to (num_workers=0)",
        path,
        options=identity["options"],
        trust_remote_code=trust_remote_code,
        cache_dir=path.parent.parent if path.parent.name == "processors" else None,
    )
    if processor.key != key:
        raise CorruptionError("the processor's copy answers otherwise than it did", path=path)
    _given[key] = processor
    return processor


def processor_of(store: Store, given: Any = None) -> Processor:
    """Return `given`, or else the store's copy.

    Raises:
        UsageError: The store has none, it cannot be loaded here, or it is another processor.
    """
    path = store.processor_path
    if path is None:
        raise UsageError("prepared without a processor: its rows have no pictures", path=store.path)
    known = _given.get(store.processor_key)
    if given is None and known is not None:
        return known
    identity = store.manifest["document"]["processor"]
    processor = _load(
        path if given is None else given,
        "a processor that cannot be made of the store's copy, one with code of its own, say, must "
        "be given as an object",
        path,
        options=identity["options"],
        cache_dir=store.cache_root,
    )
    found = msgspec.json.decode(msgspec.json.encode(processor.identity))
    # Another version of transformers may write down settings otherwise, and do the same.
    settings = ["configuration"] * (identity["code"] == found["code"])
    names = ["class", "image_token", "options", *settings, "answers"]
    differ = [name for name in names if identity.get(name) != found.get(name)]
    if differ:
        raise UsageError(
            f"the processor is not the one that the rows were prepared with: {' and '.join(differ)}"
            " differ, so pixels would not fit the tokens; give the same one, or prepare the rows "
            "again",
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
    """Return the function that identifies a processor (an executor's entry)."""

    def identify(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.media import Processor

        processor = Processor.load(
            payload["where"],
            trust_remote_code=payload["trust_remote_code"],
            cache_dir=payload["cache_dir"],
        )
        card = _card(processor)
        _keep(processor, card, CacheLayout(Path(payload["cache_dir"])))
        made: dict[str, Any] = msgspec.to_builtins(card)
        return made

    return identify


def _card(processor: Processor) -> ProcessorCard:
    return ProcessorCard(
        key=processor.key,
        identity=processor.identity,
        template=processor.chat_template,
        image_token=processor.image_token,
        video_token=processor.video_token,
        media_token_ids=tuple(sorted(processor.media_token_ids)),
    )


def _keep(processor: Processor, card: ProcessorCard, cache: CacheLayout) -> None:
    home = cache.processor(card.key)
    if home.is_dir():
        return
    staged = PrivateDirectory("tokenmill-processor-")
    processor.save(staged.path)
    files = {
        path.relative_to(staged.path).as_posix(): path.read_bytes()
        for path in sorted(staged.path.rglob("*"))
        if path.is_file()
    }
    publish_files(cache.root, home, files)


def _facts_key(where: Any, *, trust_remote_code: bool) -> str | None:
    directory = Path(where)
    if not directory.is_dir():
        return None  # a name of the hub may mean another revision tomorrow
    files = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.suffix in _SUFFIXES and path.is_file()
    }
    question = {"processor": VERSION, "trust_remote_code": trust_remote_code}
    return key_of_files(files, question, ("transformers", "pillow", "torch"))
