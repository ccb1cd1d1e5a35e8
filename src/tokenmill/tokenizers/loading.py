"""Load a tokenizer from a path, a hub id or an object, and compare it with AutoTokenizer.

Backend ``auto`` is the tokenizer.json, if AutoTokenizer (where transformers is installed) encodes
alike. Otherwise loading stops and names the choice. It stops, too, if AutoTokenizer cannot load the
directory, unless nothing there brings code or names another class than the generic one. A token
that other files of the directory name and tokenizer.json does not know would be encoded as ordinary
text: that is refused unless the caller gives the tokenizer.json itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenmill._core.collector import without_collector
from tokenmill._core.optional import transformers_muted
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.tokenizers.cache import (
    Comparison,
    Facts,
    facts_key,
    keep_copy,
    read_fact,
    write_fact,
)
from tokenmill.tokenizers.directory import (
    INSTALL,
    Location,
    brings_code,
    choose_template,
    is_installed,
    locate,
    named_tokens,
    read_special_tokens,
    read_template,
    states_a_class,
)
from tokenmill.tokenizers.identity import (
    added_tokens,
    counted_tokens,
    parse_backend,
    read_head,
    refuse_randomness,
    vocabulary,
)
from tokenmill.tokenizers.parity_texts import parity_texts, vocabulary_texts
from tokenmill.tokenizers.tokenizer import COPY, Tokenizer, check_copy

BACKENDS = ("auto", "file", "transformers")

_TRUST = "trust_remote_code=True to run the code it brings, or "


@without_collector()
def load(
    source: Any,
    *,
    backend: str = "auto",
    chat_template: Any = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: Directory, tokenizer.json, hub id, `tokenizers.Tokenizer`, transformers tokenizer
            or a `Tokenizer` of ours.
        backend: ``auto``, ``file`` or ``transformers``.
        chat_template: Instead of the tokenizer's own: Jinja source, the path of a file, the name
            of one of its own templates, or several sources by name.
        trust_remote_code: Whether AutoTokenizer may run code that the directory brings along.

    Raises:
        TokenizerError: It cannot be loaded, it is unclear who encodes, or files of the directory
            contradict each other.
    """
    if backend not in BACKENDS:
        raise UsageError(f"tokenizer_backend={backend!r}: choose one of {', '.join(BACKENDS)}")
    if isinstance(source, str | os.PathLike):
        place = locate(source)
        tokenizer, comparison = _load_place(place, backend, trust_remote_code)
        comparison.refuse(place.directory, template_given=chat_template is not None)
    else:
        tokenizer = _adopt_object(source)
        refuse_randomness(read_head(tokenizer.data), path=tokenizer.path)
    tokenizer.template = choose_template(chat_template, tokenizer.template)
    return tokenizer


@without_collector()
def identify(
    source: Any,
    *,
    cache_dir: str | os.PathLike[str],
    backend: str = "auto",
    chat_template: Any = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer, publish its facts in the cache and keep a copy of it there."""
    root, place = Path(cache_dir), locate(source)
    name = facts_key(source, backend=backend, trust_remote_code=trust_remote_code)
    known = read_fact(root, name, Facts)
    tokenizer, comparison = _load_place(place, backend, trust_remote_code, known)
    facts = Facts(tokenizer.card, comparison)
    write_fact(root, name, facts)
    card = facts.card_for(chat_template, place.directory)
    tokenizer = _adopt_object(tokenizer)
    tokenizer.template = card.template
    tokenizer.__dict__["card"] = card
    keep_copy(tokenizer, root)
    return tokenizer


def _load_place(
    place: Location, backend: str, trust_remote_code: bool, known: Facts | None = None
) -> tuple[Tokenizer, Comparison]:
    """Load a tokenizer's files and compare them with AutoTokenizer, unless that is known."""
    if backend == "transformers":
        return _load_with_auto(place, trust_remote_code), Comparison()
    if not place.file.is_file():
        if backend == "auto" and is_installed():
            return _load_with_auto(place, trust_remote_code), Comparison()
        remedy = f"; to convert what is there: {INSTALL}" if backend == "auto" else ""
        raise TokenizerError(f"there is no tokenizer.json{remedy}", path=place.directory)
    try:
        data = place.file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read it: {error.strerror}", path=place.file) from error
    is_copy = COPY.summary_of(place.directory).is_file() and not place.named
    if is_copy:
        check_copy(place.directory)
    ours = Tokenizer(
        data,
        template=read_template(place.directory),
        special_tokens=read_special_tokens(place.directory),
        backend="file",
        path=place.file,
    )
    if not is_copy:  # a copy was examined before
        _examine(place, ours)
    if backend != "auto" or place.named or not is_installed():
        return ours, Comparison()
    if known is not None:
        ours.notes.update(known.card.notes)
        return ours, known.comparison
    return ours, _compare(place, ours, trust_remote_code)


def _examine(place: Location, ours: Tokenizer) -> None:
    """Raise if the ids are random or other files of the directory contradict tokenizer.json."""
    refuse_randomness(read_head(ours.data, path=ours.path), path=ours.path)
    contradiction = _contradiction(place.directory, ours)
    if contradiction is not None and not place.named:
        raise TokenizerError(contradiction, path=place.directory)
    if contradiction is not None:
        ours.notes["named_tokens"] = contradiction.partition(";")[0]


def _contradiction(directory: Path, ours: Tokenizer) -> str | None:
    """Describe a token that another file names differently, or return None."""
    named = named_tokens(directory)
    head = read_head(ours.data, path=ours.path)
    known = {token["content"]: int(token["id"]) for token in added_tokens(head)}
    strangers = {token.content for token in named} - set(known)
    if strangers:
        known |= _ordinary_tokens(strangers, ours)
    wrong = [
        token
        for token in named
        if token.content not in known or token.id not in (None, known[token.content])
    ]
    if not wrong:
        return None
    token = wrong[0]
    stated = "" if token.id is None else f" as id {token.id}"
    found = f"has it as id {known[token.content]}" if token.content in known else "lacks it"
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    code = " and trust_remote_code=True (it brings code of its own)"
    code = code if brings_code(directory) else ""
    return (
        f"{token.file} names the token {token.content!r}{stated}, but tokenizer.json {found}{more};"
        f" such a text would be encoded as other tokens than the model knows. Choose"
        f" tokenizer_backend='transformers'{code}, or correct tokenizer.json. If it is right,"
        " give that file instead of its directory"
    )


def _ordinary_tokens(texts: set[str], ours: Tokenizer) -> dict[str, int]:
    """Return those of the texts that the model's own vocabulary encodes as one token.

    A token of the vocabulary may be unreachable: no merges lead to it. The one for unknown
    characters is no text, so it need not be reachable.
    """
    document = parse_backend(ours.data, path=ours.path)
    model = document["model"]
    unknown = model.get("unk_token"), model.get("unk_id")
    return {
        text: number
        for text, number in vocabulary(document)
        if text in texts
        and (
            text == unknown[0]
            or number == unknown[1]
            or ours.reference.encode(text, add_special_tokens=False).ids == [number]
        )
    }


def _load_with_auto(place: Location, trust_remote_code: bool) -> Tokenizer:
    try:
        auto = load_auto(place.directory, trust_remote_code=trust_remote_code)
    except AutoTokenizerError as error:
        raise TokenizerError(
            f"AutoTokenizer cannot load it: {error}", path=place.directory
        ) from error
    adopted = adopt(auto, path=place.directory)
    refuse_randomness(read_head(adopted.data), path=str(place.directory))
    return adopted


def _compare(place: Location, ours: Tokenizer, trust_remote_code: bool) -> Comparison:
    """Compare with AutoTokenizer, which must load the directory unless the file is complete."""
    try:
        auto = load_auto(place.directory, trust_remote_code=trust_remote_code)
    except AutoTokenizerError as error:
        reason = str(error).splitlines()[0][:200]
        if not brings_code(place.directory) and not states_a_class(place.directory):
            ours.notes["auto_tokenizer"] = f"not compared: {reason}"
            return Comparison()
        code = "" if trust_remote_code else _TRUST
        raise TokenizerError(
            f"AutoTokenizer cannot load it ({reason}), so it is unknown whether it would encode"
            f" like the tokenizer.json beside it. Choose {code}tokenizer_backend='file' to encode"
            " with tokenizer.json as it stands",
            path=place.directory,
        ) from error
    ours.notes["auto_tokenizer"] = "encodes alike"
    return compare(auto, ours)


def _adopt_object(source: Any) -> Tokenizer:
    if isinstance(source, Tokenizer):
        return Tokenizer(
            source.data,
            template=source.template,
            special_tokens=source.special_tokens,
            backend=source.backend,
            path=source.path,
            notes=source.notes,
        )
    if hasattr(source, "special_tokens_map") and hasattr(source, "encode"):
        return adopt(source)
    if hasattr(source, "to_str") and hasattr(source, "encode_batch"):
        return Tokenizer(source.to_str().encode("utf-8"), backend="file")
    raise UsageError(
        f"a {type(source).__name__} is no tokenizer: give a directory, a tokenizer.json, a hub id,"
        " a tokenizers.Tokenizer or a transformers tokenizer"
    )


# AutoTokenizer


class AutoTokenizerError(Exception):
    """AutoTokenizer cannot load a directory; the message says why."""


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Import transformers as if torch were not installed, which halves the time.

    Only for a process of our own that ends afterwards.
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
    """Load a directory with AutoTokenizer; raise `AutoTokenizerError` if it fails."""
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
    """Convert a transformers tokenizer."""
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


def compare(auto: Any, ours: Tokenizer) -> Comparison:
    """Find how AutoTokenizer encodes or renders differently from a tokenizer.json."""
    theirs = adopt(auto) if getattr(auto, "backend_tokenizer", None) is not None else None
    text = _text_encoded_differently(auto, theirs, ours)
    encoding = None if text is None else f"it encodes {text[:80]!r} differently"
    template = getattr(auto, "chat_template", None)
    if template is not None and theirs is not None and theirs.template != ours.template:
        return Comparison(encoding, "it has another chat template")
    special = counted_tokens(theirs.special_tokens if theirs else {}, ours.template)
    own = counted_tokens(ours.special_tokens, ours.template)
    for name in sorted({*special, *own}):
        if special.get(name) != own.get(name):
            return Comparison(
                encoding,
                f"its {name} is {special.get(name)!r}, the directory says {own.get(name)!r}",
            )
    return Comparison(encoding)


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
