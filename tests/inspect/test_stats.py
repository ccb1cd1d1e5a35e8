"""Statistics against plain Python: bins, limits and packs add up."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.build.making import INLINE, TOKENIZER, conversations, write_rows
from tests.cli.harness import Shell
from tests.store.making import make_columns, make_store
from tokenmill.build.calls import run_recipe
from tokenmill.data.loader import Loader
from tokenmill.data.packs import Pack
from tokenmill.errors import SourceMissing, UsageError
from tokenmill.inspect import stats
from tokenmill.inspect.stats import PERCENTILES, open_mixture, packing_preview, store_stats
from tokenmill.store import Store, open_store
from tokenmill.store.named import write_name

rows_of_tokens = st.lists(
    st.integers(1, 40_000).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=60
)


def arrays(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    table = np.array(rows, np.int32).reshape(-1, 2)
    return table[:, 0], table[:, 1]


@given(rows_of_tokens, st.sampled_from([1, 2, 6]))
def test_length_bins_contain_every_row_once(rows: list[tuple[int, int]], per_doubling: int) -> None:
    lengths, _ = arrays(rows)
    bins = stats.length_histogram(lengths, per_doubling)
    for entry in bins:
        inside = [n for n in lengths.tolist() if entry["from"] <= n <= entry["to"]]
        assert (entry["rows"], entry["tokens"]) == (len(inside), sum(inside))
    assert sum(entry["rows"] for entry in bins) == len(rows)
    assert all(a["to"] + 1 == b["from"] for a, b in itertools.pairwise(bins))
    if bins:
        assert bins[0]["rows"]
        assert bins[-1]["rows"]


@given(rows_of_tokens, st.sampled_from([10, 20]))
def test_share_bins_contain_every_row_once(rows: list[tuple[int, int]], bins: int) -> None:
    counts = Counter(min(bins - 1, trained * bins // length) for length, trained in rows)
    lengths, trained = arrays(rows)
    found = stats.share_histogram(trained, lengths, bins)
    assert [entry["rows"] for entry in found] == [counts[n] for n in range(bins)]
    assert [entry["from"] for entry in found] == [n / bins for n in range(bins)]


@given(rows_of_tokens, st.integers(1, 50_000))
def test_limit_drops_longer_rows(rows: list[tuple[int, int]], limit: int) -> None:
    longer = [(length, trained) for length, trained in rows if length > limit]
    assert stats.limit_effect(*arrays(rows), limit) == {
        "max_length": limit,
        "rows_dropped": len(longer),
        "tokens_dropped": sum(length for length, _ in longer),
        "trained_tokens_dropped": sum(trained for _, trained in longer),
        "tokens_truncated": sum(length - limit for length, _ in longer),
    }


def test_limits_end_where_nothing_is_dropped_and_include_requested_ones() -> None:
    lengths = np.array([100, 3000], np.int32)
    assert stats.limits_to_try(lengths) == [512, 1024, 2048, 4096]
    assert stats.limits_to_try(lengths, [700, 9999]) == [512, 700, 1024, 2048, 4096, 9999]
    assert stats.limits_to_try(np.zeros(0, np.int32)) == [512]
    with pytest.raises(UsageError, match="positive"):
        stats.limits_to_try(lengths, [0])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    directory = tmp_path_factory.mktemp("stats")
    one = write_rows(directory / "one.jsonl", conversations(40, words=30))
    two = write_rows(directory / "two.jsonl", conversations(25, first=100, words=300))
    prepared = run_recipe(
        [str(one), str(two)], str(TOKENIZER), cache_dir=directory / "cache", **INLINE
    )
    return open_store(prepared.path)


@pytest.mark.parametrize("window", [10, 65536])
def test_packs_equal_those_of_the_loader(store: Store, window: int) -> None:
    for length in (300, 400, 1500, 2048):  # at 1,500 another order gives another number of packs
        pack = Pack(length, window=window, oversize="drop")
        loader = Loader(store, batch_size=1, pack=pack, pad_token_id=0)
        packs = [int((batch["seq_idx"] >= 0).sum()) for batch in loader]
        for windows in (None, 16):
            found = packing_preview(store, pack, windows=windows).document()
            assert (found["packs"], found["rows"]) == (len(packs), 65)
            assert found["tokens"] == sum(packs)
            assert found["fill"] == round(sum(packs) / (len(packs) * length), 6)
            assert found["rows_longer"] == int((store.lengths > length).sum())
    small = Pack(2048, window=10, oversize="drop")
    assert packing_preview(store, small, windows=3).document()["rows"] == 30


def test_percentiles_per_source_are_those_of_its_rows(store: Store) -> None:
    found = stats.store_distributions(store)["source_percentiles"]
    lengths = np.asarray(store.lengths)
    for mine, rows in zip(found, (lengths[:40], lengths[40:]), strict=True):
        ordered = np.sort(rows)
        ranks = {p: max(0, -(-p * len(rows) // 100) - 1) for p in PERCENTILES}
        assert mine == {f"p{p}": int(ordered[rank]) for p, rank in ranks.items()}


def test_roles_and_sources_add_up_to_the_store(store: Store) -> None:
    document = store_stats(store)
    tokens = sum(len(row.input_ids) for row in store)
    assert document["tokens"] == tokens
    turns: Counter[str] = Counter()
    for row in store:
        for role, start, end in row.turns:
            turns[role] += end - start
    assert {role: entry["tokens"] for role, entry in document["roles"].items()} == dict(turns)
    names = [Path(source["path"]).name for source in document["sources"]]
    assert names == ["one.jsonl", "two.jsonl"]
    assert sum(source["tokens"] for source in document["sources"]) == tokens


RECIPE = """\
sources: {{chat: {chat}, code: stores/{code}}}
weights: {{chat: 0.9, code: 0.1}}
exhausted: {exhausted}
"""


@pytest.mark.parametrize("exhausted", ["stop", "repeat", "drop"])
def test_mixture_counts_the_rows_that_the_loader_serves(
    tmp_path: Path, shell: Shell, exhausted: str
) -> None:
    chat = make_store(tmp_path, [make_columns([5] * 80)], name="chat")
    code = make_store(tmp_path, [make_columns([9] * 50)], name="code")
    recipe = tmp_path / "mix.yaml"
    recipe.write_text(RECIPE.format(chat=chat.path, code=code.path.name, exhausted=exhausted))
    planned = shell("stats", "--mix", recipe, "--steps", 20, "--batch-size", 6, "--json").json
    loader = Loader(open_mixture(recipe), batch_size=6)
    for _ in itertools.islice(loader.repeat(), 20):
        pass
    served = {name: counts["rows"] for name, counts in loader.served().items()}
    assert planned["rows"] == served
    assert sum(served.values()) == planned["samples"] == 120
    assert planned["shares"] == {name: round(rows / 120, 6) for name, rows in served.items()}
    assert planned["passes"]["chat"] == round(served["chat"] / 80, 6)
    shown = shell("stats", "--mix", recipe).out
    assert "chat" in shown
    assert "%" in shown


def test_mixture_takes_names_of_stores(tmp_path: Path, own_cache: Path) -> None:
    first, second = (make_store(own_cache, [make_columns([n] * 80)], name=str(n)) for n in (5, 9))
    write_name(own_cache, "chat", first.key)
    recipe = tmp_path / "mix.yaml"
    recipe.write_text(f"sources: {{chat: chat, code: {second.key}}}")
    views = open_mixture(recipe).views
    assert [view.key for view in views] == [first.key, second.key]
    recipe.write_text("sources: {chat: missing/chat}")
    with pytest.raises(SourceMissing, match=re.escape(str(tmp_path / "missing"))):
        open_mixture(recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights: {}", "map names to stores"),
        ("sources: [a]", "map names to stores"),
        ("sources: {a: x}\nweight: 1", "did you mean weights"),
        ("sources: {a: x}\nweights: 3", "map the names of sources"),
        ("- a", "mapping"),
        ("a: [", "YAML"),
    ],
)
def test_invalid_mixture_recipe_is_a_usage_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        open_mixture(path)
    with pytest.raises(SourceMissing, match=r"none\.yaml"):
        open_mixture(tmp_path / "none.yaml")
