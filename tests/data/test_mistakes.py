"""Common mistakes raise errors that say what to write instead; objects describe themselves."""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.build.making import conversations, prepare, write_rows
from tests.cli.harness import QUICK, Shell
from tests.data.making import open_prompts
from tokenmill.errors import UsageError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tm.Store:
    directory = tmp_path_factory.mktemp("mistakes")
    rows = [*conversations(7), {"messages": 7}]
    return prepare(write_rows(directory / "rows <b>.jsonl", rows), cache_dir=directory / "cache")


def hf_dataset(store: tm.Store, **given: Any) -> Any:
    return pytest.importorskip("tokenmill.integrations.hf").for_trl(store, **given)


CALLS: dict[str, tuple[Callable[[tm.Store], Any], str]] = {
    "path": (lambda store: tm.Loader("data"),  # type: ignore[arg-type]
             r"expected a store, got a path; write tm\.open_store\('data'\)"),
    "concat": (lambda store: tm.concat([store, "data"]),  # type: ignore[list-item]
               r"write tm\.open_store\('data'\)"),
    "pack": (lambda store: tm.Loader(store, pack=4096),  # type: ignore[arg-type]
             r"got 4096; write pack=tm\.Pack\(4096\)"),
    "pack of trl": (lambda store: hf_dataset(store, pack=4096), r"write pack=tm\.Pack\(4096\)"),
    "no pack": (lambda store: tm.Loader(store, pack=True),  # type: ignore[arg-type]
                r"pack must be a tm\.Pack, got True$"),
    "config of trl": (lambda store: hf_dataset(store, config=object()),
                      "config must be a mapping of arguments"),
    "micro": (lambda store: tm.Loader(store, micro_batches=512),  # type: ignore[arg-type]
              r"write micro_batches=tm\.MicroBatches\(max_tokens=512\)"),
    "layout": (lambda store: tm.Loader(store, layout="x"),
               "layout must be one of sides, interleaved, got 'x'"),
    "no sources": (lambda store: tm.prepare(), "no sources: pass at least one file"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_error_says_what_to_write(store: tm.Store, name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(UsageError, match=message):
        call(store)


def test_unknown_argument_of_torch_has_a_suggestion(store: tm.Store) -> None:
    pytest.importorskip("torch")
    with pytest.raises(UsageError, match=r"unknown arguments: batchsize \(did you mean batch_si"):
        store.torch(batchsize=4)
    with pytest.raises(UsageError, match=r"num_worker \(did you mean num_workers\?\)"):
        store[:4].torch(num_worker=2)


def test_column_to_keep_that_the_first_rows_lack_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_rows(tmp_path / "a.jsonl", conversations(2))
    with caplog.at_level(logging.WARNING, "tokenmill.build"):
        prepare(source, keep_columns=["id"])
        assert not caplog.records
        prepare(source, keep_columns=["id", "zz"])
    assert "keep_columns names 'zz', but the first rows have no such column" in caplog.text
    assert "their columns are id, messages" in caplog.text


def test_target_that_cannot_be_written_is_refused_before_the_build(
    shell: Shell, tmp_path: Path, own_cache: Path
) -> None:
    one, two = (write_rows(tmp_path / f"{n}.jsonl", conversations(n)) for n in (1, 2))
    occupied, other, file = tmp_path / "occupied", tmp_path / "other", tmp_path / "file"
    write_rows(occupied / "notes.txt", ["mine"])
    file.write_text("a file")
    assert shell("prepare", one, *QUICK, "--out", other).code == 0
    assert shell("prepare", one, *QUICK, "--out", other).code == 0, "the same store again"
    stores = sorted((own_cache / "stores").iterdir())
    for target, message in {
        occupied: "exists and is not a copy of this store; choose another directory",
        other: "contains store ",
        file / "below": "is no writable directory",
    }.items():
        refused = shell("prepare", two, *QUICK, "--out", target)
        assert refused.code in (1, 2)
        assert message in refused.err
        assert "rows," not in refused.err, "nothing was built"
    assert sorted((own_cache / "stores").iterdir()) == stores


def test_reprs_say_how_much_there_is_and_where(store: tm.Store, tmp_path: Path) -> None:
    key, trained = re.escape(store.key[:12]), r"\d+\.\d% trained"
    source = re.escape(str(store.sources[0]))
    assert re.fullmatch(rf"Store\({key}, 7 rows, \d+ tokens, {trained}, 1 rejected\)", repr(store))
    view = store[2:5]
    assert re.fullmatch(r"View\(\w{12}, 3 of 7 rows of a store\)", repr(view))
    assert re.fullmatch(rf"Row\(\d+ tokens, \d+ trained, {source}:3\)", repr(view[0]))
    loader = tm.Loader(view, batch_size=2, rank=1, world_size=2)
    assert repr(loader) == (
        f"Loader({view!r}, batch_size=2, seed=42, order=feistel, rank 1 of 2, epoch 0, position 0)"
    )
    next(iter(loader))
    assert repr(loader).endswith("epoch 1, position 0)")
    packed = tm.Loader(view, batch_size=1, pack=tm.Pack(4096))
    assert "order=feistel, pack of 4,096 tokens, epoch 0" in repr(packed)
    prompts = open_prompts(
        write_rows(tmp_path / "p.jsonl", [{"text": "Why?"}, {"x": 1}]), cache_dir=tmp_path / "c"
    )
    assert repr(prompts).startswith("PromptDataset(1 of 2 prompts, epoch 0, position 0, <Rows 2 of")


def test_notebooks_show_rows_and_stores(store: tm.Store) -> None:
    shown = store[1]._repr_html_()
    body = shown[shown.index("<pre") :]
    marked = "".join(html.unescape(text) for text in re.findall(r"<mark>(.*?)</mark>", body, re.S))
    row = store[1]
    ids = row.input_ids[row.loss_mask > 0].tolist()
    assert marked == store.tokenizer.decode(ids)
    assert html.unescape(re.sub(r"<[^>]*>", "", body)) == row.text
    assert "<|im_start|>" not in shown
    table = store._repr_html_()
    assert "rows &lt;b&gt;.jsonl" in table
    assert "<td>7</td>" in table


def test_dir_of_a_store_is_its_public_api(store: tm.Store) -> None:
    names = dir(store)
    assert not [name for name in names if name.startswith("_")]
    assert {"filter", "select", "shuffle", "split", "map", "torch", "attach", "lengths"} <= {*names}
    assert "slice_at" not in names
    for name in names:
        assert name in vars(store) or hasattr(tm.Store, name), name
