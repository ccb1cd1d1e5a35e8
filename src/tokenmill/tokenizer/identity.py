"""Identity: the document that names a tokenizer by what it does, and the card that carries it.

`Tokenizer` makes both; the keys of slices and stores are made of the document. Two tokenizers have
one identity when no row of any data can come out differently: the digest of the backend that
encodes, the chat template, the special tokens that can reach the text, and the ids of a probe text
(which see what no file shows: another version of the library that encodes the same document
differently). Names, paths, versions, engines and leftovers of use are not in it.

An `IdentityCard` is all a planning process needs to know of a tokenizer without loading one; it
is plain data and is remembered on disk by `tokenmill.tokenizer.memo`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from tokenmill import fingerprint

FORMAT = 1  # raised when the document's own form changes

Template = str | dict[str, str] | None

ALWAYS_COUNTED = ("bos_token", "eos_token", "pad_token")
"""Special tokens that matter without a template: appended ends, padding."""


def identity_document(
    *,
    backend: str,
    template: Template,
    special_tokens: dict[str, str],
    probe_ids: list[int],
) -> dict[str, Any]:
    """The identity of a tokenizer.

    Of all named special tokens only those count that can reach the output.
    """
    named = template if isinstance(template, dict) else {"default": template}
    sources = {name: source for name, source in named.items() if source is not None}
    counted = {
        name: token
        for name, token in special_tokens.items()
        if name in ALWAYS_COUNTED or any(name in source for source in sources.values())
    }
    return {
        "format": FORMAT,
        "backend": backend,
        "template": {name: fingerprint.key(source) for name, source in sources.items()},
        "special_tokens": counted,
        "probe": fingerprint.key(probe_ids),
    }


@dataclass(frozen=True, slots=True)
class IdentityCard:
    """What can be known of a tokenizer without loading it.

    Attributes:
        identity: The identity document.
        key: Its 40 hex digits.
        template: Chat template source, several by name, or None.
        special_tokens: Named special tokens as text.
        control_tokens: The added tokens that are flagged as special, as text, by id. They are no
            part of the identity: the flag changes what is skipped in decoding, never an id.
        pad_id: Id of the pad token, if there is one.
        eos_id: Id of the end-of-sequence token, if there is one.
        bos_id: Id of the beginning-of-sequence token, if there is one.
        backend: Who encodes: ``file`` or ``transformers``.
        checksum: Of the backend's tokenizer.json, as `Tokenizer.files` gives it.
        notes: What was found while loading, for people.
    """

    identity: dict[str, Any]
    key: str
    template: Template
    special_tokens: dict[str, str]
    control_tokens: list[str]
    pad_id: int | None
    eos_id: int | None
    bos_id: int | None
    backend: str
    checksum: str
    notes: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> IdentityCard:
        return cls(**document)
