"""`Processor`: the user's processor of transformers, run and never imitated.

A processor replaces each *image token* of a rendered text by an *expansion*: placeholders, and what
is between and around them, depending on the size of the image and of its neighbours in the row.
`Processor.expand` gives that text from the sizes of the images alone; `Processor.reference` runs
the whole processor with real pixels, and audits compare the two.
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
from tokenmill._core.process import RecentValues
from tokenmill.errors import RowError, UsageError
from tokenmill.media.asking import BATTERY, Answers, Asking, Battery, Memory, Row, Size
from tokenmill.media.reference import bad_media

if TYPE_CHECKING:
    import numpy.typing as npt

VERSION = 1  # raised when what an identity holds changes

MOST_REMEMBERED = 64 << 20  # bytes of answers in one process

_CONFIGURATION = "processor_config.json"
_NO_PART = ("video_processor", "feature_extractor", "audio_processor", "audio_tokenizer")
_NO_SETTING = ("_name_or_path", "name_or_path", "_commit_hash", "auto_map")
_TYPES = ("mm_token_type_ids", "token_type_ids")
_TEXT = ("input_ids", "attention_mask", "special_tokens_mask", *_TYPES)


class ExpansionDiffers(Exception):
    """A learned expansion gave other ids than the processor did."""


class Expanded(msgspec.Struct, frozen=True):
    text: str  # what the processor passes to its tokenizer
    pieces: list[tuple[int, int]]  # character range of each expansion


class Referenced(msgspec.Struct, frozen=True):
    ids: list[int]
    features: dict[str, npt.NDArray[Any]]  # other inputs of the model, under its own names
    token_types: list[int] | None  # 0 text, 1 image, if the processor returns them


class Learned(NamedTuple):
    """What is known of the images of a row by their sizes."""

    answers: Answers
    computed: bool  # from the sizes alone, so valid for all such images; else with blank ones


class Layout(NamedTuple):
    """How `Processor.features` and `Processor.token_types` of a batch are made of its rows."""

    joined: frozenset[str]  # features that are the concatenation of their rows
    by_row: bool  # whether any feature counts rows
    types_name: str | None  # of the token types among the model's inputs
    tells_types: bool  # whether token types distinguish the tokens of images


class Processor:
    """A processor of transformers that takes images.

    Args:
        processor: The object; `load` also takes a directory or a hub id.
        options: What the trainer passes at every call besides text and images, for instance
            ``{"do_pan_and_scan": True}``.
        cache_dir: Where answers are kept for other processes.
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
            raise UsageError(f"{name} takes no pictures; give a processor with an image processor")
        if getattr(processor, "tokenizer", None) is None:
            raise UsageError(f"{name} has no tokenizer; give the processor that takes the text")
        token = getattr(processor, "image_token", None)
        if not token:
            raise UsageError(
                f"{name} does not say which token stands for a picture (image_token), so its"
                " expansions cannot be learned"
            )
        self.image_token = str(token)
        self._asking = Asking(processor, self.image_token, self.options)
        self._memory = Memory(cache_dir, fingerprint.key(self._question))
        self._known = RecentValues(MOST_REMEMBERED)
        self._distrusted = False

    @classmethod
    def load(
        cls,
        where: Any,
        *,
        options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> Processor:
        """Load the processor of a directory or a hub id, or wrap an object."""
        if isinstance(where, Processor):
            return where
        if isinstance(where, str | os.PathLike):
            where = _from_files(os.fspath(where), trust_remote_code)
        return cls(where, options, cache_dir=cache_dir)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write files that `load` reads, without the options."""
        with transformers_muted():
            if all(getattr(self._processor, name, self) is not None for name in _NO_PART):
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
        """Tokens that occur only for media: the special tokens of expansions."""
        ids: set[int] = set()
        for kind in ("image", "video", "audio"):
            found = getattr(self._processor, f"{kind}_token_ids", None) or ()
            ids.update(number for number in found if isinstance(number, int))
        special = {  # other added tokens, such as Gemma's newlines, occur in text too
            number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }
        for answers in self._battery.answers:
            for answer in answers.pictures:
                ids |= special.intersection(
                    self.tokenizer.encode(answer.text, add_special_tokens=False)
                )
        return frozenset(ids)

    @functools.cached_property
    def repeatable(self) -> dict[str, int]:
        """Text and id of media tokens that are encoded one by one, whatever is around them.

        They are split off before normalization, without white space, and no other added token
        contains them. So a run of them is as many ids, and does not affect the text beside it.
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
    def _question(self) -> dict[str, Any]:
        """What identifies it without running it: no paths, no parts for other media."""
        try:
            settings = json.loads(self._processor.to_json_string())
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"the configuration of {type(self._processor).__name__} cannot be written down"
                f" ({error}), so nothing could be named by it"
            ) from error
        for name in _NO_PART:
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
    def _battery(self) -> Battery:
        known = self._memory.recall(None, Battery)
        if known is not None and len(known.answers) == len(BATTERY):
            return known
        answers = tuple(self._asking.with_blanks(row) for row in BATTERY)
        if all(answer.refused is not None for answer in answers):
            raise UsageError(
                f"{type(self._processor).__name__} refuses pictures of every size:"
                f" {answers[0].refused}"
            )
        hollow = all(
            self._asking.hollow(row) == (answer if answer.refused is None else None)
            for row, answer in zip(BATTERY, answers, strict=True)
        )
        found = Battery(answers, hollow)
        self._memory.remember(None, found)
        return found

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines its answers, and its answers to `BATTERY`."""
        named = [
            None
            if answers.refused is not None
            else fingerprint.key(
                [[answer.text, list(answer.grid or ())] for answer in answers.pictures]
            )
            for answers in self._battery.answers
        ]
        return {**self._question, "answers": named}

    @functools.cached_property
    def key(self) -> str:
        return fingerprint.key(self.identity)

    @property
    def asks_hollow(self) -> bool:
        """Whether answers for new sizes are computed without pixels, in a millisecond."""
        return not self._distrusted and self._battery.hollow

    def distrust(self) -> None:
        self._distrusted = True
        self._known.clear()

    def learned(self, sizes: Sequence[Size]) -> Learned:
        """What the processor makes of the images of a row, each given as (width, height).

        Images that it refuses are a RowError (``bad_media``), here and in the methods below.
        """
        row = tuple((int(width), int(height)) for width, height in sizes)
        found: Learned | None = self._known.get(row)
        if found is None:
            found = self._learn(row)
            self._known.put(row, found, found.answers.weight)
        _taken(found.answers, row)
        return found

    def _learn(self, row: Row) -> Learned:
        answers = self._asking.hollow(row) if self.asks_hollow else None
        if answers is not None:
            return Learned(answers, computed=True)
        answers = self._memory.recall(row, Answers)
        if answers is None:
            answers = self._asking.with_blanks(row)
            self._memory.remember(row, answers)
        return Learned(answers, computed=False)

    def ask(self, pictures: Sequence[Any]) -> Answers:
        """What the processor makes of these images of `Pictures.open`, without kept answers."""
        sizes = tuple((int(one.width), int(one.height)) for one in pictures)
        return _taken(self._asking.with_pictures(sizes, list(pictures)), sizes)

    def expand(self, text: str, sizes: Sequence[Size], answers: Answers | None = None) -> Expanded:
        """Replace each image token of a rendered text by the expansion of its image.

        ``answers`` are those of `ask`, or of `learned` by default. Another number of image tokens
        than of images is a RowError (``media_mismatch``).
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
        learned = self.learned(sizes).answers if answers is None else answers
        for answer, after in zip(learned.pictures, between[1:], strict=True):
            pieces.append((at, at + len(answer.text)))
            parts += (answer.text, after)
            at += len(answer.text) + len(after)
        return Expanded("".join(parts), pieces)

    def reference(self, text: str, pictures: Sequence[Any]) -> Referenced:
        """Run the whole processor on a rendered text and its images; adds no special tokens."""
        try:
            made = self._run([text], [list(pictures)] if pictures else None)
        except MemoryError:
            raise
        except Exception as error:
            raise bad_media(f"the processor refuses the row: {error}") from error
        types = next((made[name] for name in _TYPES if name in made), None)
        return Referenced(
            ids=_as_list(made["input_ids"])[0],
            features=_features_of(made),
            token_types=None if types is None else _as_list(types)[0],
        )

    def features(self, rows: Sequence[Sequence[Any]]) -> dict[str, npt.NDArray[Any]]:
        """The pixels of a batch, under the model's own names.

        Images are given row by row as they were prepared, also of a pack: the result may depend on
        the other images of a row.
        """
        given = [list(row) for row in rows if row or self.layout.by_row]
        if not any(given):
            return {}
        try:
            return _features_of(self._run([self.image_token * len(row) for row in given], given))
        except MemoryError:
            raise
        except Exception as error:
            raise bad_media(f"the processor refuses the pictures: {error}") from error

    def _run(self, texts: list[str], pictures: list[list[Any]] | None) -> Mapping[str, Any]:
        backend = getattr(self._processor.image_processor, "backend", "")
        tensors = "pt" if backend == "torchvision" else "np"
        made: Mapping[str, Any] = self._processor(
            text=texts,
            images=pictures,
            text_kwargs={"add_special_tokens": False, "return_tensors": None},
            images_kwargs={"return_tensors": tensors},
            **self.options,
        )
        return made

    @functools.cached_property
    def layout(self) -> Layout:
        import numpy as np
        from PIL import Image

        rows = [
            [Image.radial_gradient("L").convert("RGB").resize(size) for size in sizes]
            for sizes in (((97, 61),), ((640, 480), (333, 500)))
        ]
        texts = [self.image_token * len(row) for row in rows]
        made = self._run(texts, rows)
        together = _features_of(made)
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
        ids = _as_list(made["input_ids"])[0]  # of one picture and nothing else
        name = next((name for name in _TYPES if name in made), None)
        return Layout(joined, by_row, name, any(self.token_types(ids, [len(ids)])))

    def token_types(self, ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Type of each token of a row, 0 text and 1 image; ``counts`` has those of each image."""
        make = self._processor.create_mm_token_type_ids
        more = len(inspect.signature(make).parameters) - 1
        found: list[int] = make([list(ids)], *([[list(counts)]] if more else []))[0]
        return found


def _taken(answers: Answers, row: Row) -> Answers:
    if answers.refused is not None:
        shown = ", ".join(f"{width}×{height}" for width, height in row)
        raise bad_media(f"the processor refuses {shown} pixels: {answers.refused}")
    return answers


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
            if name not in _NO_SETTING
        }
    return [_without_paths(member) for member in value] if isinstance(value, list) else value


def _code_of(processor: Any) -> dict[str, str]:
    """The version of transformers, and the source of classes that are not of transformers."""
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
    with optional("transformers", "processor="), transformers_muted():
        from transformers import AutoProcessor

        try:
            return AutoProcessor.from_pretrained(where, trust_remote_code=trust_remote_code)
        except Exception as error:
            found = _without_video(Path(where))
            if found is not None:
                return found
            raise UsageError(
                f"the processor cannot be loaded: {type(error).__name__}: {error}", path=where
            ) from error


def _without_video(directory: Path) -> Any | None:
    """A processor without its parts for other media, if these may need missing libraries."""
    import transformers

    try:
        settings = json.loads((directory / _CONFIGURATION).read_text(encoding="utf-8"))
        kind = getattr(transformers, settings["processor_class"])
        parts = kind.get_attributes()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not any(part in _NO_PART for part in parts):
        return None
    loaders = {
        "tokenizer": transformers.AutoTokenizer,
        "image_processor": transformers.AutoImageProcessor,
    }
    if any(part not in loaders and part not in _NO_PART for part in parts):
        return None
    template = directory / "chat_template.jinja"
    known = inspect.signature(kind.__init__).parameters
    given = {name: value for name, value in settings.items() if name in known}
    for part in parts:
        loader = loaders.get(part)
        given[part] = None if loader is None else loader.from_pretrained(os.fspath(directory))
    if template.is_file():
        given["chat_template"] = template.read_text(encoding="utf-8")

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    lenient = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    lenient.__module__ = kind.__module__
    return lenient(**given)
