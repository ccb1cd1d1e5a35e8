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

from tests.build.making import (
    INLINE,
    TOKENIZER,
    conversation,
    conversations,
    files_of,
    small_cuts,
    write_rows,
)
from tokenmill.api import run_recipe
from tokenmill.build.outcome import Prepared
from tokenmill.work.progress import Snapshot

Run = Callable[..., Prepared]


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    small_cuts(monkeypatch)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """About 70 KiB: eight slices or so."""
    return write_rows(tmp_path / "chat.jsonl", conversations(300))


def run(source: Any, **given: Any) -> Prepared:
    return run_recipe(source, str(TOKENIZER), **(INLINE | given))


def bits(cache: Path, prepared: Prepared) -> dict[str, bytes]:
    """The files of a store and of its slices, without those of other stores in the cache."""
    keys = set(prepared.store.slice_keys())
    slices = files_of(cache, "slices")
    mine = {name: data for name, data in slices.items() if Path(name).name.split(".")[0] in keys}
    assert len(mine) == 3 * len(keys)
    return mine | files_of(prepared.path.parent, prepared.path.name)


# The same content


def test_same_content_elsewhere_is_a_hit(source: Path, tmp_path: Path) -> None:
    first = run(source)
    assert not first.hit
    assert first.account.slices_built == first.summary()["slices"] > 5
    other = tmp_path / "other" / "name.ndjson"
    other.parent.mkdir()
    shutil.copy(source, other)
    os.utime(other, (1, 1))
    found = run(other)
    assert found.hit
    assert found.store.key == first.store.key
    assert found.store[0].origin.path == str(other), "origins name the files of this call"


def test_same_content_compressed_is_a_hit(source: Path, tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    data = source.read_bytes()
    (tmp_path / "chat.jsonl.gz").write_bytes(gzip.compress(data))
    (tmp_path / "chat.jsonl.zst").write_bytes(zstandard.compress(data))
    key = run(source).store.key
    for name in ("chat.jsonl.gz", "chat.jsonl.zst"):
        found = run(tmp_path / name)
        assert (found.hit, found.store.key) == (True, key), name
        origin = found.store[7].origin
        assert data[origin.offset :][: origin.length] == json.dumps(conversation(7)).encode()


def test_workers_and_engines_are_part_of_no_key(source: Path) -> None:
    key = run(source).store.key
    for given in (
        {"num_workers": 2, "executor": "local"},
        {"engine": "hf"},
        {"renderer": "jinja2"},
        {"on_bad_row": "raise"},
        {"max_rejected": "1%"},
        {"rehash": True},
    ):
        found = run(source, **given)
        assert (found.hit, found.store.key) == (True, key), given


def test_two_files_of_the_same_rows_share_slices(source: Path, tmp_path: Path) -> None:
    copy = shutil.copy(source, tmp_path / "copy.jsonl")
    one = run(source)
    both = run([str(source), str(copy)])
    assert both.account.slices_built == 0
    assert len(both.store) == 600
    assert both.store[300].origin.path == str(copy)
    assert both.store[300].input_ids.tolist() == one.store[0].input_ids.tolist()


# Content that changes a little


def test_appended_rows_build_only_the_tail(source: Path) -> None:
    before = run(source).summary()
    with open(source, "a") as file:
        file.write(json.dumps(conversation(300)) + "\n")
    after = run(source)
    assert not after.hit
    assert len(after.store) == 301
    assert after.account.slices_built <= 2
    assert after.summary()["slices"] - before["slices"] <= 1


def test_inserted_row_rebuilds_a_few_slices(source: Path) -> None:
    run(source)
    source.write_bytes(json.dumps(conversation(9999)).encode() + b"\n" + source.read_bytes())
    after = run(source)
    assert len(after.store) == 301
    assert 1 <= after.account.slices_built <= 3


def test_removed_and_edited_rows_rebuild_a_few_slices(source: Path) -> None:
    run(source)
    rows = source.read_text().splitlines()
    edited = [*rows[:100], rows[101].replace("amber", "AMBER"), *rows[102:]]
    after = run(write_rows(source, edited))
    assert 1 <= after.account.slices_built <= 3


# Another limit


LIMITS = (None, 90, 60, 50)


def built_directly(source: Path, cache: Path, limit: int | None, **given: Any) -> dict[str, bytes]:
    direct = run(source, cache_dir=cache, max_length=limit, **given)
    assert direct.account.slices_derived == 0
    return bits(cache, direct)


@pytest.fixture
def uneven(tmp_path: Path) -> Path:
    """Rows of about 30 to 120 tokens, some bad, in several slices."""
    rows: list[Any] = [conversation(n, 4 + n * 7 % 28) for n in range(300)]
    rows[40:40] = ["{", '{"messages": 3}']
    rows[200:200] = ['{"messages": [{"role": "narrator", "content": "x"}]}']
    return write_rows(tmp_path / "uneven.jsonl", rows)


@pytest.mark.parametrize("larger", [None, 90])
@pytest.mark.parametrize("smaller", [60, 45])
def test_smaller_limit_tokenizes_nothing_and_is_bit_identical(
    uneven: Path, tmp_path: Path, own_cache: Path, larger: int | None, smaller: int
) -> None:
    given = {"carry": ("id",)}
    base = run(uneven, max_length=larger, **given)
    derived = run(uneven, max_length=smaller, **given)
    assert not derived.hit
    assert derived.account.slices_built == 0
    assert derived.account.slices_derived == derived.summary()["slices"] > 5
    assert 0 < len(derived.store) < len(base.store)
    assert int(derived.store.lengths.max()) <= smaller
    direct = built_directly(uneven, tmp_path / "direct", smaller, **given)
    assert bits(own_cache, derived) == direct


def test_derived_from_derived_is_bit_identical(
    uneven: Path, tmp_path: Path, own_cache: Path
) -> None:
    for limit in LIMITS[:-1]:
        run(uneven, max_length=limit)
    last = run(uneven, max_length=LIMITS[-1])
    assert last.account.slices_built == 0
    assert bits(own_cache, last) == built_directly(uneven, tmp_path / "direct", LIMITS[-1])


def test_larger_limit_tokenizes_only_slices_that_dropped_rows(
    tmp_path: Path, own_cache: Path
) -> None:
    rows = conversations(300, words=6)
    rows[10] = conversation(10, words=60)  # the one long row lies in the first slice
    source = write_rows(tmp_path / "one_long.jsonl", rows)
    small = run(source, max_length=60)
    assert small.store.rejected == {"overlong": 1}
    for limit in (100, None):
        shutil.rmtree(tmp_path / "direct", ignore_errors=True)
        larger = run(source, max_length=limit)
        slices = larger.summary()["slices"]
        if limit == 100:
            assert larger.account.slices_built == 1
            assert larger.account.slices_derived == slices - 1
        else:
            assert larger.account.slices_built == 1, "100 drops it too"
        assert bits(own_cache, larger) == built_directly(source, tmp_path / "direct", limit)
    assert len(larger.store) == 300


def test_truncation_is_never_derived(uneven: Path) -> None:
    run(uneven)
    cut = run(uneven, max_length=60, overlong="truncate")
    assert cut.account.slices_derived == 0
    assert cut.account.slices_built == cut.summary()["slices"]
    dropped = run(uneven, max_length=60)
    assert dropped.account.slices_built == 0, "dropping is derived from no limit, not from this"
    assert len(dropped.store) < len(cut.store)


def test_derived_with_expanded_turns_is_bit_identical(tmp_path: Path, own_cache: Path) -> None:
    rows = [{"messages": conversation(n, 9)["messages"] * (1 + n % 3)} for n in range(120)]
    source = write_rows(tmp_path / "turns.jsonl", rows)
    run(source, expand="turns")
    derived = run(source, expand="turns", max_length=100)
    assert derived.account.slices_built == 0
    assert derived.store.rejected["overlong"] > 0
    direct = built_directly(source, tmp_path / "direct", 100, expand="turns")
    assert bits(own_cache, derived) == direct


def test_a_corrupt_base_is_tokenized_instead(uneven: Path, tmp_path: Path, own_cache: Path) -> None:
    base = run(uneven)
    victim = base.store.layout.slice(next(base.store.slice_keys())).tokens
    victim.chmod(0o644)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    derived = run(uneven, max_length=60)
    assert derived.account.slices_built == 1
    assert derived.account.slices_derived == derived.summary()["slices"] - 1
    assert bits(own_cache, derived) == built_directly(uneven, tmp_path / "direct", 60)


# On request


def test_force_recache_builds_again_and_compares(source: Path, own_cache: Path) -> None:
    first = run(source)
    before = bits(own_cache, first)
    again = run(source, force_recache=True)
    assert not again.hit
    assert again.account.slices_built == again.summary()["slices"]
    assert again.account.slices_derived == 0
    assert bits(own_cache, again) == before


def test_force_recache_mends_a_corrupt_slice(source: Path, own_cache: Path) -> None:
    first = run(source)
    before = bits(own_cache, first)
    victim = first.store.layout.slice(next(first.store.slice_keys())).tokens
    victim.chmod(0o644)
    victim.write_bytes(victim.read_bytes()[:-8])
    again = run(source, force_recache=True)
    assert bits(own_cache, again) == before
    assert len(list((own_cache / "quarantine").iterdir())) > 0
    assert again.store.verify() > 0


@pytest.mark.parametrize("gone", ["all slices", "a record", "tokens", "meta"])
def test_slices_that_are_gone_are_built_again(source: Path, own_cache: Path, gone: str) -> None:
    """Somebody cleaned up by hand: the same command simply works."""
    first = run(source)
    before = bits(own_cache, first)
    files = first.store.layout.slice(next(first.store.slice_keys()))
    if gone == "all slices":
        shutil.rmtree(own_cache / "slices")
    else:
        {"a record": files.record, "tokens": files.tokens, "meta": files.meta}[gone].unlink()
    again = run(source)
    assert not again.hit
    slices = again.summary()["slices"]
    assert again.account.slices_built == (slices if gone == "all slices" else 1)
    assert bits(own_cache, again) == before
    assert run(source).hit


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
def test_slice_collected_during_the_build_is_built_again(
    source: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """As `cache gc` would, having marked it when no store needed it yet."""
    from tokenmill.build import run as running

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
    assert prepared.account.slices_built == prepared.summary()["slices"] + 1
    assert prepared.store.verify() > 0
    assert len(prepared.store) == 300


# How far a build is


def test_progress_counts_every_slice_once_found_built_or_derived(source: Path) -> None:
    seen: list[Snapshot] = []
    first = run(source)
    slices = first.summary()["slices"]
    source.write_bytes(source.read_bytes() + json.dumps(conversation(300)).encode() + b"\n")
    grown = run(source, progress=seen.append)
    assert 0 < grown.account.slices_built < slices
    assert seen[-1].fraction == 1.0
    assert (seen[-1].rows, seen[-1].slices) == (301, grown.summary()["slices"])
    derived = run(source, max_length=400, progress=seen.append)
    assert derived.account.slices_derived == derived.summary()["slices"]
    assert (seen[-1].rows, seen[-1].slices) == (301, derived.summary()["slices"])


def test_progress_does_not_count_a_slice_twice_whose_derivation_failed(
    source: Path, own_cache: Path
) -> None:
    seen: list[Snapshot] = []
    run(source)
    for tokens in (own_cache / "slices").rglob("*.meta.arrow"):
        tokens.write_bytes(b"damaged")
    run(source, max_length=400, progress=seen.append)
    assert (seen[-1].rows, seen[-1].fraction) == (300, 1.0)


@pytest.mark.parametrize("looked_at", [4096, 0])
@pytest.mark.parametrize("ending", [".json", ".arrow", ".meta.arrow"])
def test_lost_file_of_any_slice_is_made_again(
    source: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, looked_at: int, ending: str
) -> None:
    monkeypatch.setattr("tokenmill.build.run.MOST_LOOKED_AT", looked_at)
    first = run(source)
    honest = files_of(own_cache, "slices")
    assert run(source).hit
    last = list(first.store.slice_keys())[-1]
    (own_cache / "slices" / last[:2] / f"{last}{ending}").unlink()
    again = run(source)
    assert (again.hit, again.account.slices_built) == (False, 1)
    assert files_of(own_cache, "slices") == honest
