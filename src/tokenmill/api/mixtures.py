"""A mixture from its recipe: ``mix.yaml`` with the arguments of `tokenmill.mix`.

`open_mixture` reads the file, opens the stores that it names and mixes them. The same file plans a
run (``tokenmill mix``) and makes the data of one, so what was looked at is what is trained.

    sources: {chat: stores/chat, code: stores/code}
    weights: {chat: [[0, 0.9], [1000000, 0.5]], code: [[0, 0.1], [1000000, 0.5]]}
    by: rows
    exhausted: repeat
    schedule_by: samples
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.errors import UsageError
from tokenmill.options import refuse_unknown

if TYPE_CHECKING:
    from tokenmill.dataset import Mixture

_NAMES = ("sources", "weights", "by", "exhausted", "schedule_by")


def open_mixture(path: str | os.PathLike[str]) -> Mixture:
    """The mixture that a recipe describes; relative paths of stores are relative to the file."""
    from tokenmill.build.recipe import read_yaml
    from tokenmill.dataset import mix
    from tokenmill.store import open_store

    path = Path(path)
    document = read_yaml(path)
    refuse_unknown(document, _NAMES, "names", path=path)
    sources = document.pop("sources", None)
    if not isinstance(sources, dict) or not all(
        isinstance(name, str) and isinstance(store, str) for name, store in sources.items()
    ):
        raise UsageError("sources are stores by name: {chat: path/to/store, …}", path=path)
    if not isinstance(document.get("weights", {}), dict):
        raise UsageError("weights are numbers or points by the name of a source", path=path)
    opened = {name: open_store(_beside(path, store)) for name, store in sources.items()}
    given: dict[str, Any] = document
    return mix(opened, **given)


def _beside(recipe: Path, store: str) -> str:
    return store if "://" in store else str(recipe.parent / Path(store).expanduser())
