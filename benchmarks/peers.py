"""Peers: what users run today, reimplemented from its documented behaviour.

`skyrl_last` is SkyRL's SFT tokenization for the last assistant message: transformers renders and
encodes the prompt and the whole conversation, and the mask is the difference of their lengths.
`skyrl_every` trains every assistant message: each message is rendered and encoded after two fixed
ones, whose tokens are removed. For a conversation with one answer both give the same mask, and the
first is faster. `skyrl_slices` is the parallel path: each spawned worker opens the file with
`datasets` and takes a contiguous part, rows return through the pool as lists, and the parent saves
them. `datasets_map` is `datasets.map` with ``apply_chat_template``.

All take OpenAI messages. Rows with tools or calls have ``messages`` and ``tools`` as JSON text,
like many datasets on the hub: Arrow would add the arguments of all calls to every call, as nulls.

To exclude start-up, every worker writes the time of its first row into the directory ``begun``;
`work_began` is the mean of these times.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any


def load_auto(directory: str) -> Any:
    """Load the tokenizer as a trainer does."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def as_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation of a row of the benchmark corpora."""
    messages: list[dict[str, Any]] = _decoded(row.get("messages") or row["conversations"])
    return messages


def as_tools(row: dict[str, Any]) -> list[Any] | None:
    """Return the tool descriptions of a row, or None."""
    tools: list[Any] | None = _decoded(row.get("tools"))
    return tools


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def work_began(begun: Path) -> float:
    """Return the mean time at which workers began; all processes share the clock."""
    return mean(float(file.read_text()) for file in begun.iterdir())


def _record_start(begun: Path | None) -> None:
    if begun is not None:
        file = begun / str(os.getpid())
        if not file.exists():
            file.write_text(repr(time.perf_counter()))


def _ids(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, **options
    )["input_ids"]
    return ids


def skyrl_last(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None
) -> dict[str, Any]:
    """Tokenize with two renders and two encodes; mask by difference of lengths."""
    prompt = _ids(tokenizer, messages[:-1], tools=tools, add_generation_prompt=True)
    whole = _ids(tokenizer, messages, tools=tools)
    actions = len(whole) - len(prompt)
    return _skyrl_row(whole, [1] * actions)


FIXED = [
    {"role": "system", "content": "You answer questions."},
    {"role": "user", "content": "Hello."},
]


def skyrl_every(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None
) -> dict[str, Any]:
    """Tokenize with two renders and two encodes per message, from the first answer on."""
    first = next(k for k, message in enumerate(messages) if message["role"] == "assistant")
    whole = _ids(tokenizer, messages[:first], tools=tools) if first else []
    empty = [{"role": "user", "content": ""}]
    header = len(_ids(tokenizer, empty, tools=tools, add_generation_prompt=True))
    header -= len(_ids(tokenizer, empty, tools=tools))
    mask: list[int] = []
    for message in messages[first:]:
        fixed = _ids(tokenizer, FIXED, tools=tools)
        ids = _ids(tokenizer, [*FIXED, message], tools=tools)[len(fixed) :]
        whole = whole + ids
        if message["role"] != "assistant":
            mask += [0] * len(ids)
            continue
        end = len(ids)
        if tokenizer.eos_token_id in ids:
            end -= ids[::-1].index(tokenizer.eos_token_id)
        mask += [0] * header + [1] * (end - header) + [0] * (len(ids) - end)
    return _skyrl_row(whole, mask)


def _skyrl_row(ids: list[int], mask: list[int]) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "num_actions": len(mask),
        "loss_mask": mask,
    }


def skyrl_rows(
    tokenizer: Any, rows: Iterable[dict[str, Any]], *, every: bool = False
) -> list[dict[str, Any]]:
    """Tokenize rows in this process; skip those that do not end with an answer."""
    result = []
    for row in rows:
        messages, tools = as_messages(row), as_tools(row)
        if messages[-1]["role"] == "assistant":
            result.append((skyrl_every if every else skyrl_last)(tokenizer, messages, tools))
    return result


def _skyrl_share(share: tuple[str, str, Path | None, bool, int, int]) -> list[dict[str, Any]]:
    path, directory, begun, every, start, stop = share
    tokenizer = load_auto(directory)
    rows = _open_json(path).select(range(start, stop))
    _record_start(begun)
    return skyrl_rows(tokenizer, rows, every=every)


def _open_json(path: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.load_dataset("json", data_files=path, split="train")


def skyrl_slices(
    path: Path,
    directory: str,
    out: Path,
    workers: int = 2,
    begun: Path | None = None,
    *,
    every: bool = False,
) -> None:
    """Tokenize parts of the rows in spawned workers, and save them as a dataset."""
    import datasets

    count = len(_open_json(str(path)))
    bounds = [count * n // workers for n in range(workers + 1)]
    shares = [(str(path), directory, begun, every, *pair) for pair in itertools.pairwise(bounds)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.map(_skyrl_share, shares)
    datasets.Dataset.from_list(list(itertools.chain(*results))).save_to_disk(str(out))


def datasets_map(
    tokenizer: Any, rows: Sequence[dict[str, Any]], num_proc: int = 1, begun: Path | None = None
) -> Any:
    """Run `datasets.map` with `apply_chat_template`, one conversation at a time."""
    import datasets

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        _record_start(begun)
        ids = tokenizer.apply_chat_template(
            as_messages(row), tools=as_tools(row), tokenize=True, return_dict=False
        )
        return {"input_ids": ids}

    columns = [
        {"messages": row.get("messages") or row["conversations"], "tools": row.get("tools")}
        for row in rows
    ]
    data = datasets.Dataset.from_list(columns)
    return data.map(
        tokenized,
        num_proc=num_proc if num_proc > 1 else None,
        load_from_cache_file=False,
        remove_columns=["messages", "tools"],
    )
