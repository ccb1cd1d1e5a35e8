"""Rows that others tokenized: the same tokens and masks in a store, or a rejection with its reason.

The rows are those of a store of conversations, written down as each library writes them; the store
made of them must hold what the first one holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tests.build.making import EXAMPLES, INLINE, TOKENIZER, files_of, small_cuts, write_rows
from tokenmill.errors import UsageError
from tokenmill.inspect.page.document import make_page
from tokenmill.inspect.row import view_row
from tokenmill.inspect.stats import store_stats
from tokenmill.store import Row, Store

TOKENS: dict[str, Any] = {**INLINE, "tokenizer": str(TOKENIZER), "format": "tokens"}
Writer = Callable[[Row], dict[str, Any]]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Store:
    cache = tmp_path_factory.mktemp("chats")
    source = EXAMPLES / "conversations.jsonl"
    return tm.prepare(source, tokenizer=str(TOKENIZER), cache_dir=cache, **INLINE)


def labelled(row: Row) -> list[int]:
    pairs = zip(row.input_ids.tolist(), row.loss_mask.tolist(), strict=True)
    return [-100, *[token if on else -100 for token, on in pairs][1:]]


def skyrl_cached(row: Row) -> dict[str, Any]:
    """SkyRL's own cache: the mask of the last tokens only."""
    mask = row.loss_mask.tolist()
    first = mask.index(1)
    return {
        "input_ids": row.input_ids.tolist(),
        "attention_mask": [1] * len(mask),
        "num_actions": len(mask) - first,
        "loss_mask": mask[first:],
    }


def padded(row: Row) -> dict[str, Any]:
    """As verl's dataset hands it out with left padding."""
    ids, mask, size = row.input_ids.tolist(), row.loss_mask.tolist(), len(row)
    return {
        "input_ids": [0] * 3 + ids + [0] * 2,
        "attention_mask": [0] * 3 + [1] * size + [0] * 2,
        "position_ids": [0] * 3 + list(range(size)) + [size - 1] * 2,
        "loss_mask": [0] * 3 + mask + [0] * 2,
    }


WRITERS: dict[str, Writer] = {
    "skyrl": lambda row: {
        "input_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()},
    "skyrl cache": skyrl_cached,
    "axolotl": lambda row: {
        "input_ids": row.input_ids.tolist(), "attention_mask": [1] * len(row),
        "labels": labelled(row), "position_ids": list(range(len(row))), "length": len(row)},
    "trl labels": lambda row: {
        "input_ids": row.input_ids.tolist(), "labels": labelled(row), "seq_lengths": [len(row)]},
    "trl masks": lambda row: {
        "input_ids": row.input_ids.tolist(), "completion_mask": [1] * len(row),
        "assistant_masks": row.loss_mask.tolist()},
    "verl": padded,
    "numbers of other types": lambda row: {
        "input_ids": row.input_ids.tolist(), "loss_mask": [float(m) for m in row.loss_mask],
        "assistant_masks": [bool(m) for m in row.loss_mask]},
    "null columns": lambda row: {
        "input_ids": row.input_ids.tolist(), "labels": None, "loss_mask": row.loss_mask.tolist(),
        "pixel_values": None},
}  # fmt: skip


def write(rows: list[dict[str, Any]], kind: str, path: Path) -> str:
    if kind == "jsonl":
        return str(write_rows(path / "rows.jsonl", rows))
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path / "rows.parquet", row_group_size=70)
        return str(path / "rows.parquet")
    datasets = pytest.importorskip("datasets")
    datasets.Dataset(table).save_to_disk(str(path / "saved"))
    return str(path / "saved")


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "jsonl") for name in WRITERS), *((name, "parquet") for name in WRITERS),
     ("skyrl", "save_to_disk"), ("null columns", "save_to_disk")],
)  # fmt: skip
def test_rows_of_every_writer_become_the_store_they_came_from(
    chats: Store, tmp_path: Path, name: str, kind: str
) -> None:
    rows = [WRITERS[name](row) | {"id": number} for number, row in enumerate(chats)]
    source = write(rows, kind, tmp_path)
    store = tm.prepare(source, **TOKENS, keep_columns=["id"])
    assert (len(store), store.rejected) == (len(chats), {})
    for number, (row, wanted) in enumerate(zip(store, chats, strict=True)):
        assert np.array_equal(row.input_ids, wanted.input_ids)
        assert np.array_equal(row.loss_mask, wanted.loss_mask)
        assert row.extra == {"id": number}
        assert row.origin.row == number
        assert row.turns == []
    assert store.manifest["totals"]["trained_tokens"] == int(chats.trained.sum())


GOOD = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
BAD: dict[str, tuple[dict[str, Any] | str, str, str]] = {
    "no ids": ({"text": "x"}, "bad_shape", "no column 'input_ids'.*text"),
    "ids of text": ({**GOOD, "input_ids": ["5", 6, 7, 8]}, "bad_shape", "Expected `int`.*input"),
    "true as an id": ({**GOOD, "input_ids": [True, 6, 7, 8]}, "bad_shape", "Expected `int`"),
    "batch of one": ({**GOOD, "input_ids": [[5, 6, 7, 8]]}, "bad_shape", "Expected `int`"),
    "huge id": ({**GOOD, "input_ids": [2**70, 6, 7, 8]}, "bad_shape", ""),
    "negative id": ({**GOOD, "input_ids": [5, -1, 7, 8]}, "bad_shape", r"input_ids\[1\] is -1"),
    "id behind the vocabulary": (
        {**GOOD, "input_ids": [5, 6, 7, 4096]}, "bad_shape", r"\[3\] is 4096.*below 4096"),
    "no mask": ({"input_ids": [5, 6]}, "bad_shape", "the row has no labels"),
    "short mask": ({**GOOD, "loss_mask": [0, 1, 1]}, "bad_shape", "3 values, input_ids has 4"),
    "weights": ({**GOOD, "loss_mask": [0, 0, 0.5, 1]}, "bad_shape", r"loss_mask\[2\].*got 0.5"),
    "mask of 2": ({**GOOD, "assistant_masks": [0, 2, 1, 1]}, "bad_shape", "assistant_masks"),
    "mask of text": ({**GOOD, "loss_mask": ["0", 0, 1, 1]}, "bad_shape", "Expected"),
    "null in a mask": ({**GOOD, "loss_mask": [None, 0, 1, 1]}, "bad_shape", "Expected"),
    "shifted labels": (
        {"input_ids": [5, 6, 7, 8], "labels": [6, 7, 8, -100]}, "mask_unproven", "not be shifted"),
    "another label": (
        {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 9, 8]}, "mask_unproven", r"labels\[2\]"),
    "short labels": ({"input_ids": [5, 6], "labels": [-100]}, "bad_shape", "labels has 1"),
    "labels against mask": (
        {**GOOD, "labels": [-100, 6, 7, 8]}, "mask_unproven", "labels and loss_mask differ.* 1"),
    "mask against masks": (
        {**GOOD, "completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 1, 1]},
        "mask_unproven", "loss_mask and completion_mask and assistant_masks differ at token 1"),
    "hole in the attention": (
        {**GOOD, "attention_mask": [1, 0, 1, 1]}, "bad_shape", "zeros between ones"),
    "attention by number": (
        {**GOOD, "attention_mask": [1, 1, 2, 2]}, "bad_shape", "attention_mask.*got 2"),
    "nothing attended": ({**GOOD, "attention_mask": [0] * 4}, "bad_shape", "every token as"),
    "trained padding": (
        {**GOOD, "attention_mask": [1, 1, 1, 0]}, "mask_unproven", "marks it as padding"),
    "pack by positions": ({**GOOD, "position_ids": [0, 1, 0, 1]}, "bad_shape", "position_ids"),
    "pack by lengths": ({**GOOD, "seq_lengths": [2, 2]}, "bad_shape", "2 sequences"),
    "pack by bounds": ({**GOOD, "cu_seqlens": [0, 2, 4]}, "bad_shape", "several sequences"),
    "window of another size": (
        {**GOOD, "num_actions": 2, "loss_mask": [1, 1, 1]}, "bad_shape", "num_actions is 2"),
    **{
        name: ({**GOOD, name: ["a"]}, "bad_shape", f"{name}.*must not have images")
        for name in ("pixel_values", "images", "image", "videos", "video", "audios", "audio",
                     "multi_modal_inputs", "multi_modal_data", "media", "input_features",
                     "images_bytes")
    },
    "image tokens": (
        {**GOOD, "mm_token_type_ids": [0, 1, 0, 0]}, "bad_shape", "mm_token_type_ids.*images"),
    "short weights": ({**GOOD, "loss_weights": [0, 1]}, "bad_shape", "loss_weights has 2 values"),
    "negative weight": (
        {**GOOD, "loss_weights": [0, 0, -1, 1]}, "bad_shape", r"loss_weights\[2\].*got -1"),
    "weight too large": (
        {**GOOD, "loss_weights": [0, 0, 1e300, 1]}, "bad_shape", r"loss_weights\[2\].*got 1e"),
    "weight of text": ({**GOOD, "loss_weights": [0, 0, "1", 1]}, "bad_shape", "Expected"),
    "weight outside the mask": (
        {**GOOD, "loss_weights": [0, 0.5, 0.5, 1]}, "mask_unproven",
        "loss_mask and loss_weights differ at token 1"),
    "weight of 0 inside the mask": (
        {**GOOD, "loss_weights": [0, 0, 0, 1]}, "mask_unproven",
        "loss_mask and loss_weights differ at token 2"),
    "two weights": (
        {**GOOD, "loss_weights": [0, 0, 0.5, 1], "weight": 2}, "bad_shape",
        "'weight' and 'loss_weights'"),
    "nothing trained": ({**GOOD, "loss_mask": [0] * 4}, "no_trained_tokens", ""),
    "empty": ({"input_ids": [], "loss_mask": []}, "no_trained_tokens", ""),
    "too long": (
        {"input_ids": [5] * 9, "loss_mask": [1] * 9}, "overlong", "longer than 8 tokens"),
    "no object": ("[1]", "bad_json", ""),
}  # fmt: skip


def test_rows_that_break_a_rule_are_rejected_with_reason_and_origin(tmp_path: Path) -> None:
    rows = [row for bad, _, _ in BAD.values() for row in (GOOD, bad)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    store = tm.prepare(path, **TOKENS, max_length=8)
    assert [row.input_ids.tolist() for row in store] == [GOOD["input_ids"]] * len(BAD)
    rejected = list(store.rejected_rows())
    assert [origin.row for origin, _, _ in rejected] == list(range(1, len(rows), 2))
    for name, (origin, reason, detail) in zip(BAD, rejected, strict=True):
        assert (origin.path, origin.line) == (str(path), origin.row + 1)
        assert reason == BAD[name][1], name
        assert re.search(BAD[name][2], detail), f"{name}: {detail}"


def test_everything_is_trained_where_the_caller_says_so(tmp_path: Path) -> None:
    weighted = [{**GOOD, "loss_weights": [first, 1, 0.5, 2]} for first in (0.25, 0)]
    rows = [{"input_ids": [5, 6, 7]}, {**GOOD, "attention_mask": [1, 1, 1, 0]}, *weighted]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    store = tm.prepare(path, **TOKENS, train_on="everything")
    assert [row.loss_mask.tolist() for row in store] == [[1, 1, 1], [1, 1, 1], [1, 1, 1, 1]]
    assert store[2].weights.tolist() == [0.25, 1, 0.5, 2]
    assert store.rejected == {"mask_unproven": 1}
    for wrong in ({"train_on": "completion"}, {"expand": "turns"}):
        with pytest.raises(UsageError, match="tokens"):
            tm.prepare(path, **TOKENS, **wrong)


def test_first_token_may_be_called_untrained_by_one_column_alone(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6], "labels": [-100, 6], "loss_mask": [1, 1]},
        {"input_ids": [5, 6], "labels": [5, 6], "loss_mask": [0, 1]},
        {"input_ids": [5, 6], "loss_mask": [1, 1]},
    ]
    store = tm.prepare(write_rows(tmp_path / "rows.jsonl", rows), **TOKENS)
    assert [row.loss_mask.tolist() for row in store] == [[0, 1], [0, 1], [1, 1]]


def test_workers_limits_and_rebuilds_give_the_same_bytes(
    chats: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_cuts(monkeypatch)
    rows = [WRITERS["trl labels"](chats[number]) for number in range(60)]
    path = write_rows(tmp_path / "rows.jsonl", [*rows, {"input_ids": [5]}])
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    tm.prepare(path, **TOKENS, cache_dir=one)
    tm.prepare(path, **TOKENS, cache_dir=one, force_recache=True)
    tm.prepare(path, **(TOKENS | {"executor": "local", "num_workers": 2}), cache_dir=two)
    assert len(files_of(one, "slices")) > 6
    assert files_of(one, "slices") == files_of(two, "slices")
    derived = tm.prepare(path, **TOKENS, cache_dir=one, max_length=60)
    fresh = tm.prepare(path, **TOKENS, cache_dir=three, max_length=60)
    assert 0 < len(derived) < len(rows)
    assert files_of(three, "slices").items() <= files_of(one, "slices").items()
    assert derived.key == fresh.key


def test_packing_and_the_page_serve_them(chats: Store, tmp_path: Path) -> None:
    source = write([WRITERS["axolotl"](row) for row in chats], "parquet", tmp_path)
    store = tm.prepare(source, **TOKENS)
    packed = {"batch_size": 2, "pack": tm.Pack(512)}
    ours, theirs = (next(iter(tm.Loader(data, **packed))) for data in (store, chats))
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    shown = view_row(store, 7)
    assert shown.pieces == view_row(chats, 7).pieces
    made = make_page(store, tmp_path / "page.html")
    assert made["rows_in_page"] == len(store)
    assert store_stats(store)["trained_tokens"] == store_stats(chats)["trained_tokens"]


def test_other_formats_name_this_one(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [json.dumps(GOOD)])
    with pytest.raises(tm.errors.SourceError, match="rows with input_ids need the format 'tokens'"):
        tm.prepare(path, tokenizer=str(TOKENIZER), **INLINE)
    with pytest.raises(UsageError, match="prepare checks them"):
        tm.lint(path, tokenizer=str(TOKENIZER), **INLINE, format="tokens")
