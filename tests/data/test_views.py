"""Views against a plain list of row numbers."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.making import make_columns, make_store
from tokenmill.data.choices import filtered, split, split_points
from tokenmill.data.mixture import mix
from tokenmill.data.order import Permutation, derive_key
from tokenmill.data.view import View, as_view, concat
from tokenmill.errors import CacheError, UsageError
from tokenmill.store import Row, Store
from tokenmill.store.record import META_COLUMNS


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    root = tmp_path_factory.mktemp("cache")
    rng = np.random.default_rng(3)

    def slice_of(count: int, seed: int) -> object:
        langs = ["en", "de", "fr", None]
        return make_columns(
            rng.integers(3, 40, count).tolist(),
            seed=seed,
            carried={
                "lang": [json.dumps(langs[i % 4]) for i in range(count)],
                "meta": [
                    json.dumps({"score": i / 10, "tag": {"deep": i % 3}}) for i in range(count)
                ],
            },
        )

    one = make_store(root, [slice_of(20, 1), slice_of(13, 2)], name="one")
    two = make_store(root, [slice_of(9, 3)], name="two")
    return one, two


def first_ids(view: Store | View, indices: list[int]) -> list[list[int]]:
    return [row.input_ids.tolist() for row in view.batch(indices)]


def everything(store: Store) -> list[list[int]]:
    return [row.input_ids.tolist() for row in store]


def flipped(row: Row) -> dict[str, Any]:
    return {"loss_mask": 1 - row.loss_mask}


def short(limit: int, trained: Any, length: Any) -> Any:
    return (length < limit) & (trained != 3)


KINDS = ["slice", "concat", "filter", "function", "split", "select", "shuffle", "map", "pickle"]


def test_views_composed_at_random_equal_lists(stores: tuple[Store, Store]) -> None:
    """A row of the model is (ids, mask, stored mask, point of the split)."""
    one, two = stores

    def model_of(store: Store) -> list[tuple[list[int], list[int], list[int], int]]:
        digests = np.concatenate([columns["digest"] for _, columns in store.columns(["digest"])])
        masks = [row.loss_mask.tolist() for row in store]
        points = split_points(digests, 5).tolist()
        return list(zip(everything(store), masks, masks, points, strict=True))

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def compare(data: st.DataObject) -> None:
        view: Store | View = one
        model = model_of(one)
        for _ in range(data.draw(st.integers(1, 5))):
            kind = data.draw(st.sampled_from(KINDS))
            if kind == "slice":
                ends = st.none() | st.integers(-len(model) - 3, len(model) + 3)
                cut = slice(
                    data.draw(ends), data.draw(ends), data.draw(st.sampled_from([1, 1, 2, -1, -3]))
                )
                view, model = view[cut], model[cut]
            elif kind == "concat":
                view, model = concat([view, two]), model + model_of(two)
            elif kind in ("filter", "function"):
                limit = data.draw(st.integers(1, 45))
                if kind == "filter":
                    view = view.filter(f"length < {limit} and trained != 3")
                else:
                    chosen = partial(short, limit)
                    view = view.filter(chosen, columns=["trained", "length"])
                # Filters see what is stored, whatever a map made of it.
                model = [row for row in model if len(row[0]) < limit and sum(row[2]) != 3]
            elif kind == "split":
                side = data.draw(st.integers(0, 1))
                view = view.split({"a": 0.5, "b": 0.5}, seed=5)[side]
                model = [row for row in model if (row[3] < 2**63) != bool(side)]
            elif kind == "select":
                picks = data.draw(st.lists(st.integers(-len(model), len(model) - 1), max_size=12)
                                  if model else st.just([]))  # fmt: skip
                view, model = view.select(picks), [model[pick] for pick in picks]
            elif kind == "shuffle":
                seed = data.draw(st.integers(0, 3))
                view = view.shuffle(seed)
                if model:
                    order = Permutation(len(model), derive_key(4, seed, 0, 0))
                    model = [model[place] for place in order.indices(np.arange(len(model)))]
            elif kind == "map":
                view = view.map(flipped)
                model = [(ids, [1 - m for m in mask], *rest) for ids, mask, *rest in model]
            else:
                view = pickle.loads(pickle.dumps(view))
            assert len(view) == len(model)
        if model:
            picks = data.draw(
                st.lists(st.integers(-len(model), len(model) - 1), min_size=1, max_size=8)
            )
            assert first_ids(view, picks) == [model[i][0] for i in picks]
        assert [(row.input_ids.tolist(), row.loss_mask.tolist()) for row in view] == [
            (ids, mask) for ids, mask, *_ in model
        ]
        assert view.lengths.tolist() == [len(row[0]) for row in model]
        assert view.trained.tolist() == [sum(row[2]) for row in model]
        view, numbers = as_view(view), np.arange(len(model))
        assert view.lengths_at(numbers).tolist() == view.lengths.tolist()
        assert view.trained_at(numbers).tolist() == view.trained.tolist()
        halves = np.asarray([len(row[0]) // 2 for row in model], dtype=np.int64)
        assert view.trained_within(numbers, halves * 0, halves).tolist() == [
            sum(row[1][: len(row[0]) // 2]) for row in model
        ]
        assert view.total("lengths") == sum(len(row[0]) for row in model)

    compare()


def test_view_numpy_integers_negatives_and_bounds_follow_lists(stores: tuple[Store, Store]) -> None:
    view = concat(stores)
    assert view[np.int64(-1)].input_ids.tolist() == everything(stores[1])[-1]
    assert view[np.uint8(3)].input_ids.tolist() == everything(stores[0])[3]
    for wrong in (len(view), -len(view) - 1):
        with pytest.raises(IndexError, match=f"row {wrong}"):
            view[wrong]
    with pytest.raises(TypeError):
        view[1.5]  # type: ignore[call-overload]


def test_view_keys_name_content_and_nothing_else(stores: tuple[Store, Store]) -> None:
    one, two = stores
    views = [
        as_view(one), as_view(two), as_view(one)[1:], as_view(one)[2:], concat([one, two]),
        concat([two, one]), filtered(one, "length < 9"), filtered(one, "length < 10"),
        *split(one, {"a": 0.5, "b": 0.5}), *split(one, {"a": 0.5, "b": 0.5}, seed=1),
    ]  # fmt: skip
    assert len({view.key for view in views}) == len(views)
    assert as_view(one).key == one.key
    assert filtered(one, "length<9").key == filtered(one, " length  <  9 ").key


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("length < 20 and trained > 3", lambda i, n, t: n < 20 and t > 3),
        ("10 <= length < 20 or length == 39", lambda i, n, t: 10 <= n < 20 or n == 39),
        ("not length < 20", lambda i, n, t: n >= 20),
        ("trained / length > 0.34 and length % 2 == 1", lambda i, n, t: t / n > 0.34 and n % 2),
        ("carried.lang == 'en'", lambda i, n, t: i % 4 == 0),
        ("carried.lang in ('en', 'de') and length > 9", lambda i, n, t: i % 4 < 2 and n > 9),
        ("carried.lang is None", lambda i, n, t: i % 4 == 3),
        ("carried.lang < 'em'", lambda i, n, t: i % 4 == 1),
        ("carried.meta.score >= 0.5", lambda i, n, t: i >= 5),
        ("carried['meta']['tag'].deep * 2 == 4", lambda i, n, t: i % 3 == 2),
        ("carried.meta.missing is not None", lambda i, n, t: False),
        ("file == 'one.jsonl' and source == 'one.jsonl'", lambda i, n, t: True),
        ("source != 'one.jsonl'", lambda i, n, t: False),
    ],
)
def test_filter_expressions_keep_what_they_say(
    stores: tuple[Store, Store], where: str, kept: object
) -> None:
    store = stores[0]
    expected = []
    for number in range(len(store)):
        place = number if number < 20 else number - 20  # carried values count from 0 per slice
        if kept(place, int(store.lengths[number]), int(store.trained[number])):  # type: ignore[operator]
            expected.append(store[number].input_ids.tolist())
    assert [row.input_ids.tolist() for row in filtered(store, where)] == expected


@pytest.mark.parametrize(
    "where",
    [
        "__import__('os').system('true')", "length.__class__", "open('x')", "lambda: 1", "size < 3",
        "[x for x in (1,)]", "length <", "length; trained", "f'{length}'", "carried", "x := 3",
        "length if trained else 0", "length ** 9 ** 9 > 0", "carried[0] == 1", "(" * 3000,
        "length < 1 " * 2000, "1 << 3", "carried.lang.upper() == 'EN'",
    ],
)  # fmt: skip
def test_filter_anything_but_comparisons_is_refused(
    stores: tuple[Store, Store], where: str
) -> None:
    with pytest.raises(UsageError):
        filtered(stores[0], where)


@pytest.mark.parametrize(
    ("where", "columns", "message"),
    [
        (3, None, "text"),
        (lambda length: length > 3, None, "say the columns"),
        ("length > 3", ["length"], "columns are for a function"),
        (lambda size: size > 3, ["size"], "no name 'size'"),
        (lambda length: length > 3 and length < 9, ["length"], "& and"),
        (lambda length: True, ["length"], "one truth value per row"),
        (lambda length: length, ["length"], "one truth value per row"),
        (lambda length: (length > 3)[1:], ["length"], "one truth value per row"),
        ("carried.colour == 'red'", None, r"no column 'carried\.colour'"),
        ("carried.lang < 3", None, "cannot be answered"),
    ],
)
def test_filter_callable_unknown_column_and_wrong_types_are_refused(
    stores: tuple[Store, Store], where: Any, columns: list[str] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        filtered(stores[0], where, columns=columns)


def test_filter_function_sees_carried_values_and_files(stores: tuple[Store, Store]) -> None:
    langs = ["carried.lang", "file"]
    view = concat(stores).filter(lambda lang, file: (lang == "en") & (file == "two.jsonl"), langs)
    assert [row.carried["lang"] for row in view] == ["en"] * 3
    same = concat(stores).filter("carried.lang == 'en' and file == 'two.jsonl'")
    assert [row.input_ids.tolist() for row in view] == [row.input_ids.tolist() for row in same]


def test_selected_rows_are_named_by_content_and_refused_without_their_index(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([3, 4, 5, 6])])
    view = store.select([2, 0])
    assert view.key == store.select(np.asarray([2, 0])).key != store.select([0, 2]).key
    # Whoever says it, and however: a filter by function is its rows.
    assert store.filter(lambda n: n > 4, ["length"]).key == store.select([2, 3]).key
    assert len(pickle.dumps(view)) < 16 << 10
    for wrong in (4, -5):
        with pytest.raises(IndexError, match=f"row {wrong}"):
            store.select([wrong])
    with pytest.raises(UsageError, match="not by truth values"):
        store.select([True, False, True])
    data = pickle.dumps(view)
    shutil.rmtree(tmp_path / "rows")
    with pytest.raises(CacheError, match="select them again"):
        pickle.loads(data)


def test_shuffle_never_changes_and_depends_on_the_seed(stores: tuple[Store, Store]) -> None:
    view = stores[0].shuffle(seed=7)
    assert view.lengths.tolist() != stores[0].lengths.tolist()
    assert sorted(view.lengths.tolist()) == sorted(stores[0].lengths.tolist())
    assert len({stores[0].shuffle(seed).key for seed in range(3)} | {stores[0].key}) == 4
    numbers = as_view(view).locate(np.arange(6))[0][2]
    assert numbers.tolist() == GOLDEN_SHUFFLE
    with pytest.raises(UsageError, match="seed"):
        stores[0].shuffle(seed=-1)


def with_more(row: Row) -> dict[str, Any]:
    return {"input_ids": [*row.input_ids, 1], "loss_mask": [*row.loss_mask, 1]}


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (with_more, "stored lengths"),
        (lambda row: {"labels": row.input_ids}, r"not \['labels'\]"),
        (lambda row: row.input_ids, "not ndarray"),
        (lambda row: {"loss_mask": row.loss_mask * 2}, "zeros and ones"),
        (lambda row: {"input_ids": row.input_ids / 2}, "token ids"),
        (lambda row: {"input_ids": row.input_ids.astype(np.int64) + 2**32}, "no token ids"),
        (lambda row: {"input_ids": row.input_ids.astype(np.int64) - 2**20}, "no token ids"),
    ],
)
def test_map_that_gives_something_else_is_refused_with_the_rows_origin(
    stores: tuple[Store, Store], function: Any, message: str
) -> None:
    view = stores[0].map(function)
    with pytest.raises(UsageError, match=message) as refused:
        view[3]
    assert str(stores[0][3].origin) in str(refused.value)
    with pytest.raises(UsageError, match="a function of a row"):
        stores[0].map("length")  # type: ignore[arg-type]


def test_map_takes_a_row_back(stores: tuple[Store, Store]) -> None:
    mapped = stores[0].map(lambda row: row.with_tokens(row.input_ids[::-1], row.loss_mask))
    assert mapped[3].input_ids.tolist() == stores[0][3].input_ids.tolist()[::-1]
    assert stores[0].map(lambda row: row)[3].origin == stores[0][3].origin


def test_map_is_part_of_no_key_and_a_lambda_stays_at_home(stores: tuple[Store, Store]) -> None:
    view = stores[0].map(flipped)
    assert view.key == stores[0].key
    assert view[2].origin == stores[0][2].origin
    assert view[2].turns == stores[0][2].turns
    assert pickle.loads(pickle.dumps(view))[2].loss_mask.tolist() == view[2].loss_mask.tolist()
    with pytest.raises(UsageError, match="top of a module"):
        pickle.dumps(stores[0].map(lambda row: {}))


def test_split_rows_stay_on_their_side_when_others_come_or_go(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    old = make_columns(rng.integers(3, 9, 400).tolist(), seed=1)
    new = make_columns(rng.integers(3, 9, 300).tolist(), seed=2)
    before = make_store(tmp_path / "a", [old], name="before")
    # One slice, the old rows at other places in it: only their digests are the same.
    both = make_columns([*np.diff(new.starts), *np.diff(old.starts)], seed=3)
    digest = np.concatenate([new.digest, old.digest])
    after = make_store(tmp_path / "b", [dataclasses.replace(both, digest=digest)], name="after")
    shares = {"train": 0.9, "val": 0.1}

    def digests(view: View) -> set[int]:
        (store,) = view.stores
        stored = np.concatenate([columns["digest"] for _, columns in store.columns(["digest"])])
        return set(stored[view.row_index.numbers(np.arange(len(view)))].tolist())

    train, val = split(before, shares)
    train_after, val_after = split(after, shares)
    assert digests(train) <= digests(train_after)
    assert digests(val) <= digests(val_after)
    assert not digests(train_after) & digests(val_after)
    assert len(train) + len(val) == 400
    assert 15 < len(val) < 75
    assert digests(split(before, shares, seed=1)[1]) != digests(val)


def test_split_points_never_change() -> None:
    found = split_points([0, 1, 2**63, 2**64 - 1], 0).tolist()
    assert found == split_points(np.asarray([0, 1, 2**63, 2**64 - 1], np.uint64), 0).tolist()
    assert found == GOLDEN_POINTS
    assert split_points([0], 1).tolist() != found[:1]


GOLDEN_SHUFFLE = [23, 11, 4, 1, 5, 15]
GOLDEN_POINTS = [
    9236879893005533980,
    14802220423699367860,
    15434222201637483509,
    4505700450476164628,
]


@pytest.mark.parametrize(
    "shares", [{}, {"a": 0.5}, {"a": 0.5, "b": 0.6}, {"a": 1.5, "b": -0.5}, {"a": True}, [0.5, 0.5]]
)
def test_split_impossible_shares_are_refused(stores: tuple[Store, Store], shares: object) -> None:
    with pytest.raises(UsageError):
        split(stores[0], shares)  # type: ignore[arg-type]


def test_kept_rows_are_published_once_and_found_again(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores[0]
    first = filtered(store, "length < 33")
    directory = store.path.parent.parent / "rows" / first.key
    assert sorted(p.name for p in directory.iterdir()) == ["index.bin", "kept.json"]
    stamp = (directory / "index.bin").stat()
    monkeypatch.setattr(Store, "columns", lambda *_: pytest.fail("chosen again"))
    again = filtered(store, "length < 33")
    assert (directory / "index.bin").stat().st_mtime_ns == stamp.st_mtime_ns
    assert again.key == first.key
    assert isinstance(again.row_index._numbers, np.memmap)


def test_kept_rows_without_any_writable_cache_live_in_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "cache", [make_columns([3, 4, 5, 6])])
    (tmp_path / "cache" / "staging").rmdir()
    (tmp_path / "cache" / "staging").write_text("not a directory")  # root ignores modes
    (tmp_path / "blocked").write_text("nor this")
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "blocked"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    view = filtered(store, "length > 4")
    assert [len(row) for row in view] == [5, 6]
    (place,) = tmp_path.glob("tokenmill-rows-*")
    data = pickle.dumps(view)
    assert [len(row) for row in pickle.loads(data)] == [5, 6]
    del view
    assert not place.exists()
    assert [len(row) for row in pickle.loads(data)] == [5, 6]  # chosen again


@pytest.mark.parametrize(
    "wrong",
    [{"by": "bytes"}, {"exhausted": "cry"}, {"weights": {"a": 1}}, {"weights": {"a": 1, "c": 1}}]
    + [{"weights": {"a": wrong, "b": 1}}
       for wrong in (0, -1, "1", float("nan"), float("inf"), True, None)],
)  # fmt: skip
def test_mixture_that_means_nothing_is_refused(stores: tuple[Store, Store], wrong: Any) -> None:
    with pytest.raises(UsageError):
        mix(dict(zip("ab", stores, strict=True)), **wrong)
    with pytest.raises(UsageError):
        mix({}, {})
    with pytest.raises(UsageError, match="no rows"):
        mix({"a": as_view(stores[0])[:0]}, {"a": 1})


def test_mixture_key_changes_with_every_part(stores: tuple[Store, Store]) -> None:
    one, two = stores
    mixtures = [
        mix({"a": one, "b": two}, {"a": 0.7, "b": 0.3}),
        mix({"a": one, "b": two}, {"a": 0.6, "b": 0.4}),
        mix({"a": two, "b": one}, {"a": 0.7, "b": 0.3}),
        mix({"a": one, "b": two}, {"a": 0.7, "b": 0.3}, by="tokens"),
        mix({"a": one, "b": two}, {"a": 0.7, "b": 0.3}, exhausted="drop"),
        mix({"a": one, "b": two}),
    ]
    assert len({mixture.key for mixture in mixtures}) == len(mixtures)
    assert len(pickle.dumps(mixtures[0])) < 16 << 10


OWN = [*META_COLUMNS, "source", "file", "carried", "carried.length"]


@pytest.mark.parametrize("name", OWN)
def test_filter_tells_a_carried_column_from_the_stores_own(tmp_path: Path, name: str) -> None:
    texts = ['"en"', "7", '"de"', "null"]
    columns = make_columns([3, 4, 5, 6], carried={name: texts})
    store = make_store(tmp_path, [columns])
    where = f"carried[{name!r}] == 'de' or carried[{name!r}] == 7"
    assert [len(row) for row in filtered(store, where)] == [4, 5]
    both = filtered(store, f"({where}) and length > 4 and source == 'fake.jsonl'")
    assert [len(row) for row in both] == [5]
    assert [len(row) for row in filtered(filtered(store, "length < 6")[1:], where)] == [4, 5]
    assert [len(row) for row in filtered(concat([store, store]), where)] == [4, 5, 4, 5]


def test_carried_lists_of_equal_length_stay_lists(tmp_path: Path) -> None:
    tags = [["a", "b"], ["c", "d"], ["a", "d"]]
    columns = make_columns([4, 5, 6], carried={"tags": [json.dumps(tag) for tag in tags]})
    store = make_store(tmp_path, [columns])
    assert len(store.filter("carried.tags is not None")) == 3

    def has_a(carried: Any) -> Any:
        return np.array(["a" in tag for tag in carried])

    assert [len(row) for row in store.filter(has_a, columns=["carried.tags"])] == [4, 6]


def fails_to_open(length: Any) -> Any:
    raise FileNotFoundError(2, "No such file", "list.txt")


def test_failing_function_of_a_filter_is_not_taken_for_a_full_disk(
    stores: tuple[Store, Store],
) -> None:
    with pytest.raises(FileNotFoundError, match=r"list\.txt"):
        len(stores[0].filter(fails_to_open, columns=["length"]))
