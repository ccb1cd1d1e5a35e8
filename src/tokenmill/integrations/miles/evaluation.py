"""Evaluation sets of miles and slime, read row by row.

The hosts' evaluation makes a `Dataset` of every set of ``--eval-prompt-data`` or ``--eval-config``
and walks its ``samples``. They name that class nowhere but in their code, in several modules, and
`serve_evaluation` puts `EvalDataset` in its place in the process of the data source, which is that
of the rollouts. Which prompts a set has, their texts and their order are the host's.
"""

from __future__ import annotations

import copy
import importlib
import logging
import sys
from typing import Any

from tokenmill.integrations.hosts import date_named
from tokenmill.integrations.miles.host import Host, HostFlags
from tokenmill.origin import nothing_left
from tokenmill.prompts import Prompt, PromptDataset

logger = logging.getLogger(__name__)


class EvalDataset:
    """What a host's evaluation asks of its dataset, over prompts that are not in memory.

    Args:
        path: The set.
        tokenizer: The host's, not needed: its flags say whose it is.
        processor: The host's, for prompts with media.
        max_length: Tokens that a prompt may have; None: any.
        described: The host's names of columns and its template's variables.

    Attributes:
        host: The framework.
        settings: Its flags.
        replaced: The class that this stands for.
    """

    host: Host
    settings: HostFlags
    replaced: Any

    def __init__(
        self, path: str, tokenizer: Any, processor: Any, max_length: int | None, **described: Any
    ) -> None:
        described["metadata_key"] = described.get("metadata_key") or "metadata"
        with date_named(self.settings.hf_checkpoint):
            self.prompts = PromptDataset(
                path,
                processor=processor,
                max_length=max_length,
                convention=self.host.name,
                **{**self.settings.tokenizer, **described},
            )
        if not len(self.prompts):
            rejected = self.prompts.rejected_rows()
            raise nothing_left("prompt", self.prompts.rejected, rejected, str(path))
        if self.prompts.rejected:
            logger.warning("prompts of %s that are not served: %s", path, self.prompts.rejected)

    @property
    def samples(self) -> EvalDataset:
        """The host's samples, made as they are asked for."""
        return self

    def __len__(self) -> int:
        return len(self.prompts)

    def __getitem__(self, number: int) -> Any:
        return host_sample(self.host, self.prompts[number])


def host_sample(host: Host, prompt: Prompt) -> Any:
    """A sample of the host's, which shares nothing with any other: rollouts write into them."""
    return host.sample(
        prompt=copy.deepcopy(prompt.prompt),
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(prompt.metadata),
        multimodal_inputs=copy.deepcopy(prompt.multimodal_inputs),
    )


def serve_evaluation(host: Host, settings: HostFlags) -> None:
    """Put `EvalDataset` where the host's code, loaded or not, finds its dataset class."""
    home = importlib.import_module(f"{host.name}.utils.data")
    theirs = getattr(home.Dataset, "replaced", home.Dataset)
    names = {"host": host, "settings": settings, "replaced": theirs}
    ours = type("Dataset", (EvalDataset,), names)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == host.name:
            found = vars(module).get("Dataset")
            if found is not None and getattr(found, "replaced", found) is theirs:
                module.Dataset = ours  # type: ignore[attr-defined]
