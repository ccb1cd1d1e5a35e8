"""Images that rows refer to, and the processor that turns them into tokens and pixels.

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
