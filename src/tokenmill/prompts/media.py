"""Media in prompts: what a processor is given, and how long a prompt is with it.

A *processor* is what multimodal models bring beside a tokenizer: called with a prompt's text and
its media it answers with ``input_ids``, in which an image stands for as many tokens as it costs.
`extract` collects the media of a conversation the way the hosts do: by the processor's own
``extract_media``, by ``qwen_vl_utils`` where that is installed, else by opening image files with
PIL and handing on everything that is no path. `measure` is the length that counts for a prompt
with media; a prompt without any is measured by the tokenizer.

The key of a length index holds a processor's *identity*: its class and settings. Media files
themselves are known by the names in the rows: an image that is changed in place is not noticed.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

from tokenmill import fingerprint
from tokenmill.errors import RowError
from tokenmill.optional import optional
from tokenmill.prompts.shaping import Messages
from tokenmill.prompts.spec import MEDIA

PATCH_SIZE = 14  # pixels; what the hosts assume of an image processor that does not say


def identity(processor: Any) -> str | None:
    """The key of a processor's class and settings; None where it cannot tell them."""
    kind = f"{type(processor).__module__}.{type(processor).__qualname__}"
    settings = getattr(processor, "to_dict", None)
    if settings is None:
        return None
    try:
        told = json.dumps(settings(), sort_keys=True, default=str)
    except (TypeError, ValueError):
        return None
    return fingerprint.key({"processor": kind, "settings": told})


def has_media(messages: Any) -> bool:
    """Whether a conversation holds a part that is an image, a video or a sound."""
    return isinstance(messages, list) and any(
        isinstance(part, dict)
        and (part.get("type") in MEDIA or any(kind in part for kind in MEDIA))
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def extract(messages: Messages, processor: Any) -> dict[str, Any]:
    """The media of a conversation, under the names that the processor takes.

    Raises:
        RowError: They cannot be read.
    """
    try:
        if hasattr(processor, "extract_media"):
            found: dict[str, Any] = processor.extract_media(messages)
            return found
        by_host = _host_extractor()
        if by_host is not None:
            images_part = getattr(processor, "image_processor", None)
            patch = getattr(images_part, "patch_size", PATCH_SIZE)
            images, videos = by_host(messages, image_patch_size=patch)
            return {"images": images, "videos": videos}
        return _opened(messages)
    except RowError:
        raise
    except Exception as error:  # whatever image libraries raise
        raise RowError(f"its media cannot be read ({type(error).__name__}: {error})") from error


def measure(text: str, messages: Messages, processor: Any) -> int:
    """Tokens of a prompt with its media.

    Raises:
        RowError: The media cannot be read, or the processor refuses them.
    """
    inputs = extract(messages, processor)
    try:
        ids = processor(text=text, **{name: value for name, value in inputs.items() if value})
        first = ids["input_ids"]
        return len(first[0]) if len(first) and hasattr(first[0], "__len__") else len(first)
    except Exception as error:
        raise RowError(f"the processor fails ({type(error).__name__}: {error})") from error


def _host_extractor() -> Any:
    try:
        return importlib.import_module("qwen_vl_utils").process_vision_info
    except ImportError:
        return None


def _opened(messages: Messages) -> dict[str, Any]:
    media: dict[str, list[Any]] = {"images": [], "videos": [], "audio": []}
    names = {"image": "images", "video": "videos", "audio": "audio"}
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            for kind, name in names.items():
                if isinstance(part, dict) and kind in part:
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
