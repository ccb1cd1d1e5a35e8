"""Batches of groups: whole, in our order, the same under any geometry, and resumed to the group."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import tokenmill as tm
from tests.store.making import make_columns, make_group_columns, make_store
from tokenmill.data.order import PURPOSE_MISMATCH, FeistelOrder, derive_key
from tokenmill.errors import StateError, UsageError
from tokenmill.store import Group, Store

GROUPS = 23


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    root: Path = tmp_path_factory.mktemp("groups")
    rng = np.random.default_rng(5)
    made = {
        "preference": [make_group_columns([2] * n, seed=n, pairs=True) for n in (9, GROUPS - 9)],
        "kto": [make_group_columns([1] * n, seed=n) for n in (9, GROUPS - 9)],
        "ranked": [make_group_columns(rng.integers(2, 5, n).tolist(), seed=n)
                   for n in (9, GROUPS - 9)],
    }  # fmt: skip
    return {name: make_store(root, slices, name=name) for name, slices in made.items()}


def expected(store: Store, epochs: int = 2, seed: int = 42) -> list[Group]:
    """The groups of a run, one after the other."""
    order = FeistelOrder(len(store.groups), seed)
    numbers = [order.indices(e, np.arange(len(store.groups))).tolist() for e in range(epochs)]
    return [store.groups[n] for n in itertools.chain.from_iterable(numbers)]


def served(batch: dict[str, Any], name: str = "") -> list[list[int]]:
    """The rows of a padded matrix, without their padding."""
    ids, mask = batch[f"{name}input_ids"], batch[f"{name}attention_mask"]
    return [row[seen == 1].tolist() for row, seen in zip(ids, mask, strict=True)]


def check_row(batch: dict[str, Any], name: str, place: int, row: Any) -> None:
    seen = batch[f"{name}attention_mask"][place] == 1
    mask = row.loss_mask.copy()
    mask[0] = 0
    assert batch[f"{name}input_ids"][place][seen].tolist() == row.input_ids.tolist()
    assert batch[f"{name}loss_mask"][place][seen].tolist() == mask.tolist()
    labels = np.where(mask, row.input_ids, -100)
    assert batch[f"{name}labels"][place][seen].tolist() == labels.tolist()


@pytest.mark.parametrize("padding_side", ["right", "left"])
def test_pairs_are_served_by_their_sides(stores: dict[str, Store], padding_side: str) -> None:
    groups = iter(expected(stores["preference"], 3))
    loader = tm.Loader(stores["preference"], batch_size=4, padding_side=padding_side)
    for batch in loader.repeat(2):
        here = list(itertools.islice(groups, len(batch["prompt_tokens"])))
        for side, name in enumerate(("chosen_", "rejected_")):
            assert batch[f"{name}input_ids"].shape[0] == len(here)
            longest = max(len(group.rows[side]) for group in here)
            assert batch[f"{name}input_ids"].shape[1] == longest
            for place, group in enumerate(here):
                check_row(batch, name, place, group.rows[side])
            scores = [np.nan if g.scores is None else g.scores[side] for g in here]
            assert np.array_equal(batch[f"{name}score"], np.float32(scores), equal_nan=True)
        assert batch["prompt_tokens"].tolist() == [group.prompt_tokens for group in here]
        assert batch["margin"].tolist() == [group.margin or 0.0 for group in here]
        trained = sum(int(r.loss_mask[1:].sum()) for group in here for r in group.rows)
        assert batch["num_trained_tokens"] == trained
    assert len(list(groups)) == GROUPS - (-2 * GROUPS) % 4


@pytest.mark.parametrize("kind", ["preference", "ranked"])
def test_groups_are_interleaved(stores: dict[str, Store], kind: str) -> None:
    groups = iter(expected(stores[kind], 1))
    for batch in tm.Loader(stores[kind], batch_size=5, layout="interleaved"):
        here = list(itertools.islice(groups, len(batch["prompt_tokens"])))
        rows = [(n, row) for n, group in enumerate(here) for row in group.rows]
        assert batch["group_idx"].tolist() == [number for number, _ in rows]
        assert batch["label"].tolist() == [-1 if r.label is None else r.label for _, r in rows]
        for place, (_, row) in enumerate(rows):
            check_row(batch, "", place, row)
    assert not list(groups)


@pytest.mark.parametrize("seed", [0, 42])
def test_kto_rows_have_the_answer_of_a_fixed_other_row(stores: dict[str, Store], seed: int) -> None:
    store = stores["kto"]
    shift = 1 + derive_key(PURPOSE_MISMATCH, seed, 0, 0) % (GROUPS - 1)
    batches = list(tm.Loader(store, batch_size=4, seed=seed, indices=True))
    for batch in batches:
        for place, number in enumerate(batch["indices"].tolist()):
            row, other = store[number], store[(number + shift) % GROUPS]
            assert number != (number + shift) % GROUPS
            asked, answered = row.prompt_tokens or 0, other.prompt_tokens or 0
            ids = [*row.input_ids[:asked].tolist(), *other.input_ids[answered:].tolist()]
            assert served(batch, "kl_")[place] == ids
            kept = batch["kl_labels"][place][batch["kl_attention_mask"][place] == 1] != -100
            assert kept.tolist() == [False] * asked + [True] * (len(ids) - asked)
            assert batch["label"][place] == row.label
    assert sum(len(batch["indices"]) for batch in batches) == GROUPS


@pytest.mark.parametrize("kind", ["preference", "kto", "ranked"])
def test_a_group_stays_in_one_pack(stores: dict[str, Store], kind: str) -> None:
    store = stores[kind]
    pack = tm.Pack(length=64, window=8)
    found: list[list[tuple[int, ...]]] = []
    for batch in tm.Loader(store, batch_size=2, pack=pack):
        bounds = batch["cu_seqlens"].tolist()
        flat = batch["input_ids"].reshape(-1)
        segments = [tuple(flat[a:b].tolist()) for a, b in itertools.pairwise(bounds)]
        groups: dict[int, list[int]] = {}
        for segment, group in enumerate(batch["group_idx"].tolist()):
            if group >= 0:
                groups.setdefault(group, []).append(segment)
        assert list(groups) == list(range(len(batch["prompt_tokens"])))
        for members in groups.values():
            assert len({bounds[segment] // 64 for segment in members}) == 1
            found.append([segments[segment] for segment in members])
        if kind == "preference":
            assert batch["pair_index"].tolist() == list(groups.values())
            assert (batch["label"][batch["pair_index"]] == [1, 0]).all()
    wanted = [[tuple(row.input_ids.tolist()) for row in group.rows] for group in store.groups]
    assert sorted(found) == sorted(wanted)


def stream(loader: Any) -> list[list[int]]:
    rows = []
    for batch in loader:
        if "chosen_input_ids" in batch:
            sides = zip(served(batch, "chosen_"), served(batch, "rejected_"), strict=True)
            rows += [row for pair in sides for row in pair]
        elif "cu_seqlens" in batch:
            flat = batch["input_ids"].reshape(-1)
            cuts = itertools.pairwise(batch["cu_seqlens"].tolist())
            rows += [flat[a:b].tolist() for (a, b), g in zip(cuts, batch["group_idx"], strict=True)
                     if g >= 0]  # fmt: skip
        else:
            rows += served(batch)
    return rows


HOW: dict[str, dict[str, Any]] = {
    "sides": {"batch_size": 3},
    "interleaved": {"batch_size": 3, "layout": "interleaved"},
    "packed": {"batch_size": 1, "pack": tm.Pack(length=80, window=8)},
    "by length": {"batch_size": 3, "group_by_length": True},
}


@mock.patch.multiple("tokenmill.data.stream", LENGTH_WINDOW=8, LENGTH_GROUP=4)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["preference", "kto", "ranked"])
def test_resume_at_any_step_continues_with_the_next_group(
    stores: dict[str, Store], kind: str, how: str
) -> None:
    whole = tm.Loader(stores[kind], **HOW[how])
    rows, states = [], []
    for batch in whole.repeat(2):
        rows.append(stream([batch]))
        states.append(whole.state_dict())
    for place, state in enumerate(states):
        resumed = tm.Loader(stores[kind], **HOW[how])
        resumed.load_state_dict(state)
        assert stream(resumed.repeat(2)) == list(itertools.chain(*rows[place + 1 :]))


@pytest.mark.parametrize("how", ["sides", "interleaved", "packed"])
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_whole_groups(stores: dict[str, Store], how: str, world: int) -> None:
    given = dict(HOW[how])
    alone = tm.Loader(stores["preference"], **given)
    ranks = [
        iter(tm.Loader(stores["preference"], rank=r, world_size=world, **given))
        for r in range(world)
    ]
    rows = []
    for batches in zip(*ranks, strict=True):
        assert len({batch["num_trained_tokens"] for batch in batches}) == 1
        for batch in batches:
            served_rows = [row for row in stream([batch]) if row]
            assert len(served_rows) % 2 == 0
            rows += served_rows
    assert rows == stream(alone)


def test_a_mixture_counts_groups(stores: dict[str, Store]) -> None:
    sources = {"a": stores["preference"], "b": stores["ranked"]}
    loader = tm.Loader(tm.mix(sources, {"a": 0.75, "b": 0.25}), batch_size=8)
    batches = itertools.islice(loader.repeat(), 5)
    sizes = [np.bincount(batch["group_idx"]).tolist() for batch in batches]
    assert [len(each) for each in sizes] == [8] * 5
    build_stats = loader.served()
    assert (build_stats["a"]["rows"], build_stats["b"]["rows"]) == (30, 10)
    state = loader.state_dict()
    again = tm.Loader(tm.mix(sources, {"a": 0.75, "b": 0.25}), batch_size=8)
    again.load_state_dict(state)
    assert again.served() == build_stats


def test_a_mixture_by_tokens_counts_the_tokens_of_groups(stores: dict[str, Store]) -> None:
    sources = {"a": stores["preference"], "b": stores["ranked"]}
    loader = tm.Loader(tm.mix(sources, {"a": 0.5, "b": 0.5}, by="tokens"), batch_size=23)
    for _ in itertools.islice(loader.repeat(), 40):
        pass
    tokens = {name: source["tokens"] for name, source in loader.served().items()}
    assert 0.95 < tokens["a"] / tokens["b"] < 1.05


def test_rows_are_served_one_by_one_where_asked_for(stores: dict[str, Store]) -> None:
    store = stores["preference"]
    loader = tm.Loader(store, batch_size=4, unit="rows")
    assert len(loader) == -(-2 * GROUPS // 4)
    assert "chosen_input_ids" not in next(iter(loader))
    with pytest.raises(StateError, match="order"):
        tm.Loader(store).load_state_dict(loader.state_dict())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layout": "both"}, "layout must be one of"),
        ({"unit": "pairs"}, "unit must be one of"),
        ({"pack": tm.Pack(length=64, oversize="truncate")}, "groups cannot be truncated or split"),
        ({"pack": tm.Pack(length=64, oversize="split")}, "groups cannot be truncated or split"),
        ({"pack": tm.Pack(length=12)}, r"group \d+ has \d+ tokens, a pack has 12"),
        ({"micro_batches": tm.MicroBatches(max_tokens=12)}, r"group \d+ has \d+ tokens"),
    ],
)
def test_invalid_combinations_are_rejected(
    stores: dict[str, Store], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        tm.Loader(stores["preference"], **given)


def test_rows_without_groups_are_not_served_as_groups(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this data has none"):
        tm.Loader(make_store(tmp_path, [make_columns([3, 4])]), unit="groups")


def test_groups_longer_than_a_pack_are_dropped_whole(stores: dict[str, Store]) -> None:
    dropped = tm.Loader(stores["preference"], pack=tm.Pack(length=18, oversize="drop"))
    fit = [g for g in stores["preference"].groups if sum(map(len, g.rows)) <= 18]
    assert 0 < sum(len(batch["pair_index"]) for batch in dropped) == len(fit) < GROUPS


def test_a_rank_without_groups_gets_padding(stores: dict[str, Store]) -> None:
    two = stores["preference"].groups[0:1].rows
    for layout, name in (("sides", "rejected_"), ("interleaved", "")):
        loader = tm.Loader(two, batch_size=1, rank=1, world_size=2, layout=layout)
        [batch] = list(loader)
        assert batch[f"{name}input_ids"].shape == (1, 1)
        assert (batch[f"{name}labels"] == -100).all()
        assert batch["prompt_tokens"].tolist() == [-1]


@pytest.mark.parametrize("kind", ["preference", "kto", "ranked"])
@pytest.mark.parametrize("wish", [{}, {"layout": "padded"}, {"context_parallel": 2}], ids=str)
def test_micro_batches_hold_whole_groups(
    stores: dict[str, Store], kind: str, wish: dict[str, Any]
) -> None:
    store, shared = stores[kind], wish.get("context_parallel", 1)
    group_of = np.repeat(np.arange(GROUPS), [len(group) for group in store.groups])
    longest = max(len(row) for row in store)
    micro = tm.MicroBatches(max_tokens=8 * longest, **wish)

    def loader(rank: int) -> tm.Loader:
        return tm.Loader(store, batch_size=5, rank=rank, world_size=2 * shared,
                         micro_batches=micro, indices=True)  # fmt: skip

    if kind == "kto" and shared > 1:
        with pytest.raises(UsageError, match="mismatched answers"):
            loader(0)
        return
    found = []
    for steps in zip(*(loader(rank) for rank in range(0, 2 * shared, shared)), strict=True):
        assert len({len(step) for step in steps}) == 1
        for batch in itertools.chain.from_iterable(steps):
            numbers = batch["indices"].tolist()
            if not numbers:
                continue  # padding, so that ranks have equally many
            rows = [store[number] for number in numbers]
            groups = list(dict.fromkeys(group_of[number] for number in numbers))
            assert numbers == [n for g in groups for n in np.flatnonzero(group_of == g)]
            found += groups
            prompts = [store.groups[g].prompt_tokens for g in groups]
            assert batch["prompt_tokens"].tolist() == prompts
            if "chosen_input_ids" in batch:
                assert kind == "preference"
                assert wish == {"layout": "padded"}
                for place, group in enumerate(groups):
                    for side, name in enumerate(("chosen_", "rejected_")):
                        check_row(batch, name, place, store.groups[group].rows[side])
            else:
                labels = [-1 if row.label is None else row.label for row in rows]
                assert batch["label"].tolist() == labels
                places = [groups.index(group_of[number]) for number in numbers]
                assert batch["group_idx"].tolist() == places
            if kind == "kto":
                assert len(batch["kl_input_ids"]) == len(rows)
    assert sorted(found) == list(range(GROUPS))
