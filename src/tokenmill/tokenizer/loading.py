"""Loading: from whatever names a tokenizer to a `Tokenizer`.

A path or hub id leads to a `Place` with files; an object, be it a `tokenizers.Tokenizer` or a
tokenizer of transformers, is taken as it is.

Who encodes (``backend``): ``file`` is the tokenizer.json, ``transformers`` is what AutoTokenizer
makes of the directory, ``auto`` is the file, after AutoTokenizer, where transformers is
installed, was seen to encode alike. Where it does not, guessing would train on other ids than
the model serves, so loading stops and names the choice. Naming a tokenizer.json file is a choice.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tokenmill import fingerprint
from tokenmill.errors import CorruptionError, TokenizerError, UsageError
from tokenmill.tokenizer import transformers_door as door
from tokenmill.tokenizer.backend import refuse_randomness, skim_backend
from tokenmill.tokenizer.place import INSTALL, Place, find_place
from tokenmill.tokenizer.templates import (
    choose_template,
    read_config,
    read_special_tokens,
    read_template,
)
from tokenmill.tokenizer.tokenizer import CHECKSUMS, Tokenizer

BACKENDS = ("auto", "file", "transformers")


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
        TokenizerError: It cannot be loaded, or file and AutoTokenizer encode differently.
    """
    if backend not in BACKENDS:
        raise UsageError(f"tokenizer_backend={backend!r}: choose one of {', '.join(BACKENDS)}")
    if isinstance(source, str | os.PathLike):
        place = find_place(source)
        tokenizer = _load_place(place, backend, chat_template is not None, trust_remote_code)
    else:
        tokenizer = _adopt_object(source)
    tokenizer.template = choose_template(chat_template, tokenizer.template)
    refuse_randomness(skim_backend(tokenizer.data, path=tokenizer.path), path=tokenizer.path)
    return tokenizer


def _load_place(
    place: Place, backend: str, template_given: bool, trust_remote_code: bool
) -> Tokenizer:
    if backend == "transformers":
        return _load_auto(place, trust_remote_code)
    if not place.file.is_file():
        if backend == "auto" and door.is_installed():
            return _load_auto(place, trust_remote_code)
        remedy = f"; to convert what is there: {INSTALL}" if backend == "auto" else ""
        raise TokenizerError(f"there is no tokenizer.json{remedy}", path=place.directory)
    try:
        data = place.file.read_bytes()
    except OSError as error:
        raise TokenizerError(f"cannot read it: {error.strerror}", path=place.file) from error
    if (place.directory / CHECKSUMS).is_file() and not place.named:
        _check_copy(place.directory)
    ours = Tokenizer(
        data,
        template=read_template(place.directory),
        special_tokens=read_special_tokens(place.directory),
        backend="file",
        path=place.file,
    )
    if backend == "auto" and not place.named and door.is_installed():
        _refuse_ambiguity(place, ours, template_given, trust_remote_code)
    return ours


def _check_copy(directory: Path) -> None:
    """A copy that tokenmill made must be as it was made; a flipped bit would be other ids."""
    for name, expected in read_config(directory, CHECKSUMS).items():
        path = directory / os.path.basename(name)
        actual = fingerprint.checksum(path.read_bytes()) if path.is_file() else "nothing"
        if actual != expected:
            raise CorruptionError(
                f"checksum {actual}, expected {expected}; remove this directory and prepare again",
                path=path,
            )


def _load_auto(place: Place, trust_remote_code: bool) -> Tokenizer:
    try:
        auto = door.load_auto(place.directory, trust_remote_code=trust_remote_code)
    except door.AutoTokenizerError as error:
        raise TokenizerError(
            f"AutoTokenizer cannot load it: {error}", path=place.directory
        ) from error
    return door.adopt(auto, path=place.directory)


def _refuse_ambiguity(
    place: Place, ours: Tokenizer, template_given: bool, trust_remote_code: bool
) -> None:
    """Compare with AutoTokenizer; what it cannot load, no trainer loads through it either."""
    try:
        auto = door.load_auto(place.directory, trust_remote_code=trust_remote_code)
    except door.AutoTokenizerError as error:
        ours.notes["auto_tokenizer"] = f"not compared: {str(error).splitlines()[0][:200]}"
        return
    difference = door.difference(auto, ours, template_matters=not template_given)
    if difference is not None:
        raise TokenizerError(
            f"AutoTokenizer and the tokenizer.json beside it disagree: {difference}. Say which one"
            " your trainer uses: tokenizer_backend='transformers' or tokenizer_backend='file'",
            path=place.directory,
        )
    ours.notes["auto_tokenizer"] = "encodes alike"


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
        return door.adopt(source)
    if hasattr(source, "to_str") and hasattr(source, "encode_batch"):
        return Tokenizer(source.to_str().encode("utf-8"), backend="file")
    raise UsageError(
        f"a {type(source).__name__} is no tokenizer: give a directory, a tokenizer.json, a hub id,"
        " a tokenizers.Tokenizer or a transformers tokenizer"
    )
