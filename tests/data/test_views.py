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
from tokenmill.data.choices import split_points
from tokenmill.data.loader import Loader
from tokenmill.data.mixture import mix
from tokenmill.data.order import Permutation, derive_key
from tokenmill.data.stream import RunIndex
from tokenmill.data.view import View, as_view, concat
from tokenmill.errors import CacheError, CorruptionError, UsageError
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
            extra={
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
                side = data.draw(st.sampled_from("ab"))
                view = view.split({"a": 0.5, "b": 0.5}, seed=5)[side]
                model = [row for row in model if (row[3] < 2**63) == (side == "a")]
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


@pytest.mark.parametrize("index", ["x", 1.5, None, (1, 2), b"1", np.float64(1), np.arange(2), [0]])
def test_index_that_is_no_integer_is_a_type_error(stores: tuple[Store, Store], index: Any) -> None:
    view = concat(stores)
    for data in (stores[0], view, view.shuffle(), stores[0].groups, view.groups):
        with pytest.raises(TypeError, match="must be an integer, got"):
            data[index]
    with pytest.raises(TypeError, match="must be an integer, got"):
        view.batch([index])


@pytest.mark.parametrize("index", [2**70, -(2**70), 2**63, np.uint64(2**64 - 1)])
def test_index_beyond_64_bits_is_out_of_range(stores: tuple[Store, Store], index: Any) -> None:
    view = concat(stores)
    for data in (stores[0], view, view.shuffle()):
        with pytest.raises(IndexError, match=str(index)):
            data[index]
    with pytest.raises(IndexError, match=str(index)):
        view.batch(np.asarray([index]))


def test_stores_of_different_tokenizers_are_not_combined(tmp_path: Path) -> None:
    one, other = (
        make_store(tmp_path / name, [make_columns([3, 4])], name=name, tokenizer=name)
        for name in ("a", "b")
    )
    names = [store.manifest["tokenizer"]["identity"] for store in (one, other)]
    for combine in (
        lambda: concat([one, other]),
        lambda: concat([concat([one, one]), other.shuffle()]),
        lambda: mix({"a": one, "b": other}),
        lambda: mix({"a": one[:1], "b": other.map(flipped)}, {"a": 1, "b": 2}),
    ):
        with pytest.raises(UsageError, match=".*".join(names)):
            combine()
    assert len(concat([one, one])) == 4


def test_view_keys_name_content_and_nothing_else(stores: tuple[Store, Store]) -> None:
    one, two = stores
    views = [
        as_view(one), as_view(two), as_view(one)[1:], as_view(one)[2:], concat([one, two]),
        concat([two, one]), one.filter("length < 9"), one.filter("length < 10"),
        *one.split({"a": 0.5, "b": 0.5}).values(),
        *one.split({"a": 0.5, "b": 0.5}, seed=1).values(),
    ]  # fmt: skip
    assert len({view.key for view in views}) == len(views)
    assert as_view(one).key == one.key
    assert one.filter("length<9").key == one.filter(" length  <  9 ").key


@pytest.mark.parametrize(
    ("where", "kept"),
    [
        ("length < 20 and trained > 3", lambda i, n, t: n < 20 and t > 3),
        ("10 <= length < 20 or length == 39", lambda i, n, t: 10 <= n < 20 or n == 39),
        ("not length < 20", lambda i, n, t: n >= 20),
        ("trained / length > 0.34 and length % 2 == 1", lambda i, n, t: t / n > 0.34 and n % 2),
        ("extra.lang == 'en'", lambda i, n, t: i % 4 == 0),
        ("extra.lang in ('en', 'de') and length > 9", lambda i, n, t: i % 4 < 2 and n > 9),
        ("extra.lang is None", lambda i, n, t: i % 4 == 3),
        ("extra.lang < 'em'", lambda i, n, t: i % 4 == 1),
        ("extra.meta.score >= 0.5", lambda i, n, t: i >= 5),
        ("extra['meta']['tag'].deep * 2 == 4", lambda i, n, t: i % 3 == 2),
        ("extra.meta.missing is not None", lambda i, n, t: False),
        ("file == 'one.jsonl' and source == 'one.jsonl'", lambda i, n, t: True),
        ("source != 'one.jsonl'", lambda i, n, t: False),
    ],
)
def test_filter_expressions_select_the_expected_rows(
    stores: tuple[Store, Store], where: str, kept: object
) -> None:
    store = stores[0]
    expected = []
    for number in range(len(store)):
        place = number if number < 20 else number - 20  # extra values count from 0 per slice
        if kept(place, int(store.lengths[number]), int(store.trained[number])):  # type: ignore[operator]
            expected.append(store[number].input_ids.tolist())
    assert [row.input_ids.tolist() for row in store.filter(where)] == expected


@pytest.mark.parametrize(
    "where",
    [
        "__import__('os').system('true')", "length.__class__", "open('x')", "lambda: 1", "size < 3",
        "[x for x in (1,)]", "length <", "length; trained", "f'{length}'", "extra", "x := 3",
        "length if trained else 0", "length ** 9 ** 9 > 0", "extra[0] == 1", "(" * 3000,
        "length < 1 " * 2000, "1 << 3", "extra.lang.upper() == 'EN'",
    ],
)  # fmt: skip
def test_filter_anything_but_comparisons_is_refused(
    stores: tuple[Store, Store], where: str
) -> None:
    with pytest.raises(UsageError):
        stores[0].filter(where)


@pytest.mark.parametrize(
    ("where", "columns", "message"),
    [
        (3, None, "text"),
        (lambda length: length > 3, None, "needs columns, the names"),
        ("length > 3", ["length"], "only for a filter function"),
        (lambda size: size > 3, ["size"], "unknown name 'size'"),
        (lambda length: length > 3, "length", "columns must be a list of strings, got 'length'"),
        (lambda length: length > 3, [5], r"columns must be a list of strings, got \[5\]"),
        (lambda length: length > 3, 5, "columns must be a list of strings, got 5"),
        (lambda length: length > 3 and length < 9, ["length"], "& and"),
        (lambda length: True, ["length"], "one boolean per row"),
        (lambda length: length, ["length"], "one boolean per row"),
        (lambda length: (length > 3)[1:], ["length"], "one boolean per row"),
        ("extra.colour == 'red'", None, r"no column 'extra\.colour'"),
        ("extra.lang < 3", None, "cannot be evaluated"),
    ],
)
def test_filter_callable_unknown_column_and_wrong_types_are_refused(
    stores: tuple[Store, Store], where: Any, columns: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        stores[0].filter(where, columns=columns)


@pytest.mark.parametrize(
    "where",
    [
        "1 / 0", "1 // 0", "1 % 0 == 1", "length in 5", "3 in length", "not 'x'", "'x'", "not []",
        "()", "-'x'", "[length] * 1000000000", "[1, 2] * 1000000000 == 3",
        "'x' * 1000000000 == 'y'",
        "1000000000 * 'x' == 'y'", "'%1000000000d' % 1 == 'y'", "file * 1000000000 == 'y'",
        "not " * 2000 + "length", "-" * 2000 + "length > 0", "length" + " + 1" * 1500 + " > 0",
        "length * 99999999999999999999 > 1", "length * 9223372036854775807 > 1",
        "length * length * 1000000000000000000 > 1", "length < (1, 2)", "extra.meta < extra.lang",
        "length > 0x" + "f" * 6000, "length" + " + 1" * 150 + " > 0",
    ],
)  # fmt: skip
def test_filter_that_cannot_be_evaluated_is_a_usage_error(
    stores: tuple[Store, Store], where: str
) -> None:
    with pytest.raises(UsageError):
        stores[0].filter(where)


def test_filter_arithmetic_is_that_of_python_integers(tmp_path: Path) -> None:
    lengths = [3, 46_340, 46_341, 70_000]
    store = make_store(tmp_path, [make_columns(lengths)])
    for where in (
        "length * length > 1000000",
        "length * length * length == 70000 * 70000 * 70000",
        "(length > 3) + (trained > 3) == 2",
        "length - 100000 < 0",
        "-length * 100000 < 0",
    ):
        rows = zip(lengths, store.trained.tolist(), strict=True)
        expected = [row[0] for row in rows if eval(where, {"length": row[0], "trained": row[1]})]
        assert [len(row) for row in store.filter(where)] == expected, where
    assert [len(row) for row in store.filter(lambda n: n * n > 10**9, ["length"])] == lengths[1:]
    for where in ("length / images > 5", "not length // images < 5", "not length % images >= 0"):
        assert len(store.filter(where)) == 4, where  # infinite or NaN, as for floats


def test_filter_function_gets_extra_values_and_files(stores: tuple[Store, Store]) -> None:
    langs = ["extra.lang", "file"]
    view = concat(stores).filter(lambda lang, file: (lang == "en") & (file == "two.jsonl"), langs)
    assert [row.extra["lang"] for row in view] == ["en"] * 3
    same = concat(stores).filter("extra.lang == 'en' and file == 'two.jsonl'")
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
    with pytest.raises(UsageError, match="got booleans"):
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
        (with_more, "may not change the number of tokens"),
        (lambda row: {"labels": row.input_ids}, r"got \['labels'\]"),
        (lambda row: row.input_ids, "got ndarray"),
        (lambda row: {"loss_mask": row.loss_mask * 2}, "0 or 1"),
        (lambda row: {"input_ids": row.input_ids / 2}, "token ids"),
        (lambda row: {"input_ids": row.input_ids.astype(np.int64) + 2**32}, "that are token ids"),
        (lambda row: {"input_ids": row.input_ids.astype(np.int64) - 2**20}, "that are token ids"),
    ],
)
def test_map_with_wrong_result_is_rejected_with_the_origin(
    stores: tuple[Store, Store], function: Any, message: str
) -> None:
    view = stores[0].map(function)
    with pytest.raises(UsageError, match=message) as refused:
        view[3]
    assert str(stores[0][3].origin) in str(refused.value)
    with pytest.raises(UsageError, match="a function of a row"):
        stores[0].map("length")  # type: ignore[arg-type]


def test_map_accepts_a_returned_row(stores: tuple[Store, Store]) -> None:
    mapped = stores[0].map(lambda row: row.with_tokens(row.input_ids[::-1], row.loss_mask))
    assert mapped[3].input_ids.tolist() == stores[0][3].input_ids.tolist()[::-1]
    assert stores[0].map(lambda row: row)[3].origin == stores[0][3].origin


def test_map_is_not_part_of_the_key_and_needs_a_module_function(
    stores: tuple[Store, Store],
) -> None:
    view = stores[0].map(flipped)
    assert view.key == stores[0].key
    assert view[2].origin == stores[0][2].origin
    assert view[2].turns == stores[0][2].turns
    assert pickle.loads(pickle.dumps(view))[2].loss_mask.tolist() == view[2].loss_mask.tolist()
    with pytest.raises(UsageError, match="top level of a module"):
        pickle.dumps(stores[0].map(lambda row: {}))


def test_rows_stay_in_their_split_when_others_are_added_or_removed(tmp_path: Path) -> None:
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

    train, val = before.split(shares).values()
    train_after, val_after = after.split(shares).values()
    assert digests(train) <= digests(train_after)
    assert digests(val) <= digests(val_after)
    assert not digests(train_after) & digests(val_after)
    assert len(train) + len(val) == 400
    assert 15 < len(val) < 75
    assert digests(before.split(shares, seed=1)["val"]) != digests(val)


def test_numbers_of_numpy_are_those_of_python(stores: tuple[Store, Store]) -> None:
    one, other = stores
    for kind in (np.float16, np.float32, np.float64):
        shares = {"a": kind(0.1), "b": kind(0.9)}
        views = one.split(shares, seed=np.int64(3))
        same = one.split({"a": 0.1, "b": 0.9}, seed=3)
        assert [view.key for view in views.values()] == [view.key for view in same.values()]
        mixed = mix({"a": one, "b": other}, shares)
        assert mixed.key == mix({"a": one, "b": other}, {"a": 0.1, "b": 0.9}).key
    counted = mix({"a": one, "b": other}, {"a": np.int64(1), "b": np.uint8(2)})
    assert counted.key == mix({"a": one, "b": other}, {"a": 1, "b": 2}).key


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
        stores[0].split(shares)  # type: ignore[arg-type]


def pickled(store: Store) -> dict[str, Any]:
    return {
        "store": store,
        "row": store[1],
        "view": concat([store, store]).shuffle(3),
        "filter": store.filter("length > 1"),
        "select": store.select([0]),
        "map": store.map(flipped),
        "loader": Loader(store, batch_size=2),
        "mixture": mix({"a": store}, {"a": 1}),
        "run": RunIndex(store),
        "sidecar": store.attach("x", [1.0, 2.0, 3.0], producer="p"),
        "values of a view": as_view(store).sidecar("x"),
    }


def test_pickles_of_a_replaced_store_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", [make_columns([3, 4, 5])], name="a")
    other = make_store(tmp_path / "b", [make_columns([3, 4, 5], seed=1)], name="b")
    data = {name: pickle.dumps(value) for name, value in pickled(store).items()}
    for value in data.values():
        pickle.loads(value)
    shutil.rmtree(store.path)
    shutil.copytree(other.path, store.path)
    shutil.copytree(tmp_path / "b" / "slices", tmp_path / "a" / "slices", dirs_exist_ok=True)
    assert Store(store.path).key == other.key
    for value in data.values():
        with pytest.raises(CorruptionError, match=f"{store.key}.*{other.key}"):
            pickle.loads(value)


def test_selected_rows_are_published_once_and_reused(
    stores: tuple[Store, Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores[0]
    first = store.filter("length < 33")
    directory = store.path.parent.parent / "rows" / first.key
    assert sorted(p.name for p in directory.iterdir()) == ["index.bin", "kept.json"]
    stamp = (directory / "index.bin").stat()
    monkeypatch.setattr(Store, "columns", lambda *_: pytest.fail("chosen again"))
    again = store.filter("length < 33")
    assert (directory / "index.bin").stat().st_mtime_ns == stamp.st_mtime_ns
    assert again.key == first.key
    assert isinstance(again.row_index._numbers, np.memmap)


def test_selected_rows_without_writable_cache_use_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "cache", [make_columns([3, 4, 5, 6])])
    (tmp_path / "cache" / "staging").rmdir()
    (tmp_path / "cache" / "staging").write_text("not a directory")  # root ignores modes
    (tmp_path / "blocked").write_text("nor this")
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path / "blocked"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    view = store.filter("length > 4")
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
def test_invalid_mixture_is_rejected(stores: tuple[Store, Store], wrong: Any) -> None:
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


OWN = [*META_COLUMNS, "source", "file", "extra", "extra.length"]


@pytest.mark.parametrize("name", OWN)
def test_filter_distinguishes_extra_columns_from_stored_ones(tmp_path: Path, name: str) -> None:
    texts = ['"en"', "7", '"de"', "null"]
    columns = make_columns([3, 4, 5, 6], extra={name: texts})
    store = make_store(tmp_path, [columns])
    where = f"extra[{name!r}] == 'de' or extra[{name!r}] == 7"
    assert [len(row) for row in store.filter(where)] == [4, 5]
    both = store.filter(f"({where}) and length > 4 and source == 'fake.jsonl'")
    assert [len(row) for row in both] == [5]
    assert [len(row) for row in store.filter("length < 6")[1:].filter(where)] == [4, 5]
    assert [len(row) for row in concat([store, store]).filter(where)] == [4, 5, 4, 5]


def test_extra_lists_of_equal_length_stay_lists(tmp_path: Path) -> None:
    tags = [["a", "b"], ["c", "d"], ["a", "d"]]
    columns = make_columns([4, 5, 6], extra={"tags": [json.dumps(tag) for tag in tags]})
    store = make_store(tmp_path, [columns])
    assert len(store.filter("extra.tags is not None")) == 3

    def has_a(extra: Any) -> Any:
        return np.array(["a" in tag for tag in extra])

    assert [len(row) for row in store.filter(has_a, columns=["extra.tags"])] == [4, 6]


def fails_to_open(length: Any) -> Any:
    raise FileNotFoundError(2, "No such file", "list.txt")


def test_failing_function_of_a_filter_is_not_taken_for_a_full_disk(
    stores: tuple[Store, Store],
) -> None:
    with pytest.raises(FileNotFoundError, match=r"list\.txt"):
        len(stores[0].filter(fails_to_open, columns=["length"]))
