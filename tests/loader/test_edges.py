"""Prefetching and refusals of the loader."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.programs import python
from tests.store.making import damage_slice, make_columns, make_store
from tokenmill.dataset import as_view, filtered, mix
from tokenmill.errors import CorruptionError, UsageError
from tokenmill.loader import Loader
from tokenmill.packing import Pack
from tokenmill.store import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    lengths = np.random.default_rng(0).integers(1, 30, 50).tolist()
    return make_store(tmp_path_factory.mktemp("cache"), [make_columns(lengths)], pad_id=9)


def numbers(loader: Loader) -> list[list[int]]:
    return [batch["indices"].tolist() for batch in loader]


# Prefetching


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "tokenmill-prefetch"]


def test_prefetch_thread_ends_when_the_iterator_is_dropped(store: Store) -> None:
    before = len(threads())
    iterator = iter(Loader(store, prefetch=2))
    next(iterator)
    assert len(threads()) == before + 1
    del iterator
    gc.collect()
    for _ in range(50):
        if len(threads()) == before:
            break
        time.sleep(0.05)
    assert len(threads()) == before


def test_prefetch_error_reaches_the_trainer_with_its_type(tmp_path: Path) -> None:
    store = make_store(tmp_path, [make_columns([5] * 40)])
    damage_slice(tmp_path)
    loader = Loader(store, prefetch=2)
    iterator = iter(loader)
    for _ in range(2):  # and again: an error does not turn into a silent end
        with pytest.raises(CorruptionError, match="checksum"):
            list(iterator)
    assert loader.state_dict()["position"] == 0


def test_prefetching_process_exits_without_being_waited_for(store: Store) -> None:
    program = (
        "import sys\nfrom tokenmill import Loader, open_store\n"
        f"iterator = iter(Loader(open_store({str(store.path)!r}), prefetch=3))\n"
        "next(iterator)\nprint('served')\n"
    )
    done = python(program)
    assert done.returncode == 0
    assert done.stdout == "served\n"
    assert done.stderr == ""


def test_reading_imports_neither_pyarrow_nor_any_host_library(store: Store) -> None:
    program = (
        "import sys\nfrom tokenmill import Loader, Pack, mix, open_store, split\n"
        f"store = open_store({str(store.path)!r})\n"
        "next(iter(Loader(store, prefetch=1, pack=Pack(64))))\n"
        "train, val = split(store, {'train': 0.5, 'val': 0.5})\n"
        "next(iter(Loader(mix({'a': train, 'b': val}))))\n"
        "heavy = {'pyarrow', 'jinja2', 'tokenizers', 'fastokens', 'transformers',\n"
        "         'datasets', 'torch', 'ray', 'fsspec', 'zstandard', 'typer', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = python(program)
    assert done.stdout == "[]\n", done.stderr


# Refusals


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size"), ({"batch_size": 2.0}, "batch_size"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"), ({"rank": -1}, "rank"),
        ({"world_size": 0}, "world_size"), ({"drop_last": "yes"}, "drop_last"),
        ({"pad_side": "top"}, "pad_side"), ({"seed": -1}, "seed"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"prefetch": -1}, "prefetch"),
        ({"pack": 64}, "tm.Pack"),
        ({"pack": Pack(64), "pad_side": "left"}, "tail"),
        ({"pack": Pack(60), "pad_to_multiple_of": 8}, "no multiple"),
        ({"pack": Pack(8)}, r"row \d+ has .* pack only 8"),
        ({"shuffle": False, "group_by_length": True}, "shuffle=False"),
    ],
)  # fmt: skip
def test_loader_impossible_wish_is_refused_at_once(
    store: Store, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        Loader(store, **wrong)


def test_loader_data_that_is_none_is_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="expected a store"):
        Loader([1, 2, 3])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no rows"):
        Loader(as_view(store)[:0])


def test_global_batch_larger_than_an_epoch_is_refused_where_it_cannot_be_served(
    store: Store,
) -> None:
    loader = Loader(store, batch_size=17, world_size=3, indices=True)
    with pytest.raises(UsageError, match="batch of 51 samples is larger than an epoch of 50"):
        loader.repeat()
    with pytest.raises(UsageError, match="larger than an epoch"):
        next(iter(Loader(store, batch_size=51, drop_last=True)))
    assert [len(batch["indices"]) for batch in loader] == [17]  # one short batch


def test_packs_that_drop_everything_are_an_error_not_an_endless_search(store: Store) -> None:
    view = filtered(store, "length > 20")
    with pytest.raises(UsageError, match="no samples"):
        next(iter(Loader(view, pack=Pack(10, oversize="drop"))))


def test_mixture_by_tokens_holds_token_shares(tmp_path: Path) -> None:
    """Rows of one source are ten times as long; shares are of tokens all the same."""
    short = make_store(tmp_path / "a", [make_columns([6] * 400)], name="short")
    long = make_store(tmp_path / "b", [make_columns([60] * 400)], name="long")
    for by, name in (("tokens", "tokens"), ("trained_tokens", "trained_tokens"), ("rows", "rows")):
        loader = Loader(mix({"short": short, "long": long}, {"short": 0.7, "long": 0.3}, by=by), 10)
        iterator = loader.repeat()
        for _ in range(150):
            next(iterator)
        served = loader.served()
        total = served["short"][name] + served["long"][name]
        assert abs(served["short"][name] / total - 0.7) < 0.01, by
