"""Who the tokenizer is, without loading one in the parent.

`identity_card` recalls the card from the cache's memo. Where it is not remembered, finding out
costs seconds and engines (and, for ``auto``, transformers): for anything that has a path or a name
that is a task for the executor like any other, and only the card travels back. A tokenizer given as
an object exists only here, so it is looked at here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.build.executors import Executor, LocalExecutor, Setup, Task
from tokenmill.build.recipe import Recipe
from tokenmill.errors import WorkerError
from tokenmill.tokenizer import IdentityCard, load, recall, remember

ENTRY = "tokenmill.build.identify:open_identifier"


def identity_card(recipe: Recipe, cache_dir: Path, executor: Executor) -> IdentityCard:
    """The card of a recipe's tokenizer; afterwards its copy is in the cache."""
    arguments: dict[str, Any] = {
        "backend": recipe.tokenizer_backend,
        "chat_template": recipe.chat_template,
        "trust_remote_code": recipe.trust_remote_code,
    }
    if not isinstance(recipe.tokenizer, str | os.PathLike):
        tokenizer = load(recipe.tokenizer, **arguments)
        remember(tokenizer, cache_dir)
        return tokenizer.card
    card = recall(recipe.tokenizer, cache_dir=cache_dir, **arguments)
    if card is not None and (cache_dir / "tokenizers" / card.key).is_dir():
        return card
    payload = {"source": os.fspath(recipe.tokenizer), "cache_dir": str(cache_dir), **arguments}
    # A local worker is a process of our own; whatever else runs tasks may go on to other work.
    setup = Setup(ENTRY, {"own_process": isinstance(executor, LocalExecutor)})
    with contextlib.closing(  # type: ignore[type-var]
        executor.run(setup, [Task(0, payload, "tokenizer")])
    ) as finished:
        for done in finished:
            return IdentityCard.from_dict(done.result)
    raise WorkerError("no worker looked at the tokenizer")


def open_identifier(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Entry for executors: returns the function that identifies one tokenizer."""

    def identify_one(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.tokenizer import reload
        from tokenmill.tokenizer.transformers_door import without_torch

        quick = options["own_process"] and not payload["trust_remote_code"]
        with without_torch() if quick else contextlib.nullcontext():
            # Not `identify`: that is content with a memo, and the cache's copy may be gone.
            return reload(payload.pop("source"), **payload).card.as_dict()

    return identify_one
