"""Images that rows refer to, and the processor that turns them into tokens and pixels.

Importing this package loads neither Pillow nor transformers; using it needs the extra ``vision``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill._core.optional import lazy_exports

if TYPE_CHECKING:
    from tokenmill.media.images import ImageFacts as ImageFacts
    from tokenmill.media.images import Images as Images
    from tokenmill.media.images import Limits as Limits
    from tokenmill.media.probe import ImageExpansion as ImageExpansion
    from tokenmill.media.probe import RowExpansion as RowExpansion
    from tokenmill.media.probe import Size as Size
    from tokenmill.media.processor import Expanded as Expanded
    from tokenmill.media.processor import ExpansionMismatch as ExpansionMismatch
    from tokenmill.media.processor import Processor as Processor
    from tokenmill.media.reference import Reference as Reference
    from tokenmill.media.reference import reference_from_text as reference_from_text
    from tokenmill.media.reference import reference_of as reference_of

_EXPORTS = {
    "probe": "ImageExpansion RowExpansion Size",
    "images": "Limits ImageFacts Images",
    "processor": "ExpansionMismatch Expanded Processor",
    "reference": "Reference reference_from_text reference_of",
}

__all__ = sorted(" ".join(_EXPORTS.values()).split())
__getattr__ = lazy_exports(__name__, **_EXPORTS)
