"""Rows that are tokenized on request give the stream of the finished store, in every geometry."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversation, conversations, write_rows
from tests.build.test_groups import kto, pair, ranked
from tokenmill.data.by_source import MAX_DRAWS
from tokenmill.data.order import PURPOSE_REPLACEMENT, derive_key
from tokenmill.errors import RowError, SourceError, StateError, UsageError
from tokenmill.store.by_source import SourceRows, StoreBySource

SHARES = (0, 1, 30)  # percent of rejected rows
BROKEN = (
    '{"messages": [',
    '{"nothing": 1}',
    '{"messages": [{"role": "user", "content": "?"}]}',
    json.dumps(conversation(0, words=100)),  # rejected by a limit only
)


class Both(NamedTuple):
    lazy: SourceRows
    finished: StoreBySource


def with_broken(rows: list[Any], share: int) -> list[Any]:
    """Replace a share of the rows by rows that are rejected, each for another reason."""
    return [
        BROKEN[n % len(BROKEN)] if (n * 37 + 41) % 100 < share else row
        for n, row in enumerate(rows)
    ]


def both(source: Any, cache: Path, **options: Any) -> Both:
    given = {**INLINE, "tokenizer": str(TOKENIZER), **options}
    finished = tm.prepare(source, cache_dir=cache / "finished", **given).by_source()
    lazy = tm.prepare(source, cache_dir=cache / "lazy", lazy=True, **given)
    assert type(lazy).__name__ == "LazyRows"
    assert len(lazy) == len(finished)
    assert lazy.key == finished.key
    return Both(lazy, finished)


@pytest.fixture(scope="module", params=SHARES)
def data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    home = tmp_path_factory.mktemp("by-source")
    rows = with_broken(conversations(60, words=5), request.param)
    halves = [write_rows(home / f"{n}.jsonl", rows[n * 30 :][:30]) for n in range(2)]
    made = both(halves, home, keep_columns=["id"], max_length=120)
    assert bool(made.finished.store.rejected) == bool(request.param)
    return made


def digest(batch: Any) -> str:
    hasher = hashlib.sha256()
    for name in sorted(batch):
        value = np.asarray(batch[name])
        hasher.update(f"{name} {value.dtype.str} {value.shape}".encode() + value.tobytes())
    return hasher.hexdigest()[:20]


def served(loader: Any, steps: int | None = None, epochs: int | None = None) -> list[str]:
    return [digest(batch) for batch in itertools.islice(loader.repeat(epochs), steps)]


# Rows


def assert_same_units(data: Both) -> None:
    numbers = np.arange(len(data.lazy))
    rejected = 0
    for ours, theirs in zip(data.lazy.read(numbers), data.finished.read(numbers), strict=True):
        if isinstance(theirs, RowError):
            rejected += 1
            assert str(ours) == str(theirs)
            assert ours.reason == theirs.reason
            continue
        for row, stored in zip(ours, theirs, strict=True):
            assert np.array_equal(row.input_ids, stored.input_ids)
            assert np.array_equal(row.loss_mask, stored.loss_mask)
            assert np.array_equal(row.weights, stored.weights)
            for name in ("text", "turns", "origin", "extra", "part", "label", "prompt_tokens"):
                assert getattr(row, name) == getattr(stored, name), name
            assert (row.score, row.margin) == (stored.score, stored.margin)
    assert rejected == sum(data.finished.store.rejected.values())


def test_rows_and_rejections_are_those_of_the_store(data: Both) -> None:
    assert_same_units(data)
    for number in range(len(data.lazy)):
        try:
            stored = data.finished[number]
        except RowError as error:
            with pytest.raises(RowError, match=re.escape(error.message)):
                data.lazy[number]
        else:
            assert np.array_equal(data.lazy[number].input_ids, stored.input_ids)


CORPORA: dict[str, dict[str, Any]] = {
    "alpaca_eval_en": {},
    "alpaca_zh": {},
    "codealpaca": {},
    "drone_tool_calls": {},
    "glaive_tools_sharegpt": {},
    "gsm8k_prompts": {"columns": {"prompt": "prompt", "completion": "label"}},
    "reason_tool_use": {},
    "smilechat_zh": {"trailing": "trim"},
    "tau_bench_trajectories": {"trailing": "trim", "max_length": 3000, "overlong": "truncate"},
    "think_traces": {"max_length": 2500},
    "toy_chat": {},
}


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("name", CORPORA)
def test_stream_of_every_corpus_is_that_of_the_store(
    shared: Path, tmp_path: Path, name: str
) -> None:
    lines = (shared / "corpora" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[:16]
    template = str(shared / "tokenizers" / "qwen3" / "chat_template.jinja")
    for share in SHARES:
        source = write_rows(tmp_path / f"{share}.jsonl", with_broken(lines, share))
        made = both(source, tmp_path, chat_template=template, **CORPORA[name])
        assert_same_units(made)
        lazy, finished = (tm.Loader(part, 4, seed=share) for part in made)
        assert served(lazy, epochs=1) == served(finished, epochs=1)
        assert lazy.served() == finished.served()


# Streams


LOADERS: dict[str, dict[str, Any]] = {
    "rows": {},
    "sequential": {"shuffle": False},
    "short": {"batch_size": 7},
    "indices": {"indices": True, "padding_side": "left", "pad_to_multiple_of": 8},
    "packed": {"pack": tm.Pack(96, window=24), "rank": 1, "world_size": 2},
    "split": {
        "pack": tm.Pack(24, window=16, oversize="split", method="first_fit"),
        "indices": True,
    },
}


@pytest.mark.parametrize("name", LOADERS)
def test_batches_and_states_equal_those_of_the_store(data: Both, name: str) -> None:
    options = {"batch_size": 6, "seed": 7, **LOADERS[name]}
    lazy, finished = (tm.Loader(part, **options) for part in data)
    # More than two epochs.
    for ours, theirs in itertools.islice(zip(lazy.repeat(), finished.repeat(), strict=True), 24):
        assert digest(ours) == digest(theirs)
        assert "num_trained_tokens" not in ours
        assert lazy.state_dict() == finished.state_dict()
    assert lazy.served() == finished.served()


def test_order_is_the_usual_one_with_replacements_by_a_rule(data: Both) -> None:
    """An oracle of the documented rule, and of what a batch counts."""
    seed, size, rows = 3, 5, len(data.lazy)
    accepted = [not isinstance(unit, RowError) for unit in data.lazy.read(np.arange(rows))]
    order = tm.data.order.FeistelOrder(rows, seed)  # type: ignore[attr-defined]
    loader = tm.Loader(data.lazy, size, seed=seed, indices=True)
    for step, batch in enumerate(loader.repeat(2)):
        expected = []
        for at in range(step * size, (step + 1) * size):
            epoch, position = divmod(at, rows)
            number = int(order.indices(epoch, np.asarray([position]))[0])
            draws = itertools.count()
            while not accepted[number]:
                key = derive_key(PURPOSE_REPLACEMENT, seed, epoch, position, next(draws))
                number = key % rows
            expected.append(number)
        assert batch["indices"].tolist() == expected
        assert batch["local_trained_tokens"] == (batch["labels"] != -100).sum()
        assert batch["local_weight_sum"] == batch["loss_weights"].sum()


def test_packs_of_ranks_have_the_rows_of_their_positions(data: Both) -> None:
    ranks = 3
    one = tm.Loader(data.finished, 3 * 16, seed=5, indices=True).repeat()
    expected = np.asarray(next(one)["indices"])  # the first window of all ranks
    for rank in range(ranks):
        pack = tm.Pack(200, window=16)
        loader = tm.Loader(
            data.lazy, 1, seed=5, pack=pack, indices=True, rank=rank, world_size=ranks
        )
        found: list[int] = []
        for batch in loader.repeat():
            found += batch["indices"].tolist()
            tokens = sum(len(data.finished[number]) for number in batch["indices"].tolist())
            assert (batch["seq_idx"] >= 0).sum() == tokens
            if loader.state_dict()["window"]:
                break
        assert sorted(found) == sorted(expected[rank::ranks].tolist())


@pytest.mark.parametrize("data", [30], indirect=True)
def test_rows_longer_than_a_pack(data: Both) -> None:
    """Dropping all rows ends in an error. Errors name the row, not its position."""
    for part in data:
        loader = tm.Loader(part, pack=tm.Pack(8, window=4, oversize="drop"))
        with pytest.raises(UsageError, match="all rows of 64 windows have more than 8 tokens"):
            next(loader.repeat())
        loader = tm.Loader(part, pack=tm.Pack(8, window=4))
        with pytest.raises(UsageError, match=r"row \d+ has \d+ tokens, a pack has 8") as caught:
            next(loader.repeat())
        row, tokens = map(int, re.findall(r"\d+", str(caught.value))[:2])
        assert len(part[row]) == tokens


@pytest.mark.parametrize("name", ["rows", "packed"])
def test_resume_at_every_step(data: Both, name: str) -> None:
    """The other kind of data continues: states belong to both."""
    options = {"batch_size": 9, **LOADERS[name]}
    loader = tm.Loader(data.lazy, **options)
    batches, states = [], [loader.state_dict()]
    for batch in itertools.islice(loader.repeat(), 15):
        batches.append(digest(batch))
        states.append(json.loads(json.dumps(loader.state_dict())))
    for step, state in enumerate(states[:-2]):
        resumed = tm.Loader(data[step % 2], **options)
        resumed.load_state_dict(state)
        assert served(resumed, 2) == batches[step : step + 2]


def rows_of(batches: list[dict[str, Any]]) -> list[list[int]]:
    return [
        ids[mask == 1].tolist()
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def test_world_sizes_change_on_resume(data: Both) -> None:
    """1 → 2 → 4 → 3 ranks serve the rows that one rank serves."""
    expected = rows_of(list(itertools.islice(tm.Loader(data.finished, 12).repeat(), 20)))
    found: list[list[int]] = []
    state = None
    for size in (1, 2, 4, 3):
        for _ in range(3):
            states = []
            for rank in range(size):
                loader = tm.Loader(data.lazy, 12 // size, rank=rank, world_size=size)
                if state is not None:
                    loader.load_state_dict(state)
                found += rows_of(list(itertools.islice(loader.repeat(), 1)))
                states.append(loader.state_dict())
            assert states == states[:1] * size
            state = states[0]
    assert found == expected[: len(found)]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*", "ignore:.*worker processes.*")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "name"), [*((share, "rows") for share in SHARES), (30, "packed")], indirect=["data"]
)
def test_workers_do_not_change_an_epoch(data: Both, name: str) -> None:
    torch = pytest.importorskip("tokenmill.integrations.torch")
    options = {"batch_size": 8, **LOADERS[name]}
    plain = tm.Loader(data.lazy, **options)
    expected = served(plain, 16)
    for workers in (0, 2, 3):
        loader = torch.DataLoader(data.lazy, num_workers=workers, **options)
        found = served(loader, 7)
        state, counted = loader.state_dict(), loader.served()
        resumed = torch.DataLoader(data.finished, num_workers=3 - workers, **options)
        resumed.load_state_dict(state)
        assert found + served(resumed, 9) == expected
        again = tm.Loader(data.finished, **options)
        served(again, 7)
        assert counted == again.served()  # prefetched batches are not counted


GOLDEN = {
    0: "db7e8858b0f6 b9c85e07de10",
    1: "b2912fc4b097 24ca64367f47",
    30: "1ca0faed1824 77351406d4de",
}


def test_checksums_of_whole_epochs(data: Both, request: pytest.FixtureRequest) -> None:
    """A change of the order or of the rule of replacements breaks resumed runs."""
    share = request.node.callspec.params["data"]
    epochs = []
    for epoch in range(2):
        loader = tm.Loader(data.lazy, 16, seed=1, indices=True)
        loader.set_epoch(epoch)
        epochs.append(hashlib.sha256("".join(map(digest, loader)).encode()).hexdigest()[:12])
    assert " ".join(epochs) == GOLDEN[share]


@pytest.mark.parametrize("data", [30], indirect=True)
def test_prefetching_thread_serves_the_same(data: Both) -> None:
    assert served(tm.Loader(data.lazy, 6, prefetch=3), 9) == served(tm.Loader(data.lazy, 6), 9)


# Other data


def as_table(path: Path, rows: list[Any]) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def test_parquet_rows(tmp_path: Path) -> None:
    rows = conversations(40)
    for row in rows[::9]:
        row["messages"] = row["messages"][:1]
    made = both([as_table(tmp_path / f"{n}.parquet", rows[n::2]) for n in range(2)], tmp_path)
    assert_same_units(made)
    assert served(tm.Loader(made.lazy, 6), 9) == served(tm.Loader(made.finished, 6), 9)


@pytest.mark.parametrize("layout", ["sides", "interleaved"])
@pytest.mark.parametrize("make", [pair, ranked])
def test_groups_are_units(tmp_path: Path, make: Any, layout: str) -> None:
    rows = [{"prompt": "p", "chosen": "", "rejected": "x"} if n % 4 == 1 else make(n)
            for n in range(40)]  # fmt: skip
    made = both(write_rows(tmp_path / "groups.jsonl", rows), tmp_path)
    assert_same_units(made)
    lazy, finished = (tm.Loader(part, 6, layout=layout, indices=True) for part in made)
    for ours, theirs in itertools.islice(zip(lazy.repeat(), finished.repeat(), strict=True), 16):
        assert digest(ours) == digest(theirs)
    assert len(made.lazy[0]) in (2, 3, 4, 5)
    assert lazy.served() == finished.served()


def test_selections_concatenations_and_mixtures(data: Both, tmp_path: Path) -> None:
    others = both(write_rows(tmp_path / "more.jsonl", conversations(20, 500)), tmp_path)
    views = [
        {
            "select": ours.select([4, 2, 2, 47, 30, -1]),
            "slice": ours[10:50:3],
            "shuffled": ours.shuffle(5),
            "concat": tm.concat([ours, theirs]),
            "mixed": tm.mix({"a": ours, "b": theirs}, {"a": 0.3, "b": 0.7}),
            "mapped": ours.map(backwards),
        }
        for ours, theirs in zip(data, others, strict=True)
    ]
    for name, lazy in views[0].items():
        loaders = [tm.Loader(part, 4, seed=9, indices=True) for part in (lazy, views[1][name])]
        assert served(loaders[0], 9) == served(loaders[1], 9), name
        assert loaders[0].served() == loaders[1].served()
        assert loaders[0].state_dict() == loaders[1].state_dict()
    packs = [tm.Loader(part["mixed"], 2, pack=tm.Pack(300, window=8)) for part in views]
    assert served(packs[0], 6) == served(packs[1], 6)
    assert packs[0].served() == packs[1].served()
    mixed = tm.Loader(views[0]["mixed"], 10, indices=True)
    numbers = np.concatenate([batch["indices"] for batch in itertools.islice(mixed.repeat(), 10)])
    assert (numbers >= len(data.lazy)).sum() == 70  # replacements are of the same source


def backwards(row: tm.Row) -> dict[str, Any]:
    return {"input_ids": row.input_ids[::-1]}


# Opening


def test_finished_store_of_the_cache_is_used(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", conversations(8))
    given = {**INLINE, "tokenizer": str(TOKENIZER), "cache_dir": tmp_path}
    before = tm.prepare(source, lazy=True, **given)
    store = tm.prepare(source, **given)
    after = tm.prepare(source, lazy=True, **given)
    assert isinstance(after, StoreBySource)
    assert (after.key, after.store.key) == (before.key, store.key)
    assert served(tm.Loader(after, 3), 6) == served(tm.Loader(before, 3), 6)


def test_pickles_are_small_and_serve_the_same(data: Both) -> None:
    for part in data:
        pickled = pickle.dumps(part)
        assert len(pickled) < 16 << 10
        assert served(tm.Loader(pickle.loads(pickled), 6), 4) == served(tm.Loader(part, 6), 4)


def test_pickles_do_not_grow_with_the_number_of_files(tmp_path: Path) -> None:
    names = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(60)]
    files = [write_rows(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in names]
    for some, more in zip(both(files[:30], tmp_path), both(files, tmp_path), strict=True):
        pickled = pickle.dumps(more)
        assert len(pickled) < len(pickle.dumps(some)) + 100
        assert pickle.loads(pickled)[59].origin == more[59].origin
        assert more[59].origin.path == str(files[59])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*")
@pytest.mark.parametrize("data", [30], indirect=True)
def test_fast_engine_is_loaded_later_and_not_used_in_forked_processes(
    data: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy: Any = pickle.loads(pickle.dumps(data.lazy))
    lazy._options["engine"] = "auto"  # as for a large file
    numbers = np.arange(len(lazy))
    lazy.read(numbers)
    assert list(lazy._pipelines) == ["hf"]
    monkeypatch.setattr("tokenmill.build.lazy.SMALL_JOB_BYTES", 0)
    assert_same_units(Both(lazy, data.finished))
    assert lazy._pipeline() is lazy._pipelines["auto"]
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            assert_same_units(Both(lazy, data.finished))
            assert lazy._pipeline() is lazy._pipelines["hf"]
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


# Rejections


def test_rejections_are_counted_and_warned_of_once(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", with_broken(conversations(100, words=4), 20))
    lazy = both(source, tmp_path, max_rejected=0.5)[0]
    for limit, expected in ((0.1, 1), (0.5, 0), (3, 1), (None, 0)):
        lazy.max_rejected = limit
        loader = tm.Loader(lazy, 10, seed=4)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in loader:
                pass
        assert len(caught) == expected
        if caught:
            allowed = {0.1: "10%", 3: "3"}[limit]  # type: ignore[index]
            assert f"more than the allowed {allowed};" in str(caught[0].message)
            assert "rows.jsonl:" in str(caught[0].message)
    counts = loader.served()["data"]["rejected"]
    assert set(counts) == {"bad_json", "bad_shape", "trailing_user"}
    assert sum(count["rows"] for count in counts.values()) >= 15
    assert all(1 <= len(count["first"]) <= 5 for count in counts.values())
    assert "rows.jsonl:" in counts["bad_json"]["first"][0]


def test_error_after_many_draws_names_the_rate(tmp_path: Path) -> None:
    rows = [BROKEN[0]] * 4000
    rows[0] = conversations(1)[0]
    given = {**INLINE, "tokenizer": str(TOKENIZER), "cache_dir": tmp_path}
    lazy = tm.prepare(write_rows(tmp_path / "rows.jsonl", rows), lazy=True, **given)
    with pytest.raises(SourceError, match=rf"{MAX_DRAWS} rows drawn.*9\d\.\d%.*bad_json"):
        list(tm.Loader(lazy, 2, shuffle=False))
    with pytest.raises(SourceError, match="all of 64 rows spread over the source are rejected"):
        tm.prepare(f"{tmp_path / 'rows.jsonl'}@[1:]", lazy=True, **given)


# What needs a finished store


def refusals(data: SourceRows) -> Iterator[tuple[str, Any]]:
    yield "lengths", lambda: data.lengths
    yield "trained", lambda: tm.concat([data, data]).trained
    yield "columns", lambda: data.filter("length > 3")
    yield "columns", lambda: data.split({"a": 0.5, "b": 0.5})
    yield "lengths", lambda: tm.mix({"a": data}, by="tokens")
    yield "group_by_length", lambda: tm.Loader(data, group_by_length=True)
    yield "micro_batches", lambda: tm.Loader(data, micro_batches=tm.MicroBatches(1000))
    yield "sidecars", lambda: tm.Loader(data, sidecars=["x"])
    yield "attach", lambda: data.attach("x", [], producer="p")
    yield "number of packs", lambda: len(tm.Loader(data, pack=tm.Pack(99)))


def test_what_needs_a_finished_store_is_refused(data: Both) -> None:
    for part in data:
        for name, call in refusals(part):
            with pytest.raises(
                UsageError, match=rf"{name}: not available by source row.*finished store"
            ):
                call()
        packed = tm.Loader(part, 2, pack=tm.Pack(99, window=8))
        for iterate in (lambda loader=packed: next(iter(loader)), lambda loader=packed:
                        loader.repeat(2)):  # fmt: skip
            with pytest.raises(UsageError, match=r"use loader\.repeat\(\) without epochs"):
                iterate()
        with pytest.raises(UsageError, match="cannot be combined; use store"):
            tm.concat([part, data.finished.store])
    state = tm.Loader(data.lazy, pack=tm.Pack(99), rank=0, world_size=2).state_dict()
    with pytest.raises(StateError, match="another packing"):
        tm.Loader(data.lazy, pack=tm.Pack(99), rank=1, world_size=2).load_state_dict(state)


def test_rows_that_may_become_several_are_refused(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", conversations(4))
    given = {**INLINE, "tokenizer": str(TOKENIZER), "cache_dir": tmp_path}
    with pytest.raises(UsageError, match="expand='turns' may make several rows"):
        tm.prepare(source, lazy=True, expand="turns", **given)
    with pytest.raises(UsageError, match="expand='append' may make several rows"):
        tm.prepare(source, expand="append", **given).by_source()
    with pytest.raises(UsageError, match="format='rollouts' may make several rows"):
        tm.prepare(source, lazy=True, format="rollouts", **given)


def test_kto_and_rows_of_several_kinds_are_refused(tmp_path: Path) -> None:
    answers = both(write_rows(tmp_path / "kto.jsonl", map(kto, range(6))), tmp_path)
    for part in answers:
        with pytest.raises(UsageError, match="mismatched answers of KTO rows"):
            tm.Loader(part)
    source = write_rows(tmp_path / "kinds.jsonl", [conversations(1)[0], *map(pair, range(6))])
    given = {**INLINE, "tokenizer": str(TOKENIZER), "cache_dir": tmp_path}
    lazy = tm.prepare(source, lazy=True, **given)
    with pytest.raises(UsageError, match="kind preference, earlier ones are of kind single"):
        list(tm.Loader(lazy, 3))
    with pytest.raises(UsageError, match="needs rows of one kind, the store has 6 preference"):
        tm.prepare(source, **given).by_source()
    broken = write_rows(tmp_path / "broken.jsonl", [BROKEN[0]] * 3)
    for is_lazy in (False, True):  # the second call finds the empty store of the first
        with pytest.raises(SourceError, match="no row left: all 3 were rejected"):
            tm.prepare(broken, lazy=is_lazy, **given)
