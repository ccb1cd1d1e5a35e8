"""Find the fingerprint of a tokenizer: in the cache, or with a worker that loads it.

A tokenizer object exists only in this process, so it is loaded here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenmill._core.encoders import EncoderSource
from tokenmill._core.fingerprint import plain
from tokenmill._core.paths import checked_path
from tokenmill._core.publish import make_directory
from tokenmill.build.executors import LocalExecutor
from tokenmill.build.tasks import Done, Executor, Setup, Task, run_tasks
from tokenmill.errors import CacheError, WorkerError, check_bool, check_one_of
from tokenmill.tokenizers.cache import copy_path, keep_copy, recall
from tokenmill.tokenizers.encoders import template_or_encoder
from tokenmill.tokenizers.identity import TokenizerFingerprint

IDENTIFY = "tokenmill.build.identity:open_identifier"
MAX_WAIT_S = 30.0  # seconds to wait for another process that loads a tokenizer


def identify_tokenizer(choice: Any, cache_dir: Path, executor: Executor) -> TokenizerFingerprint:
    """Return the fingerprint of a tokenizer (`TokenizerOf`, a recipe); copy it to the cache."""
    check_one_of("tokenizer_backend", choice.tokenizer_backend, ("auto", "transformers", "file"))
    check_bool("trust_remote_code", choice.trust_remote_code)
    if isinstance(choice.chat_template, os.PathLike):
        checked_path("chat_template", choice.chat_template)
    elif isinstance(choice.chat_template, str):
        plain(choice.chat_template, "chat_template")
    arguments: dict[str, Any] = {
        "backend": choice.tokenizer_backend,
        "chat_template": template_or_encoder(
            choice.chat_template,
            choice.encoder,
            choice.encoder_kwargs,
            choice.tokenizer,
            trust_remote_code=choice.trust_remote_code,
        ),
        "trust_remote_code": choice.trust_remote_code,
    }
    if not isinstance(choice.tokenizer, str | os.PathLike):
        from tokenmill.tokenizers.loading import load

        tokenizer = load(choice.tokenizer, **arguments)
        keep_copy(tokenizer, cache_dir)
        return tokenizer.card
    # A worker may have another working directory.
    arguments["source"] = absolute(checked_path("tokenizer", choice.tokenizer))
    arguments["chat_template"] = absolute(arguments["chat_template"])

    def known() -> TokenizerFingerprint | None:
        card = recall(cache_dir=cache_dir, **arguments)
        return card if card is not None and copy_path(cache_dir, card).is_dir() else None

    if card := known():
        return card
    with _one_at_a_time(cache_dir):
        if card := known():  # another process was faster
            return card
        payload = {**arguments, "cache_dir": str(cache_dir)}
        if isinstance(template := arguments["chat_template"], EncoderSource):
            payload["chat_template"] = template.dump()
        return TokenizerFingerprint.from_dict(run_on_worker(executor, IDENTIFY, payload))


@contextlib.contextmanager
def _one_at_a_time(cache_dir: Path) -> Iterator[None]:
    """Keep other processes of this machine from loading the same tokenizer at the same time.

    This only saves work: it waits at most `MAX_WAIT_S`, and not where locks do not work.
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
    except (OSError, ValueError):  # the source of a template is not a valid path
        return name


def run_on_worker(executor: Executor, entry: str, payload: dict[str, Any]) -> dict[str, Any]:
    # A local worker ends after this task; other executors may reuse the process.
    options = {"own_process": isinstance(executor, LocalExecutor)}
    setup = Setup(entry, options, shared=(payload["cache_dir"],), prefer_local=True)
    answers: list[Done] = []
    run_tasks(executor, setup, [Task(0, payload, "tokenizer")], answers.append)
    if not answers:
        raise WorkerError("no worker loaded the tokenizer")
    return answers[0].result


def open_identifier(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that finds a tokenizer's identity (an executor's entry)."""

    def identify_one(payload: dict[str, Any]) -> dict[str, Any]:
        from tokenmill.tokenizers.loading import identify, without_torch

        quick = options["own_process"] and not payload["trust_remote_code"]
        with without_torch() if quick else contextlib.nullcontext():
            payload["chat_template"] = EncoderSource.load(payload["chat_template"])
            return identify(payload.pop("source"), **payload).card.as_dict()

    return identify_one
