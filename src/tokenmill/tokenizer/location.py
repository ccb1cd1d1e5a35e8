"""Where a tokenizer's files lie.

A `Location` is a directory, or one tokenizer.json with what lies beside it. A hub id becomes a
directory through huggingface_hub, which honours HF_HUB_OFFLINE. This module imports nothing heavy:
a process that only wants to recall a tokenizer's identity gets by with it.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from tokenmill.errors import TokenizerError
from tokenmill.optional import install_line, optional

INSTALL = install_line("transformers")
HUB_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "config.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip


def is_installed() -> bool:
    """Whether transformers could be imported; does not import it."""
    return importlib.util.find_spec("transformers") is not None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tokenizer's files lie.

    Attributes:
        directory: What AutoTokenizer would be given.
        file: The tokenizer.json; it may be missing in a directory.
        named: Whether the caller named the file itself, which is a choice of the backend.
    """

    directory: Path
    file: Path
    named: bool


def locate(source: str | os.PathLike[str]) -> Location:
    """Where a path or hub id leads."""
    path = Path(source)
    if path.is_dir():
        return Location(path, path / "tokenizer.json", named=False)
    if path.is_file():
        return Location(path.parent, path, named=True)
    text = os.fspath(source)
    if not isinstance(source, str) or text.startswith((".", "/", "~")) or text.endswith(".json"):
        raise TokenizerError("no such tokenizer directory or file", path=text)
    directory = _from_hub(text)
    return Location(directory, directory / "tokenizer.json", named=False)


def _from_hub(name: str) -> Path:
    """The files of a hub id, ``owner/name`` or ``owner/name@revision``, as a local directory."""
    purpose = f"no such directory; loading {name!r} from the hub"
    with optional("huggingface_hub", purpose, raises=TokenizerError, path=name):
        import huggingface_hub
    repository, _, revision = name.partition("@")
    try:
        found = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(HUB_FILES)
        )
    except Exception as error:
        raise TokenizerError(
            f"neither a directory here nor on the hub ({type(error).__name__}: {error})",
            path=name,
        ) from error
    return Path(found)
