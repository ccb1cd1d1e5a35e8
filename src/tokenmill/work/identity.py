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
import threading
import time
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
    answer_key,
    is_installed,
    locate,
    memo_key,
    recall,
    recall_answer,
    remember,
    remember_card,
)
from tokenmill.work.claims import Claims
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


class Comparison:
    """AutoTokenizer being asked in a process of its own, while the caller goes on."""

    def __init__(self, arguments: dict[str, Any], cache_dir: Path, name: str) -> None:
        self._arguments = arguments
        self._cache_dir = cache_dir
        self._name = name
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._compare, daemon=True)
        self._thread.start()

    def _compare(self) -> None:
        def ask() -> None:
            payload = {**self._arguments, "cache_dir": str(self._cache_dir)}
            # Not pinned: it takes whatever core the builders leave.
            ask_worker(LocalExecutor(1, pin=False), COMPARE, payload)

        try:
            answer = _once(
                self._cache_dir,
                self._name,
                lambda: recall_answer(self._cache_dir, self._name),
                ask,
            )
            if answer is not None:
                answer.refuse_difference(locate(self._arguments["source"]).directory)
        except BaseException as error:
            self._error = error

    def check(self) -> None:
        """Raise what was found so far, if anything is wrong."""
        if self._error is not None:
            raise self._error

    def agree(self, card: IdentityCard) -> None:
        """Wait for the answer; raise if it is not "alike", else remember it for the next call."""
        self._thread.join()
        self.check()
        remember_card(card, cache_dir=self._cache_dir, **self._arguments)


def identity_card(
    choice: TokenizerChoice, cache_dir: Path, executor: Executor
) -> tuple[IdentityCard, Comparison | None]:
    """The card of the chosen tokenizer, and what must still agree; its copy is in the cache."""
    arguments: dict[str, Any] = {
        "backend": choice.tokenizer_backend,
        "chat_template": choice.chat_template,
        "trust_remote_code": choice.trust_remote_code,
    }
    if not isinstance(choice.tokenizer, str | os.PathLike):
        from tokenmill.tokenizer import load  # here: a parent that only asks must not pay for it

        tokenizer = load(choice.tokenizer, **arguments)
        remember(tokenizer, cache_dir)
        return tokenizer.card, None
    # Whoever looks at it may have another working directory.
    arguments["source"] = absolute(os.fspath(choice.tokenizer))
    arguments["chat_template"] = absolute(choice.chat_template)
    known = _recalled(arguments, cache_dir)
    if known is not None:
        return known, None
    if isinstance(executor, LocalExecutor) and choice.tokenizer_backend == "auto":
        name = _question(arguments, cache_dir)
        if name is not None:
            comparison = Comparison(arguments, cache_dir, name)
            return _found({**arguments, "backend": "file"}, cache_dir, executor), comparison
    return _found(arguments, cache_dir, executor), None


def _recalled(arguments: dict[str, Any], cache_dir: Path) -> IdentityCard | None:
    """The remembered card, where the tokenizer's copy is there as well."""
    card = recall(cache_dir=cache_dir, **arguments)
    return card if card is not None and (cache_dir / "tokenizers" / card.key).is_dir() else None


def _question(arguments: dict[str, Any], cache_dir: Path) -> str | None:
    """The name of the answer that is still open; None where AutoTokenizer need not be asked here.

    It need not where its answer is remembered: then looking at the tokenizer costs no more than
    looking at its file. And without a tokenizer.json there is nothing to build with before it
    answers.
    """
    place = locate(arguments["source"])
    if place.named or not place.file.is_file() or not is_installed():
        return None
    name = answer_key(
        arguments["source"],
        template_given=arguments["chat_template"] is not None,
        trust_remote_code=arguments["trust_remote_code"],
    )
    return None if name is None or recall_answer(cache_dir, name) is not None else name


def _found(arguments: dict[str, Any], cache_dir: Path, executor: Executor) -> IdentityCard:
    """The card of a tokenizer that somebody has to look at."""

    def ask() -> IdentityCard:
        payload = {**arguments, "cache_dir": str(cache_dir)}
        return IdentityCard.from_dict(ask_worker(executor, IDENTIFY, payload))

    name = memo_key(**arguments)
    if name is None:
        return ask()
    return _once(cache_dir, name, lambda: _recalled(arguments, cache_dir), ask)


def _once(
    cache_dir: Path, name: str, recalled: Callable[[], Found | None], ask: Callable[[], Found]
) -> Found:
    """What is remembered under a name, or what asking gives; only one at a time asks."""
    with Claims(cache_dir) as claims:
        while (known := recalled()) is None:
            if claims.take(name):
                known = recalled()  # what another was asked a moment before
                return ask() if known is None else known
            time.sleep(POLL_S)
        return known


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


def open_comparer(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Entry for executors: returns the function that asks AutoTokenizer, and only that."""

    def compare_one(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.tokenizer import load

        cache_dir = Path(payload.pop("cache_dir"))
        with _lightly(options, payload):
            # Raises where it is ambiguous who encodes.
            load(payload.pop("source"), **payload, cache_dir=cache_dir)
        return {}

    return compare_one


def _lightly(
    options: dict[str, Any], payload: dict[str, Any]
) -> contextlib.AbstractContextManager[None]:
    """In a process of our own that ends afterwards, go without torch, which only costs time."""
    from tokenmill.tokenizer.auto_tokenizer import without_torch

    quick = options["own_process"] and not payload["trust_remote_code"]
    return without_torch() if quick else contextlib.nullcontext()
