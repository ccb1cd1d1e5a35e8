"""Who the tokenizer is, without loading one in the parent.

`identity_card` recalls the card from the cache's memo. Where it is not remembered, finding out
costs seconds and engines: for anything that has a path or a name that is a task for the executor
like any other, and only the card travels back. A tokenizer given as an object exists only here, so
it is looked at here.

With ``tokenizer_backend="auto"`` finding out also means importing transformers and asking
AutoTokenizer, which takes longer than all the rest and nearly always says "alike". So a local
executor builds meanwhile with the card of the file: a `Comparison` runs beside it, and nothing is
committed or returned before it agreed.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenmill.build.executors import Executor, LocalExecutor, Setup, Task
from tokenmill.build.recipe import Recipe
from tokenmill.errors import TokenizerError, WorkerError
from tokenmill.tokenizer import IdentityCard, recall, remember, remember_card

IDENTIFY = "tokenmill.build.identify:open_identifier"
COMPARE = "tokenmill.build.identify:open_comparer"


class Comparison:
    """AutoTokenizer being asked in a process of its own, while the caller goes on.

    Args:
        arguments: Of `tokenmill.tokenizer.load`, with ``source``.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._arguments = arguments
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._compare, daemon=True)
        self._thread.start()

    def _compare(self) -> None:
        try:
            # Not pinned: it takes whatever core the builders leave.
            _ask(LocalExecutor(1, pin=False), COMPARE, self._arguments)
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what was found so far, if anything is wrong."""
        if self._error is not None:
            raise self._error

    def agree(self, card: IdentityCard, cache_dir: Path) -> None:
        """Wait for the answer; raise if it is not "alike", else remember it for the next call."""
        self._thread.join()
        self.check()
        remember_card(card, cache_dir=cache_dir, **self._arguments)


def identity_card(
    recipe: Recipe, cache_dir: Path, executor: Executor
) -> tuple[IdentityCard, Comparison | None]:
    """The card of a recipe's tokenizer, and what must still agree; its copy is in the cache."""
    arguments: dict[str, Any] = {
        "backend": recipe.tokenizer_backend,
        "chat_template": recipe.chat_template,
        "trust_remote_code": recipe.trust_remote_code,
    }
    if not isinstance(recipe.tokenizer, str | os.PathLike):
        from tokenmill.tokenizer import load  # here: a parent that only asks must not pay for it

        tokenizer = load(recipe.tokenizer, **arguments)
        remember(tokenizer, cache_dir)
        return tokenizer.card, None
    card = recall(recipe.tokenizer, cache_dir=cache_dir, **arguments)
    if card is not None and (cache_dir / "tokenizers" / card.key).is_dir():
        return card, None
    arguments["source"] = os.fspath(recipe.tokenizer)
    payload = {**arguments, "cache_dir": str(cache_dir)}
    if isinstance(executor, LocalExecutor) and recipe.tokenizer_backend == "auto":
        comparison = Comparison(arguments)
        # Without a tokenizer.json there is nothing to build with before AutoTokenizer answers.
        with contextlib.suppress(TokenizerError):
            found = _ask(executor, IDENTIFY, {**payload, "backend": "file"})
            return IdentityCard.from_dict(found), comparison
    return IdentityCard.from_dict(_ask(executor, IDENTIFY, payload)), None


def _ask(executor: Executor, entry: str, payload: dict[str, Any]) -> dict[str, Any]:
    # A local worker is a process of our own; whatever else runs tasks may go on to other work.
    setup = Setup(entry, {"own_process": isinstance(executor, LocalExecutor)})
    with contextlib.closing(  # type: ignore[type-var]
        executor.run(setup, [Task(0, payload, "tokenizer")])
    ) as finished:
        for done in finished:
            return done.result
    raise WorkerError("no worker looked at the tokenizer")


def open_identifier(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Entry for executors: returns the function that finds out who a tokenizer is."""

    def identify_one(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.tokenizer import reload

        with _without_torch(options, payload):
            # Not `identify`: that is content with a memo, and the cache's copy may be gone.
            return reload(payload.pop("source"), **payload).card.as_dict()

    return identify_one


def open_comparer(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Entry for executors: returns the function that asks AutoTokenizer, and only that."""

    def compare_one(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.tokenizer import load

        with _without_torch(options, payload):
            load(payload.pop("source"), **payload)  # raises where it is ambiguous who encodes
        return {}

    return compare_one


def _without_torch(
    options: dict[str, Any], payload: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    from tokenmill.tokenizer.transformers_door import without_torch

    quick = options["own_process"] and not payload["trust_remote_code"]
    return without_torch() if quick else contextlib.nullcontext()
