"""Drivers of the trainers; `DRIVERS` lists them in the order of the page.

A driver is a module that prepares rows with the trainer's own code::

    NAME = "SkyRL, all answers"      # on the page
    CHECKOUT = "SkyRL"               # its directory under TRAINERS; None if it is installed
    PATHS = ("",)                    # directories of the checkout for sys.path
    PACKAGE = "skyrl"                # the package with its version
    STAND_INS = ("vllm",)            # packages that it imports and does not use
    TRAINS = "every"                 # answers that should be trained: every, or the last
    HOW = "tokenize_chat_example"    # the called function, for the page

    def prepare(rows, tokenizer, template): ...

``prepare`` gets rows (``messages``, and ``tools`` if there are any), a transformers tokenizer with
its chat template, and the template's name. It returns ids and a mask, or an error message, for each
row. `one_by_one` makes it from a function of one row. A driver may also have ``untimed()``, a
context for all calls that are not timed.

A driver imports its trainer inside functions, so its constants can be read without the trainer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

DRIVERS = (
    "tokenmill", "trl_sft", "trl_dpo", "skyrl_last", "skyrl_every", "miles", "slime", "verl",
    "verl_ignoring", "axolotl", "llama_factory", "ms_swift", "nemo_rl", "openrlhf", "open_instruct",
    "torchtune",
    "renderers",
)  # fmt: skip

Prepared = tuple[list[int], list[int]] | str


def driver(name: str) -> ModuleType:
    """The module of a driver."""
    return importlib.import_module(f"conformance.trainers.{name}")


def one_by_one(
    rows: Sequence[dict[str, Any]], function: Callable[[dict[str, Any]], Prepared]
) -> list[Prepared]:
    """Rows one after another; what the host raises is its answer for that row."""
    answers: list[Prepared] = []
    for row in rows:
        try:
            answers.append(function(row))
        except Exception as error:  # whatever a host raises is what its user would see
            answers.append(describe(error))
    return answers


def in_halves(
    rows: list[dict[str, Any]], function: Callable[[list[dict[str, Any]]], list[Prepared]]
) -> list[Prepared]:
    """Rows all at once; what raises is halved, until the rows that raise stand alone."""
    try:
        return function(rows)
    except Exception as error:
        if len(rows) == 1:
            return [describe(error)]
        middle = len(rows) // 2
        return in_halves(rows[:middle], function) + in_halves(rows[middle:], function)


def describe(error: Exception) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def from_labels(ids: Sequence[int], labels: Sequence[int]) -> Prepared:
    """Ids and a mask, of ids and labels that are -100 where untrained."""
    return [int(token) for token in ids], [int(label != -100) for label in labels]
