"""The identity of a tokenizer: equal if no row can be encoded differently.

It holds the digest of the tokenizer.json, the chat template, the special tokens that can reach the
text, and the ids of a probe text, which show a library version that encodes differently. The digest
is that of `canonical_backend`: the same tokenizer.json has many spellings.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from tokenmill._core import fingerprint
from tokenmill.errors import TokenizerError

FORMAT = 1  # raised when the document's own form changes

Template = str | dict[str, str] | None

ALWAYS_COUNTED = ("bos_token", "eos_token", "pad_token")  # they matter without a template, too


def identity_document(
    backend: str, template: Template, special_tokens: dict[str, str], probe: str
) -> dict[str, Any]:
    named = template if isinstance(template, dict) else {"default": template}
    keys = {name: fingerprint.key(source) for name, source in named.items() if source is not None}
    return {
        "format": FORMAT,
        "backend": backend,
        "template": keys,
        "special_tokens": counted_tokens(special_tokens, template),
        "probe": probe,
    }


def counted_tokens(special_tokens: dict[str, str], template: Template) -> dict[str, str]:
    """Return the special tokens that can reach the output."""
    sources = template.values() if isinstance(template, dict) else [template or ""]
    return {
        name: token
        for name, token in special_tokens.items()
        if name in ALWAYS_COUNTED or any(name in source for source in sources)
    }


@dataclass(frozen=True, slots=True)
class IdentityCard:
    """What a planning process needs of a tokenizer, without loading it."""

    identity: dict[str, Any]  # the identity document
    key: str  # its fingerprint
    template: Template
    special_tokens: dict[str, str]  # named ones, as text
    control_tokens: list[str]  # added tokens flagged as special; the flag never changes an id
    pad_id: int | None
    eos_id: int | None
    bos_id: int | None
    backend: str  # "file" or "transformers"
    checksum: str  # of the tokenizer.json
    notes: dict[str, str] = field(default_factory=dict)  # for people

    def with_template(self, template: Template) -> IdentityCard:
        """Return the card of the same tokenizer with another chat template."""
        backend, probe = self.identity["backend"], self.identity["probe"]
        identity = identity_document(backend, template, self.special_tokens, probe)
        return replace(self, identity=identity, key=fingerprint.key(identity), template=template)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> IdentityCard:
        return cls(**document)


# The tokenizer.json

# Members that cannot change an id: we never truncate, pad or add special tokens.
IGNORED = ("version", "truncation", "padding", "post_processor", "decoder")

# Older files omit what newer ones write out.
_MISSING_IS_TRUE = {"ByteLevel": ("add_prefix_space", "use_regex"), "Metaspace": ("split",)}
_STEPS_OF_SEQUENCE = ("normalizers", "pretokenizers")


def parse_backend(data: bytes, *, path: str | None = None) -> dict[str, Any]:
    """Read a tokenizer.json and check that it is one."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"not a tokenizer.json: {error}", path=path) from error
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), dict | list):
        raise TokenizerError("not a tokenizer.json: it has no model with a vocab", path=path)
    return document  # type: ignore[no-any-return]


class _ModelHead(msgspec.Struct):
    vocab: msgspec.Raw
    dropout: float | None = None


class _Head(msgspec.Struct):
    model: _ModelHead
    added_tokens: list[dict[str, Any]] | None = None


def read_head(data: bytes, *, path: str | None = None) -> dict[str, Any]:
    """Read a tokenizer.json without vocabulary and merges, in a few milliseconds."""
    try:
        head = msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return parse_backend(data, path=path)
    if bytes(head.model.vocab)[:1] not in (b"{", b"["):
        return parse_backend(data, path=path)
    return {"model": {"dropout": head.model.dropout}, "added_tokens": head.added_tokens}


def refuse_randomness(document: dict[str, Any], *, path: str | None = None) -> None:
    """Raise `TokenizerError` if BPE dropout would give random ids."""
    if document["model"].get("dropout"):
        raise TokenizerError(
            "the tokenizer's model has BPE dropout, so its ids are random;"
            ' set "dropout" to null in tokenizer.json',
            path=path,
        )


def added_tokens(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens with all flags, by id."""
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
    """Return (token, id) of the model's own vocabulary."""
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
    """Return the common form of all spellings of a tokenizer.json, without what changes no id.

    Also without the flag ``special`` and ``trim_offsets``: transformers changes them on loading.
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
    """Round a Unigram's score: `tokenizers` rewrites it with an error in the last place."""
    return [token, float(f"{score:.13g}")]


def _model_type(model: dict[str, Any]) -> str:
    """Guess the type, which old files do not state."""
    if isinstance(model["vocab"], list):
        return "Unigram"
    if "merges" in model:
        return "BPE"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def backend_digest(document: dict[str, Any]) -> str:
    return fingerprint.key_of_parsed(canonical_backend(document))


def _plain(value: Any) -> Any:
    """Remove members that are null, false or the empty string, and write out defaults."""
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
    stated = step.get("prepend_scheme")
    return older if stated is None else stated
