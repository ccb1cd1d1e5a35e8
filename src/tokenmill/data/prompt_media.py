"""Images and other media of prompts: their token counts, and the values passed to a trainer.

The key of a length index holds the identity of the processor, how a trainer loads images, and the
digests of images outside of the rows. Other media are identified by their names in the rows.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokenmill._core import fingerprint
from tokenmill._core.optional import optional
from tokenmill.build.expansion import Expander
from tokenmill.build.referenced import ReferencedFiles, digest_of
from tokenmill.chat import Rendering
from tokenmill.chat.calls import IMAGE_PARTS, is_media
from tokenmill.chat.images import VALUES, Image, MediaTokens
from tokenmill.data.prompt_rows import MEDIA, Convention, Messages, PromptSpec, Shaped, prompt_of
from tokenmill.errors import RowError, UsageError
from tokenmill.media import ImageFacts, Images, Processor, Reference, Size, reference_of
from tokenmill.sources.block import Block
from tokenmill.sources.index import IndexCache
from tokenmill.sources.parse import attempt
from tokenmill.tokenizers.encoder import Encoder

DEFAULT_PATCH_SIZE = 14  # pixels; what trainers assume of an image processor without one
_PROBE_SIZES: tuple[Size, ...] = ((28, 28), (97, 61), (640, 480), (1000, 30), (3000, 2000))
_MAX_SIZES = 1 << 16  # loaded sizes in memory

Inputs = dict[str, Any]
Load = Callable[[Reference], Any]
VisionFunction = Callable[[Messages, Any], Inputs]
"""``process_vision_info`` of a trainer: messages and processor → inputs of the processor."""


def open_media(
    processor: Any,
    spec: PromptSpec,
    *,
    media_root: Any = None,
    media_urls: bool = False,
    trust_remote_code: bool = False,
    cache_dir: Path,
) -> ProcessorMedia:
    is_trainer = Convention.load(spec.convention).is_trainer
    function = _vision_function(spec)
    if not hasattr(processor, "extract_media"):
        try:
            found = Processor.load(
                processor, trust_remote_code=trust_remote_code, cache_dir=cache_dir
            )
            _ = found.key
        except UsageError:
            if isinstance(processor, str | os.PathLike):
                raise
        else:
            if is_trainer and media_root is None:
                media_root, media_urls = (os.getcwd(), "/"), True
            images = Images(media_root, urls=media_urls)
            return ImageMedia(found, spec, images, function, cache_dir)
    return ProcessorMedia(processor, function)


def _media_parts(messages: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(messages, list):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (is_media(part) or _kind_of(part)):
                yield part


def _kind_of(part: dict[str, Any]) -> str | None:
    return next((kind for kind in MEDIA if part.get(kind) is not None), None)


class ProcessorMedia:
    """Measures prompts with media by running the processor on every row: the reference.

    ``processor(text=…, images=…, videos=…)["input_ids"]`` works for anything callable, and for rows
    with videos or audio. ``function`` collects the media of a conversation; None uses the types of
    parts.
    """

    by_processor = True  # whether the processor runs on every row
    tokenizer: Any = None
    chat_template: Any = None

    def __init__(self, processor: Any, function: VisionFunction | None = None) -> None:
        self._processor = processor
        self._function = function

    @property
    def key(self) -> Any:
        """The class and settings of the processor; None if it has no `to_dict`."""
        kind = f"{type(self._processor).__module__}.{type(self._processor).__qualname__}"
        settings = getattr(self._processor, "to_dict", None)
        if settings is None:
            return None
        try:
            text = json.dumps(settings(), sort_keys=True, default=str)
        except (TypeError, ValueError):
            return None
        return fingerprint.key({"processor": kind, "settings": text})

    def digest(self, block: Block) -> str:
        """Return the digest of the files that a block refers to; empty if unknown."""
        return ""

    def begin(self, block: Block, digest: str) -> None:
        """Begin a block whose files have this digest."""

    def require_own_tokenizer(self, tokenizer: Any) -> None:
        """Raise `UsageError` for a tokenizer that differs from the processor's."""

    def is_in(self, shaped: Shaped) -> bool:
        return any(True for _ in _media_parts(shaped.prompt))

    def served(self, shaped: Shaped, base: str | None) -> Inputs:
        """Return `inputs` of a row to serve; ``base`` is the directory of its file."""
        return self.inputs(shaped)

    def inputs(self, shaped: Shaped, load: Load | None = None) -> Inputs:
        """Open the media of a conversation, as arguments of the processor.

        ``load`` opens an image; None uses the current block.
        """
        assert isinstance(shaped.prompt, list)
        try:
            if hasattr(self._processor, "extract_media"):
                found: Inputs = self._processor.extract_media(shaped.prompt)
                return found
            if self._function is not None:
                return self._function(shaped.prompt, self._processor)
            return _inputs_of(shaped.prompt)
        except RowError:
            raise
        except Exception as error:  # image libraries raise many types
            raise RowError(f"the media cannot be read ({type(error).__name__}: {error})") from error

    def measure(
        self, rows: Sequence[tuple[str, Shaped]], encoder: Encoder | None
    ) -> list[int | RowError]:
        """Count the tokens of rendered prompts with their media."""
        return [attempt(self._length, text, shaped) for text, shaped in rows]

    def _length(self, text: str, shaped: Shaped) -> int:
        inputs = {name: value for name, value in self.inputs(shaped).items() if value}
        try:
            ids = self._processor(text=text, **inputs)["input_ids"]
            return len(ids[0] if len(ids) and hasattr(ids[0], "__len__") else ids)
        except Exception as error:
            raise RowError(f"the processor failed ({type(error).__name__}: {error})") from error


def _inputs_of(messages: Messages) -> Inputs:
    names = {"image": "images", "video": "videos", "audio": "audio"}
    media: dict[str, list[Any]] = {name: [] for name in names.values()}
    for part in _media_parts(messages):
        for kind, name in names.items():
            if kind in part:
                media[name].append(_opened(part[kind]) if kind == "image" else part[kind])
    return {name: items or None for name, items in media.items() if items or name != "audio"}


def _opened(item: Any) -> Any:
    """Open an image file; return anything but a path unchanged."""
    if not isinstance(item, str | os.PathLike) or "://" in str(item) or str(item)[:5] == "data:":
        return item
    with optional("PIL", "opening images", raises=RowError):
        opener = importlib.import_module("PIL.Image").open
    with opener(item) as image:
        return image.convert("RGB")


class _Image(NamedTuple):
    part: dict[str, Any]
    value: Any  # in the row


class ImageMedia(ProcessorMedia):
    """Measures images of prompts by their headers, for a transformers processor.

    The `Expander` of the build puts the computed expansion in place of each image token, and audits
    some rows with the processor itself. After one `ExpansionMismatch`, the processor measures all
    rows. Serving a prompt opens its images: as the processor would load them, or, under the
    convention of a trainer, by the trainer's own function, which may resize them first.
    """

    by_processor = False

    def __init__(
        self,
        processor: Processor,
        spec: PromptSpec,
        images: Images,
        function: VisionFunction | None,
        cache_dir: Path,
    ) -> None:
        super().__init__(processor.original, function)
        self.tokenizer = processor.tokenizer
        self.chat_template = processor.chat_template
        self._spec = spec
        self._wrapped = processor
        self._loading: TrainerLoading | None = None
        if function is not None and Convention.load(spec.convention).is_trainer:
            self._loading = TrainerLoading(function, processor.original)
        self._referenced = ReferencedFiles(
            self._columns(), self._values, images, IndexCache(cache_dir)
        )

    def require_own_tokenizer(self, tokenizer: Any) -> None:
        from tokenmill.build.slices import require_own_tokenizer

        require_own_tokenizer(self._wrapped, tokenizer)

    @cached_property
    def _expander(self) -> _PromptExpander:
        return _PromptExpander(self._wrapped, self._referenced, self, self._loading)

    @property
    def key(self) -> Any:
        loading = None if self._loading is None else self._loading.document
        return {"identity": self._wrapped.key, "loading": loading}

    def _columns(self) -> dict[str, Any]:
        spec = self._spec
        keys = spec.multimodal_keys
        columns = {
            "prompt": spec.prompt_key,
            "media": None if keys is None else dict(sorted(keys.items())),
            "conversation": spec.as_conversation,
        }
        return {"prompts": columns}

    def _values(self, row: dict[str, Any]) -> Iterable[Any]:
        prompt, unnamed_images = prompt_of(row, self._spec)
        if not _has_only_images(prompt):
            return []
        return [image.value for image in _images_of(prompt, unnamed_images)]

    def digest(self, block: Block) -> str:
        return digest_of(self._referenced.of(block))

    def begin(self, block: Block, digest: str) -> None:
        self._expander.begin(block, digest)

    def served(self, shaped: Shaped, base: str | None) -> Inputs:
        images = self._referenced.images
        return self.inputs(shaped, lambda one: images.open(images.read(one, base), one.name))

    def inputs(self, shaped: Shaped, load: Load | None = None) -> Inputs:
        if self._loading is not None or not _has_only_images(shaped.prompt):
            return super().inputs(shaped)
        load = load or self._expander.open
        images = _images_of(shaped.prompt, shaped.unnamed_images)
        return {"images": [load(reference_of(one.value)) for one in images] or None, "videos": None}

    def measure(
        self, rows: Sequence[tuple[str, Shaped]], encoder: Encoder | None
    ) -> list[int | RowError]:
        """Count tokens; raises `ExpansionMismatch` if the processor gives other ids."""
        assert encoder is not None
        found: dict[int, int | RowError] = {}
        rendering = Rendering()
        for number, (text, shaped) in enumerate(rows):
            if self.by_processor or not _has_only_images(shaped.prompt):
                found[number] = attempt(self._length, text, shaped)
                continue
            images = attempt(_images_of, shaped.prompt, shaped.unnamed_images)
            if isinstance(images, RowError):
                found[number] = images
                continue
            rendering.images[len(rendering.texts)] = [Image(one.value, ()) for one in images]
            rendering.texts.append(text)
            rendering.source.append(number)
        if rendering.texts:
            shown = [rows[number][1] for number in rendering.source]
            lengths = self._expander.lengths(rendering, shown, encoder)
            found.update(zip(rendering.source, lengths, strict=True))
        return [found[number] for number in range(len(rows))]


def _has_only_images(prompt: str | Messages) -> bool:
    return isinstance(prompt, list) and all(
        (part.get("type") or _kind_of(part) or "image") in IMAGE_PARTS
        for part in _media_parts(prompt)
    )


def _images_of(prompt: str | Messages, unnamed_images: list[Any]) -> list[_Image]:
    """Return the images of a conversation; parts without a value get those of the column."""
    waiting = iter(unnamed_images)
    found = []
    for part in _media_parts(prompt):
        value = next((part[name] for name in VALUES if part.get(name) is not None), None)
        if value is None:
            value = next(waiting, None)
        if value is None:
            raise RowError("an image part has no image", reason="media_mismatch")
        found.append(_Image(part, value))
    left = sum(1 for _ in waiting)
    if left:
        raise RowError(f"{left} images have no image part", reason="media_mismatch")
    return found


class _PromptExpander(Expander):
    """The build's expander for prompts; a trainer may load images with its own function."""

    def __init__(
        self,
        processor: Processor,
        referenced: ReferencedFiles,
        media: ProcessorMedia,
        loading: TrainerLoading | None,
    ) -> None:
        tokens = MediaTokens(processor.image_token)
        super().__init__(processor, tokens, list(processor.media_token_ids), referenced)
        self._media = media
        self._loading = loading
        self._rows: Sequence[Shaped] = ()

    def lengths(
        self, rendering: Rendering, rows: Sequence[Shaped], encoder: Encoder
    ) -> list[int | RowError]:
        self._rows = rows
        rendering.spans = [[] for _ in rows]
        rendering.ends = [[] for _ in rows]
        expansions = self.expand(rendering)
        encoded = encoder.encode(expansions.texts, expansions.spans, expansions.marks)
        digests = [
            fingerprint.checksum64(text.encode("utf-8", "surrogatepass"))
            for text in rendering.texts
        ]
        encoded, _ = self.resolve_spans(
            expansions, encoded, np.array(digests, np.uint64), Counter()
        )
        added = len(self._processor.tokenizer("")["input_ids"])  # special tokens of every call
        lengths: list[int | RowError] = [length + added for length in encoded.lengths.tolist()]
        for number, error in encoded.rejected:
            lengths[number] = error
        return lengths

    def _sizes(
        self, number: int, references: Sequence[Reference], facts: Sequence[ImageFacts]
    ) -> list[Size]:
        if self._loading is None:
            return super()._sizes(number, references, facts)
        row = self._rows[number]
        images = zip(_images_of(row.prompt, row.unnamed_images), references, facts, strict=True)
        return [self._loading.size(one.part, its.stored_size, ref.name) for one, ref, its in images]

    def _images(self, number: int, references: Sequence[Reference]) -> list[Any]:
        if self._loading is None:
            return super()._images(number, references)
        return self._media.inputs(self._rows[number])["images"] or []


class TrainerLoading:
    """Sizes of images after a trainer's loading function, probed with blank images."""

    def __init__(self, function: VisionFunction, processor: Any) -> None:
        self._function = function
        self._processor = processor
        self._known = lru_cache(_MAX_SIZES)(self._probe)

    @cached_property
    def document(self) -> Any:
        """Results for some sizes, as the identity of the function."""
        part = json.dumps({"type": "image", "image": ""})
        return [self._probe(part, size) for size in _PROBE_SIZES]

    def size(self, part: dict[str, Any], size: Size, name: str) -> Size:
        options = {key: "" if key in VALUES else value for key, value in part.items()}
        found = self._known(json.dumps(options, sort_keys=True, default=str), size)
        if isinstance(found, str):
            raise RowError(f"{name} cannot be loaded: {found}", reason="bad_media")
        return found

    def _probe(self, part: str, size: Size) -> Size | str:
        options: dict[str, Any] = json.loads(part)
        name = next((name for name in VALUES if name in options), "image")
        blank = {**options, name: Images.blank(*size)}
        try:
            found = self._function([{"role": "user", "content": [blank]}], self._processor)
            (image,) = found["images"]
            width, height = image.size
        except Exception as error:  # a failing size is a result, too
            return f"{type(error).__name__}: {error}"
        return int(width), int(height)


def _vision_function(spec: PromptSpec) -> VisionFunction | None:
    module = Convention.load(spec.convention).vision_module
    if module is not None:
        with suppress(ImportError, AttributeError):
            function: VisionFunction = importlib.import_module(module).process_vision_info
            return function
    try:
        collect = importlib.import_module("qwen_vl_utils").process_vision_info
    except ImportError:
        return None

    def by_qwen(messages: Messages, processor: Any) -> Inputs:
        images_part = getattr(processor, "image_processor", None)
        patch = getattr(images_part, "patch_size", DEFAULT_PATCH_SIZE)
        images, videos = collect(messages, image_patch_size=patch)
        return {"images": images, "videos": videos}

    return by_qwen
