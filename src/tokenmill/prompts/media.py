"""Media in prompts: how long a prompt is with them, and what a host is given of them.

A *processor* is what multimodal models bring beside a tokenizer: called with a prompt's text and
its media it answers with ``input_ids``, in which an image stands for as many tokens as it costs.
There are two ways to such a length, and `open_media` chooses:

- `PromptPictures`, for processors of transformers (`tokenmill.media.Processor`): the headers of the
  pictures say how large they are, the processor's learned expansion takes the place of each image
  token, and its tokenizer counts. No picture is decoded, and none is held. The first such row of a
  block and one in `AUDIT_ONE_IN`, by content, go through the processor itself with their real
  pictures and must have the same ids; one difference (`ExpansionDiffers`), and the whole index is
  measured by the processor.
- `AskedMedia`, the reference: the processor runs on the opened media of every row. It serves
  whatever can be called, and rows with videos or sounds.

Pictures are opened when a prompt is asked for: as the processor itself would load them, or, under
the convention of a trainer, by its own function, which may resize them first. What a
host's function makes of a size is found out by asking it with a blank picture (`HostLoading`).

The key of a length index holds what the processor is, how a host loads pictures, and the digests of
the pictures outside of the rows. Videos, sounds, and the media of processors that can only be
called are known by their names in the rows.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, NamedTuple

from tokenmill import fingerprint
from tokenmill.chat.calls import IMAGE_PARTS, is_media
from tokenmill.errors import RowError, UsageError
from tokenmill.media import ExpansionDiffers, Pictures, Processor, Reference, Size, reference_of
from tokenmill.optional import optional
from tokenmill.prompts.shaping import Messages, Shaped, prompt_of
from tokenmill.prompts.spec import MEDIA, Convention, PromptSpec

PATCH_SIZE = 14  # pixels; what the hosts assume of an image processor that does not say
AUDIT_ONE_IN = 128  # rows with pictures, by content; the first of a block in any case
_VALUES = ("image", "image_url", "url", "path", "base64", "bytes", "data", "source")
_SIZES: tuple[Size, ...] = ((28, 28), (97, 61), (640, 480), (1000, 30), (3000, 2000))
"""What a host's function is asked about to tell it from another."""
_MOST_KNOWN = 1 << 16  # sizes of pictures whose loaded size is remembered

Inputs = dict[str, Any]
Read = Callable[[Reference], bytes]
HostFunction = Callable[[Messages, Any], Inputs]


class Shown(NamedTuple):
    """A picture of a prompt: the part that stands for it, and what the row says of it."""

    part: dict[str, Any]
    value: Any


def open_media(
    processor: Any,
    spec: PromptSpec,
    *,
    media_root: Any = None,
    media_urls: bool = False,
    trust_remote_code: bool = False,
    cache_dir: Any = None,
) -> AskedMedia | PromptPictures:
    """How the media of prompts are measured and opened.

    Args:
        processor: Directory, hub id, a processor of transformers, or what is called like one.
        spec: What shapes rows.
        media_root: Directories of pictures; None: that of each row's file. The hosts start from the
            working directory, and open whatever they are given.
        media_urls: Whether addresses are opened.
        trust_remote_code: Allow a processor to bring code of its own.
        cache_dir: Where what is learned of the processor is kept.
    """
    hosted = Convention.load(spec.convention).is_trainer
    function = _host_function(spec)
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
            if hosted and media_root is None:
                media_root, media_urls = (os.getcwd(), "/"), True
            loading = HostLoading(function, found.original) if hosted and function else None
            return PromptPictures(found, spec, Pictures(media_root, urls=media_urls), loading)
    return AskedMedia(processor, function)


def has_media(messages: Any) -> bool:
    """Whether a conversation holds a part that is an image, a video or a sound."""
    return any(True for _ in _media_parts(messages))


def _media_parts(messages: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(messages, list):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and (is_media(part) or _held(part)):
                yield part


def _held(part: dict[str, Any]) -> str | None:
    """The kind of medium that a part holds under its own name."""
    return next((kind for kind in MEDIA if part.get(kind) is not None), None)


# By the processor itself


class AskedMedia:
    """The media of prompts by whatever can be called: the reference.

    Args:
        processor: ``processor(text=…, images=…, videos=…)["input_ids"]``.
        function: The host's own, which collects the media of a conversation.
    """

    def __init__(self, processor: Any, function: HostFunction | None = None) -> None:
        self._processor = processor
        self._function = function

    @property
    def key(self) -> Any:
        """Its class and settings; None where it cannot tell them."""
        kind = f"{type(self._processor).__module__}.{type(self._processor).__qualname__}"
        settings = getattr(self._processor, "to_dict", None)
        if settings is None:
            return None
        try:
            told = json.dumps(settings(), sort_keys=True, default=str)
        except (TypeError, ValueError):
            return None
        return fingerprint.key({"processor": kind, "settings": told})

    def inputs(self, shaped: Shaped, read: Read) -> Inputs:
        """The media of a conversation, under the names that the processor takes.

        Raises:
            RowError: They cannot be read.
        """
        assert isinstance(shaped.prompt, list)
        try:
            if hasattr(self._processor, "extract_media"):
                found: Inputs = self._processor.extract_media(shaped.prompt)
                return found
            if self._function is not None:
                return self._function(shaped.prompt, self._processor)
            return _opened(shaped.prompt)
        except RowError:
            raise
        except Exception as error:  # whatever image libraries raise
            raise RowError(f"its media cannot be read ({type(error).__name__}: {error})") from error

    def opened(self, shaped: Shaped, base: str | None) -> Inputs:
        """`inputs`, of a row that is asked for."""
        return self.inputs(shaped, _unread)

    @property
    def tokenizer(self) -> Any:
        """Of what can be called, none is known."""
        return None

    chat_template = tokenizer

    def length(self, text: str, shaped: Shaped, read: Read, *, audited: bool = False) -> int:
        """Tokens of a prompt with its media.

        Raises:
            RowError: The media cannot be read, or the processor refuses them.
        """
        return len(self.ids(text, self.inputs(shaped, read)))

    def ids(self, text: str, inputs: Inputs) -> list[int]:
        """The processor's tokens.

        Raises:
            RowError: It refuses.
        """
        try:
            made = self._processor(text=text, **{name: v for name, v in inputs.items() if v})
            ids = made["input_ids"]
            return list(ids[0] if len(ids) and hasattr(ids[0], "__len__") else ids)
        except Exception as error:
            raise RowError(f"the processor fails ({type(error).__name__}: {error})") from error


def _unread(reference: Reference) -> bytes:
    raise AssertionError(f"{reference.name} is opened by a host")


def _opened(messages: Messages) -> Inputs:
    media: dict[str, list[Any]] = {"images": [], "videos": [], "audio": []}
    names = {"image": "images", "video": "videos", "audio": "audio"}
    for part in _media_parts(messages):
        for kind, name in names.items():
            if kind in part:
                item = part[kind]
                media[name].append(_image(item) if kind == "image" else item)
    return {name: items or None for name, items in media.items() if items or name != "audio"}


def _image(item: Any) -> Any:
    """An image file, opened; whatever is no path goes on as it is."""
    if not isinstance(item, str | os.PathLike) or "://" in str(item) or str(item)[:5] == "data:":
        return item
    with optional("PIL", "opening images", raises=RowError):
        opener = importlib.import_module("PIL.Image").open
    with opener(item) as image:
        return image.convert("RGB")


# By what is known of the processor


class PromptPictures:
    """The pictures of prompts, by their headers.

    Args:
        processor: The user's.
        spec: What shapes rows.
        pictures: Opens what they refer to.
        loading: How a host loads pictures; None: as the processor itself would.
    """

    def __init__(
        self,
        processor: Processor,
        spec: PromptSpec,
        pictures: Pictures,
        loading: HostLoading | None = None,
    ) -> None:
        self.processor = processor
        self.pictures = pictures
        self._spec = spec
        self._loading = loading
        function = _host_function(spec) if loading is None else loading.function
        self._asked = AskedMedia(processor.original, function)
        self.by_processor = False  # whether nothing that was learned is believed

    @property
    def key(self) -> Any:
        """What the processor is, and how pictures reach it."""
        loading = None if self._loading is None else self._loading.document
        return {"identity": self.processor.key, "loading": loading}

    # Which pictures there are: `tokenmill.build.externals.Finder`

    @property
    def document(self) -> dict[str, Any]:
        """The columns that hold them."""
        spec = self._spec
        keys = spec.multimodal_keys
        columns = {
            "prompt": spec.prompt_key,
            "media": None if keys is None else dict(sorted(keys.items())),
            "conversation": spec.as_conversation,
        }
        return {"prompts": columns}

    def values(self, row: dict[str, Any]) -> Iterable[Any]:
        """What a row says of its pictures."""
        prompt, bare = prompt_of(row, self._spec)
        if not isinstance(prompt, list) or not _only_pictures(prompt):
            return []
        return [shown.value for shown in _shown(prompt, bare)]

    # What they become

    def inputs(self, shaped: Shaped, read: Read) -> Inputs:
        """The pictures of a conversation, opened, under the names that the processor takes.

        Raises:
            RowError: One cannot be used.
        """
        assert isinstance(shaped.prompt, list)
        if self._loading is not None or not _only_pictures(shaped.prompt):
            return self._asked.inputs(shaped, read)
        opened = []
        for shown in _shown(shaped.prompt, shaped.bare):
            reference = reference_of(shown.value)
            opened.append(self.pictures.open(read(reference), reference.name))
        return {"images": opened or None, "videos": None}

    def opened(self, shaped: Shaped, base: str | None) -> Inputs:
        """`inputs`, of a row that is asked for, whose file is in a directory."""
        return self.inputs(shaped, partial(self.pictures.read, base=base))

    @property
    def tokenizer(self) -> Any:
        """The processor's own."""
        return self.processor.tokenizer

    @property
    def chat_template(self) -> Any:
        """The processor's own."""
        return self.processor.chat_template

    def length(self, text: str, shaped: Shaped, read: Read, *, audited: bool = False) -> int:
        """Tokens of a prompt with its pictures: as many as the processor's ``input_ids``.

        Args:
            text: As the template prints it.
            shaped: The row.
            read: Gives the bytes of a picture.
            audited: Whether the processor itself is asked, too.

        Raises:
            RowError: A picture cannot be used, or there are more or fewer than places for them.
            ExpansionDiffers: The processor gives other ids.
        """
        assert isinstance(shaped.prompt, list)
        if self.by_processor or not _only_pictures(shaped.prompt):
            return len(self._asked.ids(text, self.inputs(shaped, read)))
        sizes = [self._size(shown, read) for shown in _shown(shaped.prompt, shaped.bare)]
        expanded = self.processor.expand(text, sizes).text
        ids = list(self.processor.tokenizer(expanded)["input_ids"])
        if audited or fingerprint.checksum64(text.encode()) % AUDIT_ONE_IN == 0:
            inputs = self.inputs(shaped, read)
            try:
                wanted = self._asked.ids(text, inputs)
            except RowError as error:
                raise ExpansionDiffers(error.message) from error
            if wanted != ids:
                raise ExpansionDiffers(
                    f"the processor gives {len(wanted)} tokens, these are {len(ids)}"
                )
        return len(ids)

    def _size(self, shown: Shown, read: Read) -> Size:
        """What of a picture reaches the processor: width and height, by its header."""
        reference = reference_of(shown.value)
        facts = self.pictures.facts(read(reference), reference.name)
        if self._loading is None:
            return facts.width, facts.height
        return self._loading.size(shown.part, facts.unturned, reference.name)


def _only_pictures(messages: Messages) -> bool:
    return all(
        (part.get("type") or _held(part) or "image") in IMAGE_PARTS
        for part in _media_parts(messages)
    )


def _shown(messages: Messages, bare: list[Any]) -> list[Shown]:
    """The pictures of a conversation in order; parts that bring none have those of the column.

    Raises:
        RowError: There are more or fewer pictures than parts for them.
    """
    waiting = iter(bare)
    found = []
    for part in _media_parts(messages):
        value = next((part[name] for name in _VALUES if part.get(name) is not None), None)
        if value is None:
            value = next(waiting, None)
        if value is None:
            raise RowError("an image part without a picture", reason="media_mismatch")
        found.append(Shown(part, value))
    left = sum(1 for _ in waiting)
    if left:
        raise RowError(f"{left} picture(s) more than places for them", reason="media_mismatch")
    return found


# By hosts


class HostLoading:
    """What a host's own function makes of pictures on their way to the processor.

    Args:
        function: ``process_vision_info`` of the host: messages and processor → inputs.
        processor: The processor itself.
    """

    def __init__(self, function: HostFunction, processor: Any) -> None:
        self.function = function
        self._processor = processor
        self._known: OrderedDict[tuple[Size, str], Size] = OrderedDict()

    @cached_property
    def document(self) -> Any:
        """Its answers, which tell it from another."""
        return [self._asked({"type": "image", "image": ""}, size) for size in _SIZES]

    def size(self, part: dict[str, Any], size: Size, name: str) -> Size:
        """Width and height of a picture as the processor is given it.

        Raises:
            RowError: The host refuses such a picture (``bad_media``).
        """
        options = {key: value for key, value in part.items() if key not in _VALUES}
        asked = (size, json.dumps(options, sort_keys=True, default=str))
        found = self._known.get(asked)
        if found is None:
            answer = self._asked(part, size)
            if isinstance(answer, str):
                raise RowError(f"{name} cannot be loaded: {answer}", reason="bad_media")
            found = self._known[asked] = answer
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        return found

    def _asked(self, part: dict[str, Any], size: Size) -> Size | str:
        held = next((name for name in _VALUES if name in part), "image")
        blank = {**part, held: Pictures.blank(*size)}
        try:
            found = self.function([{"role": "user", "content": [blank]}], self._processor)
            (image,) = found["images"]
            width, height = image.size
        except Exception as error:  # whatever it raises is its answer
            return f"{type(error).__name__}: {error}"
        return int(width), int(height)


def _host_function(spec: PromptSpec) -> HostFunction | None:
    """The function that collects the media of a conversation: the trainer's, or `qwen_vl_utils`."""
    module = Convention.load(spec.convention).vision_module
    if module is not None:
        with suppress(ImportError, AttributeError):
            function: HostFunction = importlib.import_module(module).process_vision_info
            return function
    try:
        collect = importlib.import_module("qwen_vl_utils").process_vision_info
    except ImportError:
        return None

    def by_qwen(messages: Messages, processor: Any) -> Inputs:
        images_part = getattr(processor, "image_processor", None)
        patch = getattr(images_part, "patch_size", PATCH_SIZE)
        images, videos = collect(messages, image_patch_size=patch)
        return {"images": images, "videos": videos}

    return by_qwen
