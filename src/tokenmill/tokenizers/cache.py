"""Caches of tokenizers: facts by the digests of their files, copies on disk, engines in memory.

Identifying a tokenizer takes seconds; `recall` reads the result in milliseconds. Facts are not part
of any key, so a read-only cache or a damaged file costs only time. Workers load a *copy*, which is
enough to encode and decode without transformers.
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
from tokenmill._core.artifact import ArtifactKind, publish_files
from tokenmill._core.encoders import EncoderSource
from tokenmill._core.optional import installed_version
from tokenmill._core.process import parent_had_threads
from tokenmill.errors import CacheError, CorruptionError, TokenizerError
from tokenmill.tokenizers.directory import (
    choose_template,
    locate,
    read_file,
    read_special_tokens,
    read_template,
)
from tokenmill.tokenizers.identity import FORMAT, TokenizerFingerprint

if TYPE_CHECKING:
    from tokenmill.tokenizers.tokenizer import Tokenizer

MAX_TOKENIZERS = 4  # in memory; each takes up to half a GB
SMALL_JOB_BYTES = 4 << 20  # the reference encodes this much while fastokens would load
FACTS_VERSION = 6  # raised when the members of facts or their computation change
DIRECTORY = "tokenizers"
_FACT = ArtifactKind("memo", "", raw=True)

# Files of a tokenizer's directory that AutoTokenizer or tokenmill reads. Weights are never opened.
_NAMES = (
    "tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab", "merges.txt",
    "config.json", "chat_template", "tekken.json", "spiece.model", "sentencepiece",
)  # fmt: skip
_FOLDERS = ("additional_chat_templates", "encoding")
_SUFFIXES = (".jinja", ".model", ".tiktoken", ".py")

Made = TypeVar("Made")


# Facts on disk


class Comparison(msgspec.Struct, frozen=True):
    """Differences between AutoTokenizer and the tokenizer.json of the same directory."""

    encoding: str | None = None
    template: str | None = None  # ignored if the caller gives a template
    overrides: str | None = None  # class whose code replaces `apply_chat_template`; the same
    python: str | None = None  # class that encodes in Python and cannot be converted

    def refuse(self, path: Any, template: Any) -> None:
        """Raise if the directory needs a choice and the caller gave no template or encoder."""
        template_given = template is not None
        if self.python is not None and not isinstance(template, EncoderSource):
            raise TokenizerError(
                f"{self.python} encodes in Python and has no fast backend, so the masks of its"
                " texts cannot be proven. Set ",
                ("encoder", "transformers"),
                " to use the ids of its apply_chat_template",
                path=path,
            )
        if self.overrides is not None and not template_given:
            raise TokenizerError(
                f"the code of {self.overrides} replaces apply_chat_template, so its template alone"
                " may print other text. Set ",
                ("encoder", "transformers"),
                " to use its code, or ",
                ("chat_template",),
                " to use a template",
                path=path,
            )
        difference = self.encoding or (None if template_given else self.template)
        if difference is not None:
            raise TokenizerError(
                f"AutoTokenizer and tokenizer.json of this directory differ: {difference}. Choose"
                " the one that your trainer uses: ",
                ("tokenizer_backend", "transformers"),
                " or ",
                ("tokenizer_backend", "file"),
                path=path,
            )


class Facts(msgspec.Struct, frozen=True):
    card: TokenizerFingerprint  # with the template of the tokenizer itself
    comparison: Comparison

    def card_for(self, chat_template: Any, path: Any) -> TokenizerFingerprint:
        """Return the fingerprint with the caller's template; raise if AutoTokenizer differs."""
        self.comparison.refuse(path, chat_template)
        return self.card.with_template(choose_template(chat_template, self.card.template))


def facts_key(source: Any, *, backend: str, trust_remote_code: bool) -> str | None:
    """Return the name of a tokenizer's cached facts; None if it has no files."""
    if not isinstance(source, str | os.PathLike):
        return None
    location = locate(source)
    try:
        files = {
            str(path.relative_to(location.directory)): path
            for folder in (location.directory, *map(location.directory.joinpath, _FOLDERS))
            if folder.is_dir()
            for path in folder.iterdir()
            if (path.name.startswith(_NAMES) or path.suffix in _SUFFIXES) and path.is_file()
        }
        if location.named:
            files["named"] = location.file
        options = {"backend": backend, "trust_remote_code": trust_remote_code, "format": FORMAT}
        return key_of_files(files, options, ("tokenizers", "transformers"))
    except OSError:
        return None


def key_of_files(files: dict[str, Path], options: Any, libraries: Iterable[str]) -> str:
    """Return the name of a cached fact, which depends on files, options and library versions."""
    return fingerprint.key(
        {
            "facts": FACTS_VERSION,
            "files": {name: fingerprint.checksum(read_file(f)) for name, f in files.items()},
            "question": options,
            "versions": [installed_version(name) or "" for name in libraries],
        }
    )


def read_fact(root: Path, name: str | None, kind: type[Made]) -> Made | None:
    data = None if name is None else _read(root, f"{name}.json")
    try:
        return None if data is None else msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def write_fact(root: Path, name: str | None, fact: Any) -> None:
    if name is not None:
        _write(root, f"{name}.json", msgspec.json.encode(fact, order="deterministic"))


def _path(root: Path, file: str) -> Path:
    return root / DIRECTORY / "memo" / file


def _read(root: Path, file: str) -> bytes | None:
    with contextlib.suppress(CacheError):
        data: bytes | None = _FACT.open_or_none(_path(root, file), root)
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
) -> TokenizerFingerprint | None:
    """Return the cached fingerprint of a tokenizer, or None; load no engine."""
    name = facts_key(source, backend=backend, trust_remote_code=trust_remote_code)
    facts = read_fact(Path(cache_dir), name, Facts)
    return None if facts is None else facts.card_for(chat_template, locate(source).directory)


# Copies


def copy_path(root: Path, card: TokenizerFingerprint) -> Path:
    return root / DIRECTORY / card.key


def keep_copy(tokenizer: Tokenizer, root: Path) -> None:
    path = copy_path(root, tokenizer.card)
    with contextlib.suppress(CacheError):
        if not path.is_dir():
            publish_files(root, path, tokenizer.files())


def load_copy(path: Path, document: dict[str, Any]) -> Tokenizer:
    """Load the copy of a tokenizer from the cache, with its table of pieces.

    If its tokenizer.json is not identical to that of the fingerprint, compute and compare the key.
    """
    from tokenmill.tokenizers.tokenizer import Tokenizer, check_copy

    card, file = TokenizerFingerprint.from_dict(document), path / "tokenizer.json"
    try:
        check_copy(path)
        tokenizer = Tokenizer(
            read_file(file),
            template=choose_template(
                card.template if isinstance(card.template, EncoderSource) else None,
                read_template(path),
            ),
            special_tokens=read_special_tokens(path),
            backend=card.backend,
            path=file,
            notes=card.notes,
        )
        actual = tokenizer.checksum, tokenizer.template, tokenizer.special_tokens
        is_same = actual == (card.checksum, card.template, card.special_tokens)
        if not is_same and tokenizer.key != card.key:
            raise CorruptionError("the copy of the tokenizer has another identity", path=file)
    except TokenizerError as error:
        raise CorruptionError(f"damaged copy of a tokenizer: {error.message}", path=file) from error
    except OSError as error:  # an error of the cache, not of the worker
        raise CacheError(
            f"the copy of the tokenizer cannot be read: {error.strerror}; run the command again",
            path=path,
        ) from error
    if is_same:
        tokenizer.__dict__["card"] = card
    share_table(tokenizer, path.parent.parent)
    return tokenizer


def share_table(tokenizer: Tokenizer, root: Path) -> None:
    """Set the tokenizer's table of pieces from the cache; write the table if it is missing."""
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
    if not _path(root, file).exists():  # the table came from this process's memory
        _write(root, file, table.to_bytes())
    tokenizer.__dict__["table"] = table


# Engines in memory


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.RLock()  # making one object may need another
        self.objects: dict[str, Any] = {}


_lock = threading.Lock()
_slots: OrderedDict[str, _Slot] = OrderedDict()
_parent_slots: list[object] = []


def once(checksum: str, name: str, make: Callable[[], Made]) -> Made:
    """Return the object ``name`` of a tokenizer, and call ``make`` if it is not in memory.

    The objects of the last `MAX_TOKENIZERS` tokenizers are cached. Threads wait for each other. An
    error of ``make`` is raised and not cached.
    """
    with _lock:
        slot = _slots.setdefault(checksum, _Slot())
        _slots.move_to_end(checksum)
        while len(_slots) > MAX_TOKENIZERS:
            _slots.popitem(last=False)
    with slot.lock:
        if name not in slot.objects:
            slot.objects[name] = make()
        result: Made = slot.objects[name]
        return result


def engine_for(name: str, size: int) -> str:
    return "hf" if name == "auto" and size <= SMALL_JOB_BYTES else name


def clear_cache() -> None:
    """Drop all loaded objects, for tests that replace one."""
    with _lock:
        _slots.clear()


def _reset_after_fork() -> None:
    """Start empty if a thread of the parent may have held a lock or used an engine at the fork."""
    global _lock, _slots
    if not parent_had_threads():
        return
    _parent_slots.append(_slots)  # keep a reference, because freeing them is not safe
    _lock, _slots = threading.Lock(), OrderedDict()


os.register_at_fork(after_in_child=_reset_after_fork)
