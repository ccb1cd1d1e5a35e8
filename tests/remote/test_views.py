"""Tests of views of remote stores: a copied cache, or a pushed store."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest

import tokenmill as tm
from tests.remote.servers import RangeServer
from tests.store.making import make_columns, make_store
from tokenmill.errors import UsageError
from tokenmill.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    slices = [make_columns(range(3, 40), seed=number) for number in range(2)]
    return make_store(tmp_path / "cache", slices)


@pytest.fixture(params=["whole cache", "pushed"])
def there(request: pytest.FixtureRequest, store: Store, web: RangeServer, tmp_path: Path) -> Store:
    if request.param == "pushed":
        tm.push(store, web.root / "store")
        url = web.url("store")
    else:
        shutil.copytree(tmp_path / "cache", web.root, dirs_exist_ok=True)
        url = web.url(f"stores/{store.key}")
    return tm.open_store(url, cache_dir=tmp_path / "blocks")


def test_splits_and_filters_equal_those_of_the_local_store(
    store: Store, there: Store, tmp_path: Path
) -> None:
    parts = {"train": 0.7, "val": 0.3}
    splits = there.split(parts)
    for name, local in store.split(parts).items():
        remote = splits[name]
        assert [len(row) for row in remote] == [len(row) for row in local]
        assert [len(row) for row in pickle.loads(pickle.dumps(remote))] == [
            len(row) for row in local
        ]
        # Indexes are in the caller's cache, beside the cached blocks of the store.
        assert (tmp_path / "blocks" / "rows" / remote.key).is_dir()
    assert len(there.filter("length > 20")) == 38


def test_remote_store_can_be_pulled_but_not_pushed(there: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="pull it first"):
        tm.push(there, tmp_path / "out")
    assert not (tmp_path / "out").exists()
