"""Which of miles and slime is the host, and what is taken from it.

A `Host` is the framework's name, its `Sample` class and the few functions of its own that only it
can answer for (loading a processor, a function by its dotted path). The framework that the process
has already loaded is the host; else the first of the two that can be imported. Nothing here is
looked for before a data source is made, so importing tokenmill's adapter needs neither.

`HostFlags` reads the host's flags: every name is theirs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any, Literal

from tokenmill.errors import UsageError, check_one_of
from tokenmill.integrations.hosts import stated_date

HOSTS: tuple[Literal["miles", "slime"], ...] = ("miles", "slime")
EVALUATION = "TOKENMILL_EVAL"
ORDER = "TOKENMILL_ORDER"
STORE = "TOKENMILL_STORE"
TURN_END = "TOKENMILL_TURN_END"


@dataclass(frozen=True)
class Host:
    """The framework that runs us.

    Attributes:
        name: ``miles`` or ``slime``.
        sample: Its `Sample` class.
    """

    name: Literal["miles", "slime"]
    sample: Any

    def load_processor(self, checkpoint: str) -> Any:
        """What the host loads beside a tokenizer for multimodal models, or None."""
        return self._tools().load_processor(checkpoint, trust_remote_code=True)

    def load_tokenizer(self, checkpoint: str, template: str | None) -> Any:
        """The host's own tokenizer, for the details that it dumps."""
        options = {} if template is None else {"chat_template_path": template}
        return self._tools().load_tokenizer(checkpoint, trust_remote_code=True, **options)

    def _tools(self) -> Any:
        return importlib.import_module(f"{self.name}.utils.processing_utils")


def find_host() -> Host:
    """The host of this process.

    Raises:
        UsageError: Neither miles nor slime is there.
    """
    loaded = [name for name in HOSTS if f"{name}.utils.types" in sys.modules]
    reasons = []
    for name in [*loaded, *(name for name in HOSTS if name not in loaded)]:
        try:
            return Host(name, importlib.import_module(f"{name}.utils.types").Sample)
        except (ImportError, AttributeError) as error:
            reasons.append(f"{name}: {error}")
    raise UsageError(f"this needs miles or slime beside tokenmill ({'; '.join(reasons)})")


def load_function(path: str) -> Any:
    """A function by its dotted path, as the hosts' flags name one."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{path!r} cannot be imported: {error}") from error


@dataclass(frozen=True)
class HostFlags:
    """The host's flags, as far as data is concerned.

    Args:
        args: The namespace of its command line.
    """

    args: Any

    def __getattr__(self, name: str) -> Any:
        # A flag that one host has and the other has not is as good as not given.
        return getattr(self.args, name, None)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """``--apply-chat-template-kwargs``."""
        value = self.apply_chat_template_kwargs
        value = json.loads(value) if isinstance(value, str) else value
        return dict(value or {})

    @property
    def order(self) -> str:
        """``miles``: what the host's own source would give; ``feistel`` chooses tokenmill's."""
        return os.environ.get(ORDER) or "miles"

    @property
    def lazy_evaluation(self) -> bool:
        """Whether evaluation sets are read by us, too: the hosts have no flag for their class."""
        said = os.environ.get(EVALUATION) or "0"
        check_one_of(EVALUATION, said, ("0", "1"))
        return said == "1"

    @property
    def turn_end(self) -> Any:
        """``turn``: the hosts train what a template prints after the closer, too."""
        return os.environ.get(TURN_END) or "turn"

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Whose tokenizer and template, in tokenmill's names."""
        return {
            "tokenizer": self.hf_checkpoint,
            "tokenizer_backend": "transformers",
            "trust_remote_code": True,
            "chat_template": self.chat_template_path,
            "date": stated_date(),
        }
