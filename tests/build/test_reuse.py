"""Reuse: what is there is not made again, and what is made from it is bit for bit the same."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.build.making import conversation, conversations, files_of, run, small_cuts, write_rows
from tokenmill.build import run as running
from tokenmill.build.outcome import Prepared
from tokenmill.build.progress import Snapshot


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    small_cuts(monkeypatch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """About 70 KiB: eight slices or so."""
    return write_rows(tmp_path / "chat.jsonl", conversations(300))


def bits(cache: Path, prepared: Prepared) -> dict[str, bytes]:
    """The files of a store and of its slices, without those of other stores in the cache."""
    keys = set(prepared.store.slice_keys())
    slices = files_of(cache, "slices")
    mine = {name: data for name, data in slices.items() if Path(name).name.split(".")[0] in keys}
    assert len(mine) == 3 * len(keys)
    return mine | files_of(prepared.path.parent, prepared.path.name)


def test_same_content_is_a_hit_whatever_its_name_compression_workers_and_engines(
    source: Path, tmp_path: Path
) -> None:
    zstandard = pytest.importorskip("zstandard")
    first = run(source)
    assert not first.hit
    assert first.build_stats.slices_built == first.summary()["slices"] > 5
    data = source.read_bytes()
    for name, copied in {
        "other/name.ndjson": data,
        "chat.jsonl.gz": gzip.compress(data),
        "chat.jsonl.zst": zstandard.compress(data),
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(copied)
        os.utime(path, (1, 1))
        found = run(path)
        assert (found.hit, found.store.key) == (True, first.store.key), name
        origin = found.store[7].origin
        assert origin.path == str(path), "origins name the files of this call"
        assert data[origin.offset :][: origin.length] == json.dumps(conversation(7)).encode()
    for given in (
        {"num_workers": 2, "executor": "local"},
        {"reference": True},
        {"max_rejected": 0},
        {"max_rejected": "1%"},
    ):
        found = run(source, **given)
        assert (found.hit, found.store.key) == (True, first.store.key), given
    copy = tmp_path / "other" / "name.ndjson"
    both = run([str(source), str(copy)])
    assert both.build_stats.slices_built == 0, "two files of the same rows share slices"
    assert len(both.store) == 600
    assert both.store[300].origin.path == str(copy)
    assert both.store[300].input_ids.tolist() == first.store[0].input_ids.tolist()


@pytest.mark.parametrize(
    ("change", "most"),
    [
        (lambda rows: [*rows, json.dumps(conversation(300))], 2),
        (lambda rows: [json.dumps(conversation(9999)), *rows], 3),
        (lambda rows: [*rows[:100], rows[101].replace("amber", "AMBER"), *rows[102:]], 3),
    ],
    ids=["appended", "inserted", "removed and edited"],
)
def test_changed_rows_rebuild_a_few_slices(
    source: Path, change: Callable[[list[str]], list[str]], most: int
) -> None:
    before = run(source).summary()
    rows = change(source.read_text().splitlines())
    after = run(write_rows(source, rows))
    assert not after.hit
    assert len(after.store) == len(rows)
    assert 1 <= after.build_stats.slices_built <= most
    assert after.summary()["slices"] - before["slices"] <= 1


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Rows of about 30 to 120 tokens, some bad, in several slices; the first slice is short."""
    rows: list[Any] = [conversation(n, 4 + n * 7 % 28 if n > 60 else 4) for n in range(300)]
    rows[40:40] = ["{", '{"messages": 3}']
    rows[200:200] = ['{"messages": [{"role": "narrator", "content": "x"}]}']
    return write_rows(tmp_path / "uneven.jsonl", rows)


LIMITS: list[dict[str, Any]] = [
    {"max_length": 80},
    {"max_length": 45, "keep_columns": ("id",)},
    {"max_length": 60, "overlong": "truncate"},
    {"max_length": 100, "expand": "turns"},
]


@pytest.mark.parametrize("given", LIMITS, ids=str)
def test_another_limit_tokenizes_nothing_and_keeps_the_rest(
    uneven: Path, tmp_path: Path, own_cache: Path, given: dict[str, Any]
) -> None:
    limit, truncates = given["max_length"], given.get("overlong") == "truncate"
    shaping = {name: value for name, value in given.items() if name in ("keep_columns", "expand")}
    whole = run(uneven, **shaping)
    limited = run(uneven, **given)
    slices = limited.summary()["slices"]
    assert not limited.hit
    assert limited.build_stats.slices_built == 0
    assert 0 < limited.build_stats.slices_derived < slices, (
        "slices without overlong rows are shared"
    )
    shared = set(limited.store.slice_keys()) & set(whole.store.slice_keys())
    assert len(shared) == slices - limited.build_stats.slices_derived
    # Compared with every row of the store without a limit.
    expected, lost = [], 0
    for row in whole.store:
        mask = row.loss_mask[:limit]
        if len(row.input_ids) <= limit or (truncates and mask.any()):
            ends = [(role, min(a, limit), min(b, limit)) for role, a, b in row.turns]
            expected.append((row.input_ids[:limit].tolist(), mask.tolist(), ends, row.origin))
        else:
            lost += 1
    assert lost > 0
    assert expected == [
        (row.input_ids.tolist(), row.loss_mask.tolist(), list(row.turns), row.origin)
        for row in limited.store
    ]
    reason = "no_trained_tokens" if truncates else "overlong"
    before, after = whole.store.rejected, limited.store.rejected
    assert after == {**before, reason: before.get(reason, 0) + lost}
    if "keep_columns" in given:
        assert [row.extra for row in limited.store] == [
            row.extra for row in whole.store if len(row.input_ids) <= limit
        ]
    # A build that starts with the limit makes the same bytes.
    direct = run(uneven, cache_dir=tmp_path / "direct", **given)
    assert direct.build_stats.slices_derived == 0
    assert direct.build_stats.slices_built == slices
    assert bits(tmp_path / "direct", direct) == bits(own_cache, limited)
    assert direct.store.verify() > 0
    assert run(uneven, cache_dir=tmp_path / "direct", **shaping).build_stats.slices_built == 0


def test_dropped_tokens_are_in_no_file_of_the_store(uneven: Path) -> None:
    datasets = pytest.importorskip("datasets")
    store = run(uneven, max_length=60).store
    loaded = datasets.load_from_disk(str(store.path))
    assert max(map(len, loaded["input_ids"])) <= 60
    assert len(loaded) == len(store)


def test_corrupt_slice_is_tokenized_again_for_another_limit(
    uneven: Path, tmp_path: Path, own_cache: Path
) -> None:
    base = run(uneven)
    victim = base.store.layout.slice(list(base.store.slice_keys())[-1]).tokens
    victim.chmod(0o644)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    limited = run(uneven, max_length=60)
    assert limited.build_stats.slices_built == 1
    direct = run(uneven, cache_dir=tmp_path / "direct", max_length=60)
    assert bits(own_cache, limited) == bits(tmp_path / "direct", direct)


@pytest.mark.parametrize("stats", [4096, 0], ids=["by stat", "by directory"])
def test_slices_that_are_gone_are_built_again(
    source: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, stats: int
) -> None:
    monkeypatch.setattr("tokenmill.build.run.MAX_STATS", stats)
    first = run(source)
    before = bits(own_cache, first)
    last = first.store.layout.slice(list(first.store.slice_keys())[-1])
    for gone in (last.record, last.tokens, last.meta, own_cache / "slices"):
        if gone.is_dir():
            shutil.rmtree(gone)
        else:
            gone.unlink()
        again = run(source)
        assert not again.hit
        slices = again.summary()["slices"]
        assert again.build_stats.slices_built == (slices if gone.name == "slices" else 1), gone
        assert bits(own_cache, again) == before
    assert run(source).hit


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
def test_slice_collected_during_the_build_is_built_again(
    source: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As `cache gc` would, having marked it when no store needed it yet."""
    commit, calls = running.commit_store, 0

    def collected(cache: Any, document: Any, placements: Any, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        places = list(placements)
        files = cache.slice(places[2].key)
        gone = [files.record, files.tokens, files.meta] if calls == 1 else []
        if moment == "before the commit":
            for path in gone:
                path.unlink()
        layout = commit(cache, document, iter(places), *rest)
        for path in gone:
            path.unlink(missing_ok=True)
        return layout

    monkeypatch.setattr(running, "commit_store", collected)
    prepared = run(source)
    assert calls == 2
    assert prepared.build_stats.slices_built == prepared.summary()["slices"] + 1
    assert prepared.store.verify() > 0
    assert len(prepared.store) == 300


def test_progress_counts_every_slice_once_found_built_or_derived(source: Path) -> None:
    seen: list[Snapshot] = []
    first = run(source)
    slices = first.summary()["slices"]
    source.write_bytes(source.read_bytes() + json.dumps(conversation(300)).encode() + b"\n")
    grown = run(source, progress=seen.append)
    assert 0 < grown.build_stats.slices_built < slices
    assert seen[-1].fraction == 1.0
    assert (seen[-1].rows, seen[-1].slices) == (301, grown.summary()["slices"])
    limited = run(source, max_length=int(first.store.lengths.max()) - 1, progress=seen.append)
    assert limited.build_stats.slices_derived > 0
    assert (seen[-1].rows, seen[-1].slices) == (301, limited.summary()["slices"])


def described(prepared: Prepared) -> dict[str, Any]:
    names = ("engine", "renderer", "audited_rows", "notes", "used", "untraced", "slices")
    return {name: prepared.store.proof[name] for name in names}


@pytest.mark.parametrize("reused", ["rows", "limit", "lost", "damaged"])
def test_proof_counts_the_slices_of_earlier_runs_too(
    reused: str, source: Path, tmp_path: Path
) -> None:
    more = write_rows(tmp_path / "more.jsonl", conversations(20, first=900))
    sources = [source, more] if reused == "rows" else source
    limit = {"max_length": 80} if reused == "limit" else {}
    expected = described(run(sources, cache_dir=tmp_path / "alone", **limit))
    first = run(source)
    if reused in ("lost", "damaged"):
        shutil.rmtree(first.path)
        path = next((tmp_path / "tokenmill-cache" / "slices").rglob("*.json"))
        path.unlink() if reused == "lost" else path.write_bytes(b"{}")
    built = run(sources, **limit)
    assert built.build_stats.slices_built < built.summary()["slices"]
    assert described(built) == expected
    assert sum(expected["used"]["render.renderer"].values()) == expected["slices"]
    hit = run(sources, **limit)
    assert hit.hit
    assert described(hit) == expected
    assert list(hit.remarks()) == list(built.remarks())


@pytest.mark.parametrize("limit", [None, 80])
def test_any_number_of_slices_without_files_is_rebuilt(
    limit: int | None, source: Path, tmp_path: Path
) -> None:
    first = run(source, max_length=limit)
    expected = [row.input_ids.tolist() for row in first.store]
    assert first.summary()["slices"] > running.MAX_REBUILDS
    shutil.rmtree(first.path)
    for path in (tmp_path / "tokenmill-cache" / "slices").rglob("*.meta.arrow"):
        path.unlink()
    assert [row.input_ids.tolist() for row in run(source, max_length=limit).store] == expected
