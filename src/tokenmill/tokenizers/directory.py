"""Find a tokenizer's directory and read templates and special tokens as transformers does.

This module imports nothing heavy, so that reading a cached identity is fast.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tokenmill._core.encoders import EncoderSource
from tokenmill._core.optional import install_line, optional
from tokenmill._core.paths import checked_path, read_bounded
from tokenmill.errors import CorruptionError, TokenizerError
from tokenmill.tokenizers.identity import Template

INSTALL = install_line("transformers")
HUB_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.model", "*.tiktoken", "config.json", "chat_template*", "additional_chat_templates/*",
    "tekken.json", "encoding/*.py", "encoding*.py",
)  # fmt: skip
EXTRA_TEMPLATES = "additional_chat_templates"
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # use tokenizer.json unchanged
_MAX_PATH = 4096


def is_installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


@dataclass(frozen=True, slots=True)
class Location:
    directory: Path  # for AutoTokenizer
    file: Path  # the tokenizer.json, which may be missing
    named: bool  # whether the caller passed the file itself, which implies the backend "file"


def read_file(path: Path) -> bytes:
    """Return the bytes of a file, or raise `TokenizerError` if it is too large."""
    try:
        return read_bounded(path)
    except CorruptionError as error:
        raise TokenizerError(error.message, path=path) from error


def locate(source: str | os.PathLike[str]) -> Location:
    path = Path(checked_path("tokenizer", source))
    if path.is_dir():
        return Location(path, path / "tokenizer.json", named=False)
    if path.is_file():
        return Location(path.parent, path, named=True)
    text = os.fspath(source)
    if not isinstance(source, str) or text.startswith((".", "/", "~")) or text.endswith(".json"):
        raise TokenizerError("no such tokenizer directory or file", path=text)
    if ":/" in text:
        raise TokenizerError(
            "a tokenizer cannot be a URL; download it and pass its directory, or pass a hub id",
            path=text,
        )
    directory = _from_hub(text)
    return Location(directory, directory / "tokenizer.json", named=False)


def _from_hub(name: str) -> Path:
    """Return the local directory of a hub id, ``owner/name`` or ``owner/name@revision``."""
    purpose = f"no such directory; loading {name!r} from the hub"
    with optional("huggingface_hub", purpose, raises=TokenizerError, path=name):
        import huggingface_hub
    repository, _, revision = name.partition("@")
    try:
        path = huggingface_hub.snapshot_download(
            repository, revision=revision or None, allow_patterns=list(HUB_FILES)
        )
    except Exception as error:
        raise TokenizerError(
            f"neither a local directory nor on the hub ({type(error).__name__}: {error})",
            path=name,
        ) from error
    return Path(path)


def read_config(directory: Path, name: str = "tokenizer_config.json") -> dict[str, Any]:
    """Read a JSON object of the directory; return {} if the file is missing."""
    path = directory / name
    try:
        document = msgspec.json.decode(read_file(path))
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TokenizerError(f"cannot read the file: {error}", path=path) from error
    if not isinstance(document, dict):
        raise TokenizerError("the file must contain a JSON object", path=path)
    return document


def read_special_tokens(directory: Path) -> dict[str, str]:
    config = read_config(directory)
    if "added_tokens_decoder" not in config:  # the older layout
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
    file: str
    content: str
    id: int | None


def named_tokens(directory: Path) -> list[NamedToken]:
    """Return the tokens that files other than tokenizer.json define, with their ids if given."""
    named: list[NamedToken] = []

    def add(file: str, value: Any, number: Any = None) -> None:
        content = value.get("content") if isinstance(value, dict) else value
        try:
            token_id = None if number is None else int(number)
        except (TypeError, ValueError) as error:
            raise TokenizerError(
                f"the id of the token {content!r} must be an integer, got {number!r}",
                path=directory / file,
            ) from error
        if isinstance(content, str) and content:
            named.append(NamedToken(file, content, token_id))

    decoder = read_config(directory).get("added_tokens_decoder")
    for number, value in (decoder if isinstance(decoder, dict) else {}).items():
        add("tokenizer_config.json", value, number)
    for content, number in read_config(directory, "added_tokens.json").items():
        add("added_tokens.json", content, number)
    for value in read_config(directory, "special_tokens_map.json").values():
        for one in value if isinstance(value, list) else [value]:
            add("special_tokens_map.json", one)
    return named


def has_remote_code(directory: Path) -> bool:
    """Return whether the directory contains code of a tokenizer class (``auto_map``)."""
    classes = read_config(directory).get("auto_map")
    return bool(classes.get("AutoTokenizer") if isinstance(classes, dict) else classes)


def has_own_class(directory: Path) -> bool:
    name = read_config(directory).get("tokenizer_class")
    if name is None:  # AutoTokenizer then chooses a class by the model type in config.json
        return (directory / "config.json").exists()
    return name not in GENERIC_CLASSES


def read_template(directory: Path) -> Template:
    """Return the directory's chat template, several by name, or None."""
    templates: dict[str, str] = {}
    single = directory / "chat_template.jinja"
    if single.is_file():
        templates["default"] = _read_text(single)
    if (directory / EXTRA_TEMPLATES).is_dir():
        for path in sorted((directory / EXTRA_TEMPLATES).glob("*.jinja")):
            templates[path.stem] = _read_text(path)
    if templates:
        return templates["default"] if set(templates) == {"default"} else templates
    for name in ("tokenizer_config.json", "chat_template.json"):  # the latter is the processor's
        template = _template_in(read_config(directory, name), directory / name)
        if template is not None:
            return template
    return None


def choose_template(override: Any, own: Template) -> Any:
    """Return the caller's template (source, file, or name in ``own``); ``own`` if it is None."""
    if override is None:
        return own
    if isinstance(override, EncoderSource):
        return override
    if isinstance(override, dict):
        return {str(name): str(source) for name, source in override.items()}
    if isinstance(override, os.PathLike):
        return _read_text(Path(override))
    if not isinstance(override, str):
        raise TokenizerError(f"chat_template must be text or a path, got {type(override).__name__}")
    if isinstance(own, dict) and override in own:
        return own[override]
    looks_like_a_path = len(override) < _MAX_PATH and not any(c in override for c in "{}\n\0")
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
        text = read_file(path).decode("utf-8")
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read the chat template: {error}", path=path) from error
    if path.suffix == ".json":  # the form of processors: an object with the source
        try:
            document = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise TokenizerError(f"not JSON: {error}", path=path) from error
        template = _template_in(document, path) if isinstance(document, dict) else None
        if not isinstance(template, str):
            raise TokenizerError('the file has no "chat_template"', path=path)
        return template
    return text


def _template_in(config: dict[str, Any], path: Path) -> Template:
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        if isinstance(template, dict):
            return {str(name): str(source) for name, source in template.items()}
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (TypeError, KeyError) as error:
        raise TokenizerError(
            '"chat_template" must be text or a list of {"name", "template"} objects', path=path
        ) from error
