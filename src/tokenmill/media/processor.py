"""`Processor`: the user's own processor, asked and never imitated.

A processor of transformers turns each *image token* of a rendered text into an *expansion*: so many
placeholders, with whatever stands between and around them, according to the size of the picture. It
then hands the text to its tokenizer. `Processor.expand` gives that text, with the character range
of every expansion in it, from the sizes of the pictures alone. Who encodes it gets the ids that the
processor gives for the pictures themselves; `Processor.reference` runs the processor whole, with
real pixels, and is what that is compared with.

How the expansions are learned is in `tokenmill.media.asking`. They are remembered by the sizes of
all pictures of a row together, because nothing forbids a processor to treat a picture according to
its neighbours (some cut a picture into tiles only where it is alone).

`Processor.features` are the pixels, under the model's own names.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill import fingerprint
from tokenmill.errors import RowError, UsageError
from tokenmill.media.asking import Answer, Asking, Refused, Size, quietly
from tokenmill.media.reference import bad_media
from tokenmill.optional import installed_version, optional

if TYPE_CHECKING:
    import numpy.typing as npt

VERSION = 1  # raised when what an identity holds changes

BATTERY: tuple[tuple[Size, ...], ...] = (
    ((64, 64),), ((640, 480),), ((480, 640),), ((1000, 333),), ((333, 1000),), ((1280, 1024),),
    ((1919, 1081),), ((97, 61),), ((2400, 40),), ((640, 480), (97, 61)), ((97, 61), (97, 61)),
)  # fmt: skip
"""Sizes of pictures, row by row, whose answers are part of a processor's identity."""

MOST_REMEMBERED = 1 << 16  # rows of sizes: some tens of MB where each is another

_NO_PART = ("video_processor", "feature_extractor", "audio_processor", "audio_tokenizer")
_NO_CONFIGURATION = ("_name_or_path", "name_or_path", "_commit_hash", "auto_map")
_TEXT = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "special_tokens_mask",
)


class Expanded(msgspec.Struct, frozen=True):
    """A text whose image tokens are expanded.

    Attributes:
        text: What the processor hands to its tokenizer.
        pieces: Character ranges of the expansions in it, picture by picture.
    """

    text: str
    pieces: list[tuple[int, int]]


class Referenced(msgspec.Struct, frozen=True):
    """What the whole processor makes of a text and its pictures.

    Attributes:
        ids: The tokens.
        features: What else the model is given, under its own names.
        token_types: ``mm_token_type_ids`` or however the processor calls it; None where it gives
            none.
    """

    ids: list[int]
    features: dict[str, npt.NDArray[Any]]
    token_types: list[int] | None = None


class Processor:
    """A processor of transformers that takes pictures.

    Args:
        processor: The object; `load` also takes a directory or a hub id.
        options: What the trainer gives it at every call besides text and pictures, for instance
            ``{"do_pan_and_scan": True}``.
    """

    def __init__(self, processor: Any, options: Mapping[str, Any] | None = None) -> None:
        self._processor = processor
        self.options = fingerprint.plain(options or {}, "the processor's options")
        name = type(processor).__name__
        if getattr(processor, "image_processor", None) is None:
            raise UsageError(
                f"{name} takes no pictures; give a processor that has an image processor"
            )
        if getattr(processor, "tokenizer", None) is None:
            raise UsageError(f"{name} has no tokenizer; give the processor that renders the text")
        token = getattr(processor, "image_token", None)
        if not token:
            raise UsageError(
                f"{name} does not say which token stands for a picture (image_token), so its"
                " expansions cannot be learned"
            )
        self.image_token = str(token)
        self._asking = Asking(processor, self.image_token, self.options)
        self._known: OrderedDict[tuple[Size, ...], tuple[Answer, ...] | Refused] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(
        cls,
        where: Any,
        *,
        options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> Processor:
        """The processor of a directory or a hub id, or around an object.

        Raises:
            UsageError: It cannot be loaded, or takes no pictures.
        """
        if isinstance(where, Processor):
            return where
        if not isinstance(where, str | os.PathLike):
            return cls(where, options)
        return cls(_from_files(os.fspath(where), trust_remote_code), options)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the files that `load` reads."""
        with quietly():
            self._processor.save_pretrained(os.fspath(directory))

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, an object of transformers."""
        return self._processor.tokenizer

    @property
    def chat_template(self) -> Any:
        """The template it renders with: its own, else its tokenizer's."""
        own = getattr(self._processor, "chat_template", None)
        return own if own is not None else getattr(self.tokenizer, "chat_template", None)

    @property
    def video_token(self) -> str | None:
        """What its template prints for a video, which is refused."""
        token = getattr(self._processor, "video_token", None)
        return None if token is None else str(token)

    @functools.cached_property
    def media_token_ids(self) -> frozenset[int]:
        """Tokens that only ever stand for media: added ones that expansions are made of."""
        ids: set[int] = set()
        for kind in ("image", "video", "audio"):
            ids.update(
                number
                for number in getattr(self._processor, f"{kind}_token_ids", None) or ()
                if isinstance(number, int)
            )
        added = set(self.tokenizer.get_added_vocab().values())
        for sizes in BATTERY:
            for answer in self._answers_or_none(sizes) or ():
                ids.update(
                    added.intersection(self.tokenizer.encode(answer.text, add_special_tokens=False))
                )
        return frozenset(ids)

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that decides what it answers: no path, no part that looks at no picture."""
        configuration = json.loads(self._processor.to_json_string())
        for name in _NO_PART:
            configuration.pop(name, None)
        return {
            "version": VERSION,
            "class": type(self._processor).__name__,
            "code": _code_of(self._processor),
            "configuration": _without_paths(configuration),
            "options": self.options,
            "image_token": self.image_token,
            "answers": [self._named_answer(sizes) for sizes in BATTERY],
        }

    @functools.cached_property
    def key(self) -> str:
        """The name of `identity`."""
        return fingerprint.key(self.identity)

    def _named_answer(self, sizes: tuple[Size, ...]) -> list[str] | None:
        answers = self._answers_or_none(sizes)
        if answers is None:
            return None
        return [fingerprint.key({"text": one.text, "grid": one.grid}) for one in answers]

    def _answers_or_none(self, sizes: tuple[Size, ...]) -> tuple[Answer, ...] | None:
        try:
            return self.answers(sizes)
        except RowError:
            return None

    def answers(self, sizes: Sequence[Size]) -> tuple[Answer, ...]:
        """What the processor makes of a row's pictures, each given as (width, height).

        Raises:
            RowError: It refuses one of them (``bad_media``).
        """
        row = tuple((int(width), int(height)) for width, height in sizes)
        with self._lock:
            found = self._known.get(row)
            if found is not None:
                self._known.move_to_end(row)
        if found is None:
            found = self._asking.ask(row)
            with self._lock:
                self._known[row] = found
                while len(self._known) > MOST_REMEMBERED:
                    self._known.popitem(last=False)
        if isinstance(found, Refused):
            shown = ", ".join(f"{width}×{height}" for width, height in row)
            raise bad_media(f"the processor refuses pictures of {shown} pixels: {found.why}")
        return found

    def expand(self, text: str, sizes: Sequence[Size]) -> Expanded:
        """A rendered text, each image token replaced by the expansion of its picture.

        Args:
            text: As the chat template prints it.
            sizes: (width, height) of the pictures, as `PictureFacts` has them, in order.

        Raises:
            RowError: The text has more or fewer image tokens than there are pictures
                (``media_mismatch``), or the processor refuses a picture (``bad_media``).
        """
        between = text.split(self.image_token)
        if len(between) != len(sizes) + 1:
            raise RowError(
                f"{len(sizes)} picture(s) for {len(between) - 1} place(s) in the text"
                f" ({self.image_token})",
                reason="media_mismatch",
            )
        if not sizes:
            return Expanded(text, [])
        parts, pieces, at = [between[0]], [], len(between[0])
        for answer, after in zip(self.answers(sizes), between[1:], strict=True):
            pieces.append((at, at + len(answer.text)))
            parts += (answer.text, after)
            at += len(answer.text) + len(after)
        return Expanded("".join(parts), pieces)

    def grid(self, width: int, height: int) -> tuple[int, ...] | None:
        """Frames, rows and columns of patches of a picture, where the model is told."""
        return self.answers([(width, height)])[0].grid

    def patches(self, width: int, height: int) -> int:
        """What a picture costs the vision model: its patches, or its tiles where all are alike."""
        return self.answers([(width, height)])[0].patches

    def reference(self, text: str, pictures: Sequence[Any]) -> Referenced:
        """The whole processor on a text and its pictures.

        Args:
            text: As the chat template prints it.
            pictures: Of `Pictures.open`, in order.
        """
        made = self._run([text], [list(pictures)] if pictures else None)
        types = next(
            (made[name] for name in ("mm_token_type_ids", "token_type_ids") if name in made), None
        )
        return Referenced(
            ids=_as_list(made["input_ids"])[0],
            features=_features_of(made),
            token_types=None if types is None else _as_list(types)[0],
        )

    def _run(self, texts: list[str], pictures: list[list[Any]] | None) -> Mapping[str, Any]:
        with quietly():
            made: Mapping[str, Any] = self._processor(
                text=texts,
                images=pictures,
                add_special_tokens=False,
                return_tensors=self._asking.tensors,
                **self.options,
            )
        return made


def _features_of(made: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    return {name: _as_array(value) for name, value in made.items() if name not in _TEXT}


def _as_array(value: Any) -> npt.NDArray[Any]:
    import numpy as np

    if hasattr(value, "detach"):  # a tensor; numpy has no bfloat16, which float32 holds exactly
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
            if name not in _NO_CONFIGURATION
        }
    return [_without_paths(member) for member in value] if isinstance(value, list) else value


def _code_of(processor: Any) -> dict[str, str]:
    """The code that answers: a version of transformers, or of anything else its source."""
    found = {"transformers": installed_version("transformers") or ""}
    for part in (processor, processor.image_processor):
        for kind in type(part).__mro__:
            if kind.__module__.partition(".")[0] in ("builtins", "transformers"):
                continue
            try:
                source = inspect.getsource(sys.modules[kind.__module__]).encode()
            except (OSError, TypeError, KeyError):
                source = b""
            found[kind.__name__] = fingerprint.checksum(source)
    return found


def _from_files(where: str, trust_remote_code: bool) -> Any:
    with optional("transformers", "processor="), quietly():
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(where, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise UsageError(
                f"the processor cannot be loaded: {type(error).__name__}: {error}", path=where
            ) from error
