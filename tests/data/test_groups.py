"""Groups stay whole in every view, against a list of groups."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.store.making import make_columns, make_group_columns, make_store
from tokenmill.data.view import View, as_view, concat
from tokenmill.errors import UsageError
from tokenmill.store import Store

Model = list[list[tuple[int, ...]]]  # groups, each the token ids of its rows


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    root: Path = tmp_path_factory.mktemp("groups")
    rng = np.random.default_rng(5)
    odd = [rng.integers(1, 5, 9).tolist() for _ in range(3)]
    return {
        "pairs": make_store(root, [make_group_columns([2] * 7, seed=n, pairs=True)
                                   for n in range(3)], name="pairs"),
        "odd": make_store(root, [make_group_columns(s, seed=n) for n, s in enumerate(odd)],
                          name="odd"),
        "mixed": make_store(root, [make_group_columns([2, 1, 3], pairs=True),
                                   make_columns([3, 4, 5, 3, 9])], name="mixed"),
        "rows": make_store(root, [make_columns([3, 5, 4, 8, 3])], name="rows"),
    }  # fmt: skip


def model_of(view: View | Store) -> Model:
    found: Model = []
    for row in view.batch(range(len(view))):
        if row.part == 0:
            found.append([])
        found[-1].append(tuple(row.input_ids.tolist()))
    return found


def shown(view: View) -> Model:
    count = view.group_count
    rows, bounds = view.row_index.rows_of_groups(np.arange(count, dtype=np.int64))
    assert rows.tolist() == list(range(len(view)))
    assert view.groups_of(rows).tolist() == np.repeat(np.arange(count), np.diff(bounds)).tolist()
    tokens = [tuple(row.input_ids.tolist()) for row in view.rows(rows)]
    return [tokens[a:b] for a, b in itertools.pairwise(bounds)]


STEP = st.one_of(
    st.tuples(st.just("filter"), st.integers(3, 12)),
    st.tuples(st.just("function"), st.integers(1, 5)),
    st.tuples(st.just("split"), st.integers(0, 1)),
    st.tuples(st.just("shuffle"), st.integers(0, 3)),
    st.tuples(st.just("select"), st.lists(st.integers(0, 99), max_size=9)),
    st.tuples(st.just("slice"), st.tuples(st.integers(0, 9), st.integers(0, 30))),
    st.tuples(st.just("concat"), st.sampled_from(["pairs", "odd", "mixed", "rows"])),
    st.tuples(st.just("map"), st.just(0)),
)


def same(row: Any) -> dict[str, Any]:
    return {}


def apply(view: View, model: Model, step: tuple[str, Any], stores: dict[str, Store]) -> Any:
    name, wish = step
    if name == "filter":
        kept = [group for group in model if all(len(row) < wish for row in group)]
        return view.filter(f"length < {wish}"), kept
    if name == "function":
        starts = np.cumsum([0, *map(len, model)])
        trained = [view.trained[a:b] for a, b in itertools.pairwise(starts)]
        kept = [group for group, counts in zip(model, trained, strict=True) if min(counts) > wish]
        return view.filter(lambda trained: trained > wish, columns=["trained"]), kept
    if name == "split":
        sides = list(view.split({"a": 0.5, "b": 0.5}, seed=3).values())
        assert sorted(shown(sides[0]) + shown(sides[1])) == sorted(model)
        return sides[wish], shown(sides[wish])
    if name == "shuffle":
        made = view.shuffle(wish)
        assert sorted(shown(made)) == sorted(model)
        return made, shown(made)
    if name == "select":
        chosen = [number % len(model) for number in wish] if model else []
        rows, _ = view.row_index.rows_of_groups(np.asarray(chosen, np.int64))
        return view.select(rows), [model[number] for number in chosen]
    if name == "slice":
        first, stop = wish
        bounds = view.group_starts(np.asarray([min(first, len(model)), min(stop, len(model))]))
        return view[int(bounds[0]) : int(bounds[1])], model[first:stop]
    if name == "concat":
        return concat([view, stores[wish]]), model + model_of(stores[wish])
    return view.map(same), model


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["pairs", "odd", "mixed"]), st.lists(STEP, max_size=4))
@example("odd", [("split", 0), ("function", 3), ("shuffle", 1)])
def test_views_keep_groups_whole(
    stores: dict[str, Store], name: str, steps: list[tuple[str, Any]]
) -> None:
    view, model = as_view(stores[name]), model_of(stores[name])
    for step in steps:
        view, model = apply(view, model, step, stores)
        assert shown(view) == model
    again: View = pickle.loads(pickle.dumps(view))
    assert shown(again) == model
    assert [[tuple(r.input_ids.tolist()) for r in g.rows] for g in view.groups] == model


def test_splitting_a_group_is_rejected(stores: dict[str, Store]) -> None:
    pairs = stores["pairs"]
    for rows in ([0], [1, 0], [0, 2, 1, 3], [0, 1, 2], [1]):
        with pytest.raises(UsageError, match=r"data\.groups\.select"):
            pairs.select(rows)
    for cut in (slice(1, 5), slice(0, 3), slice(None, None, 2), slice(None, None, -1)):
        with pytest.raises(UsageError, match="split a group"):
            pairs[cut]
    assert len(pairs[2:8].groups) == 3
    assert len(pairs[4:4]) == 0
    assert [g.rows[0].origin.row for g in pairs.groups[3:9:2]] == [3, 5, 7]
    assert len(pairs.groups.select([5, -1])) == 4
