"""tokenmill as a dataset of torchtune's recipes.

    dataset:
      _component_: tokenmill.integrations.torchtune.sft_dataset
      source: STORE
      packed: True

`sft_dataset` is called by torchtune with its tokenizer, as its own builders of datasets are.
`TokenizedRows` are the rows it serves: ids, and labels as torchtune's loss reads them.
"""

from __future__ import annotations

from tokenmill.optional import optional

with optional("torch"):
    from tokenmill.integrations.torchtune.dataset import TokenizedRows, sft_dataset

    __all__ = ["TokenizedRows", "sft_dataset"]
