"""Compare the results of this tree with those of another commit: ``python -m scripts.compare``.

Both trees run the same calls of the public API on the shared corpora and templates. The script
prints every difference: token ids and masks, rejection reasons, orders, batches, packs, prompts,
exports, rollout checks, bridged ids. Messages may differ, reason codes may not.

Answers go to ``build/compare``, or to ``--dir``. The other tree is a git worktree there, and its
answers are computed once for each section. Where an argument was renamed, `given` passes it under
the name that the tree knows.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
START = "a3a58b1"  # the commit that "One mechanism per job" started from
DATE = "2026-11-15"
TOKENIZERS = ("qwen3", "llama3.1", "gemma3", "mistral-nemo", "gpt-oss", "deepseek-v3")
CHATS = (
    "alpaca_eval_en", "smilechat_zh", "codealpaca", "alpaca_zh", "drone_tool_calls",
    "tau_bench_trajectories", "glaive_tools_sharegpt", "reason_tool_use", "think_traces",
    "toy_chat",
)  # fmt: skip
RENAMED = {
    "template_kwargs": "chat_template_kwargs",
    "pad_id": "pad_token_id",
    "carry": "keep_columns",
    "source": "path",
}

Answers = Iterator[tuple[str, Any]]


def given(call: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Arguments under the names that a function of this tree knows."""
    known = inspect.signature(call).parameters
    named = {}
    for name, value in arguments.items():
        new = RENAMED.get(name, name)
        named[new if name not in known and new in known else name] = value
    return named


def digest(value: Any) -> str:
    """Return a short hash of a value of JSON, numpy or `str`."""
    text = json.dumps(value, sort_keys=True, default=_plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return str(value)


class Tree:
    """The imported tokenmill, the shared data and a cache."""

    def __init__(self, shared: Path, work: Path) -> None:
        import tokenmill

        self.tm: Any = tokenmill
        self.shared = shared
        self.work = work
        self.examples = Path(tokenmill.__file__).parent / "examples"

    def prepare(self, sources: Any, tokenizer: Any, **options: Any) -> Any:
        options = {
            "date": DATE,
            "num_workers": 0,
            "cache_dir": self.work / "cache",
            "tokenizer_backend": "file",
            **options,
        }
        return self.tm.prepare(sources, tokenizer, **given(self.tm.prepare, **options))

    def tokenizer(self, name: str) -> Path:
        return self.shared / "tokenizers" / name

    def corpus(self, name: str) -> Path:
        return self.shared / "corpora" / f"{name}.jsonl"

    def rows(self, name: str, count: int) -> list[dict[str, Any]]:
        with open(self.corpus(name), encoding="utf-8") as lines:
            return [json.loads(line) for _, line in zip(range(count), lines, strict=False)]

    def write(self, name: str, rows: Iterable[Any]) -> Path:
        path = self.work / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def stored(self, call: Callable[[], Any]) -> Any:
        """Return the rows and rejections of a store, or the type of the error."""
        try:
            store = call()
        except self.tm.TokenmillError as error:
            return type(error).__name__
        rows = [
            [row.input_ids, row.loss_mask, row.turns, row.origin.row, row.origin.line, row.part]
            + [getattr(row, "extra", None) or getattr(row, "carried", None)]
            + ([row.weights] if store.has_weights else [])
            + ([row.label, row.score, row.margin, row.prompt_tokens] if store.has_groups else [])
            for row in store
        ]
        lost = [[origin.row, origin.line, reason] for origin, reason, _ in store.rejected_rows()]
        return [len(rows), len(lost), digest(rows), digest(lost)]


def chats(tree: Tree) -> Answers:
    """Ids, masks and rejections: real tokenizers and their templates on every corpus."""
    for tokenizer in TOKENIZERS:
        for corpus in CHATS:
            source = f"{tree.corpus(corpus)}@[0:40]"
            yield (
                f"{tokenizer} {corpus}",
                tree.stored(lambda s=source, t=tokenizer: tree.prepare(s, tree.tokenizer(t))),
            )


def _mixed_rows(tree: Tree) -> list[dict[str, Any]]:
    # fmt: off
    counts = {"smilechat_zh": 3, "toy_chat": 6, "drone_tool_calls": 4, "think_traces": 2,
              "tau_bench_trajectories": 2, "glaive_tools_sharegpt": 4, "reason_tool_use": 3}
    # fmt: on
    rows = [row for name, count in counts.items() for row in tree.rows(name, count)]
    rows = [row for row in rows if len(json.dumps(row)) < 20_000]
    user, answer = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}
    system = {"role": "system", "content": "Be brief."}
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"x": 1}}}
    for messages in (
        [user, answer],
        [system, user, answer, user, answer],
        [user, {**answer, "reasoning_content": "Think."}],
        [user, {"role": "assistant", "content": None, "tool_calls": [call]},
         {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"}, answer],
        [user, {"role": "assistant", "content": ""}],
        [user, answer, user],
        [system],
        [user, user, answer, answer],
        [user, {**answer, "weight": 0}, user, {**answer, "weight": 1}],
    ):  # fmt: skip
        rows.append({"messages": messages})
    return rows


def templates(tree: Tree) -> Answers:
    """Masks of every template of the shared data, with a byte tokenizer."""
    source = tree.write("mixed.jsonl", _mixed_rows(tree))
    byte_tokenizer = tree.shared / "wild" / "byte_tokenizer"
    for path in sorted([*tree.shared.glob("templates/*/*"), *tree.shared.glob("wild/*")]):
        if path.is_file() and path.suffix in (".jinja", ".j2", ".txt"):
            name = str(path.relative_to(tree.shared))
            text = path.read_text(encoding="utf-8")
            yield (
                name,
                tree.stored(
                    lambda text=text: tree.prepare(source, byte_tokenizer, chat_template=text)
                ),
            )


def options(tree: Tree) -> Answers:
    """Each option that changes rows, on the bundled rows and some rows of each corpus."""
    own = tree.examples / "tokenizer"
    examples = [tree.examples / "conversations.jsonl", tree.examples / "dirty.jsonl"]
    mixed = tree.write("mixed.jsonl", _mixed_rows(tree))
    variants: list[dict[str, Any]] = [
        {},
        *({"train_on": name} for name in ("all_assistant_messages", "last_assistant_message",
                                          "completion", "everything")),
        {"turn_end": "turn"},
        {"thinking_opener": "trained"},
        {"expand": "turns"},
        {"expand": "append"},
        {"trailing": "trim"},
        {"max_length": 64},
        {"max_length": 64, "overlong": "truncate"},
        {"expand": "turns", "max_length": 200},
        {"carry": ["id", "topic"]},
    ]  # fmt: skip
    for variant in variants:
        name = json.dumps(variant)
        yield f"examples {name}", tree.stored(lambda v=variant: tree.prepare(examples, own, **v))
        for tokenizer in ("qwen3", "gpt-oss"):
            path = tree.tokenizer(tokenizer)
            yield (
                f"{tokenizer} {name}",
                tree.stored(lambda v=variant, p=path: tree.prepare(mixed, p, **v)),
            )
    for name, rows in _other_formats().items():
        source = tree.write(f"{name}.jsonl", rows)
        for variant in ({}, {"append_eos": False}, {"max_length": 40}):
            yield (
                f"{name} {json.dumps(variant)}",
                tree.stored(lambda s=source, v=variant: tree.prepare(s, own, **v)),
            )
        if name in ("tokens",):
            yield (
                f"{name} stated",
                tree.stored(lambda s=source: tree.prepare(s, own, format="tokens")),
            )


def _other_formats() -> dict[str, list[dict[str, Any]]]:
    say = lambda role, text: {"role": role, "content": text}  # noqa: E731
    numbers = range(30)
    return {
        "alpaca": [{"instruction": f"Add {n}.", "input": "1" * (n % 3), "output": f"It is {n}."}
                   for n in numbers],
        "prompt_completion": [{"prompt": f"Add {n}: ", "completion": f"{n} apples."}
                              for n in numbers],
        "prompt_messages": [{"prompt": [say("user", f"Add {n}.")],
                             "completion": [say("assistant", f"It is {n}." * (n % 4))]}
                            for n in numbers],
        "preference": [{"prompt": [say("user", f"Add {n}.")],
                        "chosen": [say("assistant", f"It is {n}. " * (1 + n % 5))],
                        "rejected": [say("assistant", "No.")], "margin": n / 4}
                       for n in numbers],
        "kto": [{"prompt": [say("user", f"Add {n}.")],
                 "completion": [say("assistant", f"It is {n}.")], "label": n % 2 == 0}
                for n in numbers],
        "text": [{"text": f"Line {n} of a book. " * (n % 7)} for n in numbers],
        "tokens": [{"input_ids": [n, n + 1, n + 2], "loss_mask": [0, 1, n % 2]} for n in numbers],
    }  # fmt: skip


def files(tree: Tree) -> Answers:
    """The same rows in every kind of file: contents, origins, slices of sources."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with open(tree.examples / "conversations.jsonl", encoding="utf-8") as bundled:
        talks = [json.loads(line) for line in bundled][:60]
    rows = talks + tree.rows("drone_tool_calls", 20)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    plain = [[{"role": m["role"], "content": str(m["content"])} for m in row["messages"]]
             for row in talks]  # fmt: skip
    table = pa.table({"messages": plain, "n": range(len(plain))})
    made = tree.work / "files"
    made.mkdir(exist_ok=True)
    (made / "a.jsonl").write_text(lines, encoding="utf-8")
    (made / "b.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    (made / "c.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (made / "d.jsonl").write_bytes(
        b"\xef\xbb\xbf" + lines.replace("\n", "\r\n").encode() + b"{oops"
    )
    pq.write_table(table, made / "e.parquet", row_group_size=7)
    with pa.OSFile(str(made / "f.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=9)
    for source in (*sorted(made.iterdir()), f"{made}/a.jsonl@[5:30]", f"{made}/*.jsonl*"):
        name = str(source).removeprefix(str(made))
        opened = tree.tm.open_rows(source, cache_dir=tree.work / "cache")
        found: list[Any] = []
        for number in range(len(opened)):
            origin = opened.origin(number)
            try:
                row = opened[number]
            except tree.tm.TokenmillError as error:
                row = type(error).__name__
            found.append([row, origin.row, origin.line, Path(str(origin.path)).name])
        yield f"rows {name}", [len(opened), digest(found)]
        own = tree.examples / "tokenizer"
        yield f"store {name}", tree.stored(lambda s=source, own=own: tree.prepare(s, own))


def _stores(tree: Tree) -> dict[str, Any]:
    own = tree.examples / "tokenizer"
    plain = tree.prepare(tree.examples / "conversations.jsonl", own, carry=["topic"])
    pairs = tree.prepare(tree.write("pairs.jsonl", _other_formats()["preference"]), own)
    text = tree.prepare(tree.write("text.jsonl", _other_formats()["text"]), own)
    return {"plain": plain, "pairs": pairs, "text": text}


def _loader(tree: Tree, data: Any, *, drop_last: bool = False, **arguments: Any) -> Any:
    """Return an epoch loader for old and new versions of the API."""
    known = inspect.signature(tree.tm.Loader).parameters
    if "drop_last" in known:
        arguments["drop_last"] = drop_last
    else:
        arguments["last"] = "drop" if drop_last else "keep"
    return tree.tm.Loader(data, **given(tree.tm.Loader, pad_id=0, indices=True, **arguments))


def _batches(loader: Any, most: int = 200) -> list[Any]:
    return [batch for _, batch in zip(range(most), loader, strict=False)]


def orders(tree: Tree) -> Answers:
    """Global orders, batches of every rank, packs, micro-batches, mixtures, views, resuming."""
    tm = tree.tm
    stores = _stores(tree)
    plain, pairs, text = stores["plain"], stores["pairs"], stores["text"]
    views = {
        "plain": plain,
        "pairs": pairs,
        "filter": plain.filter("trained > 20 and length < 200"),
        "select": plain.select([5, 3, 3, 250, 7]),
        "shuffle": plain.shuffle(seed=7),
        "slice": plain[10:200:3],
        "concat": tm.concat([plain, text]),
        "mix": tm.mix({"a": plain, "b": text}, weights={"a": 3, "b": 1}),
        "of a view": plain.shuffle(seed=3).filter("length > 30")[5:100],
    }
    for name, view in views.items():
        rows = view if hasattr(view, "__getitem__") else []
        yield f"rows {name}", digest([row.input_ids for row in rows])
        for size, seed in ((8, 42), (5, 7)):
            for drop_last in (False, True):
                loader = _loader(tree, view, batch_size=size, seed=seed, drop_last=drop_last)
                if drop_last and len(rows) < size:
                    continue
                epochs = [_batches(loader) for _ in range(2)]
                yield (
                    f"loader {name} {size} {seed} {drop_last}",
                    [[len(epoch) for epoch in epochs], digest(epochs)],
                )
    for name, share in sorted(_splits(plain).items()):
        yield f"split {name}", digest([row.input_ids for row in share])
    for rank in range(3):
        for drop_last in (False, True):
            loader = _loader(
                tree, plain, batch_size=7, rank=rank, world_size=3, drop_last=drop_last
            )
            batches = _batches(loader)
            yield f"rank {rank} of 3 {drop_last}", [len(batches), digest(batches)]
    arrangements = {
        "pack": {"pack": tm.Pack(length=1024)},
        "micro": {"micro_batches": tm.MicroBatches(max_tokens=512)},
        "left": {"pad_side": "left"} if "pad_side" in inspect.signature(tm.Loader).parameters
        else {"padding_side": "left"},
        "multiple": {"pad_to_multiple_of": 16},
        "sequential": {"shuffle": False},
    }  # fmt: skip
    for name, arrangement in arrangements.items():
        for data in ("plain", "pairs"):
            try:
                loader = _loader(tree, stores[data], batch_size=4, drop_last=True, **arrangement)
                batches = _batches(loader)
            except tm.TokenmillError as error:
                yield f"arranged {name} {data}", type(error).__name__
                continue
            yield f"arranged {name} {data}", [len(batches), digest(batches)]
            loader = _loader(tree, stores[data], batch_size=4, drop_last=True, **arrangement)
            iterator = iter(loader)
            served = min(3, len(batches) - 1)
            for _ in range(served):
                next(iterator)
            state = json.loads(json.dumps(loader.state_dict()))
            resumed = _loader(tree, stores[data], batch_size=4, drop_last=True, **arrangement)
            resumed.load_state_dict(state)
            yield f"resumed {name} {data}", digest(_batches(resumed)) == digest(batches[served:])


def _splits(store: Any) -> dict[str, Any]:
    shares = store.split({"train": 0.8, "val": 0.2}, seed=1)
    return shares if isinstance(shares, dict) else dict(zip(("train", "val"), shares, strict=True))


def prompts(tree: Tree) -> Answers:
    """RL prompts: texts, labels, lengths, filters, orders and the trainers' conventions."""
    call = tree.tm.PromptDataset
    gsm8k = f"{tree.corpus('gsm8k_prompts')}@[0:300]"
    first = tree.rows("gsm8k_prompts", 1)[0]
    messages = [{"prompt": row["messages"][:-1], "tools": row.get("tools")}
                for row in tree.rows("drone_tool_calls", 30)]  # fmt: skip
    chats_path = tree.write("prompts.jsonl", messages)
    key = next(name for name in ("prompt", "text", "question", "messages") if name in first)
    for tokenizer in ("qwen3", "gemma3", "gpt-oss"):
        for source, arguments in (
            (gsm8k, {"prompt_key": key, "label_key": "label"}),
            (gsm8k, {"prompt_key": key, "apply_chat_template": True, "max_length": 120}),
            (chats_path, {"prompt_key": "prompt", "tool_key": "tools",
                          "apply_chat_template": True, "max_length": 3000}),
            (tree.examples / "prompts.jsonl", {"max_length": 28, "label_key": "label"}),
        ):  # fmt: skip
            name = f"{tokenizer} {Path(str(source)).name} {json.dumps(arguments)}"
            try:
                data = call(
                    source,
                    tree.tokenizer(tokenizer),
                    date=DATE,
                    num_workers=0,
                    cache_dir=tree.work / "cache",
                    tokenizer_backend="file",
                    **arguments,
                )
                found = [[p.prompt, p.label, p.row, p.metadata] for p in data]
                lengths = data.lengths if arguments.get("max_length") else None
                data.shuffle(1)
                shuffled = [p.row for p in data]
            except tree.tm.TokenmillError as error:
                yield name, type(error).__name__
                continue
            yield name, [len(found), digest(found), digest(lengths), digest(shuffled)]


def exports(tree: Tree) -> Answers:
    """The content of every export format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    stores = _stores(tree)
    for data in ("plain", "pairs"):
        for name in ("parquet", "arrow", "jsonl", "hf", "axolotl", "llama-factory", "megatron",
                     "packed-parquet"):  # fmt: skip
            out = tree.work / f"export-{data}-{name}"
            extra = {"pack": tree.tm.Pack(length=512)} if name == "packed-parquet" else {}
            try:
                tree.tm.export(stores[data], name, out, **extra)
            except tree.tm.TokenmillError as error:
                yield f"{data} {name}", type(error).__name__
                continue
            found: list[Any] = []
            for path in sorted(p for p in [out, *out.rglob("*")] if p.is_file()):
                short = str(path.relative_to(tree.work))
                if path.suffix == ".parquet":
                    found.append([short, pq.read_table(path).to_pylist()])
                elif path.suffix == ".arrow":
                    with pa.OSFile(str(path)) as source:
                        found.append([short, _arrow(source).to_pylist()])
                elif path.suffix == ".jsonl":
                    found.append([short, path.read_text(encoding="utf-8")])
                elif path.suffix in (".bin", ".idx", ".npy"):
                    found.append([short, path.read_bytes()])
                else:
                    found.append([short])
            text = json.dumps(found, default=_plain).replace(str(tree.work), "")
            yield f"{data} {name}", [len(found), digest(text.replace(str(tree.examples), ""))]


def _arrow(source: Any) -> Any:
    import pyarrow as pa

    try:
        return pa.ipc.open_stream(source).read_all()
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source).read_all()


def rollouts(tree: Tree) -> Answers:
    """Classes and findings of valid and damaged rollouts, and rows made of them."""
    tm = tree.tm
    rows = tree.rows("smilechat_zh", 8) + tree.rows("drone_tool_calls", 12)
    for tokenizer in ("qwen3", "llama3.1", "gpt-oss"):
        source = tree.write("talks.jsonl", rows)
        store = tree.prepare(source, tree.tokenizer(tokenizer))
        sound = []
        for row in store:
            talk = dict(rows[row.origin.row])
            talk |= {"token_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()}
            sound.append(talk)
        damaged = []
        for row in sound:
            messages = row.get("messages")
            if messages and len(messages) > 2:
                damaged.append({**row, "messages": messages[:1] + messages[2:]})
            damaged.append({**row, "loss_mask": [1 - bit for bit in row["loss_mask"]]})
            damaged.append({**row, "token_ids": row["token_ids"][:-3],
                            "loss_mask": row["loss_mask"][:-3]})  # fmt: skip
            damaged.append({**row, "loss_mask": row["loss_mask"][:-1]})
            ids = list(row["token_ids"])
            ids[len(ids) // 2] = ids[0]
            damaged.append({**row, "token_ids": ids})
        for kind, dumped in (("sound", sound), ("damaged", damaged)):
            path = tree.write(f"dump-{kind}.jsonl", dumped)
            call = {"tokenizer": tree.tokenizer(tokenizer), "date": DATE, "num_workers": 0,
                    "cache_dir": tree.work / "cache", "tokenizer_backend": "file"}  # fmt: skip
            report = tm.check_rollouts(path, **call)
            found = [[f["class"], f["kind"], f["row"], f["turn"], f["token"]]
                     for f in report.findings]  # fmt: skip
            yield (
                f"{tokenizer} {kind}",
                [report.counts, report.rejected, report.unchecked, report.truncated, digest(found)],
            )
            yield (
                f"{tokenizer} {kind} store",
                tree.stored(lambda p=path, c=call: tm.from_rollouts(p, **c)),
            )


def bridges(tree: Tree) -> Answers:
    """Ids of prompts and of extended rollouts, for several templates."""
    from tokenizers import Tokenizer

    tm = tree.tm
    talks = tree.rows("smilechat_zh", 4) + tree.rows("drone_tool_calls", 6)
    paths = sorted(tree.shared.glob("templates/models/*.jinja"))
    cases = [(name, tree.tokenizer(name), None) for name in TOKENIZERS]
    cases += [(p.stem, tree.tokenizer("qwen3"), p.read_text(encoding="utf-8")) for p in paths]
    for name, tokenizer, template in cases:
        found: list[Any] = []
        plain = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        try:
            bridge = tm.Bridge(
                tokenizer, chat_template=template, date=DATE, tokenizer_backend="file"
            )
        except tm.TokenmillError as error:
            yield name, type(error).__name__
            continue
        for talk in talks:
            messages = talk.get("messages") or [
                {"role": {"client": "user", "counselor": "assistant"}.get(m["role"], m["role"]),
                 "content": m["content"]} for m in talk.get("conversations", [])
            ]  # fmt: skip
            turns = [k for k, m in enumerate(messages) if m["role"] == "assistant" and k]
            for k in turns[:3]:
                following = messages[k + 1 : next((t for t in turns if t > k), len(messages))]
                try:
                    ids = bridge.prompt(messages[:k], talk.get("tools"))
                    found.append(ids)
                    text = str(messages[k].get("content") or "")
                    sampled = plain.encode(text, add_special_tokens=False).ids
                    found.append(bridge.extend([*ids, *sampled], following) if following else None)
                except tm.TokenmillError as error:
                    found.append(type(error).__name__)
        yield name, [len(found), sum(isinstance(f, str) for f in found), digest(found)]


def images(tree: Tree) -> Answers:
    """Rows with images: ids, masks and media of three processors."""
    try:
        from tests.media.processors import make
    except ImportError:
        return
    source = tree.shared / "corpora" / "math_vision" / "math_vision.jsonl"
    with open(source, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][:40]
    for row in rows:
        row["messages"] = [{"role": "user", "content": row.pop("problem")},
                           {"role": "assistant", "content": row.pop("answer")}]  # fmt: skip
    path = tree.write("vision.jsonl", rows)
    for name in ("qwen2_vl", "gemma3", "llava_next"):
        processor = make(name)
        yield (
            name,
            tree.stored(
                lambda processor=processor: tree.prepare(
                    path,
                    None,
                    processor=processor,
                    media_root=source.parent,
                    tokenizer_backend="auto",
                )
            ),
        )


def conformance(tree: Tree) -> Answers:
    """The results of our driver in the conformance suite."""
    from conformance.conversations import all_cases
    from conformance.hosts.tokenmill import prepare as driver
    from transformers import AutoTokenizer

    cases = all_cases(tree.shared, 4)
    for name in ("qwen2.5", "qwen3", "llama3.1", "gpt-oss", "gemma3"):
        tokenizer = AutoTokenizer.from_pretrained(str(tree.tokenizer(name)))
        answers = driver([case.row for case in cases], tokenizer, "")
        codes = [a.partition(":")[0] if isinstance(a, str) else a for a in answers]
        yield name, [len(cases), sum(isinstance(code, str) for code in codes), digest(codes)]


SECTIONS: dict[str, Callable[[Tree], Answers]] = {
    call.__name__: call
    for call in (chats, templates, options, files, orders, prompts, exports, rollouts, bridges,
                 images, conformance)
}  # fmt: skip


def answer(section: str, out: Path, shared: Path) -> None:
    """Write the results of one section for the imported tree."""
    with tempfile.TemporaryDirectory() as work:
        tree = Tree(shared, Path(work))
        answers = dict(SECTIONS[section](tree))
    out.write_text(json.dumps(answers, indent=1, default=_plain), encoding="utf-8")


def run(section: str, out: Path, tree: Path, shared: Path) -> None:
    """Compute the results of one section in a process that imports a tree."""
    # The script is this tree's; package, tests and conformance are the other's.
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}",
                   "HF_HUB_OFFLINE": "1"}  # fmt: skip
    command = [sys.executable, str(Path(__file__)), section, "--shared", str(shared)]
    subprocess.run([*command, "--answers", str(out)], env=environment, cwd=tree, check=True)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return both results of every name where they differ."""
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"  {name}\n    before {json.dumps(before.get(name, 'missing'))}\n"
        f"    after  {json.dumps(after.get(name, 'missing'))}"
        for name in names
        if before.get(name, "missing") != after.get(name, "missing")
    ]


def other_tree(directory: Path, commit: str) -> Path:
    """Create a worktree of another commit."""
    tree = directory / commit / "tree"
    if not tree.exists():
        tree.parent.mkdir(parents=True, exist_ok=True)
        command = ["git", "worktree", "add", "--detach", str(tree), commit]
        subprocess.run(command, cwd=PROJECT, check=True)
    return tree


def main() -> int:
    """Compare the selected sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; none: all")
    parser.add_argument("--commit", default=START, help="the commit to compare with")
    parser.add_argument("--dir", type=Path, default=PROJECT / "build" / "compare")
    parser.add_argument("--answers", type=Path, help="only write this tree's answers")
    parser.add_argument("--shared", type=Path, help="the unpacked shared data")
    asked = parser.parse_args()
    if unknown := set(asked.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    if asked.answers:
        answer(asked.sections[0], asked.answers, asked.shared)
        return 0
    shared = asked.shared or _unpacked()
    tree = other_tree(asked.dir, asked.commit)
    found = 0
    for section in asked.sections or SECTIONS:
        before, after = tree.parent / f"{section}.json", asked.dir / f"{os.getpid()}-{section}.json"
        if not before.exists():
            run(section, before, tree, shared)
        run(section, after, PROJECT, shared)
        old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
        after.unlink()
        differing = differences(old, new)
        found += len(differing)
        print(f"{section}: {len(old)} answers, {len(differing)} differ", *differing, sep="\n")
    return 1 if found else 0


def _unpacked() -> Path:
    from tests.conftest import unpack_shared

    shared = unpack_shared()
    if shared is None:
        raise SystemExit("needs ../shared/data beside this checkout")
    return shared


if __name__ == "__main__":
    sys.exit(main())
