"""Pictures that rows refer to, and the processor that turns them into tokens and pixels.

This room knows nothing of rows, chat or stores. Three nouns:

- A `Reference` says where a picture is; `reference_of` reads what a row says of one, without
  looking anywhere, and `reference_from_text` what a store kept of it (`Reference.text`).
- `Pictures` reads references within stated bounds (`Limits`): `read(reference, base)` gives the
  bytes, `facts(data)` the digest and the size that the processor will see (`PictureFacts`), from
  the header where that is certain, and `open(data)` the pixels as ``load_image`` of transformers
  would. ``name=`` of both is what a refusal calls the picture.
- A `Processor` is the user's own processor of transformers: `Processor.load(directory | hub id |
  object)`. `expand(text, sizes)` gives the text that it hands to its tokenizer, and the character
  ranges of the expansions; `learned(sizes)` the expansions and grids themselves, what a row costs
  the vision model, and how that was found out. `reference(text, pictures)` runs it whole, with
  pixels, and `features(rows)` gives a batch's pixels under the model's names; `joined` says which
  of them are the rows' own end to end, `token_types` which token is a picture's. `identity` and
  `key` name it by what it does. Who sees an expansion differ from the reference calls `distrust`.

Sizes are (width, height) as in `PictureFacts`, always of all pictures of a row, in order.

Whatever is wrong with a picture is a `RowError` with reason ``bad_media``, more or fewer pictures
than places for them ``media_mismatch``; the message names the picture, the caller adds the row. A
server that does not answer, or a file that is just being written, is a `SourceError`: it says
nothing about the row. Videos are refused by name; the frames of one are pictures like others.

Importing this package loads neither Pillow nor transformers; using it needs the extra ``vision``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optional import first_use

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
