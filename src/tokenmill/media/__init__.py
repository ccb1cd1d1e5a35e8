"""Images that rows refer to, and the processor that turns them into tokens and pixels.

Importing this package loads neither Pillow nor transformers; using it needs the extra ``vision``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._core.optional import lazy_exports

if TYPE_CHECKING:
    from tokenmill.media.images import ImageFacts, Images, Limits
    from tokenmill.media.probe import ImageExpansion, RowExpansion, Size
    from tokenmill.media.processor import Expanded, ExpansionMismatch, Processor, Referenced
    from tokenmill.media.reference import Reference, reference_from_text, reference_of

__all__ = [
    "Expanded",
    "ExpansionMismatch",
    "ImageExpansion",
    "ImageFacts",
    "Images",
    "Limits",
    "Processor",
    "Reference",
    "Referenced",
    "RowExpansion",
    "Size",
    "reference_from_text",
    "reference_of",
]

__getattr__ = lazy_exports(
    __name__,
    probe="ImageExpansion RowExpansion Size",
    images="Limits ImageFacts Images",
    processor="ExpansionMismatch Expanded Processor Referenced",
    reference="Reference reference_from_text reference_of",
)
