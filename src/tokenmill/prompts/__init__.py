"""RL prompts that are read when they are served.

`PromptDataset` takes the arguments of the eager prompt datasets of miles and slime and gives the
same prompts. Once the lengths are known, opening it takes milliseconds, and a prompt is read,
parsed and rendered when it is indexed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.prompts.prompt_rows import Prompt, PromptMaker, PromptSpec, shape_row
    from tokenmill.prompts.prompts import PromptDataset

__all__ = ["Prompt", "PromptDataset", "PromptMaker", "PromptSpec", "shape_row"]

__getattr__ = first_use(
    __name__, prompts="PromptDataset", prompt_rows="Prompt PromptMaker PromptSpec shape_row"
)
