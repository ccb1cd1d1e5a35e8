"""The identity of a tokenizer. Two tokenizers with equal identities encode every row alike.

It consists of the digest of the tokenizer.json, the chat template, the special tokens that can
occur in the output, and the ids of a probe text, which reveal a library version that encodes
differently. The digest is that of `canonical_backend`, because equivalent files differ in form.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, TypedDict

import msgspec

from tokenmill._core import fingerprint
from tokenmill._core.encoders import EncoderSource
from tokenmill.errors import TokenizerError, TokenmillError

FORMAT = 1  # raised when the form of the document changes

Template = str | dict[str, str] | None  # as files have it; a caller may give an `EncoderSource`

ALWAYS_INCLUDED = ("bos_token", "eos_token", "pad_token")  # used without a template, too


def identity_document(
    backend: str,
    template: Template | EncoderSource,
    special_tokens: dict[str, str],
    probe: str,
) -> dict[str, Any]:
    if isinstance(template, EncoderSource):
        keys = {"encoder": template.key}
    else:
        named = template if isinstance(template, dict) else {"default": template}
        keys = {name: fingerprint.key(text) for name, text in named.items() if text is not None}
    return {
        "format": FORMAT,
        "backend": backend,
        "template": keys,
        "special_tokens": relevant_tokens(special_tokens, template),
        "probe": probe,
    }


def relevant_tokens(
    special_tokens: dict[str, str], template: Template | EncoderSource
) -> dict[str, str]:
    if isinstance(template, EncoderSource):
        template = None
    sources = template.values() if isinstance(template, dict) else [template or ""]
    return {
        name: token
        for name, token in special_tokens.items()
        if name in ALWAYS_INCLUDED or any(name in source for source in sources)
    }


@dataclass(frozen=True, slots=True)
class TokenizerFingerprint:
    """The identity and special tokens of a tokenizer, enough to plan a build without loading it."""

    identity: dict[str, Any]  # the identity document
    key: str  # its fingerprint
    template: Any  # `Template` or `EncoderSource`
    special_tokens: dict[str, str]  # named ones, as text
    control_tokens: list[str]  # added tokens flagged as special; the flag never changes an id
    pad_token_id: int | None
    eos_token_id: int | None
    bos_token_id: int | None
    backend: str  # "file" or "transformers"
    checksum: str  # of the tokenizer.json
    notes: dict[str, str] = field(default_factory=dict)  # for people

    def with_template(self, template: Template | EncoderSource) -> TokenizerFingerprint:
        backend, probe = self.identity["backend"], self.identity["probe"]
        identity = identity_document(backend, template, self.special_tokens, probe)
        return replace(self, identity=identity, key=fingerprint.key(identity), template=template)

    def as_dict(self) -> dict[str, Any]:
        is_encoder = isinstance(self.template, EncoderSource)
        return asdict(replace(self, template=self.template.dump()) if is_encoder else self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> TokenizerFingerprint:
        return cls(**{**document, "template": EncoderSource.load(document["template"])})


# The tokenizer.json

# These members cannot change an id: we never truncate, pad or add special tokens.
IGNORED = ("version", "truncation", "padding", "post_processor", "decoder")

# Older files omit these defaults.
_MISSING_IS_TRUE = {"ByteLevel": ("add_prefix_space", "use_regex"), "Metaspace": ("split",)}
_STEPS_OF_SEQUENCE = ("normalizers", "pretokenizers", "decoders")


MAX_TOKENS = 1 << 24  # ids; the libraries allocate space up to the largest one
MAX_GROWTH = 1000
_Id = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)]
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def reraise_interrupts(error: BaseException) -> None:
    """Raise errors that must not be handled here; a Rust panic is a BaseException, too."""
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | MemoryError):
        raise error


@contextlib.contextmanager
def library_errors(message: str, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Translate the exceptions of tokenizer libraries, also Rust panics, to `TokenizerError`."""
    try:
        yield
    except TokenmillError:
        raise
    except BaseException as error:
        reraise_interrupts(error)
        text = (str(error).strip() or repr(error)).splitlines()[0]
        raise TokenizerError(f"{message}: {type(error).__name__}: {text}", path=path) from error


class _Token(TypedDict):
    id: _Id
    content: str


class _AddedToken(_Token, total=False):
    special: bool
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool


class _CheckedModel(msgspec.Struct):
    vocab: dict[str, _Id] | list[tuple[str, float]]


class _Checked(msgspec.Struct):
    model: _CheckedModel
    added_tokens: list[_AddedToken] | None = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def check_ids(data: bytes, *, path: str | os.PathLike[str] | None = None) -> None:
    """Raise `TokenizerError` if a library would allocate without bound for this file or a text."""
    try:
        checked = msgspec.json.decode(data, type=_Checked)
        for section in ("normalizer", "pre_tokenizer", "decoder"):
            growth = 1
            for step in components({section: getattr(checked, section)}, section):
                growth *= _growth(step)
                if growth > MAX_GROWTH:
                    raise TokenizerError(
                        f"the {section} of the tokenizer can make a text {growth} times as long;"
                        f" {MAX_GROWTH} times are allowed",
                        path=path,
                    )
    except _UNREADABLE as error:
        raise TokenizerError(f"not a tokenizer.json: {error}", path=path) from error


def _growth(step: dict[str, Any]) -> int:
    """Return how many times as long a step can make a text, at most."""
    inserted = step.get("content") or step.get("prepend") or step.get("replacement")
    if isinstance(charsmap := step.get("precompiled_charsmap"), str):  # a trie, then texts
        with contextlib.suppress(ValueError):
            data = base64.b64decode(charsmap)
            texts = data[4 + int.from_bytes(data[:4], "little") :]
            inserted = max(texts.split(b"\0"), key=len).decode("utf-8", "replace")
    size = len(inserted) if isinstance(inserted, str) else 0
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and pattern.get("String"):
        return max(1, -(-size // len(str(pattern["String"]))))
    return 1 + size  # at every character: the pattern may match no character


def parse_backend(data: bytes, *, path: str | None = None) -> dict[str, Any]:
    """Parse a tokenizer.json and check its form."""
    try:
        document = msgspec.json.decode(data)
    except _UNREADABLE as error:
        raise TokenizerError(f"not a tokenizer.json: {error}", path=path) from error
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError('not a tokenizer.json: it has no "model" with a "vocab"', path=path)
    check_ids(data, path=path)
    return document  # type: ignore[no-any-return]


class _ModelHead(msgspec.Struct):
    vocab: msgspec.Raw
    dropout: float | None = None


class _Head(msgspec.Struct):
    model: _ModelHead
    added_tokens: list[_AddedToken] | None = None


def read_head(data: bytes, *, path: str | None = None) -> dict[str, Any]:
    """Read a tokenizer.json without vocabulary and merges, in a few milliseconds."""
    try:
        head = msgspec.json.decode(data, type=_Head)
    except _UNREADABLE:
        return parse_backend(data, path=path)
    if bytes(head.model.vocab)[:1] not in (b"{", b"["):
        return parse_backend(data, path=path)
    return {"model": {"dropout": head.model.dropout}, "added_tokens": head.added_tokens}


def require_deterministic(document: dict[str, Any], *, path: str | None = None) -> None:
    """Raise `TokenizerError` if BPE dropout would give random ids."""
    if document["model"].get("dropout"):
        raise TokenizerError(
            "the tokenizer uses BPE dropout, so its ids are random;"
            ' set "dropout" to null in tokenizer.json',
            path=path,
        )


def added_tokens(document: dict[str, Any]) -> list[dict[str, Any]]:
    tokens = []
    for token in document.get("added_tokens") or ():
        special = bool(token.get("special", False))
        full = {"id": token["id"], "content": token["content"], "special": special}
        for flag in ("single_word", "lstrip", "rstrip"):
            full[flag] = bool(token.get(flag, False))
        full["normalized"] = bool(token.get("normalized", not special))
        tokens.append(full)
    return sorted(tokens, key=lambda token: int(token["id"]))


def vocabulary(document: dict[str, Any]) -> list[tuple[str, int]]:
    vocab = document["model"]["vocab"]
    if isinstance(vocab, dict):
        return list(vocab.items())
    return [(entry[0], index) for index, entry in enumerate(vocab)]


def components(document: dict[str, Any], section: str) -> list[dict[str, Any]]:
    """Return the steps of ``normalizer`` or ``pre_tokenizer``, sequences flattened."""
    steps: list[dict[str, Any]] = []

    def walk(step: Any) -> None:
        if not isinstance(step, dict):
            return
        for name in _STEPS_OF_SEQUENCE:
            if isinstance(step.get(name), list):
                for inner in step[name]:
                    walk(inner)
                return
        steps.append(step)

    walk(document.get(section))
    return steps


def canonical_backend(document: dict[str, Any]) -> dict[str, Any]:
    """Return a form that is equal for equivalent tokenizer.json files.

    It has no members that change no id, no ``special`` flags and no ``trim_offsets``; transformers
    changes the latter two when it loads a tokenizer.
    """
    model = dict(document["model"])
    model["type"] = model.get("type") or _model_type(model)
    merges = model.pop("merges", None)
    vocab = model.pop("vocab")
    plain: dict[str, Any] = {
        "model": _plain(model),
        "vocab": vocab if isinstance(vocab, dict) else [_scored(*entry) for entry in vocab],
        "added_tokens": [
            {name: value for name, value in token.items() if name != "special"}
            for token in added_tokens(document)
        ],
    }
    if merges is not None:
        # Only the pair form can express a token with a space.
        plain["merges"] = [
            merge if isinstance(merge, list) else merge.split(" ", 1) for merge in merges
        ]
    for section in ("normalizer", "pre_tokenizer"):
        plain[section] = [_plain(step) for step in components(document, section)]
    known = {*IGNORED, "added_tokens", "model", "normalizer", "pre_tokenizer"}
    for name, value in document.items():
        if name not in known:
            plain[f"other:{name}"] = _plain(value)
    return plain


def _scored(token: str, score: float) -> list[Any]:
    """Round the score of a Unigram token: `tokenizers` writes it with a rounding error."""
    return [token, float(f"{score:.13g}")]


def _model_type(model: dict[str, Any]) -> str:
    """Infer the type, which old files do not contain."""
    if isinstance(model["vocab"], list):
        return "Unigram"
    if "merges" in model:
        return "BPE"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def backend_digest(document: dict[str, Any]) -> str:
    return fingerprint.key_of_parsed(canonical_backend(document))


def _plain(value: Any) -> Any:
    """Remove members that are null, false or the empty string, and add defaults."""
    if isinstance(value, list):
        return [_plain(member) for member in value]
    if not isinstance(value, dict):
        return value
    value = dict(value)
    for name in _MISSING_IS_TRUE.get(value.get("type", ""), ()):
        value.setdefault(name, True)
    if value.get("type") == "Metaspace":
        value["prepend_scheme"] = prepend_scheme(value)
        for name in ("str_rep", "add_prefix_space"):
            value.pop(name, None)
    return {
        name: _plain(member)
        for name, member in value.items()
        if member is not None and member is not False and member != "" and name != "trim_offsets"
    }


def prepend_scheme(step: dict[str, Any]) -> Any:
    """Return where a Metaspace step adds a space; older files have ``add_prefix_space``."""
    older = "never" if step.get("add_prefix_space") is False else "always"
    scheme = step.get("prepend_scheme")
    return older if scheme is None else scheme
