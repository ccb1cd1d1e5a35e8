"""Cached facts about tokenizers, by the digests of their files; copies of them; loaded engines.

Identifying a tokenizer takes seconds, `recall` milliseconds. Facts are part of no key of a slice or
store, so a cache that cannot be written or a damaged file costs only time. A *copy* is enough to
encode and decode without transformers; workers load it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from tokenmill._core import fingerprint
from tokenmill._core.optional import installed_version
from tokenmill._core.sealed import SealedKind, publish_files
from tokenmill.errors import CacheError, CorruptionError, TokenizerError
from tokenmill.tokenizers.directory import (
    choose_template,
    locate,
    read_special_tokens,
    read_template,
)
from tokenmill.tokenizers.identity import FORMAT, IdentityCard

if TYPE_CHECKING:
    from tokenmill.tokenizers.tokenizer import Tokenizer

MAX_TOKENIZERS = 4  # each takes up to half a GB; a program that switches between more loads again
LITTLE_WORK = 4 << 20  # bytes that the reference encodes in the time that fastokens takes to load
FACTS_VERSION = 4  # raised when the members of facts, or finding them, change
DIRECTORY = "tokenizers"
_FACT = SealedKind("memo", "", raw=True)

# What AutoTokenizer or we read in a tokenizer's directory; weights and the like are not opened.
_NAMES = (
    "tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab", "merges.txt",
    "config.json", "chat_template", "tekken.json", "spiece.model", "sentencepiece",
)  # fmt: skip
_SUFFIXES = (".jinja", ".model", ".tiktoken", ".py")

Made = TypeVar("Made")


# Facts on disk


class Comparison(msgspec.Struct, frozen=True):
    """How AutoTokenizer differs from the tokenizer.json beside it, if it does."""

    encoding: str | None = None
    template: str | None = None  # ignored if the caller gives a template

    def refuse(self, path: Any, *, template_given: bool) -> None:
        """Raise `TokenizerError` if there is a difference."""
        difference = self.encoding or (None if template_given else self.template)
        if difference is not None:
            raise TokenizerError(
                f"AutoTokenizer and the tokenizer.json beside it disagree: {difference}. Say"
                " which one your trainer uses: tokenizer_backend='transformers' or"
                " tokenizer_backend='file'",
                path=path,
            )


class Facts(msgspec.Struct, frozen=True):
    card: IdentityCard  # with the tokenizer's own template
    comparison: Comparison

    def card_for(self, chat_template: Any, path: Any) -> IdentityCard:
        """Return the card with the caller's template; refuse a difference of AutoTokenizer."""
        self.comparison.refuse(path, template_given=chat_template is not None)
        return self.card.with_template(choose_template(chat_template, self.card.template))


def facts_key(source: Any, *, backend: str, trust_remote_code: bool) -> str | None:
    """Return the name of a tokenizer's facts; None if it has no files."""
    if not isinstance(source, str | os.PathLike):
        return None
    place = locate(source)
    try:
        files = {
            str(path.relative_to(place.directory)): path
            for folder in (place.directory, place.directory / "additional_chat_templates")
            if folder.is_dir()
            for path in folder.iterdir()
            if (path.name.startswith(_NAMES) or path.suffix in _SUFFIXES) and path.is_file()
        }
        if place.named:
            files["named"] = place.file
        question = {"backend": backend, "trust_remote_code": trust_remote_code, "format": FORMAT}
        return key_of_files(files, question, ("tokenizers", "transformers"))
    except OSError:
        return None


def key_of_files(files: dict[str, Path], question: Any, libraries: Iterable[str]) -> str:
    """Return the name of a fact: the answer to a question about files, by versions of libraries."""
    return fingerprint.key(
        {
            "facts": FACTS_VERSION,
            "files": {name: fingerprint.checksum(f.read_bytes()) for name, f in files.items()},
            "question": question,
            "versions": [installed_version(name) or "" for name in libraries],
        }
    )


def read_fact(root: Path, name: str | None, kind: type[Made]) -> Made | None:
    """Read a fact; None if it is missing, damaged or of another version."""
    data = None if name is None else _read(root, f"{name}.json")
    try:
        return None if data is None else msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def write_fact(root: Path, name: str | None, fact: Any) -> None:
    """Publish a fact, unless it exists and is sound."""
    if name is not None:
        _write(root, f"{name}.json", msgspec.json.encode(fact, order="deterministic"))


def _path(root: Path, file: str) -> Path:
    return root / DIRECTORY / "memo" / file


def _read(root: Path, file: str) -> bytes | None:
    with contextlib.suppress(CacheError):
        data: bytes | None = _FACT.admit_or_none(_path(root, file), root)
        return data
    return None


def _write(root: Path, file: str, data: bytes) -> None:
    if _read(root, file) is None:
        with contextlib.suppress(CacheError):
            _FACT.write(root, _path(root, file), data)


def recall(
    source: Any,
    *,
    cache_dir: str | os.PathLike[str],
    backend: str = "auto",
    chat_template: Any = None,
    trust_remote_code: bool = False,
) -> IdentityCard | None:
    """Return the card of a tokenizer whose facts are known, else None; loads no engine."""
    name = facts_key(source, backend=backend, trust_remote_code=trust_remote_code)
    facts = read_fact(Path(cache_dir), name, Facts)
    return None if facts is None else facts.card_for(chat_template, locate(source).directory)


# Copies


def copy_path(root: Path, card: IdentityCard) -> Path:
    return root / DIRECTORY / card.key


def keep_copy(tokenizer: Tokenizer, root: Path) -> None:
    path = copy_path(root, tokenizer.card)
    with contextlib.suppress(CacheError):
        if not path.is_dir():
            publish_files(root, path, tokenizer.files())


def load_copy(path: Path, document: dict[str, Any]) -> Tokenizer:
    """Load the cache's copy of a card's tokenizer, with its table of pieces.

    Its tokenizer.json may be spelled otherwise than the card's; then its identity is computed.

    Raises:
        CorruptionError: The copy is damaged.
        CacheError: The copy cannot be read.
    """
    from tokenmill.tokenizers.tokenizer import Tokenizer, check_copy

    card, file = IdentityCard.from_dict(document), path / "tokenizer.json"
    try:
        check_copy(path)
        tokenizer = Tokenizer(
            file.read_bytes(),
            template=read_template(path),
            special_tokens=read_special_tokens(path),
            backend=card.backend,
            path=file,
            notes=card.notes,
        )
        found = tokenizer.checksum, tokenizer.template, tokenizer.special_tokens
        is_same = found == (card.checksum, card.template, card.special_tokens)
        if not is_same and tokenizer.key != card.key:
            raise CorruptionError("the tokenizer's copy is not what was written", path=file)
    except TokenizerError as error:
        raise CorruptionError(f"the tokenizer's copy: {error.message}", path=file) from error
    except OSError as error:  # a disk that cannot read it is the cache's trouble, not a worker's
        raise CacheError(
            f"the tokenizer's copy cannot be read: {error.strerror}; run the command again",
            path=path,
        ) from error
    if is_same:
        tokenizer.__dict__["card"] = card
    share_table(tokenizer, path.parent.parent)
    return tokenizer


def share_table(tokenizer: Tokenizer, root: Path) -> None:
    """Set the tokenizer's table of pieces from the cache; write it there if it is missing."""
    from tokenmill.tokenizers.pieces import PieceTable

    file = f"{tokenizer.checksum}.pieces"

    def find() -> PieceTable:
        if (data := _read(root, file)) is not None:
            with contextlib.suppress(ValueError):
                return PieceTable.from_bytes(data)
        table = tokenizer.make_table()
        _write(root, file, table.to_bytes())
        return table

    table = once(tokenizer.checksum, "table", find)
    if not _path(root, file).exists():  # this process had it before
        _write(root, file, table.to_bytes())
    tokenizer.__dict__["table"] = table


# Engines in memory


class _Slot:
    """What is loaded of one tokenizer."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # making one object may need another
        self.made: dict[str, Any] = {}


_lock = threading.Lock()
_slots: OrderedDict[str, _Slot] = OrderedDict()
_of_parents: list[object] = []


def once(checksum: str, name: str, make: Callable[[], Made]) -> Made:
    """Return an object made of a tokenizer.json; those of `MAX_TOKENIZERS` tokenizers are kept.

    Threads wait for each other. What `make` raises is raised, and the next call tries again.
    """
    with _lock:
        slot = _slots.setdefault(checksum, _Slot())
        _slots.move_to_end(checksum)
        while len(_slots) > MAX_TOKENIZERS:
            _slots.popitem(last=False)
    with slot.lock:
        if name not in slot.made:
            slot.made[name] = make()
        made: Made = slot.made[name]
        return made


def engine_for(name: str, size: int) -> str:
    """Return the engine for `size` bytes of rows if the caller chose ``name``."""
    return "hf" if name == "auto" and size <= LITTLE_WORK else name


def clear_cache() -> None:
    """Drop all engines: for tests that replace one."""
    with _lock:
        _slots.clear()


def _start_empty() -> None:
    """A thread of the parent may have held a lock or been inside an engine at the fork."""
    global _lock, _slots
    _of_parents.append(_slots)  # neither used nor freed
    _lock, _slots = threading.Lock(), OrderedDict()


os.register_at_fork(after_in_child=_start_empty)
