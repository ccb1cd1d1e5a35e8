"""SkyRL's ``skyrl.train.entrypoints.main_base`` with prompts opened by tokenmill."""

from __future__ import annotations

import sys
from typing import Any

from tokenmill._core.optional import optional
from tokenmill.integrations.skyrl.data import PromptDataset, as_task

with optional("skyrl", "this program"):
    from skyrl.train.entrypoints import main_base as original

_SKYRL_TASK = original.skyrl_entrypoint  # before `main` replaces it
_OVERRIDE = "trainer.override_entrypoint="


def skyrl_entrypoint(cfg: Any) -> None:
    """The body of SkyRL's Ray task, with our prompts where it looks for its own."""
    original.PromptDataset = PromptDataset
    _SKYRL_TASK._function(cfg)


def main() -> None:
    # Otherwise SkyRL's `main` would call this one again.
    sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith(_OVERRIDE)]
    original.skyrl_entrypoint = as_task(skyrl_entrypoint)
    original.main()


if __name__ == "__main__":
    # Not this module's `main`: Ray pickles functions of __main__ by value, without their globals.
    from tokenmill.integrations.skyrl import main_base

    main_base.main()
