"""Loading: from whatever names a tokenizer to a `Tokenizer`.

A path or hub id leads to a `Location` with files; an object, be it a `tokenizers.Tokenizer` or a
tokenizer of transformers, is taken as it is.

Who encodes (``backend``): ``file`` is the tokenizer.json, ``transformers`` is what AutoTokenizer
makes of the directory, ``auto`` is the file, after AutoTokenizer, where transformers is
installed, was seen to encode alike. Where it does not, guessing would train on other ids than
the model serves, so loading stops and names the choice. Naming a tokenizer.json file is a choice.

Where AutoTokenizer cannot load the directory (it asks for code of its own, a class or a package is
missing), nobody can say what it would encode, and ``auto`` stops as well, unless the file alone is
*complete*: nothing in the directory asks for code or names a class but the generic one, which is
the file as it stands, and the file knows every token that is named beside it.

That last part holds for ``file``, too: a token that tokenizer_config.json, added_tokens.json or
special_tokens_map.json name, and that tokenizer.json does not know or knows under another id, would
be encoded as ordinary text. Only who names the tokenizer.json itself takes it as it stands.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.collector import without_collector
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.tokenizer import auto_tokenizer, memo
from tokenmill.tokenizer.backend import (
    added_tokens,
    read_head,
    refuse_randomness,
    skim_backend,
    vocabulary,
)
from tokenmill.tokenizer.location import INSTALL, Location, locate
from tokenmill.tokenizer.templates import (
    NamedToken,
    brings_code,
    choose_template,
    named_tokens,
    read_special_tokens,
    read_template,
    states_a_class,
)
from tokenmill.tokenizer.tokenizer import COPY, Tokenizer

BACKENDS = ("auto", "file", "transformers")

_TRUST = "trust_remote_code=True to run the code it brings, or "


@without_collector()
def load(
    source: Any,
    *,
    backend: str = "auto",
    chat_template: Any = None,
    trust_remote_code: bool = False,
    cache_dir: Path | None = None,
) -> Tokenizer:
    """Load a tokenizer.

    Args:
        source: Directory, tokenizer.json, hub id, `tokenizers.Tokenizer`, transformers tokenizer
            or a `Tokenizer` of ours.
        backend: ``auto``, ``file`` or ``transformers``.
        chat_template: Instead of the tokenizer's own: Jinja source, the path of a file, the name
            of one of its own templates, or several sources by name.
        trust_remote_code: Whether AutoTokenizer may run code that the directory brings along.
        cache_dir: Where AutoTokenizer's answers are remembered; None for nowhere.

    Raises:
        TokenizerError: It cannot be loaded, it is unclear who encodes, or files of the directory
            contradict each other.
    """
    if backend not in BACKENDS:
        raise UsageError(f"tokenizer_backend={backend!r}: choose one of {', '.join(BACKENDS)}")
    if isinstance(source, str | os.PathLike):
        call = _Call(source, chat_template is not None, trust_remote_code, cache_dir)
        tokenizer = _load_place(locate(source), backend, call)
    else:
        tokenizer = _adopt_object(source)
        refuse_randomness(read_head(tokenizer.data), path=tokenizer.path)
    tokenizer.template = choose_template(chat_template, tokenizer.template)
    return tokenizer


class _Call(NamedTuple):
    """What loading by name was asked to do; see `load`."""

    source: str | os.PathLike[str]
    template_given: bool
    trust_remote_code: bool
    cache_dir: Path | None


def _load_place(place: Location, backend: str, call: _Call) -> Tokenizer:
    if backend == "transformers":
        return _load_auto(place, call.trust_remote_code)
    if not place.file.is_file():
        if backend == "auto" and auto_tokenizer.is_installed():
            return _load_auto(place, call.trust_remote_code)
        remedy = f"; to convert what is there: {INSTALL}" if backend == "auto" else ""
        raise TokenizerError(f"there is no tokenizer.json{remedy}", path=place.directory)
    try:
        data = place.file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read it: {error.strerror}", path=place.file) from error
    is_copy = COPY.summary_of(place.directory).is_file() and not place.named
    if is_copy:
        _check_copy(place.directory)
    ours = Tokenizer(
        data,
        template=read_template(place.directory),
        special_tokens=read_special_tokens(place.directory),
        backend="file",
        path=place.file,
    )
    if not is_copy:  # what was copied had been looked at, and is unchanged
        _examine(place, ours)
    if backend == "auto" and not place.named and auto_tokenizer.is_installed():
        _refuse_ambiguity(place, ours, call)
    return ours


def _examine(place: Location, ours: Tokenizer) -> None:
    """Refuse a file whose ids are random or that other files of its directory contradict."""
    refuse_randomness(read_head(ours.data, path=ours.path), path=ours.path)
    contradiction = _contradiction(place.directory, ours)
    if contradiction is not None and not place.named:
        raise TokenizerError(contradiction, path=place.directory)
    if contradiction is not None:
        ours.notes["named_tokens"] = contradiction.partition(";")[0]


def _contradiction(directory: Path, ours: Tokenizer) -> str | None:
    """What is wrong with the tokens that files beside tokenizer.json name; None: nothing."""
    named = named_tokens(directory)
    if not named:
        return None
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
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    code = " and trust_remote_code=True (it brings code of its own)"
    code = code if brings_code(directory) else ""
    return (
        f"{_described(wrong[0], known)}{more}; such a text would be encoded as other tokens than"
        f" the model knows. Choose tokenizer_backend='transformers'{code}, or mend tokenizer.json."
        " If it is right as it stands, name that file instead of its directory"
    )


def _described(token: NamedToken, known: dict[str, int]) -> str:
    stated = "" if token.id is None else f" as id {token.id}"
    found = f"has it as id {known[token.content]}" if token.content in known else "lacks it"
    return f"{token.file} names the token {token.content!r}{stated}, but tokenizer.json {found}"


def _ordinary_tokens(texts: set[str], ours: Tokenizer) -> dict[str, int]:
    """Those of the texts that the model's own vocabulary encodes as one token.

    A token that merely stands in the vocabulary may be out of reach: no merges lead to it. The one
    for unknown characters is no text, so it need not be reached.
    """
    document = skim_backend(ours.data, path=ours.path)
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


def _check_copy(directory: Path) -> None:
    """A copy that tokenmill made must be as it was made; a flipped bit would be other ids."""
    # Of any cache or of none: links within it are its owner's choice.
    sealed = COPY.admit(directory, root=Path(directory.anchor))
    for name, expected in sealed.convert(dict[str, str]).items():
        sealed.require(os.path.basename(name), checksum=expected)


def _load_auto(place: Location, trust_remote_code: bool) -> Tokenizer:
    try:
        auto = auto_tokenizer.load_auto(place.directory, trust_remote_code=trust_remote_code)
    except auto_tokenizer.AutoTokenizerError as error:
        raise TokenizerError(
            f"AutoTokenizer cannot load it: {error}", path=place.directory
        ) from error
    adopted = auto_tokenizer.adopt(auto, path=place.directory)
    refuse_randomness(read_head(adopted.data), path=str(place.directory))
    return adopted


def _refuse_ambiguity(place: Location, ours: Tokenizer, call: _Call) -> None:
    """Compare with AutoTokenizer, unless it was asked before."""
    name = None
    if call.cache_dir is not None:
        name = memo.answer_key(
            call.source,
            template_given=call.template_given,
            trust_remote_code=call.trust_remote_code,
        )
    answer = memo.recall_answer(call.cache_dir, name) if call.cache_dir and name else None
    if answer is None:
        answer = _ask_auto(place, ours, call)
        if answer is None:
            return
        if call.cache_dir and name:
            memo.remember_answer(call.cache_dir, name, answer)
    answer.refuse_difference(place.directory)
    ours.notes["auto_tokenizer"] = "encodes alike"


def _ask_auto(place: Location, ours: Tokenizer, call: _Call) -> memo.AutoAnswer | None:
    """AutoTokenizer's answer; None where it has none and there is nothing it could change."""
    try:
        auto = auto_tokenizer.load_auto(place.directory, trust_remote_code=call.trust_remote_code)
    except auto_tokenizer.AutoTokenizerError as error:
        reason = str(error).splitlines()[0][:200]
        if not brings_code(place.directory) and not states_a_class(place.directory):
            ours.notes["auto_tokenizer"] = f"not compared: {reason}"
            return None
        code = "" if call.trust_remote_code else _TRUST
        raise TokenizerError(
            f"AutoTokenizer cannot load it ({reason}), so it is unknown whether it would encode"
            f" like the tokenizer.json beside it. Choose {code}tokenizer_backend='file' to encode"
            " with tokenizer.json as it stands",
            path=place.directory,
        ) from error
    return memo.AutoAnswer(
        auto_tokenizer.difference(auto, ours, template_matters=not call.template_given)
    )


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
        return auto_tokenizer.adopt(source)
    if hasattr(source, "to_str") and hasattr(source, "encode_batch"):
        return Tokenizer(source.to_str().encode("utf-8"), backend="file")
    raise UsageError(
        f"a {type(source).__name__} is no tokenizer: give a directory, a tokenizer.json, a hub id,"
        " a tokenizers.Tokenizer or a transformers tokenizer"
    )
