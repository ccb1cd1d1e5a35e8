"""Load a tokenizer from a path, a hub id or an object, and compare it with AutoTokenizer.

Backend ``auto`` uses the tokenizer.json if AutoTokenizer encodes alike or transformers is not
installed. Otherwise it raises an error that names the choices. It also raises an error if
AutoTokenizer cannot load a directory with code or with a class other than the generic one. If other
files of the directory name tokens that tokenizer.json lacks, these would be encoded as ordinary
text; that is an error unless the caller passes the tokenizer.json itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from tokenmill._core.collector import without_collector
from tokenmill._core.encoders import arguments_of
from tokenmill._core.optional import transformers_muted
from tokenmill.errors import TokenizerError, UsageError, check_one_of
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
    choose_template,
    has_own_class,
    has_remote_code,
    is_installed,
    locate,
    named_tokens,
    read_file,
    read_special_tokens,
    read_template,
)
from tokenmill.tokenizers.encoders import encoder_of_directory, template_or_encoder
from tokenmill.tokenizers.identity import (
    added_tokens,
    check_ids,
    library_errors,
    parse_backend,
    read_head,
    relevant_tokens,
    require_deterministic,
    reraise_interrupts,
    vocabulary,
)
from tokenmill.tokenizers.parity_texts import parity_texts, vocabulary_texts
from tokenmill.tokenizers.tokenizer import COPY, Tokenizer, check_copy


def tiktoken_in(tokenizer: Any) -> Any:
    """Return the `tiktoken.Encoding` that a tokenizer is or has, or None."""
    for one in (tokenizer, getattr(tokenizer, "model", None)):
        if hasattr(one, "_mergeable_ranks") and hasattr(one, "_pat_str"):
            return one
    return None


BACKENDS = ("auto", "file", "transformers")

_TRUST = (("trust_remote_code", True), " to run its code, or ")


@library_errors("the tokenizer cannot be loaded")
@without_collector()
def load(
    source: Any,
    *,
    backend: str = "auto",
    chat_template: Any = None,
    encoder: Any = None,
    encoder_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer. The arguments are those of `prepare`; the encoder is not run.

    ``source`` may also be a `Tokenizer`, and ``chat_template`` the name of one of the tokenizer's
    templates, or several sources by name.

    Raises:
        TokenizerError: The tokenizer cannot be loaded, AutoTokenizer encodes differently, or files
            of the directory contradict each other.
    """
    check_one_of("tokenizer_backend", backend, BACKENDS)
    chat_template = template_or_encoder(
        chat_template, encoder, encoder_kwargs, source, trust_remote_code=trust_remote_code
    )
    if isinstance(source, str | os.PathLike):
        location = locate(source)
        tokenizer, comparison = _load_location(location, backend, trust_remote_code)
        comparison.refuse(location.directory, chat_template)
    else:
        tokenizer = _adopt_object(source)
        require_deterministic(read_head(tokenizer.data), path=tokenizer.path)
    tokenizer.template = choose_template(chat_template, tokenizer.template)
    return tokenizer


@library_errors("the tokenizer cannot be loaded")
@without_collector()
def identify(
    source: Any,
    *,
    cache_dir: str | os.PathLike[str],
    backend: str = "auto",
    chat_template: Any = None,
    trust_remote_code: bool = False,
) -> Tokenizer:
    """Load a tokenizer, and publish its facts and a copy of it in the cache."""
    root, location = Path(cache_dir), locate(source)
    name = facts_key(source, backend=backend, trust_remote_code=trust_remote_code)
    cached = read_fact(root, name, Facts)
    tokenizer, comparison = _load_location(location, backend, trust_remote_code, cached)
    facts = Facts(tokenizer.card, comparison)
    write_fact(root, name, facts)
    card = facts.card_for(chat_template, location.directory)
    tokenizer = _adopt_object(tokenizer)
    tokenizer.template = card.template
    tokenizer.__dict__["card"] = card
    keep_copy(tokenizer, root)
    return tokenizer


def _load_location(
    location: Location, backend: str, trust_remote_code: bool, cached: Facts | None = None
) -> tuple[Tokenizer, Comparison]:
    """Load a tokenizer's files and compare them with AutoTokenizer, unless the result is cached."""
    tekken = location.file if location.named else location.directory / "tekken.json"
    is_tekken = tekken.name == "tekken.json" and tekken.is_file()
    if is_tekken and (location.named or not location.file.is_file()):
        from tokenmill.tokenizers.ranks import of_tekken

        tokenizer = of_tekken(tekken)
        tokenizer.notes["no_template"] = str(encoder_of_directory(location.directory))
        return tokenizer, Comparison()
    if backend == "transformers":
        return _load_with_auto(location, trust_remote_code)
    if not location.file.is_file():
        if backend == "auto" and is_installed():
            return _load_with_auto(location, trust_remote_code)
        remedy = f"; transformers may convert other files: {INSTALL}" if backend == "auto" else ""
        raise TokenizerError(
            f"no tokenizer.json in this directory{remedy}", path=location.directory
        )
    try:
        data = read_file(location.file)
    except OSError as error:
        raise TokenizerError(
            f"cannot read the file: {error.strerror}", path=location.file
        ) from error
    is_copy = COPY.summary_of(location.directory).is_file() and not location.named
    if is_copy:
        check_copy(location.directory)
    tokenizer = Tokenizer(
        data,
        template=read_template(location.directory),
        special_tokens=read_special_tokens(location.directory),
        backend="file",
        path=location.file,
    )
    if not is_copy:  # a copy was examined before it was written
        _examine(location, tokenizer)
        if tokenizer.template is None and (hint := encoder_of_directory(location.directory)):
            tokenizer.notes["no_template"] = hint
    if backend != "auto" or location.named or not is_installed():
        return tokenizer, Comparison()
    if cached is not None:
        tokenizer.notes.update(cached.card.notes)
        return tokenizer, cached.comparison
    return tokenizer, _compare(location, tokenizer, trust_remote_code)


def _examine(location: Location, tokenizer: Tokenizer) -> None:
    """Raise if the ids are random or other files of the directory contradict tokenizer.json."""
    require_deterministic(read_head(tokenizer.data, path=tokenizer.path), path=tokenizer.path)
    contradiction = _contradiction(location.directory, tokenizer)
    if contradiction is not None and not location.named:
        code = " (the directory contains code)" if has_remote_code(location.directory) else ""
        raise TokenizerError(
            f"{contradiction}; the text would be encoded as tokens that the model was not trained"
            " on. Choose ",
            ("tokenizer_backend", "transformers"),
            *((" and ", ("trust_remote_code", True), code) if code else ()),
            ", or correct tokenizer.json. If tokenizer.json is right, pass the file instead of its"
            " directory",
            path=location.directory,
        )
    if contradiction is not None:
        tokenizer.notes["named_tokens"] = contradiction


def _contradiction(directory: Path, tokenizer: Tokenizer) -> str | None:
    """Return a message about a token that another file defines differently, or None."""
    named = named_tokens(directory)
    head = read_head(tokenizer.data, path=tokenizer.path)
    known = {token["content"]: int(token["id"]) for token in added_tokens(head)}
    unknown = {token.content for token in named} - set(known)
    if unknown:
        known |= _ordinary_tokens(unknown, tokenizer)
    wrong = [
        token
        for token in named
        if token.content not in known or token.id not in (None, known[token.content])
    ]
    if not wrong:
        return None
    token = wrong[0]
    expected = "" if token.id is None else f" with id {token.id}"
    actual = f"has it with id {known[token.content]}" if token.content in known else "does not"
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return (
        f"{token.file} defines the token {token.content!r}{expected}, but tokenizer.json"
        f" {actual}{more}"
    )


def _ordinary_tokens(texts: set[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Return the texts that the model's vocabulary encodes as one token, with their ids.

    A token of the vocabulary may be unreachable because no merges produce it. The token for unknown
    characters need not be reachable.
    """
    document = parse_backend(tokenizer.data, path=tokenizer.path)
    model = document["model"]
    unknown = model.get("unk_token"), model.get("unk_id")
    return {
        text: number
        for text, number in vocabulary(document)
        if text in texts
        and (
            text == unknown[0]
            or number == unknown[1]
            or tokenizer.reference.encode(text, add_special_tokens=False).ids == [number]
        )
    }


def _load_with_auto(location: Location, trust_remote_code: bool) -> tuple[Tokenizer, Comparison]:
    hint = encoder_of_directory(location.directory)
    try:
        auto = load_auto(location.directory, trust_remote_code=trust_remote_code)
    except AutoTokenizerError as error:
        remedy: tuple[Any, ...] = () if hint is None else ("; set ", *arguments_of(hint))
        if hint is None and (location.directory / "tokenizer.model").is_file():
            remedy = ("; tokenizer.model is a file of sentencepiece: pip install sentencepiece",)
        raise TokenizerError(
            f"AutoTokenizer cannot load it: {error}", *remedy, path=location.directory
        ) from error
    adopted = adopt(auto, path=location.directory)
    require_deterministic(read_head(adopted.data), path=str(location.directory))
    if adopted.template is None and hint is not None:
        adopted.notes["no_template"] = hint
    python = type(auto).__name__ if adopted.backend == "ids" else None
    return adopted, Comparison(overrides=_overrides(auto), python=python)


def _overrides(tokenizer: Any) -> str | None:
    """Return the name of a class of remote code that renders conversations by its own method."""
    kind = type(tokenizer)
    for base in kind.__mro__:
        if "apply_chat_template" in vars(base):
            is_own = not base.__module__.startswith("transformers.")
            return kind.__name__ if is_own else None
    return None


def _compare(location: Location, tokenizer: Tokenizer, trust_remote_code: bool) -> Comparison:
    """Compare with AutoTokenizer, which must load the directory unless the file is complete."""
    try:
        auto = load_auto(location.directory, trust_remote_code=trust_remote_code)
    except AutoTokenizerError as error:
        reason = str(error).splitlines()[0][:200]
        if not has_remote_code(location.directory) and not has_own_class(location.directory):
            tokenizer.notes["auto_tokenizer"] = f"not compared: {reason}"
            return Comparison()
        code = () if trust_remote_code else _TRUST
        raise TokenizerError(
            f"AutoTokenizer cannot load this directory ({reason}), so it cannot be compared with"
            " tokenizer.json. Choose ",
            *code,
            ("tokenizer_backend", "file"),
            " to use tokenizer.json without a comparison",
            path=location.directory,
        ) from error
    tokenizer.notes["auto_tokenizer"] = "encodes alike"
    return structs.replace(compare(auto, tokenizer), overrides=_overrides(auto))


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
    if tiktoken_in(source) is source:
        return _ranked(source, lambda text: source.encode(text, allowed_special="all"))
    if hasattr(source, "to_str") and hasattr(source, "encode_batch"):
        return Tokenizer(source.to_str().encode("utf-8"), backend="file")
    raise UsageError(
        ("tokenizer",),
        " must be a directory, a tokenizer.json, a hub id, a tokenizers.Tokenizer, a"
        f" transformers tokenizer or a tiktoken.Encoding, got {type(source).__name__}",
    )


# AutoTokenizer


class AutoTokenizerError(Exception):
    """AutoTokenizer cannot load a directory."""


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Import transformers as if torch were not installed, which halves the time.

    Only for a child process that ends afterwards.
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
    if not is_installed():
        backend = ("tokenizer_backend", "transformers")
        raise TokenizerError(backend, f" needs transformers: {INSTALL}")
    if (file := directory / "tokenizer.json").is_file():
        check_ids(read_file(file), path=file)
    with transformers_muted():
        from transformers import AutoTokenizer

        if trust_remote_code:
            _restore_names()
        try:
            return AutoTokenizer.from_pretrained(
                str(directory), trust_remote_code=trust_remote_code, local_files_only=True
            )
        except BaseException as error:
            reraise_interrupts(error)
            raise AutoTokenizerError(f"{type(error).__name__}: {error}") from error


def _restore_names() -> None:
    """Restore a function that transformers 5 moved and the code of checkpoints imports."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode
    from transformers.models.gpt2 import tokenization_gpt2

    if not hasattr(tokenization_gpt2, "bytes_to_unicode"):
        tokenization_gpt2.bytes_to_unicode = bytes_to_unicode


def _ranked(tokenizer: Any, encode: Callable[[str], Any], path: Path | None = None) -> Tokenizer:
    """Convert a tokenizer of tiktoken, and compare it with the original."""
    from tokenmill.tokenizers.ranks import of_tiktoken, require_equal_ids

    converted = Tokenizer(of_tiktoken(tiktoken_in(tokenizer)), backend="transformers")
    require_equal_ids(converted, encode, path)
    return converted


def adopt(tokenizer: Any, *, path: Path | None = None) -> Tokenizer:
    backend, origin = getattr(tokenizer, "backend_tokenizer", None), "transformers"
    if backend is not None and hasattr(backend, "to_str"):
        data = backend.to_str().encode("utf-8")
    elif tiktoken_in(tokenizer) is not None:
        data = _ranked(tokenizer, lambda text: tokenizer.encode(text), path).data
    else:
        from tokenmill.tokenizers.ranks import of_vocabulary

        data, origin = of_vocabulary(tokenizer), "ids"
    if getattr(tokenizer, "split_special_tokens", False):
        raise TokenizerError(
            "split_special_tokens=True encodes control tokens as text; set it to False", path=path
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
        data,
        template=template,
        special_tokens=special,
        backend=origin,
    )


def compare(auto: Any, tokenizer: Tokenizer) -> Comparison:
    adopted = adopt(auto) if getattr(auto, "backend_tokenizer", None) is not None else None
    text = _text_encoded_differently(auto, adopted, tokenizer)
    encoding = None if text is None else f"it encodes {text[:80]!r} differently"
    template = getattr(auto, "chat_template", None)
    if template is not None and adopted is not None and adopted.template != tokenizer.template:
        return Comparison(encoding, "it has another chat template")
    special = relevant_tokens(adopted.special_tokens if adopted else {}, tokenizer.template)
    own = relevant_tokens(tokenizer.special_tokens, tokenizer.template)
    for name in sorted({*special, *own}):
        if special.get(name) != own.get(name):
            return Comparison(
                encoding,
                f"its {name} is {special.get(name)!r}, that of the directory {own.get(name)!r}",
            )
    return Comparison(encoding)


def _text_encoded_differently(
    auto: Any, adopted: Tokenizer | None, tokenizer: Tokenizer
) -> str | None:
    if adopted is not None and adopted.backend_digest == tokenizer.backend_digest:
        return None
    added = {*tokenizer.added_contents, *tokenizer.special_tokens.values()}
    if adopted is not None:
        added |= {*adopted.added_contents, *adopted.special_tokens.values()}
    texts = parity_texts(added)
    texts += vocabulary_texts(tokenizer.pieces(range(len(tokenizer.table))))
    reference = tokenizer.reference.encode_batch(texts, add_special_tokens=False)
    with transformers_muted():
        for text, encoding in zip(texts, reference, strict=True):
            if auto.encode(text, add_special_tokens=False) != encoding.ids:
                return text
    return None
