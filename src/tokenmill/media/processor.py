"""Expand image tokens with the user's transformers processor.

A processor replaces each *image token* of a rendered text by an *expansion*: placeholders and the
tokens around them. It depends on the size of the image and of the other images of the row.
`Processor.expand` computes the text from the sizes alone. `Processor.reference` runs the whole
processor with real pixels; audits compare the two.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tokenmill._core import fingerprint
from tokenmill._core.optional import installed_version, optional, transformers_muted
from tokenmill._core.paths import checked_path
from tokenmill._core.process import RecentValues
from tokenmill.errors import RowError, UsageError
from tokenmill.media.probe import (
    PROBE_ROWS,
    ExpansionCache,
    Probe,
    ProbeResults,
    Row,
    RowExpansion,
    Size,
)
from tokenmill.media.reference import bad_media

if TYPE_CHECKING:
    import numpy.typing as npt

VERSION = 1  # raised when the contents of an identity change

MAX_CACHED_BYTES = 64 << 20  # expansions in memory

_CONFIGURATION = "processor_config.json"
_IGNORED_PARTS = ("video_processor", "feature_extractor", "audio_processor", "audio_tokenizer")
_IGNORED_SETTINGS = ("_name_or_path", "name_or_path", "_commit_hash", "auto_map")
_TYPES = ("mm_token_type_ids", "token_type_ids")
_TEXT = ("input_ids", "attention_mask", "special_tokens_mask", *_TYPES)


class ExpansionMismatch(Exception):
    """The expansion computed from sizes gave other ids than the processor."""


class Expanded(msgspec.Struct, frozen=True):
    text: str  # the text that the processor passes to its tokenizer
    pieces: list[tuple[int, int]]  # character range of each expansion


class Referenced(msgspec.Struct, frozen=True):
    ids: list[int]
    features: dict[str, npt.NDArray[Any]]  # other inputs of the model, under its own names
    token_types: list[int] | None  # 0 text, 1 image, if the processor returns them


class CachedExpansion(NamedTuple):
    expansion: RowExpansion
    computed: bool  # from the sizes alone, so valid for all such images; False: from blank ones


class Layout(NamedTuple):
    joined: frozenset[str]  # features that are concatenated over rows
    by_row: bool  # whether any feature counts rows
    types_name: str | None  # name of the model's input with token types
    has_image_types: bool  # whether token types distinguish the tokens of images


class Processor:
    """A processor of transformers that takes images; `load` also takes a directory or a hub id.

    ``options`` are other arguments that the trainer passes at every call, such as
    ``{"do_pan_and_scan": True}``. ``cache_dir`` shares expansions with other processes.
    """

    def __init__(
        self,
        processor: Any,
        options: Mapping[str, Any] | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._processor = processor
        self.options: dict[str, Any] = fingerprint.plain(options or {}, "the processor's options")
        name = type(processor).__name__
        if getattr(processor, "image_processor", None) is None:
            raise UsageError(("processor",), f" must have an image processor; {name} has none")
        if getattr(processor, "tokenizer", None) is None:
            raise UsageError(("processor",), f" must have a tokenizer; {name} has none")
        token = getattr(processor, "image_token", None)
        if not token:
            raise UsageError(
                ("processor",), f" must define image_token, the token of an image; {name} does not"
            )
        self.image_token = str(token)
        self._probe = Probe(processor, self.image_token, self.options)
        self._cache = ExpansionCache(cache_dir, fingerprint.key(self._settings))
        self._expansions = RecentValues(MAX_CACHED_BYTES)
        self._disabled_stages = False

    @classmethod
    def load(
        cls,
        source: Any,
        *,
        options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> Processor:
        if isinstance(source, Processor):
            return source
        if isinstance(source, str | os.PathLike):
            source = _from_files(checked_path("processor", source), trust_remote_code)
        return cls(source, options, cache_dir=cache_dir)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write files that `load` reads, without the options."""
        with transformers_muted():
            if all(getattr(self._processor, name, self) is not None for name in _IGNORED_PARTS):
                self._processor.save_pretrained(os.fspath(directory))
                return
            self.tokenizer.save_pretrained(os.fspath(directory))
            self._processor.to_json_file(Path(directory) / _CONFIGURATION)
            if isinstance(self.chat_template, str):
                text = self.chat_template
                (Path(directory) / "chat_template.jinja").write_text(text, encoding="utf-8")

    @property
    def original(self) -> Any:
        return self._processor

    @property
    def tokenizer(self) -> Any:
        return self._processor.tokenizer

    @property
    def chat_template(self) -> Any:
        own = getattr(self._processor, "chat_template", None)
        return own if own is not None else getattr(self.tokenizer, "chat_template", None)

    @property
    def video_token(self) -> str | None:
        token = getattr(self._processor, "video_token", None)
        return None if token is None else str(token)

    @functools.cached_property
    def media_token_ids(self) -> frozenset[int]:
        """The special tokens of expansions. They occur only for media."""
        ids: set[int] = set()
        for kind in ("image", "video", "audio"):
            declared = getattr(self._processor, f"{kind}_token_ids", None) or ()
            ids.update(number for number in declared if isinstance(number, int))
        special = {  # other added tokens, such as Gemma's newlines, occur in text too
            number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }
        for row in self._probe_results.answers:
            for image in row.images:
                ids |= special.intersection(
                    self.tokenizer.encode(image.text, add_special_tokens=False)
                )
        return frozenset(ids)

    @functools.cached_property
    def repeatable(self) -> dict[str, int]:
        """Text and id of the media tokens that are encoded alone in any context.

        They are split off before normalization, without white space, and no other added token
        contains them. So a run of n such tokens is n ids and does not affect the text around it.
        """
        added = self.tokenizer.added_tokens_decoder
        return {
            token.content: number
            for number, token in added.items()
            if number in self.media_token_ids
            and not (token.normalized or token.lstrip or token.rstrip or token.single_word)
            and sum(token.content in other.content for other in added.values()) == 1
        }

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        """The identity without results: no paths, no parts for other media."""
        try:
            settings = json.loads(self._processor.to_json_string())
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the configuration of {type(self._processor).__name__} must be JSON, to identify"
                f" the processor in the cache: {error}"
            ) from error
        for name in _IGNORED_PARTS:
            settings.pop(name, None)
        return {
            "version": VERSION,
            "class": type(self._processor).__name__,
            "code": _code_of(self._processor),
            "configuration": _without_paths(settings),
            "options": self.options,
            "image_token": self.image_token,
        }

    @functools.cached_property
    def _probe_results(self) -> ProbeResults:
        cached = self._cache.read(None, ProbeResults)
        if cached is not None and len(cached.answers) == len(PROBE_ROWS):
            return cached
        expansions = tuple(self._probe.with_blanks(row) for row in PROBE_ROWS)
        if all(expansion.error is not None for expansion in expansions):
            raise UsageError(
                f"{type(self._processor).__name__} rejects images of every size:"
                f" {expansions[0].error}"
            )
        shape_only = all(
            self._probe.shape_only(row) == (expansion if expansion.error is None else None)
            for row, expansion in zip(PROBE_ROWS, expansions, strict=True)
        )
        results = ProbeResults(expansions, shape_only)
        self._cache.write(None, results)
        return results

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines expansions, and the expansions of `PROBE_ROWS`."""
        keys = [
            None
            if row.error is not None
            else fingerprint.key([[image.text, list(image.grid or ())] for image in row.images])
            for row in self._probe_results.answers
        ]
        return {**self._settings, "answers": keys}

    @functools.cached_property
    def key(self) -> str:
        return fingerprint.key(self.identity)

    @property
    def uses_shape_only(self) -> bool:
        """Whether expansions of new sizes are computed without pixels, in a millisecond."""
        return not self._disabled_stages and self._probe_results.shape_only

    def disable_fast_path(self) -> None:
        self._disabled_stages = True
        self._expansions.clear()

    def expansion_for(self, sizes: Sequence[Size]) -> CachedExpansion:
        """Return the expansion of a row from the (width, height) of its images.

        Here and in the methods below, `RowError` (``bad_media``) means that the processor rejects
        the images.
        """
        row = tuple((int(width), int(height)) for width, height in sizes)
        cached: CachedExpansion | None = self._expansions.get(row)
        if cached is None:
            cached = self._expand_sizes(row)
            self._expansions.put(row, cached, cached.expansion.weight)
        _require_accepted(cached.expansion, row)
        return cached

    def _expand_sizes(self, row: Row) -> CachedExpansion:
        expansion = self._probe.shape_only(row) if self.uses_shape_only else None
        if expansion is not None:
            return CachedExpansion(expansion, computed=True)
        expansion = self._cache.read(row, RowExpansion)
        if expansion is None:
            expansion = self._probe.with_blanks(row)
            self._cache.write(row, expansion)
        return CachedExpansion(expansion, computed=False)

    def expansion_of(self, images: Sequence[Any]) -> RowExpansion:
        """Return the expansion of a row from images of `Images.open`, without any cache."""
        sizes = tuple((int(one.width), int(one.height)) for one in images)
        return _require_accepted(self._probe.with_images(sizes, list(images)), sizes)

    def expand(
        self, text: str, sizes: Sequence[Size], expansion: RowExpansion | None = None
    ) -> Expanded:
        """Replace each image token of a rendered text by its ``expansion`` (`expansion_for`)."""
        between = text.split(self.image_token)
        if len(between) != len(sizes) + 1:
            raise RowError(
                f"the row has {len(sizes)} image(s), but its text has {len(between) - 1} image"
                f" token(s) ({self.image_token})",
                reason="media_mismatch",
            )
        if not sizes:
            return Expanded(text, [])
        parts, pieces, at = [between[0]], [], len(between[0])
        row = self.expansion_for(sizes).expansion if expansion is None else expansion
        for image, after in zip(row.images, between[1:], strict=True):
            pieces.append((at, at + len(image.text)))
            parts += (image.text, after)
            at += len(image.text) + len(after)
        return Expanded("".join(parts), pieces)

    def reference(self, text: str, images: Sequence[Any]) -> Referenced:
        """Run the whole processor on a rendered text and its images, without special tokens."""
        try:
            output = self._run([text], [list(images)] if images else None)
        except MemoryError:
            raise
        except Exception as error:
            raise bad_media(f"the processor rejects the row: {error}") from error
        types = next((output[name] for name in _TYPES if name in output), None)
        return Referenced(
            ids=_as_list(output["input_ids"])[0],
            features=_features_of(output),
            token_types=None if types is None else _as_list(types)[0],
        )

    def features(self, rows: Sequence[Sequence[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the model's inputs for the images of a batch, by name.

        ``rows`` must be the prepared rows, also for a pack: the result may depend on the other
        images of a row.
        """
        images = [list(row) for row in rows if row or self.layout.by_row]
        if not any(images):
            return {}
        try:
            return _features_of(self._run([self.image_token * len(row) for row in images], images))
        except MemoryError:
            raise
        except Exception as error:
            raise bad_media(f"the processor rejects the images: {error}") from error

    def _run(self, texts: list[str], images: list[list[Any]] | None) -> Mapping[str, Any]:
        backend = getattr(self._processor.image_processor, "backend", "")
        tensors = "pt" if backend == "torchvision" else "np"
        output: Mapping[str, Any] = self._processor(
            text=texts,
            images=images,
            text_kwargs={"add_special_tokens": False, "return_tensors": None},
            images_kwargs={"return_tensors": tensors},
            **self.options,
        )
        return output

    @functools.cached_property
    def layout(self) -> Layout:
        import numpy as np
        from PIL import Image

        rows = [
            [Image.radial_gradient("L").convert("RGB").resize(size) for size in sizes]
            for sizes in (((97, 61),), ((640, 480), (333, 500)))
        ]
        texts = [self.image_token * len(row) for row in rows]
        output = self._run(texts, rows)
        together = _features_of(output)
        alone = [
            _features_of(self._run([text], [row])) for text, row in zip(texts, rows, strict=True)
        ]
        joined = frozenset(
            name
            for name, value in together.items()
            if value.ndim
            and all(one[name].shape[1:] == value.shape[1:] for one in alone)
            and np.array_equal(np.concatenate([one[name] for one in alone]), value)
        )
        by_row = any(len(value) == len(rows) for value in together.values())
        ids = _as_list(output["input_ids"])[0]  # of one image and nothing else
        name = next((name for name in _TYPES if name in output), None)
        return Layout(joined, by_row, name, any(self.token_types(ids, [len(ids)])))

    def token_types(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Return 0 (text) or 1 (image) per token; ``counts`` has the tokens of each image."""
        make = self._processor.create_mm_token_type_ids
        takes_counts = len(inspect.signature(make).parameters) > 1
        types: list[int] = make([list(ids)], *([[list(counts)]] if takes_counts else []))[0]
        return types


def _require_accepted(expansion: RowExpansion, row: Row) -> RowExpansion:
    if expansion.error is not None:
        shown = ", ".join(f"{width}×{height}" for width, height in row)
        raise bad_media(f"the processor rejects {shown} pixels: {expansion.error}")
    return expansion


def _features_of(output: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    return {name: _as_array(value) for name, value in output.items() if name not in _TEXT}


def _as_array(value: Any) -> npt.NDArray[Any]:
    import numpy as np

    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16, but float32 is exact
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        return np.asarray(value.numpy())
    return np.asarray(value)


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else [list(row) for row in value]


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_paths(member)
            for name, member in value.items()
            if name not in _IGNORED_SETTINGS
        }
    return [_without_paths(member) for member in value] if isinstance(value, list) else value


def _code_of(processor: Any) -> dict[str, str]:
    code = {"transformers": installed_version("transformers") or ""}
    for part in (processor, processor.image_processor):
        for kind in type(part).__mro__:
            if kind.__module__.partition(".")[0] in ("builtins", "transformers"):
                continue
            try:
                source = inspect.getsource(sys.modules[kind.__module__]).encode()
            except (OSError, TypeError, KeyError):
                source = b""
            code[kind.__name__] = fingerprint.checksum(source)
    return code


def _from_files(source: str, trust_remote_code: bool) -> Any:
    if ":/" in source:
        raise UsageError("a processor cannot be a URL; pass a directory or a hub id", path=source)
    with optional("transformers", ("processor",)), transformers_muted():
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(source, trust_remote_code=trust_remote_code)
        except Exception as error:
            processor = _without_video(Path(source))
            if processor is not None:
                return processor
            raise UsageError(
                f"cannot load the processor: {type(error).__name__}: {error}", path=source
            ) from error


def _without_video(directory: Path) -> Any | None:
    """Load a processor without its parts for other media, which may need missing libraries."""
    import transformers

    try:
        settings = json.loads((directory / _CONFIGURATION).read_text(encoding="utf-8"))
        kind = getattr(transformers, settings["processor_class"])
        parts = kind.get_attributes()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not any(part in _IGNORED_PARTS for part in parts):
        return None
    loaders = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
    }
    if any(part not in loaders and part not in _IGNORED_PARTS for part in parts):
        return None
    template = directory / "chat_template.jinja"
    parameters = inspect.signature(kind.__init__).parameters
    arguments = {name: value for name, value in settings.items() if name in parameters}
    for part in parts:
        loader = loaders.get(part)
        arguments[part] = None if loader is None else loader.from_pretrained(os.fspath(directory))
    if template.is_file():
        arguments["chat_template"] = template.read_text(encoding="utf-8")

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    lenient = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    lenient.__module__ = kind.__module__
    return lenient(**arguments)
