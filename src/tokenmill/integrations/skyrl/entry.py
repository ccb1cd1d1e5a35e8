"""The Ray task of our ways into SkyRL's programs, `main_sft` and `main_base`.

SkyRL parses its arguments on the head node and trains in a Ray task, which on another node, or in
a cluster that was there before, does not have the environment of the command line. `as_task` sends
what tokenmill reads of it along.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_OURS = "TOKENMILL_"


def as_task(function: Callable[..., None]) -> Any:
    """A Ray task of one CPU, as SkyRL's own are, with our variables of this environment."""
    import ray

    ours = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    return ray.remote(num_cpus=1, runtime_env={"env_vars": ours})(function)
