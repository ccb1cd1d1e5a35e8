"""A mixture from its recipe, and what it will serve, before anything runs.

`open_mixture` reads ``mix.yaml``, the arguments of `tokenmill.mix`, opens the stores that it names
and mixes them. The same file plans a run (``tokenmill mix``) and makes the data of one, so what was
looked at is what is trained.

    sources: {chat: stores/chat, code: stores/code}
    weights: {chat: 0.7, code: 0.3}
    by: rows
    exhausted: repeat

`mixture_plan` gives the planned share of every source over a number of samples and over each of a
few stretches of them. The counts are the very ones that `tokenmill.Loader` serves, a function of
the position: nothing is drawn or read, so a billion samples are planned as quickly as ten.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenmill.build.recipe import read_yaml
from tokenmill.dataset import Mixture, mix
from tokenmill.errors import UsageError
from tokenmill.options import refuse_unknown
from tokenmill.store import open_store

_NAMES = ("sources", "weights", "by", "exhausted")
STRETCHES = 20  # lines of the drawing


def open_mixture(path: str | os.PathLike[str]) -> Mixture:
    """The mixture that a recipe describes; relative paths of stores are relative to the file."""
    path = Path(path)
    document = read_yaml(path)
    refuse_unknown(document, _NAMES, "names", path=path)
    sources = document.pop("sources", None)
    if not isinstance(sources, dict) or not all(
        isinstance(name, str) and isinstance(store, str) for name, store in sources.items()
    ):
        raise UsageError("sources are stores by name: {chat: path/to/store, …}", path=path)
    if not isinstance(document.get("weights", {}), dict):
        raise UsageError("weights are numbers by the name of a source", path=path)
    opened = {name: open_store(_beside(path, store)) for name, store in sources.items()}
    given: dict[str, Any] = document
    return mix(opened, **given)


def _beside(recipe: Path, store: str) -> str:
    return store if "://" in store else str(recipe.parent / Path(store).expanduser())


def mixture_plan(mixture: Mixture, steps: int, batch_size: int) -> dict[str, Any]:
    """Planned shares of rows, over all steps and stretches of them; a batch is of all ranks."""
    grouped = mixture.view.has_groups  # a sample is then a group, as for `tokenmill.Loader`
    schedule = mixture.schedule(grouped)
    ends = sorted({steps * part // STRETCHES for part in range(STRETCHES + 1)})
    counts = [schedule.served(*divmod(end * batch_size, schedule.rows)) for end in ends]
    stretches = [
        {
            "first_step": first,
            "stop_step": stop,
            "shares": _shares(mixture, [b - a for a, b in zip(before, behind, strict=True)]),
        }
        for (first, stop), (before, behind) in zip(pairwise(ends), pairwise(counts), strict=True)
    ]
    rows = dict(zip(mixture.names, counts[-1], strict=True))
    return {
        "shares": _shares(mixture, counts[-1]),
        "rows": rows,
        "passes": {
            name: round(rows[name] / size, 6)
            for name, size in zip(mixture.names, mixture.sizes(grouped), strict=True)
        },
        "steps": steps,
        "batch_size": batch_size,
        "samples": steps * batch_size,
        "stretches": stretches,
    }


def _shares(mixture: Mixture, counts: list[int]) -> dict[str, float]:
    total = sum(counts)
    return {
        name: round(count / total, 6) for name, count in zip(mixture.names, counts, strict=True)
    }
