"""Find a tokenizer's identity: in the cache, or by a worker that loads it.

A tokenizer given as an object exists only here, so it is examined here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenmill._core.publish import make_directory
from tokenmill.build.executors import LocalExecutor
from tokenmill.build.tasks import Done, Executor, Setup, Task, run_tasks
from tokenmill.errors import CacheError, WorkerError
from tokenmill.tokenizers.cache import copy_path, keep_copy, recall
from tokenmill.tokenizers.identity import IdentityCard

IDENTIFY = "tokenmill.build.identity:open_identifier"
MAX_WAIT_S = 30.0  # seconds to wait for another process that loads a tokenizer


def identity_card(choice: Any, cache_dir: Path, executor: Executor) -> IdentityCard:
    """Return the card of a tokenizer (`TokenizerOf`, a recipe), whose copy is in the cache then."""
    arguments: dict[str, Any] = {
        "backend": choice.tokenizer_backend,
        "chat_template": choice.chat_template,
        "trust_remote_code": choice.trust_remote_code,
    }
    if not isinstance(choice.tokenizer, str | os.PathLike):
        from tokenmill.tokenizers.loading import load

        tokenizer = load(choice.tokenizer, **arguments)
        keep_copy(tokenizer, cache_dir)
        return tokenizer.card
    # A worker may have another working directory.
    arguments["source"] = absolute(os.fspath(choice.tokenizer))
    arguments["chat_template"] = absolute(choice.chat_template)

    def known() -> IdentityCard | None:
        card = recall(cache_dir=cache_dir, **arguments)
        return card if card is not None and copy_path(cache_dir, card).is_dir() else None

    if card := known():
        return card
    with _one_at_a_time(cache_dir):
        if card := known():  # found by a process that came first
            return card
        payload = {**arguments, "cache_dir": str(cache_dir)}
        return IdentityCard.from_dict(ask_worker(executor, IDENTIFY, payload))


@contextlib.contextmanager
def _one_at_a_time(cache_dir: Path) -> Iterator[None]:
    """Keep other processes of this machine from loading the same tokenizer at the same time.

    Only to save work: nobody waits longer than `MAX_WAIT_S` or where locks do not work.
    """
    directory = cache_dir / "tokenizers" / "memo"
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError, CacheError):
            make_directory(directory, cache_dir)
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, descriptor)
            deadline = time.monotonic() + MAX_WAIT_S
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.05)
        yield


def absolute(name: Any) -> Any:
    """Return an existing path as an absolute one; hub ids, template sources and others as given."""
    if not isinstance(name, str | os.PathLike):
        return name
    try:
        return os.path.abspath(name) if os.path.exists(name) else name
    except (OSError, ValueError):  # a template's source is no name of a file
        return name


def ask_worker(executor: Executor, entry: str, payload: dict[str, Any]) -> dict[str, Any]:
    # A local worker is a process of our own; whatever else runs tasks may go on to other work.
    options = {"own_process": isinstance(executor, LocalExecutor)}
    setup = Setup(entry, options, shared=(payload["cache_dir"],), near_caller=True)
    answers: list[Done] = []
    run_tasks(executor, setup, [Task(0, payload, "tokenizer")], answers.append)
    if not answers:
        raise WorkerError("no worker looked at the tokenizer")
    return answers[0].result


def open_identifier(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that finds a tokenizer's identity (an executor's entry)."""

    def identify_one(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.tokenizers.loading import identify, without_torch

        quick = options["own_process"] and not payload["trust_remote_code"]
        with without_torch() if quick else contextlib.nullcontext():
            return identify(payload.pop("source"), **payload).card.as_dict()

    return identify_one
