"""Processors of eleven families, made from their classes without a network.

`make(name)` uses the bundled tokenizer, `make(name, directory)` a real one. Without torchvision,
transformers has no video processors and refuses some classes. These parts are left out together
with the checks of the classes; they process no images.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenmill
from tests.media import torchvision_stand_in

EXAMPLE = Path(tokenmill.__file__).parent / "examples" / "tokenizer"

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}IMAGE_TOKEN{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A ChatML template for messages with parts, similar to that of the Qwen processors."""

_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}


def tokenizer_with(tokens: dict[str, str], directory: Path = EXAMPLE) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        extra_special_tokens=dict(tokens),
        model_input_names=["input_ids", "attention_mask"],
    )


def lenient(kind: type[Any]) -> type[Any]:
    """Return a subclass of a processor that accepts None for parts that are unavailable here."""

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    made = type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})
    made.__module__ = kind.__module__
    return made


def _qwen(processor: str, directory: Path, **settings: Any) -> Any:
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = tokenizer_with(_QWEN, directory)
    kind = lenient(getattr(transformers, processor))
    return kind(Qwen2VLImageProcessorPil(**settings), tokenizer, None)


def qwen2_vl(directory: Path) -> Any:
    return _qwen("Qwen2VLProcessor", directory)


def qwen2_5_vl(directory: Path) -> Any:
    small = {"shortest_edge": 4 * 28 * 28, "longest_edge": 1280 * 28 * 28}
    return _qwen("Qwen2_5_VLProcessor", directory, size=small)


def qwen3_vl(directory: Path) -> Any:
    large = {"shortest_edge": 65536, "longest_edge": 16777216}
    return _qwen("Qwen3VLProcessor", directory, patch_size=16, size=large)


def gemma3(directory: Path, **settings: Any) -> Any:
    from transformers import Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    tokens = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    images = Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, **settings)
    return Gemma3Processor(images, tokenizer_with(tokens, directory))


def _llava(processor: type[Any], images: type[Any], directory: Path) -> Any:
    return processor(
        images(size={"shortest_edge": 336}, crop_size=336),
        tokenizer_with({"image_token": "<image>"}, directory),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def llava(directory: Path) -> Any:
    from transformers import LlavaProcessor
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    return _llava(LlavaProcessor, CLIPImageProcessorPil, directory)


def llava_next(directory: Path) -> Any:
    from transformers import LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import (
        LlavaNextImageProcessorPil,
    )

    return _llava(LlavaNextProcessor, LlavaNextImageProcessorPil, directory)


def idefics3(directory: Path) -> Any:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    return Idefics3Processor(Idefics3ImageProcessorPil(), tokenizer_with({}, directory))


def internvl(directory: Path) -> Any:
    from transformers import InternVLProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tokens = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    images = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, max_patches=12
    )
    return lenient(InternVLProcessor)(images, tokenizer_with(tokens, directory), None)


def glm4v(directory: Path) -> Any:
    from transformers import Glm4vProcessor
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

    tokens = {
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>",
        "video_start_token": "<|begin_of_video|>",
        "video_end_token": "<|end_of_video|>",
    }
    tokenizer = tokenizer_with(tokens, directory)
    return lenient(Glm4vProcessor)(Glm4vImageProcessorPil(), tokenizer, None)


def pixtral(directory: Path) -> Any:
    torchvision_stand_in.install()
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    tokens = {
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
    }
    images = PixtralImageProcessorPil(patch_size={"height": 16, "width": 16})
    return PixtralProcessor(images, tokenizer_with(tokens, directory), patch_size=16)


def llama4(directory: Path) -> Any:
    torchvision_stand_in.install()
    from transformers.models.llama4.image_processing_llama4 import Llama4ImageProcessor
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    tokens = {
        "image_token": "<|image|>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "patch_token": "<|patch|>",
        "tile_x_token": "<|tile_x_separator|>",
        "tile_y_token": "<|tile_y_separator|>",
    }
    return Llama4Processor(Llama4ImageProcessor(), tokenizer_with(tokens, directory))


FAMILIES: dict[str, Callable[[Path], Any]] = {
    made.__name__: made
    for made in (
        qwen2_vl, qwen2_5_vl, qwen3_vl, gemma3, llava, llava_next, pixtral, idefics3, internvl,
        llama4, glm4v,
    )
}  # fmt: skip

OPTIONS: dict[str, dict[str, Any]] = {"gemma3_pan_and_scan": {"do_pan_and_scan": True}}
"""Options of every call, by the name of the processor."""

NAMES = (*FAMILIES, *OPTIONS)


def make(name: str, directory: Path = EXAMPLE, template: str | None = TEMPLATE) -> Any:
    """Make a processor of `NAMES` with a template that prints its image token per image."""
    processor = FAMILIES[name.partition("_pan_")[0]](directory)
    if template is not None:
        processor.chat_template = template.replace("IMAGE_TOKEN", processor.image_token)
    return processor
