"""tokenmill in the shapes of Megatron-LM.

Megatron's GPT dataset reads tokens and trains all of them; its SFT dataset tokenizes conversations
by itself. `SFTDataset` stands beside them: built by the same builder from the same configuration,
it serves packs of a store's rows with their stored masks, in our order. `PackedSamples` is what it
is made of and needs no Megatron: the sample with a number, as arrays.

Importing `SFTDataset` needs ``megatron.core``; the store needs no export.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.integrations.megatron.samples import PackedSamples
from tokenmill.optional import first_use

if TYPE_CHECKING:
    from tokenmill.integrations.megatron.dataset import SFTDataset

__all__ = ["PackedSamples", "SFTDataset"]

__getattr__ = first_use(__name__, dataset="SFTDataset")
