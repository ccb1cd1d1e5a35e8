"""The public functions: each turns names into objects, then calls one room.

`recipes` holds what is made from sources (`prepare`, `prepare_part`, `open_rows`, `lint`) with what
the command line needs of it (`run_recipe`, `run_part`, `explain_recipe`); `elsewhere` what is
given to others (`to_hf`, `export`, `push`, `pull`). Integrations are reached by name at run time,
so importing this package stays light.
"""

from tokenmill.api.elsewhere import export, pull, pull_store, push, to_hf
from tokenmill.api.recipes import (
    explain_recipe,
    lint,
    open_rows,
    prepare,
    prepare_part,
    resolve_call,
    resolve_executor,
    run_part,
    run_recipe,
)

__all__ = [
    "explain_recipe",
    "export",
    "lint",
    "open_rows",
    "prepare",
    "prepare_part",
    "pull",
    "pull_store",
    "push",
    "resolve_call",
    "resolve_executor",
    "run_part",
    "run_recipe",
    "to_hf",
]
