"""Micro-batches of a loader: every sample of a step once, under the budget, equally many each."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import pytest

from tests.sampling import sampled
from tests.store.making import make_columns, make_store
from tokenmill.data.cursor import Cursor
from tokenmill.data.filler import read_pieces
from tokenmill.data.loader import Loader
from tokenmill.data.micro import Align, MicroBatches
from tokenmill.data.packs import Pack
from tokenmill.errors import UsageError
from tokenmill.store import Store

BUDGET = 64
WISHES: dict[str, dict[str, Any]] = {
    "slab": {"balance": "tokens"},
    "work": {"balance": "work", "hidden_size": 4},
    "trained": {"balance": "trained"},
    "aligned": {"align": Align(sequence=4, slab=16)},
    "padded": {"layout": "padded", "balance": "tokens"},
    "padded work": {"layout": "padded", "align": Align(sequence=4)},
    "padded trained": {"layout": "padded", "balance": "trained"},
    "shared": {"context_parallel": 2},
    "shared contiguous": {"context_parallel": 2, "shards": "contiguous", "align": Align(slab=8)},
    "shared padded": {"context_parallel": 2, "layout": "padded"},
    "packs": {"pack": Pack(32, window=10)},
    "aligned packs": {"pack": Pack(32, window=10), "align": Align(sequence=4), "balance": "work"},
    "split packs": {"pack": Pack(16, window=10, oversize="split"), "context_parallel": 2},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    root = tmp_path_factory.mktemp("cache")
    slices = [make_columns([1 + (number * 13 + i * 7) % 31 for i in range(23)], seed=number)
              for number in range(3)]  # fmt: skip
    return make_store(root, slices, name="a")


def loaders_of(store: Any, name: str, world: int, each: int = 6, **more: Any) -> list[Loader]:
    given = dict(WISHES[name])
    pack = given.pop("pack", None)
    shared = given.get("context_parallel", 1)
    wish = MicroBatches(max_tokens=BUDGET, **given)
    return [
        Loader(store, batch_size=each, rank=rank, world_size=world * shared, pack=pack,
               micro_batches=wish, indices=True, **more)
        for rank in range(world * shared)
    ]  # fmt: skip


def held(batches: list[dict[str, Any]]) -> list[int]:
    """The tokens that batches hold, padding left out."""
    found = []
    for batch in batches:
        real = batch["seq_idx"] >= 0 if "seq_idx" in batch else batch["attention_mask"] == 1
        found += batch["input_ids"][real].tolist()
    return sorted(found)


def check_order(store: Store, slab: dict[str, Any], multiple: int) -> None:
    """Rows lie in the order of ``indices``, each from a multiple on."""
    flat, starts = slab["input_ids"].reshape(-1), slab["cu_seqlens_padded"][:-1]
    assert not (starts % multiple).any()
    for row, start in zip(slab["indices"].tolist(), starts, strict=False):  # padding has no row
        ids = store[row].input_ids.tolist()
        assert flat[start : start + len(ids)].tolist() == ids


@pytest.mark.parametrize(("name", "last"), sampled(product(WISHES, ("repeat", "keep", "drop")), 2))
def test_ranks_serve_the_step_in_equally_many_batches_under_the_budget(
    store: Store, name: str, last: str
) -> None:
    """Also where a step at an epoch's end has fewer rows than there are ranks."""
    shared = WISHES[name].get("context_parallel", 1)
    repeat = last == "repeat"
    loaders = loaders_of(store, name, 5, each=3, drop_last=last == "drop")
    pack = WISHES[name].get("pack")
    expected = [step.packs for step, _ in loaders[0].steps(Cursor(), 2, repeat=repeat)]
    steps = [list(loader.repeat(2)) if repeat else [*loader, *loader] for loader in loaders]
    assert [len(rank) for rank in steps] == [len(expected)] * len(loaders)
    for ranks, packs in zip(zip(*steps, strict=True), expected, strict=True):
        assert len({len(batches) for batches in ranks}) == 1
        every = [batch for batches in ranks for batch in batches]
        assert max(batch["input_ids"].size for batch in every) <= BUDGET
        trained = sum(int((batch["labels"] != -100).sum()) for batch in every)
        assert {batch["num_trained_tokens"] for batch in every} == {trained}
        rows = [
            row for batches in ranks[::shared] for b in batches for row in b["indices"].tolist()
        ]
        assert sorted(rows) == sorted(packs.rows.tolist())
        for first in range(0, len(ranks), shared):
            for together in zip(*ranks[first : first + shared], strict=True):
                assert len({tuple(batch["indices"].tolist()) for batch in together}) == 1
                if name in ("slab", "aligned"):
                    check_order(store, together[0], 4 if name == "aligned" else 1)
                if pack is None:
                    tokens = [t for r in together[0]["indices"] for t in store[int(r)].input_ids]
                    assert held(list(together)) == sorted(map(int, tokens))
        if pack is not None:
            pieces = read_pieces(list(store.batch(packs.rows)), packs.starts, packs.lengths)
            assert held(every) == sorted(int(token) for ids, _ in pieces for token in ids)


@pytest.mark.parametrize("name", ["trained", "padded work", "shared", "split packs"])
def test_resume_anywhere_under_other_ranks_serves_the_same_steps(store: Store, name: str) -> None:
    """A global batch of 12 samples, as 1, 2, 3, 4 or 6 ranks."""

    def step_of(batches: Any) -> list[int]:
        return sorted(row for step in batches for b in step for row in b["indices"].tolist())

    whole = loaders_of(store, name, 1, each=12)[0]
    expected = [(step_of([step]), whole.state_dict()) for step in whole.repeat(4)]
    assert len(expected) > 20
    for number, (_, state) in enumerate(expected[:-1]):
        world = (1, 2, 3, 4, 6)[number % 5]
        loaders = loaders_of(store, name, world, each=12 // world)
        for loader in loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
        steps = [next(loader.repeat(4)) for loader in loaders]
        shared = WISHES[name].get("context_parallel", 1)
        for loader in loaders:
            assert (step_of(steps[::shared]), loader.state_dict()) == expected[number + 1]


def test_prefetch_and_torch_hand_out_the_same_lists(store: Store) -> None:
    pytest.importorskip("torch")
    from tokenmill.integrations.torch import DataLoader

    def listed(steps: Any) -> Any:
        return [[(b["input_ids"].tolist(), b["labels"].tolist()) for b in step] for step in steps]

    expected = listed(loaders_of(store, "aligned", 2)[1])
    assert listed(loaders_of(store, "aligned", 2, prefetch=2)[1]) == expected
    assert listed(DataLoader(loaders_of(store, "aligned", 2)[1])) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batches": 4096}, "must be a tm.MicroBatches"),
        ({"pad_to_multiple_of": 8}, "cannot be used with micro_batches"),
        ({"padding_side": "left"}, "requires padding_side='right'"),
        ({"micro_batches": MicroBatches(64, context_parallel=2)}, "must be a multiple of"),
        ({"micro_batches": MicroBatches(30)}, "row 22 has 31 tokens"),
        ({"micro_batches": MicroBatches(31, align=Align(sequence=16))}, "has 32 tokens"),
        ({"pack": Pack(128)}, "at most 64"),
        ({"pack": Pack(40), "micro_batches": MicroBatches(64, align=Align(slab=16))}, "multiple"),
        (
            {"pack": Pack(32), "micro_batches": MicroBatches(64, layout="padded")},
            "requires MicroBatches",
        ),
    ],
)
def test_invalid_arguments_are_rejected(
    store: Store, arguments: dict[str, Any], message: str
) -> None:
    given = {"micro_batches": MicroBatches(64), **arguments}
    with pytest.raises(UsageError, match=message):
        Loader(store, batch_size=4, world_size=3, **given)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        *((Pack, {"length": wrong}) for wrong in (0, 8.5, True)),
        *((Pack, {"length": 8, **wrong})
          for wrong in ({"method": "magic"}, {"window": 0}, {"oversize": "ignore"})),
        *((MicroBatches, {"max_tokens": wrong}) for wrong in (0, True)),
        *((MicroBatches, {"max_tokens": 8, **wrong})
          for wrong in ({"balance": "rows"}, {"layout": "wide"}, {"shards": "spiral"},
                        {"align": 16}, {"context_parallel": 0}, {"max_patches": 0})),
        *((Align, wrong) for wrong in ({"sequence": 0}, {"slab": 1.5})),
    ],
)  # fmt: skip
def test_invalid_options_are_rejected_when_created(kind: Any, values: Any) -> None:
    with pytest.raises(UsageError, match=f"{list(values)[-1]} (is|must be) "):
        kind(**values)


def test_alignment_larger_than_the_budget_is_rejected() -> None:
    with pytest.raises(UsageError, match="max_tokens=8 allows 8"):
        MicroBatches(8, align=Align(slab=16))
