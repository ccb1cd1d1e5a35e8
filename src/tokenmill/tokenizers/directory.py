"""The directory of a tokenizer: where it is, its chat templates, and the tokens that it names.

A hub id becomes a directory through huggingface_hub, which honours HF_HUB_OFFLINE. A directory is
read the way transformers reads it, so that both see the same: ``chat_template.jinja`` and
``additional_chat_templates/*.jinja`` come before ``chat_template`` in tokenizer_config.json (a
string, or a list of named ones), and at last the processor's ``chat_template.json``. Special tokens
are the ``*_token`` members of tokenizer_config.json and the dictionary form of
``extra_special_tokens``; special_tokens_map.json counts only where the config does not list its
added tokens (the older layout).

This module imports nothing heavy: a process that only recalls an identity gets by with it.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill._core.optional import install_line, optional
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.identity import Template

INSTALL = install_line("transformers")
HUB_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "config.json", "chat_template*", "additional_chat_templates/*",
)  # fmt: skip
EXTRA_TEMPLATES = "additional_chat_templates"
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""The class of transformers that encodes with a tokenizer.json as it stands, by both its names."""

_LONGEST_PATH = 4096


def is_installed() -> bool:
    """Whether transformers could be imported; does not import it."""
    return importlib.util.find_spec("transformers") is not None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tokenizer's files are."""

    directory: Path  # what AutoTokenizer would be given
    file: Path  # the tokenizer.json, which may be missing in a directory
    named: bool  # whether the caller named the file itself, which is a choice of the backend


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


def read_config(directory: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    """One of the directory's JSON objects; empty where the file is missing."""
    path = directory / name
    try:
        document = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read it: {error}", path=path) from error
    if not isinstance(document, dict):
        raise TokenizerError("expected a JSON object", path=path)
    return document


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Named special tokens as text."""
    config = read_config(directory)
    if "added_tokens_decoder" not in config:
        config = {**config, **read_config(directory, "special_tokens_map.json")}
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        config = {**config, **extra}
    tokens = {}
    for name, value in config.items():
        if isinstance(value, dict):  # an AddedToken, written out
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            tokens[name] = value
    return tokens


class NamedToken(NamedTuple):
    """A token that a file beside tokenizer.json names."""

    file: str
    content: str
    id: int | None


def named_tokens(directory: Path) -> list[NamedToken]:
    """What the files beside tokenizer.json say about tokens: text, and the id where they state it.

    These are ``added_tokens_decoder`` of tokenizer_config.json, added_tokens.json and
    special_tokens_map.json, which states no ids.
    """
    named: list[NamedToken] = []

    def add(file: str, value: Any, number: Any = None) -> None:
        content = value.get("content") if isinstance(value, dict) else value
        try:
            stated = None if number is None else int(number)
        except (TypeError, ValueError) as error:
            raise TokenizerError(
                f"the token {content!r} has the id {number!r}", path=directory / file
            ) from error
        if isinstance(content, str) and content:
            named.append(NamedToken(file, content, stated))

    decoder = read_config(directory).get("added_tokens_decoder")
    for number, value in (decoder if isinstance(decoder, dict) else {}).items():
        add("tokenizer_config.json", value, number)
    for content, number in read_config(directory, "added_tokens.json").items():
        add("added_tokens.json", content, number)
    for value in read_config(directory, "special_tokens_map.json").values():
        for one in value if isinstance(value, list) else [value]:
            add("special_tokens_map.json", one)
    return named


def brings_code(directory: Path) -> bool:
    """Whether the directory asks AutoTokenizer for a class of its own (``auto_map``)."""
    classes = read_config(directory).get("auto_map")
    return bool(classes.get("AutoTokenizer") if isinstance(classes, dict) else classes)


def states_a_class(directory: Path) -> bool:
    """Whether anything says that more than the generic class, which is the file, should encode."""
    stated = read_config(directory).get("tokenizer_class")
    if stated is None:  # AutoTokenizer then asks config.json, whose model type implies a class
        return (directory / "config.json").exists()
    return stated not in GENERIC_CLASSES


def read_template(directory: Path) -> Template:
    """The directory's chat template, several by name, or None."""
    templates: dict[str, str] = {}
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = _read_text(single)
    if (directory / EXTRA_TEMPLATES).is_dir():
        for path in sorted((directory / EXTRA_TEMPLATES).glob("*.jinja")):
            templates[path.stem] = _read_text(path)
    if templates:
        return templates["default"] if set(templates) == {"default"} else templates
    template = _stated(read_config(directory), directory / "tokenizer_config.json")
    if template is None:
        template = _stated(
            read_config(directory, "chat_template.json"), directory / "chat_template.json"
        )
    return template


def choose_template(override: Any, own: Template) -> Template:
    """Return the caller's template (source, file, name of one of the own), else the own."""
    if override is None:
        return own
    if isinstance(override, dict):
        return {str(name): str(source) for name, source in override.items()}
    if isinstance(override, os.PathLike):
        return _read_text(Path(override))
    if not isinstance(override, str):
        raise TokenizerError(f"chat_template is a {type(override).__name__}, not text or a path")
    if isinstance(own, dict) and override in own:
        return own[override]
    looks_like_a_path = len(override) < _LONGEST_PATH and not any(c in override for c in "{}\n\0")
    if looks_like_a_path:
        try:
            if Path(override).is_file():
                return _read_text(Path(override))
        except OSError:  # a name too long for the file system is not a path
            pass
        if override.endswith((".jinja", ".jinja2", ".j2", ".json", ".txt")) or "/" in override:
            raise TokenizerError("no such chat template file", path=override)
    return override


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read the chat template: {error}", path=path) from error
    if path.suffix == ".json":  # the processor's form: an object that holds the source
        try:
            document = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise TokenizerError(f"not JSON: {error}", path=path) from error
        template = _stated(document, path) if isinstance(document, dict) else None
        if not isinstance(template, str):
            raise TokenizerError("it holds no chat_template", path=path)
        return template
    return text


def _stated(config: dict[str, Any], path: Path) -> Template:
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        if isinstance(template, dict):
            return {str(name): str(source) for name, source in template.items()}
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            "chat_template is neither text nor a list of named", path=path
        ) from error
