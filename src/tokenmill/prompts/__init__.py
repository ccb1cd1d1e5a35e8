"""RL prompts: a light row index, a stored length per row, a view in an order.

`PromptDataset` is the lazy twin of the eager prompt dataset of miles and slime: same arguments,
same answers, but opening it costs milliseconds once the lengths are known, and reading a prompt
reads, parses and renders that one row. A `Prompt` is what it gives. `PromptSpec` is the part of
the arguments that shapes a row; `shape_row` and `PromptMaker` are the one definition of what a
row's prompt is, used alike where lengths are measured and where prompts are served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.prompts.dataset import PromptDataset
    from tokenmill.prompts.rendering import PromptMaker
    from tokenmill.prompts.shaping import Prompt, shape_row
    from tokenmill.prompts.spec import PromptSpec

__all__ = ["Prompt", "PromptDataset", "PromptMaker", "PromptSpec", "shape_row"]

__getattr__ = first_use(
    __name__,
    dataset="PromptDataset",
    rendering="PromptMaker",
    shaping="Prompt shape_row",
    spec="PromptSpec",
)
