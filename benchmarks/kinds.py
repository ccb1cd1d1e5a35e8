"""Every kind of training row, prepared by tokenmill, SkyRL's slice path and `datasets.map`.

Eight kinds with 320 MB of distinct rows each (see `benchmarks.recombined`), Qwen3's tokenizer and
template, two workers, with masks, audits and fsync. ``TOKENMILL_BENCH_KIND_MB`` changes the size.
The peers work on every n-th of the same rows, which are converted to OpenAI messages for them in
advance. Rates count bytes of the rows as the corpus has them, on both sides.

tokenmill trains every answer of a conversation, and so does SkyRL's slice path here: by its path
for the last message if there is one answer, else by its slower path for every message. Its speed
for the last message alone is also reported, without a bound.

Start-up is excluded: the clock of every worker runs from its first row until the result is written
and open, and the mean of the two workers counts. On a busy machine, start-up varies by more than
these rows take.

For every kind, the ids of `CHECKED` rows must equal those of transformers.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.data import shared
from benchmarks.measure import watched
from benchmarks.peers import (
    as_messages,
    as_tools,
    datasets_map,
    load_auto,
    skyrl_slices,
    work_began,
)
from benchmarks.recombined import (
    Rounds,
    Row,
    agent_runs,
    answered,
    long_runs,
    read_rows,
    write_rows,
)
from benchmarks.report import Report

SIZE = int(float(os.environ.get("TOKENMILL_BENCH_KIND_MB", "320")) * 1_000_000)  # bytes of a kind
PEER_SHARE = 40  # the peers get one row in so many; their time per row does not depend on it
EVERY_SHARE = 5  # SkyRL's path for every message gets one in so many of these
TURNS = 2  # tokenmill and the peers run in turn, the peers on new rows; the means count
CHECKED = 200  # rows of a kind whose ids are compared with transformers'

TIMES_SKYRL = 25  # minimum ratio to SkyRL's slice path
TIMES_MAP = 15  # minimum ratio to datasets.map
SHARE_OF_PLAIN = 60  # minimum per cent of the plain rate for tools and agent runs
BY_PATH = ("rows_traced",)  # proof.json: rows that the reference did not render


@dataclass(frozen=True)
class Kind:
    """One kind of row: its corpora, how rows are varied, whether the plain rate bounds it."""

    name: str
    corpora: tuple[str, ...]
    rounds: Rounds | None = None
    select: Callable[[list[Row]], list[Row]] = answered
    compare_with_plain: bool = False
    answers: str = "several"


PLAIN = Kind("plain English", ("alpaca_eval_en",), answers="one")
KINDS = (
    PLAIN,
    Kind("multi-turn Chinese", ("smilechat_zh",)),
    Kind("long thinking", ("think_traces",), answers="one"),
    Kind("code in Alpaca form", ("codealpaca", "alpaca_zh"), answers="one"),
    Kind("ShareGPT with tools", ("glaive_tools_sharegpt",), compare_with_plain=True),
    Kind("OpenAI calls, arguments as text", ("drone_tool_calls",), compare_with_plain=True),
    Kind("agent runs, 20 to 60 turns", ("tau_bench_trajectories",), agent_runs, long_runs, True),
    Kind("typed parts", ("reason_tool_use",)),
)


PREPARE = """
import contextlib, json, sys, time
from statistics import mean
from tokenmill.build.calls import run_recipe
from tokenmill.build.run import BUILD
from tokenmill.build.executors import LocalExecutor

class Clocked(LocalExecutor):
    begun = {}  # when each worker began its first slice

    def run(self, setup, tasks):
        with contextlib.closing(super().run(setup, tasks)) as finished:
            for done in finished:
                if setup.entry == BUILD:
                    self.begun.setdefault(done.worker, time.perf_counter() - done.seconds)
                yield done

source, tokenizer, cache = sys.argv[1:]
start = time.perf_counter()
done = run_recipe(source, tokenizer, executor=Clocked(2), cache_dir=cache)
end, begun = time.perf_counter(), mean(Clocked.begun.values())
print(json.dumps({**done.summary(), "work": end - begun, "startup": begun - start}))
"""


def run(report: Report) -> None:
    import datasets

    datasets.disable_progress_bars()
    tokenizer = load_auto(_tokenizer())
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as directory:
        home = Path(directory)
        plain = 0.0
        for kind in KINDS:
            rate = _measure(report, kind, tokenizer, home)
            plain = plain or rate
            if kind is not PLAIN:
                bound = SHARE_OF_PLAIN if kind.compare_with_plain else None
                share = 100 * rate / plain
                report.figure(f"{kind.name}: of the plain rate", share, "%", at_least=bound)


def _tokenizer() -> str:
    return str(shared() / "tokenizers" / "qwen3")


def _prepare(source: Path, cache: Path) -> dict[str, Any]:
    """Prepare in a new process; return its summary with the seconds of work and start-up."""
    command = [sys.executable, "-c", PREPARE, str(source), _tokenizer(), str(cache)]
    summary: dict[str, Any] = json.loads(watched(command).stdout)
    return summary


def _measure(report: Report, kind: Kind, tokenizer: Any, home: Path) -> float:
    """Report one kind; return our rate in bytes per second."""
    source = home / f"{kind.corpora[0]}.jsonl"
    paths = [shared() / "corpora" / f"{name}.jsonl" for name in kind.corpora]
    corpora = [kind.select(read_rows(path)) for path in paths]
    rows = write_rows(source, corpora, SIZE, kind.rounds)
    size = source.stat().st_size
    spent, peers = [], []
    for turn in range(TURNS):
        cache = Path(tempfile.mkdtemp(prefix="cache-", dir=home))
        summary = _prepare(source, cache)
        spent.append(summary["work"])
        peers.append(_peers(source, turn, tokenizer, home, kind.answers == "several"))
        if turn < TURNS - 1:
            shutil.rmtree(cache)
    if summary["rows_out"] != rows:
        raise RuntimeError(f"{kind.name}: rows were rejected: {summary['rejected']}")
    skyrl, last, mapped = map(mean, zip(*peers, strict=True))
    ours = mean(spent) / size
    note = f"{rows:,} rows, {summary['tokens']:,} tokens; {summary['startup']:.1f} s of start-up"
    name = kind.name
    report.figure(f"{name}: prepare, 2 workers", 1 / ours / 1e6, "MB/s", note=note)
    report.figure(f"{name}: SkyRL's slice path", 1 / skyrl / 1e6, "MB/s")
    if kind.answers == "several":
        report.ratio(f"{name}: prepare / SkyRL's slice path, last message", ours=ours, peer=last)
    report.figure(f"{name}: datasets.map, num_proc=2", 1 / mapped / 1e6, "MB/s")
    report.ratio(f"{name}: prepare / SkyRL's slice path", ours=ours, peer=skyrl,
                 at_least=TIMES_SKYRL)  # fmt: skip
    report.ratio(f"{name}: prepare / datasets.map", ours=ours, peer=mapped, at_least=TIMES_MAP)
    _stages(report, name, summary["path"])
    _check(kind, source, summary["path"], tokenizer)
    source.unlink()
    shutil.rmtree(cache)
    return 1 / ours


def _peers(
    source: Path, turn: int, tokenizer: Any, home: Path, several: bool
) -> tuple[float, float, float]:
    """Return seconds per byte on a sample of the rows.

    Returns:
        SkyRL's with our masks, SkyRL's for the last message, datasets.map's.
    """
    with open(source, "rb") as lines:
        step = PEER_SHARE * TURNS
        sample = [row for number, row in enumerate(lines) if number % step == turn * PEER_SHARE]
    size = sum(map(len, sample))
    rows = [as_openai(json.loads(line)) for line in sample]
    if any(isinstance(row["messages"], str) for row in rows):  # one column, one type
        for row in rows:
            if not isinstance(row["messages"], str):
                row["messages"] = json.dumps(row["messages"], ensure_ascii=False)

    def work_of(peer: Callable[[Path], Any], share: float = 1.0) -> float:
        begun = Path(tempfile.mkdtemp(dir=home))
        peer(begun)
        return (time.perf_counter() - work_began(begun)) / (size * share)

    def skyrl(every: bool) -> float:
        some = rows[:: EVERY_SHARE if every else 1]
        path = source.with_suffix(".openai.jsonl")
        with open(path, "w") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in some)
        out = source.with_suffix(".skyrl")
        return work_of(
            lambda begun: skyrl_slices(path, _tokenizer(), out, begun=begun, every=every),
            sum(map(len, sample[:: EVERY_SHARE if every else 1])) / size,
        )

    last = skyrl(every=False)
    same = skyrl(every=True) if several else last
    mapped = work_of(lambda begun: datasets_map(tokenizer, rows, num_proc=2, begun=begun))
    return same, last, mapped


def _stages(report: Report, name: str, path: str) -> None:
    """Report the time per stage, and the share of rows rendered without the reference."""
    from tokenmill import open_store

    proof: dict[str, Any] = open_store(path).proof
    counts = proof["notes"]["render"]
    by_path = sum(counts.get(note, 0) for note in BY_PATH)
    share = 100 * by_path / max(by_path + counts.get("rows_reference", 0), 1)
    report.figure(f"{name}: rows rendered by a path", share, "%", note=str(counts))
    whole = sum(proof["stage_seconds"].values())
    for stage, spent in proof["stage_seconds"].items():
        report.figure(f"{name}: share of {stage}", 100 * spent / whole, "%")


def _check(kind: Kind, source: Path, path: str, tokenizer: Any) -> None:
    """Raise if the stored ids of a sample differ from those of transformers."""
    from tokenmill import open_store

    store = open_store(path)
    with open(source, "rb") as lines:
        every = max(1, len(store) // CHECKED)
        sample = {n: json.loads(line) for n, line in enumerate(lines) if n % every == 0}
    for number, row in sample.items():
        stored, openai = store[number], as_openai(row)
        if stored.origin.row != number:
            raise RuntimeError(f"{kind.name}: row {number} of the store is {stored.origin}")
        ids = tokenizer.apply_chat_template(
            as_messages(openai), tools=as_tools(openai), tokenize=True, return_dict=False
        )
        if stored.input_ids.tolist() != list(ids):
            raise RuntimeError(f"{kind.name}: other ids than transformers' at {stored.origin}")


ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def as_openai(row: Row) -> Row:
    """Return a row with OpenAI messages, as JSON text if it has calls or tools."""
    if "instruction" in row:
        user = "\n\n".join(filter(None, [row["instruction"], row["input"]]))
        return {"messages": [{"role": "user", "content": user},
                             {"role": "assistant", "content": row["output"]}]}  # fmt: skip
    messages = [_message(turn) for turn in row.get("messages") or row["conversations"]]
    if "tools" not in row and all(len(message) == 2 for message in messages):
        return {"messages": messages}
    tools = row.get("tools")
    tools = tools if isinstance(tools, str) or tools is None else json.dumps(tools)
    return {"messages": json.dumps(messages, ensure_ascii=False), "tools": tools}


def _message(turn: Row) -> Row:
    speaker = turn.get("role") or turn["from"]
    content = turn.get("content", turn.get("value")) or ""
    calls = [call["function"] for call in turn.get("tool_calls") or []]
    message = {"role": ROLES.get(speaker, speaker), "content": content}
    if speaker == "function_call":
        calls, message["content"] = [json.loads(content)], ""
    if isinstance(content, list):
        message["content"] = "".join(p["value"] for p in content if p["type"] == "text")
        thoughts = "".join(p["value"] for p in content if p["type"] == "reasoning")
        calls = [json.loads(p["value"]) for p in content if p["type"] == "tool_call"]
        message |= {"reasoning_content": thoughts} if thoughts else {}
    if calls:
        message["tool_calls"] = [{"type": "function", "function": _call(call)} for call in calls]
    return message


def _call(function: Row) -> Row:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return {**function, "arguments": json.loads(arguments)}
    return function
