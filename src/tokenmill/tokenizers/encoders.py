"""Find the encoder that a caller names, and everything of it that can change its output.

An encoder is ``path/to/file.py:callable``, ``module:callable`` or a callable. A file is sent to
workers as text, with the files of its directory that it imports relatively.
"""

from __future__ import annotations

import ast
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenmill._core import fingerprint
from tokenmill._core.encoders import EncoderSource, objects
from tokenmill.errors import UsageError
from tokenmill.tokenizers.directory import has_remote_code, locate, read_config

CHECKPOINT_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "tekken.json", "tiktoken.model",
)  # fmt: skip
CALLABLES = ("encode_messages", "build_chat_segments")  # of encoders in known checkpoints
ADAPTERS = {
    "mistral-common": "mistral_common", "harmony": "harmony", "transformers": "transformers",
}  # fmt: skip
FORMS = (
    "'path/to/file.py:callable', 'module:callable', a callable, 'mistral-common', 'harmony' or"
    " 'transformers'"
)


def template_or_encoder(
    chat_template: Any,
    encoder: Any,
    encoder_kwargs: Mapping[str, Any] | None,
    tokenizer: Any,
    *,
    trust_remote_code: bool,
) -> Any:
    """Return the chat template or the encoder of a call, which cannot have both."""
    if encoder is None:
        if encoder_kwargs:
            raise UsageError(("encoder_kwargs",), " needs ", ("encoder",))
        return chat_template
    if chat_template is not None:
        raise UsageError(("encoder",), " and ", ("chat_template",), " cannot be combined")
    kwargs = fingerprint.plain(dict(encoder_kwargs or {}), "encoder_kwargs")
    if isinstance(encoder, EncoderSource):
        return encoder
    if callable(encoder):
        return _of_object(encoder, kwargs)
    if isinstance(encoder, str) and encoder in ADAPTERS:
        return _of_adapter(encoder, kwargs, tokenizer, trust_remote_code)
    place, _, name = encoder.rpartition(":") if isinstance(encoder, str) else ("", "", "")
    if not place or not name.replace(".", "").isidentifier():
        raise UsageError(("encoder",), f" must be {FORMS}, got {encoder!r}")
    if place.endswith(".py"):
        return _of_file(place, name, kwargs, tokenizer, trust_remote_code)
    return _of_module(place, name, kwargs)


def _of_adapter(
    adapter: str, kwargs: dict[str, Any], tokenizer: Any, trust_remote_code: bool
) -> EncoderSource:
    """Return the encoder of a library, which reads the tokenizer's directory."""
    from tokenmill.tokenizers.cache import facts_key, key_of_files

    if not isinstance(tokenizer, str | os.PathLike):
        raise UsageError(("encoder", adapter), " needs the directory or hub id of the tokenizer")
    location = locate(tokenizer)
    path = location.directory
    if adapter == "mistral-common":
        files = [path / "tekken.json", *sorted(path.glob("tokenizer.model*"), reverse=True)]
        path = location.file if location.named else next(filter(Path.is_file, files), files[0])
        if not path.is_file():
            raise UsageError(("encoder", adapter), " needs a tekken.json or tokenizer.model",
                             path=location.directory)  # fmt: skip
        digest = key_of_files({path.name: path}, {}, ("mistral-common",))
    elif adapter == "harmony":
        digest = key_of_files({}, {}, ("openai-harmony",))
    else:
        if has_remote_code(path) and not trust_remote_code:
            raise UsageError(
                ("encoder", adapter), " runs code of a checkpoint; set ",
                ("trust_remote_code", True), path=path,
            )  # fmt: skip
        digest = facts_key(path, backend="transformers", trust_remote_code=True) or ""
    name = f"tokenmill.tokenizers.adapters:{ADAPTERS[adapter]}"
    return EncoderSource(name, kwargs, digest=digest, path=str(path.resolve()))


def _of_file(
    place: str, name: str, kwargs: dict[str, Any], tokenizer: Any, trust_remote_code: bool
) -> EncoderSource:
    path = Path(place)
    checkpoint = None
    if isinstance(tokenizer, str | os.PathLike):
        checkpoint = locate(tokenizer).directory
        path = path if path.is_file() else checkpoint / place
    if not path.is_file():
        raise UsageError(("encoder",), " names a file that does not exist", path=place)
    path = path.resolve()
    near = (folder / file for folder in path.parents[:2] for file in CHECKPOINT_FILES)
    is_remote = checkpoint is not None and path.is_relative_to(checkpoint.resolve())
    if not trust_remote_code and (is_remote or any(file.exists() for file in near)):
        raise UsageError(
            ("encoder",), " is code of a checkpoint; it runs only with ",
            ("trust_remote_code", True), path=path,
        )  # fmt: skip
    return EncoderSource(f"{path.stem}:{name}", kwargs, _sources(path), path=str(path))


def _sources(path: Path) -> dict[str, str]:
    """Return the source of a file and of the files beside it that it imports, by module name."""
    sources: dict[str, str] = {}
    wanted = [path]
    while wanted:
        one = wanted.pop(0)
        try:
            sources[one.stem] = one.read_text(encoding="utf-8")
            tree = ast.parse(sources[one.stem])
        except (OSError, ValueError, SyntaxError) as error:
            raise UsageError(("encoder",), f" cannot be read: {error}", path=one) from error
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                files = [one.parent / f"{name}.py" for name in names]
                wanted += [file for file in files if file.stem not in sources and file.is_file()]
    return sources


def _of_module(place: str, name: str, kwargs: dict[str, Any]) -> EncoderSource:
    try:
        spec = find_spec(place)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise UsageError(("encoder",), f" names the module {place!r}, which cannot be imported")
    path = Path(spec.origin).resolve()
    if "." not in place and path.suffix == ".py" and not path.is_relative_to(sys.prefix):
        # Workers do not import from the working directory.
        return EncoderSource(f"{path.stem}:{name}", kwargs, _sources(path), path=str(path))
    return EncoderSource(f"{place}:{name}", kwargs, digest=_digest(spec.origin))


def _of_object(function: Callable[..., Any], kwargs: dict[str, Any]) -> EncoderSource:
    """Return the source of a callable; one that has no name in a file works in this process."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
    try:
        file = inspect.getsourcefile(function if name else type(function))
    except TypeError:
        file = None
    if name.isidentifier() and getattr(sys.modules.get(module), name, None) is function:
        if module != "__main__":
            return _of_module(module, name, kwargs)
        if file is not None and os.path.isfile(file):
            path = Path(file).resolve()
            return EncoderSource(f"{path.stem}:{name}", kwargs, _sources(path), path=str(path))
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    state = cells if name else vars(function)
    try:
        held = fingerprint.plain({"state": state}, "the state of the encoder")
    except UsageError as error:
        raise UsageError(
            ("encoder",), f" is an object without a fingerprint ({error.message}); pass {FORMS}"
        ) from error
    kind = name or type(function).__qualname__
    digest = fingerprint.key({"source": _digest(file), "name": kind, **held})
    objects[digest] = function
    return EncoderSource(f"{module}:{kind}", kwargs, digest=digest, is_object=True)


def _digest(file: str | None) -> str:
    try:
        with open(file or "", "rb") as opened:
            return fingerprint.checksum(opened.read())
    except OSError as error:
        raise UsageError(
            ("encoder",), f" has no source file, so its rows cannot be cached; pass {FORMS}"
        ) from error


def encoder_of_directory(directory: Path) -> str | None:
    """Return the `encoder` for a directory that has one in place of a chat template."""
    for path in sorted([*directory.glob("encoding/*.py"), *directory.glob("encoding*.py")]):
        try:
            body = ast.parse(path.read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            continue
        names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
        for name in sorted(set(names) & set(CALLABLES)):
            where = path.relative_to(directory).as_posix()
            return f"{where}:{name}"
    if (directory / "tekken.json").is_file() or any(directory.glob("tokenizer.model.v*")):
        return "mistral-common"
    if (directory / "tiktoken.model").is_file() and has_remote_code(directory):
        return "transformers"
    is_gpt_oss = read_config(directory, "config.json").get("model_type") == "gpt_oss"
    return "harmony" if is_gpt_oss else None
