"""Images that rows refer to, and the processor that turns them into tokens and pixels.

A `Reference` says where an image is; `reference_of` parses what a row says. `Pictures` reads
references within `Limits`: ``read`` gives the bytes, ``facts`` digest and size, ``open`` the
pixels. A `Processor` wraps the user's processor of transformers. Sizes are (width, height), of all
images of a row, in order.

An unusable image is a `RowError` with reason ``bad_media``; a number of images that differs from
the number of image tokens has ``media_mismatch``. A server that does not answer, or a file that is
being written, is a `SourceError`. Videos are refused; frames of a video are images like others.

Importing this package loads neither Pillow nor transformers; using it needs the extra ``vision``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._core.optional import first_use

if TYPE_CHECKING:
    from tokenmill.media.asking import Answer, Answers, Size
    from tokenmill.media.pictures import Limits, PictureFacts, Pictures
    from tokenmill.media.processor import Expanded, ExpansionDiffers, Processor, Referenced
    from tokenmill.media.reference import Reference, reference_from_text, reference_of

__all__ = [
    "Answer",
    "Answers",
    "Expanded",
    "ExpansionDiffers",
    "Limits",
    "PictureFacts",
    "Pictures",
    "Processor",
    "Reference",
    "Referenced",
    "Size",
    "reference_from_text",
    "reference_of",
]

__getattr__ = first_use(
    __name__,
    asking="Answer Answers Size",
    pictures="Limits PictureFacts Pictures",
    processor="ExpansionDiffers Expanded Processor Referenced",
    reference="Reference reference_from_text reference_of",
)
