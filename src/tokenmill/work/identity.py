"""Who the tokenizer is, without loading one in the parent.

`identity_card` recalls the card from the cache's memo. Where it is not remembered, finding out
costs seconds and engines: for anything that has a path or a name that is a task for the executor
like any other, and only the card travels back. A tokenizer given as an object exists only here, so
it is looked at here.

With ``tokenizer_backend="auto"`` finding out also means importing transformers and asking
AutoTokenizer, which takes longer than all the rest and nearly always says "alike". So a local
executor builds meanwhile with the card of the file: a `Comparison` runs beside it, and nothing is
committed or returned before it agreed.

Processes and threads that meet a tokenizer at the same time claim the question: one asks, the
others wait for what it remembers. As with slices, a claim saves work and nothing depends on it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tokenmill.errors import (
    CacheError,
    CorruptionError,
    TokenizerError,
    TokenmillError,
    WorkerError,
)
from tokenmill.tokenizer import (
    IdentityCard,
    recall,
    remember,
)
from tokenmill.work.local import LocalExecutor
from tokenmill.work.tasks import Done, Executor, Setup, Task, run_tasks

if TYPE_CHECKING:
    from tokenmill.tokenizer import Tokenizer

IDENTIFY = "tokenmill.work.identity:open_identifier"
COMPARE = "tokenmill.work.identity:open_comparer"
POLL_S = 0.05  # seconds between looks at what another process was asked

Found = TypeVar("Found")


class TokenizerChoice(Protocol):
    """Whatever says which tokenizer is meant: a recipe, a request for a length index."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def tokenizer_backend(self) -> str: ...
    @property
    def chat_template(self) -> Any: ...
    @property
    def trust_remote_code(self) -> bool: ...


def identity_card(choice: TokenizerChoice, cache_dir: Path, executor: Executor) -> IdentityCard:
    """Return the card of the chosen tokenizer; its copy is in the cache."""
    arguments: dict[str, Any] = {
        "backend": choice.tokenizer_backend,
        "chat_template": choice.chat_template,
        "trust_remote_code": choice.trust_remote_code,
    }
    if not isinstance(choice.tokenizer, str | os.PathLike):
        from tokenmill.tokenizer import load  # here: a parent that only asks must not pay for it

        tokenizer = load(choice.tokenizer, **arguments)
        remember(tokenizer, cache_dir)
        return tokenizer.card
    # Whoever looks at it may have another working directory.
    arguments["source"] = absolute(os.fspath(choice.tokenizer))
    arguments["chat_template"] = absolute(choice.chat_template)
    card = recall(cache_dir=cache_dir, **arguments)
    if card is not None and (cache_dir / "tokenizers" / card.key).is_dir():
        return card
    payload = {**arguments, "cache_dir": str(cache_dir)}
    return IdentityCard.from_dict(ask_worker(executor, IDENTIFY, payload))


def absolute(name: Any) -> Any:
    """A path that exists as an absolute one; hub ids, template sources and the like stay."""
    if not isinstance(name, str | os.PathLike):
        return name
    try:
        return os.path.abspath(name) if os.path.exists(name) else name
    except (OSError, ValueError):  # a template's source is no name of a file
        return name


def ask_worker(executor: Executor, entry: str, payload: dict[str, Any]) -> dict[str, Any]:
    """What one worker answers to one question about a tokenizer or processor."""
    # A local worker is a process of our own; whatever else runs tasks may go on to other work.
    options = {"own_process": isinstance(executor, LocalExecutor)}
    shared = (payload["cache_dir"],) if "cache_dir" in payload else ()
    setup = Setup(entry, options, shared=shared, near_caller=True)
    answers: list[Done] = []
    run_tasks(executor, setup, [Task(0, payload, "tokenizer")], answers.append)
    if not answers:
        raise WorkerError("no worker looked at the tokenizer")
    return answers[0].result


def load_copy(path: Path, card: dict[str, Any]) -> Tokenizer:
    """Load the cache's copy of a tokenizer, refused unless it is the one the keys were made of.

    A copy is kept by what it does, so it may be of another spelling than the card is: what
    AutoTokenizer writes of a tokenizer.json has other bytes. Such a copy has to prove its identity.

    Raises:
        CorruptionError: The copy is damaged: its tokens would be published under a wrong key.
        CacheError: The copy cannot be read.
    """
    from tokenmill.tokenizer import load, share_table  # here: the parent loads no engine

    file = path / "tokenizer.json"
    try:
        tokenizer = load(path, backend="file")
        stated = card["checksum"], card["template"], card["special_tokens"]
        found = tokenizer.checksum, tokenizer.template, tokenizer.special_tokens
        is_the_one = found == stated or tokenizer.key == card["key"]
    except TokenizerError as error:
        raise CorruptionError(f"the tokenizer's copy: {error.message}", path=file) from error
    except TokenmillError:
        raise
    except OSError as error:  # a disk that cannot read it is the cache's trouble, not a worker's
        raise CacheError(
            f"the tokenizer's copy cannot be read: {error.strerror}; run the command again",
            path=path,
        ) from error
    if not is_the_one:
        raise CorruptionError("the tokenizer's copy is not what was written", path=file)
    share_table(tokenizer, path.parent.parent)
    return tokenizer


def open_identifier(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Entry for executors: returns the function that finds out who a tokenizer is."""

    def identify_one(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.tokenizer import reload

        with _lightly(options, payload):
            # Not `identify`: that is content with a memo, and the cache's copy may be gone.
            return reload(payload.pop("source"), **payload).card.as_dict()

    return identify_one


def _lightly(
    options: dict[str, Any], payload: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """In a process of our own that ends afterwards, go without torch, which only costs time."""
    from tokenmill.tokenizer.auto_tokenizer import without_torch

    quick = options["own_process"] and not payload["trust_remote_code"]
    return without_torch() if quick else contextlib.nullcontext()
