"""Loaded objects stay in memory, and tables of pieces are read from the cache."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastokens
import msgspec
import numpy as np
import pytest

from tests.tokenizers.families import FAMILIES, family_json
from tokenmill.tokenizers import cache, engines
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.engines import HfEngine
from tokenmill.tokenizers.pieces import PieceTable, StoredTable
from tokenmill.tokenizers.tokenizer import Tokenizer


def fresh(name: str = "byte_level") -> Tokenizer:
    return Tokenizer(family_json(name))


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []

    def counted(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def count(*arguments: object) -> object:
            seen.append(name)
            return real(*arguments)

        return count

    for method, name in (
        ("_load_reference", "reference"), ("make_table", "table"), ("_make_digest", "digest")
    ):  # fmt: skip
        monkeypatch.setattr(Tokenizer, method, counted(getattr(Tokenizer, method), name))
    from_json_str = counted(fastokens.Tokenizer.from_json_str, "fastokens")
    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=from_json_str))
    return seen


def test_engines_of_one_tokenizer_are_loaded_once_per_process(loads: list[str]) -> None:
    texts = ["Hello world", "<|im_start|>你好"]
    first = Encoder(fresh(), "fastokens").encode(texts)
    again = Encoder(fresh(), "fastokens").encode(texts)
    reference = Encoder(fresh(), "hf").encode(texts)
    assert sorted(loads) == ["fastokens", "reference", "table"]
    assert np.array_equal(first.ids, again.ids)
    assert np.array_equal(first.ids, reference.ids)
    assert fresh().key == fresh().key != fresh("stripping").key
    assert loads.count("digest") == 2
    assert loads.count("reference") == 2  # other bytes are another tokenizer


def test_concurrent_threads_load_once() -> None:
    made: list[object] = []

    def make() -> object:
        time.sleep(0.1)
        made.append(object())
        return made[-1]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: cache.once("x", "thing", make), range(4)))
    assert len(made) == 1
    assert results == made * 4


def test_only_the_last_tokenizers_are_cached_and_errors_are_not() -> None:
    made = []

    def make(name: str) -> str:
        return cache.once(name, "thing", lambda: made.append(name) or name)

    names = [str(number) for number in range(cache.MAX_TOKENIZERS + 1)]
    for name in names:
        make(name)
    make(names[-1])
    make(names[1])
    assert made == names
    make(names[0])
    assert made == [*names, names[0]]

    with pytest.raises(ZeroDivisionError):
        cache.once("y", "thing", lambda: 1 // 0)
    assert cache.once("y", "thing", lambda: 2) == 2


def test_forked_child_starts_empty_and_encodes() -> None:
    tokenizer = fresh()
    ids = Encoder(tokenizer, "fastokens").encode(["Hello world"]).ids.tolist()
    inside, go = threading.Event(), threading.Event()

    def make() -> None:
        inside.set()
        go.wait(30)

    # Another thread is loading, and holds the locks, while the process forks.
    busy = threading.Thread(target=cache.once, args=(tokenizer.checksum, "slow", make))
    busy.start()
    inside.wait(30)
    child = os.fork()
    if child == 0:
        same = Encoder(fresh(), "auto").encode(["Hello world"]).ids.tolist() == ids
        os._exit(0 if same else 1)
    deadline = time.monotonic() + 30
    status = None
    while status is None and time.monotonic() < deadline:
        pid, code = os.waitpid(child, os.WNOHANG)
        status = code if pid else None
        time.sleep(0.01)
    go.set()
    busy.join()
    if status is None:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_stored_table_equals_the_original(name: str) -> None:
    made = fresh(name).make_table()
    read = PieceTable.from_bytes(made.to_bytes())
    for attribute in ("size", "spelling", "space", "prefix", "needs_offsets"):
        assert getattr(read, attribute) == getattr(made, attribute)
    for attribute in ("is_added", "is_special", "has_counterpart"):
        assert np.array_equal(getattr(read, attribute), getattr(made, attribute))
        assert getattr(read, attribute).dtype == bool
    assert read.pieces(range(len(read))) == made.pieces(range(len(made)))
    every = np.arange(made.size * (1 if made.prefix == "never" else 2), dtype=np.int32)
    assert read.joined(every)[1].to_pybytes() == made.joined(every)[1].to_pybytes()


def test_table_is_built_once_per_cache_and_rebuilt_if_damaged(
    own_cache: Path, loads: list[str]
) -> None:
    def share() -> Tokenizer:
        cache.clear_cache()  # as another process
        tokenizer = fresh()
        cache.share_table(tokenizer, own_cache)
        return tokenizer

    expected = share().table.pieces(range(600))
    cache.share_table(fresh(), own_cache / "other")  # a table in memory is written, too
    assert list((own_cache / "other" / "tokenizers" / "memo").iterdir())
    assert share().table.pieces(range(600)) == expected
    assert loads == ["table"]
    (path,) = (own_cache / "tokenizers" / "memo").iterdir()
    whole = path.read_bytes()
    head, _, body = whole.partition(b"\n")
    for damaged in (whole[:-1], b"", whole.replace(b"Hello", b"Jello", 1), head, body):
        path.write_bytes(damaged)
        loads.clear()
        assert share().table.pieces(range(600)) == expected
        assert loads == ["table"]
        assert path.read_bytes() == whole  # the damaged file was replaced
    loads.clear()
    share()
    assert loads == []


def test_table_of_another_version_or_with_invalid_offsets_is_not_used() -> None:
    data = fresh().make_table().to_bytes()
    stored = msgspec.msgpack.decode(data, type=StoredTable)
    starts = np.frombuffer(stored.starts, np.int32)
    wrong = [msgspec.structs.replace(stored, format=99), msgspec.structs.replace(stored, size=9)]
    for place, value in ((0, -1), (-1, 10**9), (5, 10**8), (5, -(10**8))):
        moved = starts.copy()
        moved[place] = value
        wrong.append(msgspec.structs.replace(stored, starts=moved.tobytes()))
    wrong.append(msgspec.structs.replace(stored, starts=starts[:-1].tobytes()))
    for other in [data[:-1], *map(msgspec.msgpack.encode, wrong)]:
        with pytest.raises(ValueError, match=r"table of pieces|[Oo]ffset"):
            PieceTable.from_bytes(other)


def test_little_work_starts_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_may_use_threads", lambda: True)
    engine = HfEngine(fresh())
    real = engine._backend
    batches: list[int] = []

    class Backend:
        encode = staticmethod(real.encode)

        def encode_batch_fast(self, texts: list[str], **more: bool) -> list[object]:
            batches.append(len(texts))
            return [real.encode(text, **more) for text in texts]

    engine._backend = Backend()
    ids, _ = engine.encode(["Hello world"] * 3)
    assert batches == []
    monkeypatch.setattr(engines, "SMALL_JOB_BYTES", 20)
    many, _ = engine.encode(["Hello world"] * 3)
    assert batches == [3]
    assert np.array_equal(ids, many)
