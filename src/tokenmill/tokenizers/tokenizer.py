"""A loaded tokenizer: the bytes of one tokenizer.json, a template and special tokens.

Everything else is computed from these bytes on first use and shared by all tokenizers of the
process with the same bytes (`cache.once`). A pickle has only the path and checksum of the file;
loading it fails if the file has changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenmill._core import fingerprint
from tokenmill._core.artifact import ArtifactKind
from tokenmill._core.collector import without_collector
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.cache import once
from tokenmill.tokenizers.identity import (
    TokenizerFingerprint,
    added_tokens,
    backend_digest,
    check_ids,
    identity_document,
    library_errors,
    parse_backend,
    read_head,
    require_deterministic,
    vocabulary,
)
from tokenmill.tokenizers.parity_texts import probe_text
from tokenmill.tokenizers.pieces import PieceTable

COPY = ArtifactKind(
    "copy of a tokenizer", "tokenmill_checksums.json",
    remedy="remove this directory and prepare again",
)  # fmt: skip


def check_copy(directory: Path) -> None:
    """Raise `CorruptionError` if a copy has changed since it was written."""
    # A copy may be outside of any cache, so links in its path are allowed.
    artifact = COPY.open(directory, root=Path(directory.anchor))
    for name, expected in artifact.convert(dict[str, str]).items():
        artifact.require(os.path.basename(name), checksum=expected)


class _Reference:
    """A `tokenizers.Tokenizer` whose methods raise only `TokenizerError`."""

    def __init__(self, backend: Any, path: str | None, *, encodes: bool = True) -> None:
        self._backend = backend
        self._path = path
        self._encodes = encodes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("encode") and not self._encodes:
            raise TokenizerError(
                "this tokenizer is a class of Python, which encodes conversations only, with ",
                ("encoder", "transformers"), path=self._path,
            )  # fmt: skip
        return partial(self._call, getattr(self._backend, name))

    def _call(self, method: Any, *arguments: Any, **options: Any) -> Any:
        with library_errors(f"tokenizers failed to {method.__name__}", self._path):
            return method(*arguments, **options)


class Tokenizer:
    """One tokenizer.

    Args:
        data: The tokenizer.json.
        template: Chat template source, several by name, an `EncoderSource`, or None.
        special_tokens: Named special tokens (``eos_token`` …) as text.
        backend: Origin of ``data``: ``file``, ``transformers``, or ``ids`` for a vocabulary that
            only decodes.
        path: The file that ``data`` was read from, if any.
        notes: Remarks from loading, to be shown.
    """

    def __init__(
        self,
        data: bytes,
        *,
        template: Any = None,
        special_tokens: dict[str, str] | None = None,
        backend: str = "file",
        path: str | os.PathLike[str] | None = None,
        notes: dict[str, str] | None = None,
    ) -> None:
        self.data = data
        self.template = template
        self.special_tokens = dict(special_tokens or {})
        self.backend = backend
        self.path = None if path is None else os.path.abspath(path)
        self.notes = dict(notes or {})

    def __repr__(self) -> str:
        return f"Tokenizer({self.path or 'in memory'}, backend={self.backend!r})"

    @cached_property
    def checksum(self) -> str:
        return fingerprint.checksum(self.data)

    @cached_property
    def reference(self) -> Any:
        """The `tokenizers.Tokenizer` that defines the ids; it neither truncates nor pads."""
        return once(self.checksum, "reference", self._load_reference)

    def _load_reference(self, *, added: bool = True) -> Any:
        import tokenizers

        check_ids(self.data, path=self.path)
        data = self.data
        if not added:
            document = {**parse_backend(data, path=self.path), "added_tokens": []}
            data = msgspec.json.encode(document)
        with library_errors("tokenizers cannot load this file", self.path):
            reference = tokenizers.Tokenizer.from_buffer(data)
            reference.no_truncation()
            reference.no_padding()
            # A post-processor could only trim offsets here.
            reference.post_processor = tokenizers.processors.Sequence([])
        return _Reference(reference, self.path, encodes=self.backend != "ids")

    @cached_property
    def table(self) -> PieceTable:
        return once(self.checksum, "table", self.make_table)

    @without_collector()
    def make_table(self) -> PieceTable:
        """Build the table without the cache."""
        with library_errors("not a tokenizer.json", self.path):
            return PieceTable(parse_backend(self.data, path=self.path))

    @cached_property
    def _added(self) -> list[dict[str, Any]]:
        return added_tokens(read_head(self.data, path=self.path))

    @cached_property
    def added_contents(self) -> tuple[str, ...]:
        return tuple(token["content"] for token in self._added)

    @cached_property
    def left_stripping_ids(self) -> frozenset[int]:
        return frozenset(int(token["id"]) for token in self._added if token["lstrip"])

    @cached_property
    def _special_token_ids(self) -> dict[str, int]:
        named = set(self.special_tokens.values())
        ids = {token["content"]: int(token["id"]) for token in self._added}
        if not named <= set(ids):
            document = parse_backend(self.data, path=self.path)
            ids = {token: n for token, n in vocabulary(document) if token in named} | ids
        return {name: ids[token] for name, token in self.special_tokens.items() if token in ids}

    @property
    def pad_token_id(self) -> int | None:
        return self._special_token_ids.get("pad_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_token_ids.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_token_ids.get("bos_token")

    @cached_property
    def backend_digest(self) -> str:
        """Digest of the tokenizer.json, equal for all equivalent files."""
        return once(self.checksum, "digest", self._make_digest)

    @without_collector()
    def _make_digest(self) -> str:
        with library_errors("not a tokenizer.json", self.path):
            return backend_digest(parse_backend(self.data, path=self.path))

    @cached_property
    def card(self) -> TokenizerFingerprint:
        require_deterministic(read_head(self.data, path=self.path), path=self.path)
        probe = probe_text(self.added_contents)
        # The digest of the encoder covers a tokenizer that encodes no text.
        ids = [] if self.backend == "ids" else self.segment_ids(probe, special=True)
        identity = identity_document(
            self.backend_digest, self.template, self.special_tokens, fingerprint.key(ids)
        )
        return TokenizerFingerprint(
            identity=identity,
            key=fingerprint.key(identity),
            template=self.template,
            special_tokens=self.special_tokens,
            control_tokens=[token["content"] for token in self._added if token["special"]],
            pad_token_id=self.pad_token_id,
            eos_token_id=self.eos_token_id,
            bos_token_id=self.bos_token_id,
            backend=self.backend,
            checksum=self.checksum,
            notes=self.notes,
        )

    @property
    def key(self) -> str:
        return self.card.key

    def files(self) -> dict[str, bytes]:
        config: dict[str, Any] = dict(self.special_tokens)
        if isinstance(self.template, dict):
            config["chat_template"] = [
                {"name": name, "template": source} for name, source in self.template.items()
            ]
        elif isinstance(self.template, str):
            # Reading a .jinja file would turn \r\n into \n.
            config["chat_template"] = self.template
        files = {
            "tokenizer.json": self.data,
            "tokenizer_config.json": msgspec.json.format(fingerprint.canonical(config), indent=1),
        }
        sums = {name: fingerprint.checksum(data) for name, data in files.items()}
        return {**files, COPY.summary: COPY.encode(sums)}

    def segment_ids(self, text: str, *, special: bool) -> list[int]:
        """Encode a segment of text; unless it is `special`, it has no control tokens."""
        backend = self.reference if special else self._plain
        return list(backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _plain(self) -> Any:
        """The reference without its added tokens, for text that must have none."""
        return once(self.checksum, "plain", lambda: self._load_reference(added=False))

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        numbers = [int(number) for number in ids]
        return str(self.reference.decode(numbers, skip_special_tokens=skip_special_tokens))

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """Return the bytes of each id; joined, they are the text if encoding is lossless."""
        return self.table.pieces(ids)

    def is_special(self, ids: Iterable[int]) -> np.ndarray:
        numbers = np.asarray(list(ids), dtype=np.int64)
        inside = (numbers >= 0) & (numbers < len(self.table))
        special: np.ndarray = inside & self.table.is_special[np.where(inside, numbers, 0)]
        return special

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "template": self.template,
            "special_tokens": self.special_tokens,
            "backend": self.backend,
            "path": self.path,
            "notes": self.notes,
        }
        if self.path is None:
            state["data"] = self.data
        else:
            state["checksum"] = self.checksum
        if "card" in self.__dict__:  # computing it needs an engine
            state["card"] = self.card
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        checksum = state.pop("checksum", None)
        self.__dict__.update(state)
        if checksum is not None:
            self.data = _read_unchanged(str(self.path), checksum)


def _read_unchanged(path: str, checksum: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise TokenizerError(f"cannot read the file: {error.strerror}", path=path) from error
    if fingerprint.checksum(data) != checksum:
        raise TokenizerError(
            "the file changed after this tokenizer was loaded; load it again", path=path
        )
    return data
