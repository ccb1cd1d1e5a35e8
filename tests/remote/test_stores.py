"""Tests of remote stores: push, resume, open by ranges, pull, damage."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tokenmill as tm
from tests.build.making import INLINE, TOKENIZER, conversations, files_of, small_cuts, write_rows
from tests.remote.servers import RangeServer
from tokenmill._core import fingerprint, ranged, remote
from tokenmill.build.calls import run_recipe
from tokenmill.errors import (
    CacheError,
    CorruptionError,
    NonDeterminismError,
    SourceMissing,
    UsageError,
)
from tokenmill.store import Store
from tokenmill.store.slices import read_record


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store of several slices in its own cache."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        small_cuts(patch)
        rows: list[Any] = [*conversations(150), "{bad", *conversations(50, first=150)]
        path = write_rows(root / "chat.jsonl", rows)
        made = tm.prepare(
            path, tokenizer=TOKENIZER, cache_dir=root / "cache", keep_columns=["id"], **INLINE
        )
    assert made.manifest["totals"]["slices"] > 4
    return made


@pytest.fixture(autouse=True)
def nothing_pooled() -> None:
    ranged.recent.clear()


@pytest.fixture(params=["s3", "memory"])
def target(request: pytest.FixtureRequest) -> str:
    return f"{request.getfixturevalue(request.param)}/stores/chat"


def same_rows(found: Store, wanted: Store) -> None:
    assert len(found) == len(wanted)
    assert found.key == wanted.key
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours.input_ids, theirs.input_ids)
        np.testing.assert_array_equal(ours.loss_mask, theirs.loss_mask)
    for index in (0, 57, len(wanted) - 1):
        assert found[index].turns == wanted[index].turns
        assert found[index].extra == wanted[index].extra
        assert found[index].origin == wanted[index].origin
    np.testing.assert_array_equal(found.lengths, wanted.lengths)
    np.testing.assert_array_equal(found.trained, wanted.trained)
    assert list(found.rejected_rows()) == list(wanted.rejected_rows())


def test_pushed_store_opens_remotely_and_can_be_pulled(
    store: Store, target: str, tmp_path: Path
) -> None:
    pushed = tm.push(store, target)
    assert (pushed.path, pushed.rows, pushed.skipped) == (target, len(store), 0)
    there = tm.open_store(target)
    same_rows(there, store)
    assert there.verify() > 0
    same_rows(pickle.loads(pickle.dumps(there)), store)
    back = tm.pull(target, cache_dir=tmp_path / "back")
    same_rows(back, store)
    back.verify()
    made = store.path.parent.parent
    for part in ("slices", "stores"):
        assert files_of(tmp_path / "back", part) == files_of(made, part)
    assert files_of(back.tokenizer_path, ".") == files_of(store.tokenizer_path, ".")
    alone = tm.pull(target, out=tmp_path / "alone", cache_dir=tmp_path / "back")
    assert alone.path == tmp_path / "alone"
    same_rows(alone, store)


def test_pulled_store_is_a_cache_hit(
    store: Store, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    tm.push(store, f"{memory}/chat")
    cache = tmp_path / "back"
    tm.pull(f"{memory}/chat", cache_dir=cache)
    source = str(store.sources[0])
    prepared = run_recipe(source, TOKENIZER, cache_dir=cache, keep_columns=["id"], **INLINE)
    assert prepared.hit
    assert prepared.store.key == store.key


def test_loader_serves_the_same_batches_from_a_remote_store(store: Store, memory: str) -> None:
    tm.push(store, f"{memory}/chat")
    there = tm.open_store(f"{memory}/chat")
    pairs = zip(
        tm.Loader(store, batch_size=16, drop_last=True),
        tm.Loader(there, batch_size=16, drop_last=True),
        strict=True,
    )
    for ours, theirs in pairs:
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])


def test_interrupted_push_shows_no_store_and_is_resumed(
    store: Store, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, _ = remote.filesystem(target)
    real, sent = fs.put_file, []

    def put(*arguments: Any, **options: Any) -> Any:
        if len(sent) >= 7:
            raise PermissionError("the plug was pulled")
        sent.append(arguments)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "put_file", put)
        with pytest.raises(CacheError, match="plug"):
            tm.push(store, target)
    with pytest.raises(SourceMissing, match="no such store"):
        tm.open_store(target)
    pushed = tm.push(store, target)
    assert pushed.skipped == 7
    same_rows(tm.open_store(target), store)
    again = tm.push(store, target)
    assert again.skipped == again.files == pushed.files


def test_leftover_of_an_upload_is_replaced_and_other_bytes_are_not(
    store: Store, target: str
) -> None:
    fs, _ = remote.filesystem(target)
    files = store.layout.slice(next(store.slice_keys()))
    inner = fs._strip_protocol(f"{target}/slices/{files.key[:2]}/{files.tokens.name}")
    data = files.tokens.read_bytes()
    fs.pipe_file(inner, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CacheError, match="other bytes"):
        tm.push(store, target)
    assert fs.cat_file(inner) != data
    fs.pipe_file(inner, data[: len(data) // 2])
    tm.push(store, target)
    fs.invalidate_cache()
    assert fs.cat_file(inner) == data


def test_push_over_another_store_is_refused(store: Store, memory: str, tmp_path: Path) -> None:
    tm.push(store, f"{memory}/chat")
    path = write_rows(tmp_path / "other.jsonl", conversations(3))
    other = tm.prepare(path, tokenizer=TOKENIZER, **INLINE)
    with pytest.raises(CacheError, match="contains store"):
        tm.push(other, f"{memory}/chat")
    with pytest.raises(UsageError, match="cannot write to HTTP"):
        tm.push(store, "http://127.0.0.1:1/x")
    same_rows(tm.open_store(f"{memory}/chat"), store)


def test_damaged_slice_is_not_pushed(store: Store, memory: str, tmp_path: Path) -> None:
    shutil.copytree(store.path.parent.parent, tmp_path / "cache")
    broken = Store(tmp_path / "cache" / "stores" / store.key)
    flip(broken.layout.slice(next(broken.slice_keys())).tokens)
    with pytest.raises(CorruptionError):
        tm.push(broken, f"{memory}/chat")
    with pytest.raises(SourceMissing):
        tm.open_store(f"{memory}/chat")


def flip(path: Path, at: int = -200) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.unlink()  # it may be a hard link to a shared file
    path.write_bytes(data)


@pytest.fixture
def served(web: RangeServer, store: Store, memory: str) -> str:
    """The store on a web server without listing and writing."""
    tm.push(store, f"{memory}/chat")
    fs, inner = remote.filesystem(f"{memory}/chat")
    fs.get(inner, str(web.root / "full"), recursive=True)
    return web.url("full")


def test_store_over_http_reads_only_needed_blocks_once(
    web: RangeServer, served: str, store: Store, own_cache: Path
) -> None:
    web.reset()
    there = tm.open_store(served)
    assert {path.rpartition("/")[2] for path, _ in web.requests} == {"manifest.json", "slices.bin"}
    web.reset()
    row = there[5]
    np.testing.assert_array_equal(row.input_ids, store[5].input_ids)
    assert len(web.requests) == 2  # the slice's record, and the only block
    web.reset()
    np.testing.assert_array_equal(there[6].input_ids, store[6].input_ids)
    assert not web.requests
    ranged.recent.clear()
    again = tm.open_store(served)  # like another process: the blocks are cached on disk
    np.testing.assert_array_equal(again[5].input_ids, store[5].input_ids)
    fetched = [path.rpartition("/")[2] for path, _ in web.requests]
    assert fetched == ["manifest.json"]
    assert again.tokenizer_path == own_cache / "tokenizers" / store.tokenizer_path.name
    same_rows(again, store)


def test_remote_flipped_bit_is_corruption_before_the_row_is_served(
    web: RangeServer, served: str, store: Store
) -> None:
    files = store.layout.slice(next(store.slice_keys()))
    name = f"slices/{files.key[:2]}/{files.tokens.name}"
    flip(web.root / "full" / name)
    there = tm.open_store(served)
    with pytest.raises(CorruptionError, match="checksum") as caught:
        there[0]
    assert caught.value.path == f"{served}/{name}"
    checked, errors = there.check_everything()
    assert len(errors) == 1
    assert checked > 0
    (web.root / "full" / name).unlink()
    with pytest.raises(CorruptionError, match="missing"):
        tm.open_store(served)[0]


@pytest.mark.parametrize("name", ["manifest.json", "slices.bin", "lengths.bin"])
def test_flipped_bit_in_a_store_s_own_file_is_corruption(
    web: RangeServer, served: str, name: str
) -> None:
    flip(web.root / "full" / name, at=-2)
    with pytest.raises(CorruptionError):
        _ = tm.open_store(served).lengths


def test_flipped_bit_in_the_block_cache_is_fetched_again(
    web: RangeServer, served: str, store: Store, own_cache: Path
) -> None:
    _ = tm.open_store(served)[0], tm.open_store(served).lengths
    for path in own_cache.glob("blocks/*/*"):
        flip(path, at=-1)
    ranged.recent.clear()
    same_rows(tm.open_store(served), store)


def test_block_cache_stays_within_its_bound(
    web: RangeServer, served: str, store: Store, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_BLOCK_CACHE_BYTES", str(60_000))
    there = tm.open_store(served)
    for row in there:
        assert len(row.input_ids)
        kept = sum(path.stat().st_size for path in own_cache.glob("blocks/*/*"))
        assert kept <= 60_000
    monkeypatch.setenv("TOKENMILL_BLOCK_CACHE_BYTES", "0")
    shutil.rmtree(own_cache)
    ranged.recent.clear()
    same_rows(tm.open_store(served), store)
    assert not own_cache.exists()


def test_unreachable_store_is_a_cache_error_after_retries(web: RangeServer, served: str) -> None:
    there = tm.open_store(served)
    web.faults[:] = [503] * 100
    with pytest.raises(CacheError, match="after 6 attempts"):
        there[0]


def test_pull_of_other_bytes_under_a_key_of_the_cache_is_refused(
    store: Store, memory: str, tmp_path: Path
) -> None:
    tm.push(store, f"{memory}/chat")
    back = tm.pull(f"{memory}/chat", cache_dir=tmp_path / "back")
    files = back.layout.slice(next(back.slice_keys()))
    record, _ = read_record(files)
    files.record.write_bytes(msgspec.structs.replace(record, content="0" * 32).encode())
    with pytest.raises(NonDeterminismError):
        tm.pull(f"{memory}/chat", cache_dir=tmp_path / "back")


def test_interrupted_pull_is_resumed(
    web: RangeServer, served: str, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.store import transfer

    real, taken = transfer._slice_files, []

    def take(*arguments: Any) -> Any:
        if len(taken) >= 3:
            raise KeyboardInterrupt
        taken.append(arguments)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_slice_files", take)
        with pytest.raises(KeyboardInterrupt):
            transfer.copy_from(served, cache_dir=tmp_path / "back")
    assert not list((tmp_path / "back").glob("stores/*"))
    done = transfer.copy_from(served, cache_dir=tmp_path / "back")
    assert done.skipped == 3 * 3  # tokens, meta and record of three slices
    same_rows(Store(done.path), store)


def test_push_over_other_bytes_of_the_same_key_is_refused(store: Store, memory: str) -> None:
    tm.push(store, f"{memory}/chat")
    fs, inner = remote.filesystem(f"{memory}/chat/manifest.json")
    manifest = json.loads(fs.cat_file(inner))
    manifest["files"]["lengths.bin"]["checksum"] = "0" * 32
    del manifest["digest"]
    manifest["digest"] = fingerprint.key(manifest)
    fs.pipe_file(inner, fingerprint.canonical(manifest) + b"\n")
    with pytest.raises(NonDeterminismError, match="of this key with other files"):
        tm.push(store, f"{memory}/chat")
