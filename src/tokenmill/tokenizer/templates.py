"""What lies beside a tokenizer.json: chat templates and the names of special tokens.

Read the way transformers reads a directory, so that both see the same: ``chat_template.jinja``
and ``additional_chat_templates/*.jinja`` come before ``chat_template`` in tokenizer_config.json
(a string, or a list of named ones), and at last the processor's ``chat_template.json``. Special
tokens are the ``*_token`` members of tokenizer_config.json and the dictionary form of
``extra_special_tokens``; special_tokens_map.json is asked only where the config does not list
its added tokens (the older layout).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.errors import TokenizerError
from tokenmill.tokenizer.identity import Template

EXTRA_TEMPLATES = "additional_chat_templates"
_LONGEST_PATH = 4096


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
    """The template to use: the caller's source, file or name, else the tokenizer's own.

    Args:
        override: None, Jinja source, the path of a file that holds it, the name of one of the
            tokenizer's own templates, or several sources by name.
        own: What the tokenizer brings along.
    """
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
        template = _stated(_as_object(text, path), path)
        if not isinstance(template, str):
            raise TokenizerError("it holds no chat_template", path=path)
        return template
    return text


def _as_object(text: str, path: Path) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise TokenizerError(f"not JSON: {error}", path=path) from error
    return document if isinstance(document, dict) else {}


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
