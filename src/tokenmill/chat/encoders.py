"""Call encoders: Python functions that print a conversation as the model reads it.

An encoder is a black box, so it is never traced. It gets copies of the messages, in the form of
OpenAI: arguments of calls as JSON text, reasoning under each of its names.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.util import spec_from_loader
from typing import Any, NoReturn

from tokenmill._core.encoders import EncoderSource, cached_ids, objects
from tokenmill._core.id_text import IdText, id_text, ids_of
from tokenmill.chat.calls import text_arguments
from tokenmill.chat.program import NotTraced
from tokenmill.chat.template import PYTHON_LIMITS, REASONING_KEYS
from tokenmill.errors import RowError, UsageError

PROMPTED = ("user", "tool", "function", "developer", "ipython")  # an assistant turn follows
_PACKAGE = "_tokenmill_encoder_"
_loaded: dict[str, Callable[..., Any]] = {}  # by key


class _Sources(MetaPathFinder, InspectLoader):
    """Imports the files of an encoder as a package, which has no directory."""

    def __init__(self, package: str, files: Mapping[str, str], path: str) -> None:
        self.package, self.files, self.path = package, files, path

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        package, _, stem = name.rpartition(".")
        if name == self.package:
            return spec_from_loader(name, self, is_package=True)
        if package != self.package or stem not in self.files:
            return None
        return spec_from_loader(name, self, origin=self.path)

    def get_source(self, fullname: str) -> str:
        return self.files.get(fullname.rpartition(".")[2], "")


def load_encoder(source: EncoderSource) -> Callable[..., Any]:
    """Import an encoder; the caller has checked that its code may run.

    Raises:
        UsageError: It cannot be imported.
    """
    if source.key in _loaded:
        return _loaded[source.key]
    module, _, name = source.name.partition(":")
    if source.is_object:
        if source.digest not in objects:
            raise UsageError(
                ("encoder",), " is an object of another process; set ", ("num_workers", 0),
                ", or pass 'path/to/file.py:callable'",
            )  # fmt: skip
        return objects[source.digest]
    package = _PACKAGE + source.key
    is_adapter = bool(source.path) and not source.files
    shown = name.replace("_", "-") if is_adapter else source.name
    if source.files:
        if package not in sys.modules:
            sys.meta_path.append(_Sources(package, source.files, source.path))
        module = f"{package}.{module}"
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        if is_adapter:
            function = function(source.path)
    except UsageError:
        raise
    except Exception as error:
        detail = str(error).replace(f"{package}.", "")
        raise UsageError(
            ("encoder", shown), f" cannot be loaded: {type(error).__name__}: {detail}",
            path=source.path or None,
        ) from error  # fmt: skip
    if not callable(function):
        raise UsageError(("encoder", shown), f" must be callable, got {type(function).__name__}")
    loaded: Callable[..., Any] = function
    _loaded[source.key] = loaded
    return loaded


class EncoderTemplate:
    """An encoder with the methods of `ReferenceTemplate`.

    A function without a parameter ``add_generation_prompt`` prints the prompt after every message
    that an assistant answers, and one without ``tools`` reads them from the system message, as
    those of DeepSeek do.

    With ``as_text``, ids become text; they are rejected if this text has other ids.
    """

    has_generation = False

    def __init__(
        self,
        source: EncoderSource,
        variables: Mapping[str, Any],
        tokenizer: Any = None,
        *,
        as_text: bool = False,
    ) -> None:
        self.as_text = as_text
        self.function = load_encoder(source)
        self.source = source.name
        self.kwargs = {**source.kwargs, **variables}
        self.tokenizer = tokenizer
        self._segment_ids = cached_ids(
            lambda text, special: self.tokenizer.segment_ids(text, special=special)
        )
        self.strings = set(source.files.values())
        try:
            self.parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            self.parameters = inspect.signature(lambda **_: None).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        self.has_prompt = takes_any or "add_generation_prompt" in self.parameters
        self.has_tools = takes_any or "tools" in self.parameters

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        text_only: bool = False,
    ) -> str:
        """Return the text of one conversation, or its ids as an `IdText` unless ``text_only``.

        Raises:
            RowError: The encoder raises an error.
        """
        given = [_with_reasoning(_copy(message)) for message in messages]
        for call in (call for message in given for call in message.get("tool_calls") or ()):
            if isinstance(call.get("function"), dict) and "arguments" in call["function"]:
                call["function"]["arguments"] = text_arguments(call["function"]["arguments"])
        kwargs = _copy(self.kwargs)
        if self.has_prompt:
            kwargs["add_generation_prompt"] = add_generation_prompt
        elif add_generation_prompt and (not given or given[-1].get("role") not in PROMPTED):
            raise RowError(
                "the encoder has no generation prompt after such a message", reason="mask_unproven"
            )
        if tools:
            tools = [{"type": "function", "function": tool}
                     if isinstance(tool, dict) and "name" in tool and "function" not in tool
                     else tool for tool in _copy(tools)]  # fmt: skip
        if self.has_tools:
            kwargs["tools"] = tools
        elif tools:
            if not given or given[0].get("role") != "system":
                given.insert(0, {"role": "system", "content": ""})
            given[0].setdefault("tools", tools)
        try:
            function = self.function.text if text_only else self.function  # type: ignore[attr-defined]
            text = self._text(function(given, **kwargs))
            return self._decoded(text) if self.as_text and isinstance(text, IdText) else text
        except (RowError, UsageError):
            raise
        except PYTHON_LIMITS as error:
            message, reason = f"exceeds a limit of Python: {type(error).__name__}", "limit"
        except Exception as error:  # an encoder can raise whatever Python can
            shown = str(error)[:200]
            message, reason = f"failed ({type(error).__name__}: {shown})", "template_error"
        raise RowError(f"the encoder {message}", reason=reason)

    def _text(self, result: Any) -> str:
        if isinstance(result, Mapping) and "input_ids" in result:
            result = result["input_ids"]
        if isinstance(result, str):
            return result
        if hasattr(result, "tolist"):
            result = result.tolist()
        kind = type(result).__name__
        if isinstance(result, list | tuple):
            kind += f" of {type(result[0]).__name__}" if result else ""
            if all(type(one) is int for one in result):
                return id_text(result)
            pairs = [pair for one in result if (pair := _pair(one)) is not None]
            if len(pairs) == len(result):
                return id_text([number for pair in pairs for number in self._segment_ids(*pair)])
        raise UsageError(
            ("encoder",), " must return a text, a list of ids, or a list of pairs (text,"
            f" is_special), got {kind}",
        )  # fmt: skip

    @cached_property
    def header(self) -> str | None:
        """What a generation prompt adds to a question, as text or ids; None if it changes it."""
        question = [{"role": "user", "content": "?"}]
        try:
            bare = self.render(question)
            prompted = self.render(question, add_generation_prompt=True)
        except RowError:
            return None
        return prompted[len(bare) :] if prompted.startswith(bare) else None

    def is_text(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> bool:
        """Return whether the ids of a conversation are those of a text that the function prints."""
        if self.tokenizer is None or self.as_text or not hasattr(self.function, "text"):
            return False
        text = self.render(messages, tools, text_only=True)
        ids = self.tokenizer.segment_ids(text, special=True)
        return id_text(ids) == self.render(messages, tools)

    def decode(self, text: str) -> str:
        """Return the text of ids in an `IdText`."""
        table, numbers = self.tokenizer.table, ids_of(text)
        # Rows with other ids are rejected when they are encoded. The tokenizer decodes slowly.
        joined = table.joined(numbers[numbers < len(table)])[1]
        return bytes(joined).decode("utf-8", "replace")

    def _decoded(self, text: IdText) -> str:
        decoded: str = self.tokenizer.decode(ids_of(text).tolist())
        if id_text(self.tokenizer.segment_ids(decoded, special=True)) != text:
            raise RowError(
                "the encoder returns ids that the tokenizer does not give for their text",
                reason="mask_unproven",
            )
        return decoded

    def remedy(self, error: RowError) -> str:
        """Return the error's message, and what a caller can change."""
        ways = []
        if error.reason == "mask_unproven":
            ways.append("expand turns, or train_on last_assistant_message, trains turns with the"
                        " history that they were sampled with")  # fmt: skip
        mode, fits = "chat", "is for rows without reasoning"
        if error.reason == "template_drops_content":
            mode, fits = "thinking", "prints reasoning"
        if "thinking_mode" in self.parameters and self.kwargs.get("thinking_mode") != mode:
            ways.append(f"encoder_kwargs {{'thinking_mode': '{mode}'}} {fits}")
        return "; ".join([error.message.replace("the template", "the encoder"), *ways])


class UntracedEncoder:
    """Replaces the traced paths of a template: no row is traced."""

    differed = False

    def follow(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> NoReturn:
        raise NotTraced("an encoder is not traced")

    compared = follow


def _pair(one: Any) -> tuple[str, bool] | None:
    """Return the text of a segment and whether it is special; it may be an instance of a class."""
    text, special = one if isinstance(one, tuple | list) and len(one) == 2 else (
        getattr(one, "text", None), getattr(one, "allow_special", None)
    )  # fmt: skip
    return (text, special) if isinstance(text, str) and isinstance(special, bool) else None


def _copy(value: Any) -> Any:
    """Copy lists and mappings; encoders change their arguments."""
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    return [*map(_copy, value)] if isinstance(value, list) else value


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    for key in REASONING_KEYS:
        if message.get(key) is not None:
            return {**dict.fromkeys(REASONING_KEYS, message[key]), **message}
    return message
