"""The memo: what was found out about a tokenizer, remembered by the digests of its files.

Finding an identity costs loading engines, and comparing with AutoTokenizer costs importing
transformers: seconds. `recall` costs milliseconds and imports neither: it hashes the files that
could matter and looks up ``<cache_dir>/tokenizers/memo/<key>.json``. The key also holds the
arguments and the versions of tokenizers and transformers, so another version looks again.

Three things are remembered there: the identity card of a call, AutoTokenizer's answer (an
`AutoAnswer` is the same for every template of the caller's, so it has a key of its own), and, by
the checksum of a tokenizer.json, its piece table. Each file starts with a checksum of the rest.

`reload` loads what is remembered, or else finds out and remembers:
``<cache_dir>/tokenizers/<identity>/`` holds the tokenizer itself, ready to decode and to encode
without transformers. The memo is part of no key. A cache that cannot be written or a damaged memo
only costs the time.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import msgspec

from tokenmill import fingerprint
from tokenmill.errors import CacheError, TokenizerError
from tokenmill.files.sealed import SealedKind, publish_files
from tokenmill.optional import installed_version
from tokenmill.tokenizer import engine_cache
from tokenmill.tokenizer.identity import FORMAT, IdentityCard
from tokenmill.tokenizer.location import locate

if TYPE_CHECKING:
    from tokenmill.tokenizer.tokenizer import Tokenizer

VERSION = 3  # raised when a card's members or finding one change: old memos are not believed
DIRECTORY = "tokenizers"
_MEMO = SealedKind("memo", "", raw=True)

# What AutoTokenizer or we read in a tokenizer's directory; weights and the like are not opened.
_NAMES = (
    "tokenizer", "special_tokens_map.json", "added_tokens.json", "vocab", "merges.txt",
    "config.json", "chat_template", "tekken.json", "spiece.model", "sentencepiece",
)  # fmt: skip
_SUFFIXES = (".jinja", ".model", ".tiktoken", ".py")


def _file_digests(directory: Path) -> dict[str, str]:
    digests = {}
    for folder in (directory, directory / "additional_chat_templates"):
        if not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            if path.name.startswith(_NAMES) or path.suffix in _SUFFIXES:
                with contextlib.suppress(IsADirectoryError):
                    name = str(path.relative_to(directory))
                    digests[name] = fingerprint.checksum(path.read_bytes())
    return digests


class LoadOptions(TypedDict, total=False):
    """The arguments of `load` that decide what it gives."""

    backend: str
    chat_template: Any
    trust_remote_code: bool


def memo_key(
    source: Any,
    *,
    backend: str = "auto",
    chat_template: Any = None,
    trust_remote_code: bool = False,
) -> str | None:
    """The name of the memo of such a call; None where there are no files to name it by."""
    if isinstance(chat_template, str | os.PathLike) and len(os.fspath(chat_template)) < 4096:
        with contextlib.suppress(OSError, ValueError):
            chat_template = {"file": Path(chat_template).read_text(encoding="utf-8")}
    if isinstance(chat_template, os.PathLike):
        return None  # it does not exist; loading will say so
    return _key_of_files(
        source,
        {
            "backend": backend,
            "chat_template": chat_template,
            "trust_remote_code": trust_remote_code,
        },
    )


def _key_of_files(source: Any, question: dict[str, Any]) -> str | None:
    if not isinstance(source, str | os.PathLike):
        return None
    place = locate(source)
    try:
        files = _file_digests(place.directory)
        if place.named:
            files["named"] = fingerprint.checksum(place.file.read_bytes())
    except OSError:
        return None
    return fingerprint.key(
        {
            "memo": [VERSION, FORMAT],
            "files": files,
            **question,
            "versions": [installed_version(name) or "" for name in ("tokenizers", "transformers")],
        }
    )


def _path(cache_dir: Path, file: str) -> Path:
    return cache_dir / DIRECTORY / "memo" / file


def _sealed(cache_dir: Path, file: str) -> bytes | None:
    """What `_seal` wrote; None where it is missing, damaged or out of the cache: only a memo."""
    with contextlib.suppress(CacheError):
        data: bytes | None = _MEMO.admit_or_none(_path(cache_dir, file), cache_dir)
        return data
    return None


def _seal(cache_dir: Path, file: str, data: bytes) -> None:
    """Publish a memo, unless it is there; a damaged one makes room."""
    if _sealed(cache_dir, file) is None:
        with contextlib.suppress(CacheError):
            _MEMO.write(cache_dir, _path(cache_dir, file), data)


def recall(
    source: Any, *, cache_dir: str | os.PathLike[str], **options: Unpack[LoadOptions]
) -> IdentityCard | None:
    """The remembered card of a tokenizer, or None; loads no engine."""
    return _recall_card(Path(cache_dir), memo_key(source, **options))


def _recall_card(cache_dir: Path, name: str | None) -> IdentityCard | None:
    data = None if name is None else _sealed(cache_dir, f"{name}.json")
    try:
        return None if data is None else IdentityCard.from_dict(msgspec.json.decode(data))
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError):
        return None  # another version's


class AutoAnswer(NamedTuple):
    """How AutoTokenizer was seen to encode a directory differently; None: not at all."""

    difference: str | None

    def refuse_difference(self, directory: str | os.PathLike[str]) -> None:
        """Stop where it would encode differently.

        Raises:
            TokenizerError: It would; the message names the choice.
        """
        if self.difference is not None:
            raise TokenizerError(
                f"AutoTokenizer and the tokenizer.json beside it disagree: {self.difference}. Say"
                " which one your trainer uses: tokenizer_backend='transformers' or"
                " tokenizer_backend='file'",
                path=directory,
            )


def answer_key(source: Any, *, template_given: bool, trust_remote_code: bool) -> str | None:
    """The name of AutoTokenizer's answer; None where it cannot be remembered.

    With a template of the caller's the directory's own does not matter.
    """
    question = {"answer": template_given, "trust_remote_code": trust_remote_code}
    return _key_of_files(source, question)


def recall_answer(cache_dir: Path, name: str) -> AutoAnswer | None:
    """AutoTokenizer's answer, if it was asked before."""
    data = _sealed(cache_dir, f"{name}.json")
    try:
        return None if data is None else AutoAnswer(msgspec.json.decode(data)["difference"])
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError):
        return None


def remember_answer(cache_dir: Path, name: str, answer: AutoAnswer) -> None:
    """Remember AutoTokenizer's answer."""
    _seal(cache_dir, f"{name}.json", fingerprint.canonical({"difference": answer.difference}))


def reload(
    source: Any, *, cache_dir: str | os.PathLike[str], **options: Unpack[LoadOptions]
) -> Tokenizer:
    """`load` by way of the memo: the second time without AutoTokenizer or transformers."""
    from tokenmill.tokenizer.loading import load  # here: recalling must not pay for it

    cache, name = Path(cache_dir), memo_key(source, **options)
    card = _recall_card(cache, name)
    tokenizer = None if card is None else _stored(cache, card)
    if tokenizer is None:
        tokenizer = load(source, cache_dir=cache, **options)
        if name is not None:
            remember(tokenizer, cache)
            _remember_card(cache, name, tokenizer.card)
    return tokenizer


def _stored(cache_dir: Path, card: IdentityCard) -> Tokenizer | None:
    """The tokenizer under its identity, if it is there and whole."""
    from tokenmill.tokenizer.tokenizer import Tokenizer

    path = cache_dir / DIRECTORY / card.key / "tokenizer.json"
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if fingerprint.checksum(data) != card.checksum:
        return None
    tokenizer = Tokenizer(
        data,
        template=card.template,
        special_tokens=card.special_tokens,
        backend=card.backend,
        path=path,
        notes=card.notes,
    )
    tokenizer.__dict__["card"] = card
    return tokenizer


def remember(tokenizer: Tokenizer, cache_dir: Path) -> None:
    """Keep a tokenizer under its identity."""
    home = cache_dir / DIRECTORY / tokenizer.key
    with contextlib.suppress(CacheError):
        if not home.is_dir():
            publish_files(cache_dir, home, tokenizer.files())


def remember_card(
    card: IdentityCard,
    source: Any,
    *,
    cache_dir: str | os.PathLike[str],
    **options: Unpack[LoadOptions],
) -> None:
    """Remember that such a call leads to this card; the tokenizer itself is kept already."""
    name = memo_key(source, **options)
    if name is not None:
        _remember_card(Path(cache_dir), name, card)


def _remember_card(cache_dir: Path, name: str, card: IdentityCard) -> None:
    _seal(cache_dir, f"{name}.json", fingerprint.canonical(card.as_dict()))


def share_table(tokenizer: Tokenizer, cache_dir: Path) -> None:
    """See that a tokenizer's piece table is loaded, from the cache where it is there.

    Where it is not, it is left there, so that the next process need not make it.
    """
    from tokenmill.tokenizer.pieces import PieceTable

    file = f"{tokenizer.checksum}.pieces"

    def find() -> PieceTable:
        data = _sealed(cache_dir, file)
        with contextlib.suppress(msgspec.MsgspecError, ValueError, TypeError, KeyError):
            table = None if data is None else PieceTable.from_bytes(data)
            if table is not None:
                return table
        table = tokenizer.make_table()
        _seal(cache_dir, file, table.to_bytes())
        return table

    table = engine_cache.once(tokenizer.checksum, "table", find)
    if not _path(cache_dir, file).exists():  # this process had it from elsewhere
        _seal(cache_dir, file, table.to_bytes())
    tokenizer.__dict__["table"] = table
