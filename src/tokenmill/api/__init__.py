"""The public functions: each turns names into objects, then calls one room.

`recipes` holds what is made from sources (`prepare`, `prepare_part`, `open_rows`, `lint`) with what
the command line needs of it (`run_recipe`, `run_part`, `explain_recipe`); `elsewhere` what is
handed on (`to_hf`, `export`, `push`, `pull`); `rollouts` what is done with recorded ones. Hosts'
libraries are loaded when they are asked for, so importing this package stays light; what
integrations register is known from here on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tokenmill.integrations  # noqa: F401 - registers executor="ray"
from tokenmill.api.elsewhere import export, pull, push, to_hf
from tokenmill.api.recipes import (
    explain_recipe,
    lint,
    open_rows,
    prepare,
    prepare_part,
    resolve_call,
    run_part,
    run_recipe,
)
from tokenmill.api.rollouts import check_rollouts, from_rollouts

if TYPE_CHECKING:
    from tokenmill.prompts import PromptDataset

__all__ = [
    "PromptDataset",
    "check_rollouts",
    "explain_recipe",
    "export",
    "from_rollouts",
    "lint",
    "open_rows",
    "prepare",
    "prepare_part",
    "pull",
    "push",
    "resolve_call",
    "run_part",
    "run_recipe",
    "to_hf",
]


def __getattr__(name: str) -> Any:
    if name != "PromptDataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tokenmill.prompts import PromptDataset

    return PromptDataset
