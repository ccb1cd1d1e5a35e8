"""What our ways into SkyRL's programs share: the Ray task, and the date.

SkyRL parses its arguments on the head node and trains in a Ray task, which on another node, or in
a cluster that was there before, does not have the environment of the command line. `as_task` sends
what tokenmill reads of it along.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tokenmill.chat.template import REMEDY
from tokenmill.errors import TemplateError

DATE_VARIABLE = "TOKENMILL_DATE"
_OURS = "TOKENMILL_"


def as_task(function: Callable[..., None]) -> Any:
    """A Ray task of one CPU, as SkyRL's own are, with our variables of this environment."""
    import ray

    ours = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    return ray.remote(num_cpus=1, runtime_env={"env_vars": ours})(function)


def stated_date() -> str | None:
    """The date for templates that print it, which SkyRL has no name for."""
    return os.environ.get(DATE_VARIABLE) or None


@contextmanager
def date_named(tokenizer: Any) -> Iterator[None]:
    """Where a template is refused for printing the date, say how it is pinned here."""
    try:
        yield
    except TemplateError as error:
        if REMEDY not in error.message:
            raise
        raise TemplateError(
            f"the template of {tokenizer} prints the date: pin it in the environment, "
            f"{DATE_VARIABLE}=2026-11-15"
        ) from error
