"""Sidecars in batches: each value at its row or token, in every view, layout and rank."""

from __future__ import annotations

import keyword
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.making import make_columns, make_group_columns, make_store
from tokenmill import Loader, Mixture, Pack, Store, View, concat, mix, open_store
from tokenmill.data.micro import Align, MicroBatches
from tokenmill.data.view import as_view
from tokenmill.errors import UsageError
from tokenmill.store.where import NAMES

Batch = dict[str, Any]
MICRO = MicroBatches(64, layout="padded", align=Align(sequence=4))


def per_token(store: Store) -> list[np.ndarray[Any, Any]]:
    """A value that names its token: store, row and place."""
    base = int(store.key[:2], 16) * 1000.0
    return [
        (base + row + np.arange(length) / 128).astype(np.float32)
        for row, length in enumerate(store.lengths)
    ]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    cache = tmp_path_factory.mktemp("cache")
    made = []
    for number, name in enumerate("ab"):
        lengths = np.random.default_rng(number).integers(1, 30, 40).tolist()
        slices = [make_columns(lengths[:25], seed=1), make_columns(lengths[25:], seed=2)]
        store = make_store(cache, slices, name=name, pad_token_id=9)
        store.attach("ref", per_token(store), producer="m", per="token")
        store.attach("reward", [values[0] for values in per_token(store)], producer="m")
        made.append(store)
    return made


VIEWS: dict[str, Callable[[list[Store]], Store | View | Mixture]] = {
    "store": lambda s: s[0],
    "slice": lambda s: s[0][30:3:-2],
    "select": lambda s: s[0].select([5, 5, 1, 39, 0]),
    "filter": lambda s: s[0].filter("length > 10"),
    "shuffle": lambda s: s[1].shuffle(3).filter("trained > 2"),
    "split": lambda s: s[1].split({"a": 0.6, "b": 0.4})["a"],
    "map": lambda s: s[0].map(same),
    "concat": lambda s: concat([s[1][:7], s[0]]),
    "mix": lambda s: mix({"a": s[0], "b": s[1][5:]}, {"a": 0.3, "b": 0.7}),
}


def same(row: Any) -> dict[str, Any]:
    return {"loss_mask": row.loss_mask}


def expected_of(data: Store | View | Mixture) -> list[np.ndarray[Any, Any]]:
    """The values of every row of the data, by the stores' own and `locate`."""
    view = data.view if isinstance(data, Mixture) else as_view(data)
    found: list[Any] = [None] * len(view)
    for served, places, numbers in view.locate(np.arange(len(view))):
        store = getattr(served, "_store", served)
        for place, number in zip(places, numbers, strict=True):
            found[place] = per_token(store)[number]
    return found


def check_padded(batch: Batch, expected: list[np.ndarray[Any, Any]]) -> None:
    assert batch["ref"].dtype == batch["reward"].dtype == np.float32
    assert batch["ref"].shape == batch["input_ids"].shape
    assert batch["reward"].shape == batch["input_ids"].shape[:1]
    for place, row in enumerate(batch["indices"].tolist()):
        there = batch["attention_mask"][place] == 1
        assert batch["ref"][place][there].tolist() == expected[row].tolist()
        assert not batch["ref"][place][~there].any()
        assert batch["reward"][place] == expected[row][0]


def check_packed(
    batch: Batch, expected: list[np.ndarray[Any, Any]], data: Store | View | Mixture
) -> None:
    view = data.view if isinstance(data, Mixture) else as_view(data)
    ids = batch["input_ids"].reshape(-1)
    flat, tails = batch["ref"].reshape(-1), batch["seq_idx"].reshape(-1) < 0
    rows = iter(batch["indices"].tolist())
    bounds = list(pairwise(batch["cu_seqlens"].tolist()))
    assert batch["ref"].shape == batch["input_ids"].shape
    assert batch["reward"].shape == (len(bounds),)
    begun: dict[int, int] = {}
    for segment, (start, stop) in enumerate(bounds):
        if tails[start]:
            assert not flat[start:stop].any()
            assert batch["reward"][segment] == 0
            continue
        row = next(rows)
        # A row that was split comes back as pieces: the values must be those of its very tokens.
        values = expected[row]
        first = int(np.searchsorted(values, flat[start]))
        assert flat[start:stop].tolist() == values[first : first + stop - start].tolist()
        served = view[row].input_ids[first : first + stop - start]
        assert ids[start:stop].tolist() == served.tolist()
        assert batch["reward"][segment] == values[0]
        begun[row] = begun.get(row, 0) + stop - start
    assert next(rows, None) is None
    assert all(count <= len(expected[row]) for row, count in begun.items())


def batches_of(loader: Any) -> Iterator[Batch]:
    for step in loader:
        yield from step if isinstance(step, list) else [step]


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"pad_to_multiple_of": 4},
    "padded on the left": {"pad_to_multiple_of": 4, "padding_side": "left"},
    "micro-batches": {"micro_batches": MICRO},
    "micro-batches on the left": {"micro_batches": MICRO, "padding_side": "left"},
    "split packs": {"pack": Pack(16, oversize="split")},
    "truncated packs": {"pack": Pack(16, oversize="truncate")},
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_hold_every_value_at_its_token(stores: list[Store], name: str, layout: str) -> None:
    data = VIEWS[name](stores)
    expected = expected_of(data)
    seen = 0
    for rank in range(2):
        loader = Loader(
            data, batch_size=2, rank=rank, world_size=2, indices=True, **LAYOUTS[layout]
        )
        for batch in batches_of(loader):
            if "cu_seqlens" in batch:
                check_packed(batch, expected, data)
            else:
                check_padded(batch, expected)
            seen += batch["indices"].size
    assert seen >= len(expected)
    assert seen == len(expected) or isinstance(data, Mixture) or layout == "split packs"


def test_rank_without_rows_gets_zeros(stores: list[Store]) -> None:
    for more in ({}, {"pack": Pack(64)}):
        loader = Loader(stores[0][:1], batch_size=1, rank=1, world_size=2, **more)
        batch = next(iter(loader))
        assert batch["reward"].tolist() == [0.0]
        assert not batch["ref"].any()
        assert batch["ref"].shape == batch["input_ids"].shape


def test_rank_reads_only_the_values_of_its_own_rows(
    stores: list[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokenmill.store import Sidecar

    asked: list[int] = []
    real = Sidecar.batch

    def noted(self: Sidecar, indices: Any) -> Any:
        asked.extend(indices)
        return real(self, indices)

    monkeypatch.setattr(Sidecar, "batch", noted)
    batch = next(iter(Loader(stores[0], batch_size=4, rank=1, world_size=3, indices=True)))
    assert sorted(asked) == sorted(2 * batch["indices"].tolist())


def all_batches(tmp_path: Path, stores: list[Store]) -> Iterator[Batch]:
    """Yield a batch of every layout, of rows and of all kinds of groups, without sidecars."""
    columns = make_columns([9, 5, 7, 8])
    weights = np.where(columns.mask > 0, 0.5, 0).astype(np.float32)
    data = [stores[0], make_store(tmp_path, [replace(columns, weights=weights)], name="weights")]
    for number, (sizes, pairs) in enumerate([([2] * 8, True), ([1] * 8, False), ([3] * 8, False)]):
        groups = make_group_columns(sizes, pairs=pairs)
        data.append(make_store(tmp_path, [groups], name=f"groups {number}"))
    options: list[dict[str, Any]] = [
        {}, {"layout": "interleaved"}, {"pack": Pack(64)}, {"micro_batches": MicroBatches(64)},
        {"micro_batches": MicroBatches(64, layout="padded")},
        {"micro_batches": MicroBatches(64, context_parallel=2), "world_size": 2},
        {"micro_batches": MicroBatches(64, layout="padded", context_parallel=2), "world_size": 2},
    ]  # fmt: skip
    for store in data:
        for chosen in options:
            is_kto = store.manifest["totals"].get("groups", {}).get("kto")
            if not (is_kto and "world_size" in chosen):  # not supported
                yield next(batches_of(Loader(store, indices=True, sidecars=(), **chosen)))
        if not is_kto:
            yield next(Loader(store.by_source(), batch_size=2).repeat())


def test_every_name_of_a_batch_is_reserved(tmp_path: Path, stores: list[Store]) -> None:
    names = {name for batch in all_batches(tmp_path, stores) for name in batch}
    expected = {"margin", "score", "label", "prompt_tokens", "group_idx", "pair_index"}
    expected |= {"kl_labels", "shift_labels", "weight_sum", "chosen_input_ids", "rejected_score"}
    assert expected <= names
    # A sidecar may provide the weights of data without its own.
    names -= {"loss_weights"}
    for name in sorted({*names, *NAMES, *keyword.kwlist, "chosen_x", "rejected_x", "media"}):
        for write in (stores[0].attach_writer, partial(stores[0].attach, values=[1.0])):
            with pytest.raises(UsageError, match=f"'{name}' is reserved"):
                write(name, producer="test")


@pytest.mark.parametrize(
    "given",
    [
        {"micro_batches": MicroBatches(64)},
        {"micro_batches": MicroBatches(64, align=Align(sequence=4, slab=16))},
        {"micro_batches": MicroBatches(64, align=Align(sequence=4)), "pack": Pack(32, window=9)},
        {"micro_batches": MicroBatches(64), "pack": Pack(32, window=5, method="balanced")},
    ],
    ids=["slab", "aligned", "aligned packs", "packs of padding"],
)
def test_padded_packs_have_every_value_at_its_token(
    stores: list[Store], given: dict[str, Any]
) -> None:
    """Also in slabs of padding: the last step has one row for thirteen ranks."""
    expected, seen = expected_of(stores[0]), []
    for rank in range(13):
        loader = Loader(stores[0], batch_size=3, rank=rank, world_size=13,
                        indices=True, **given)  # fmt: skip
        for batch in batches_of(loader):
            flat, rows = batch["ref"].reshape(-1), iter(batch["indices"].tolist())
            there = np.zeros(flat.size, dtype=bool)
            lengths = np.diff(batch["cu_seqlens"]).tolist()
            assert batch["reward"].shape == (len(lengths),)
            for number, (start, length) in enumerate(
                zip(batch["cu_seqlens_padded"].tolist(), lengths, strict=False)
            ):
                row = next(rows) if length else None
                values = [] if row is None else expected[row].tolist()
                assert flat[start : start + length].tolist() == values
                assert batch["reward"][number] == (values[0] if values else 0)
                there[start : start + length] = True
                seen += [] if row is None else [row]
            assert not flat[~there].any()
    assert sorted(seen) == list(range(len(stores[0])))


def test_shards_hold_the_values_of_their_tokens(stores: list[Store]) -> None:
    wish = MicroBatches(48, context_parallel=2)
    ranks = [
        Loader(stores[0], rank=rank, world_size=2, micro_batches=wish, indices=True)
        for rank in (0, 1)
    ]
    expected = expected_of(stores[0])
    for steps in zip(*ranks, strict=True):
        for shards in zip(*steps, strict=True):
            held = [v for shard in shards for v in shard["ref"][shard["seq_idx"] >= 0].tolist()]
            rows = shards[0]["indices"].tolist()
            assert sorted(held) == sorted(v for row in rows for v in expected[row].tolist())


def test_sidecars_argument_selects_sidecars(stores: list[Store], tmp_path: Path) -> None:
    def served(data: Any, wanted: Any) -> set[str]:
        return set(next(iter(Loader(data, sidecars=wanted)))) & {"ref", "reward", "late"}

    assert served(stores[0], None) == {"ref", "reward"}
    assert served(stores[0], ["reward"]) == {"reward"}
    assert served(stores[0], {"ref": "m"}) == {"ref"}
    assert served(stores[0], ()) == set()
    with pytest.raises(UsageError, match="no sidecar 'x'; attached sidecars: ref, reward"):
        Loader(stores[0], sidecars=["x"])
    with pytest.raises(UsageError, match="must be a list"):
        Loader(stores[0], sidecars="ref")
    bare = make_store(tmp_path, [make_columns([3, 4])], name="bare", pad_token_id=9)
    both = concat([bare, stores[0]])
    assert served(both, None) == set(), "one of the stores has none"
    with pytest.raises(UsageError, match="no sidecar 'reward'; attached sidecars: none"):
        Loader(both, sidecars=["reward"])
    bare.attach("reward", [1, 2], producer="another")
    with pytest.raises(UsageError, match="by 'another' per row and by 'm' per row"):
        Loader(both)
    bare.attach("reward", [1, 3], producer="m")
    with pytest.raises(UsageError, match="choose producer from 'another', 'm'"):
        Loader(bare)
    assert served(both, {"reward": "m"}) == {"reward"}
    loader = Loader(bare, sidecars={"reward": "another"})
    bare.attach("late", [5, 6], producer="m")
    assert "late" not in next(iter(loader))


def test_states_do_not_depend_on_sidecars(stores: list[Store]) -> None:
    plain, more = Loader(stores[0], sidecars=(), indices=True), Loader(stores[0], indices=True)
    next(iter(more))
    plain.load_state_dict(more.state_dict())
    assert next(iter(plain))["indices"].tolist() == next(iter(more))["indices"].tolist()


def test_pickled_filler_is_small_and_fills_the_same(stores: list[Store]) -> None:
    data = VIEWS["mix"](stores)
    loader = Loader(data, batch_size=4)
    step, _ = next(loader.steps(loader.cursor, None))
    pickled = pickle.dumps(loader.filler)
    assert len(pickled) < 16 << 10
    there, here = pickle.loads(pickled).fill(step), loader.filler.fill(step)
    assert there["ref"].tobytes() == here["ref"].tobytes()
    assert there["reward"].tolist() == here["reward"].tolist()


# Views and filters


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "mix"])
def test_views_have_the_values_of_their_rows(stores: list[Store], name: str) -> None:
    view = as_view(VIEWS[name](stores))  # type: ignore[arg-type]
    expected = expected_of(view)
    found, flat = view.sidecar("ref"), view.sidecar("reward")
    assert found.values.tolist() == np.concatenate(expected).tolist()
    assert flat.values.tolist() == [values[0] for values in expected]
    assert flat[-1] == expected[-1][0]
    assert np.array_equal(found[0], expected[0])
    assert [s.name for s in view.sidecars] == ["ref", "reward"]
    assert flat[1:3].tolist() == [values[0] for values in expected[1:3]]  # type: ignore[union-attr]


def test_filter_by_sidecar(stores: list[Store]) -> None:
    store, rewards = stores[0], stores[0].sidecar("reward").values
    middle = float(np.median(rewards))
    wanted = np.flatnonzero((rewards > middle) & (store.lengths > 5)).tolist()
    text = f"reward > {middle} and length > 5"
    for view in (
        store.filter(text),
        store.filter(lambda r, n: (r > middle) & (n > 5), columns=["reward", "length"]),
        pickle.loads(pickle.dumps(store.filter(text))),
    ):
        assert view.sidecar("reward").values.tolist() == rewards[wanted].tolist()
    view = concat(stores).filter(text)
    assert len(view) > len(wanted) or stores[1].sidecar("reward").values.max() <= middle


def test_filter_by_another_producer_is_another_view(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([3] * 4)])
    store.attach("quality", [0, 1, 0, 1], producer="one")
    first = store.filter("quality > 0")
    other = make_store(tmp_path / "other", [make_columns([3] * 4)])
    other.attach("quality", [1, 1, 1, 0], producer="two")
    second = other.filter("quality > 0")
    assert (len(first), len(second)) == (2, 3)
    assert first.key != second.key
    store.attach("quality", [1, 1, 1, 0], producer="two")
    with pytest.raises(UsageError, match="choose producer"):
        open_store(store.path).filter("quality > 0.5")
    assert len(pickle.loads(pickle.dumps(first))) == 2, "the selection keeps its sidecars"


def test_filter_rejects_unknown_names_and_values_per_token(stores: list[Store]) -> None:
    with pytest.raises(UsageError, match="'ref' has values per token"):
        stores[0].filter("ref > 1")
    with pytest.raises(UsageError, match="unknown name 'reword'"):
        stores[0].filter("reword > 1")
    with pytest.raises(UsageError, match="unknown name 'reword'"):
        stores[0].filter(lambda r: r > 1, columns=["reword"])
