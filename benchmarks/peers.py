"""What users do today, written from its documented behaviour, to measure beside ours.

`skyrl_last` is what SkyRL's SFT tokenization does to a row for the last assistant message: the
prompt and the whole conversation are rendered and encoded by transformers, and the mask is the
difference of their lengths. `skyrl_every` is what it does to train every assistant message, as ours
does: each message is rendered and encoded after two fixed ones, whose tokens are then cut off.
Of a conversation with one answer the two give the same mask, and the first is the cheaper.
`skyrl_slices` is its parallel path around that: the file is opened
with `datasets`, each spawned worker opens it again and takes a contiguous share, rows come back
through the pool as lists, and the parent saves them. `datasets_map` is `datasets.map` over
``apply_chat_template``.

Both want OpenAI messages. Rows with tools or calls come with ``messages`` and ``tools`` as JSON
text, as many data sets on the hub have them: Arrow would give every call the arguments of all calls
of the file, as nulls, and the template would print them.

Where start-up is to be left aside, a directory named ``begun`` takes a note from every worker when
it holds its tokenizer and turns to its first row; `work_began` is the mean of these times.
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
    """The tokenizer as a trainer loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def as_messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a row of the benchmark corpora."""
    messages: list[dict[str, Any]] = _decoded(row.get("messages") or row["conversations"])
    return messages


def as_tools(row: dict[str, Any]) -> list[Any] | None:
    """The tool descriptions of a row, None where it has none."""
    tools: list[Any] | None = _decoded(row.get("tools"))
    return tools


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def work_began(begun: Path) -> float:
    """When workers turned to their first rows, on average; all processes share the clock."""
    return mean(float(note.read_text()) for note in begun.iterdir())


def _note_begin(begun: Path | None) -> None:
    if begun is not None:
        note = begun / str(os.getpid())
        if not note.exists():
            note.write_text(repr(time.perf_counter()))


def _ids(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, **options
    )["input_ids"]
    return ids


def skyrl_last(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[Any] | None = None
) -> dict[str, Any]:
    """Two renders and two encodes, mask by difference of lengths."""
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
    """Two renders and two encodes per message, from the first answer on."""
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
    """Rows one after another, in this process; those that end with a question are left out."""
    made = []
    for row in rows:
        messages, tools = as_messages(row), as_tools(row)
        if messages[-1]["role"] == "assistant":
            made.append((skyrl_every if every else skyrl_last)(tokenizer, messages, tools))
    return made


def _skyrl_share(share: tuple[str, str, Path | None, bool, int, int]) -> list[dict[str, Any]]:
    path, directory, begun, every, start, stop = share
    tokenizer = load_auto(directory)
    rows = _open_json(path).select(range(start, stop))
    _note_begin(begun)
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
    """The parallel path: shares of the rows in spawned workers, saved as a dataset."""
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
    """`datasets.map(apply_chat_template)`, one conversation after another."""
    import datasets

    def tokenized(row: dict[str, Any]) -> dict[str, Any]:
        _note_begin(begun)
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
