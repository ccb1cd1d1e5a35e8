"""Files of a store with wrong types raise errors; a wrong proof is a warning."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.remote.servers import RangeServer, serving
from tests.store.making import make_columns, make_store
from tokenmill._core.artifact import ArtifactKind
from tokenmill.build.outcome import BuildStats, Prepared
from tokenmill.build.recipe import RunOptions
from tokenmill.errors import CorruptionError
from tokenmill.store import Store
from tokenmill.store.manifest import encode_manifest, with_digest

WRONG: list[Any] = [5, "text", [1], {"a": 1}, True, None, 1.5, [[]], {"a": {"b": []}}]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "cache", [make_columns([3, 4, 5])])


@pytest.mark.parametrize("member", ["paths", "notes"])
@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_proof_of_wrong_types_is_a_warning(store: Store, member: str, wrong: Any) -> None:
    (store.path / "proof.json").write_text(json.dumps({member: wrong}))
    opened = Store(store.path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert isinstance(opened[0].origin.path, str | None)
        list(Prepared(opened, True, BuildStats(slices=1), 0.0, RunOptions()).remarks())
    fits = member == "notes" and wrong == {"a": {"b": 1}}
    assert fits or any("proof.json: cannot be read" in str(one.message) for one in said)


def test_list_of_files_of_wrong_types_is_refused(store: Store, tmp_path: Path) -> None:
    stated = (5, None, {"size": "1", "checksum": 3})
    files: list[Any] = [[1], *({"tokenizer/x": one} for one in stated)]
    wrong = [*WRONG, {"key": 1, "files": {}}, {"key": "k"}]
    wrong += [{"key": "k", "files": one} for one in files]
    (tmp_path / "web").mkdir()
    tm.push(store, tmp_path / "web" / "store")
    with serving(RangeServer(tmp_path / "web")) as web:
        for document in wrong:
            (tmp_path / "web" / "store" / "contents.json").write_text(json.dumps(document))
            there = tm.open_store(web.url("store"), cache_dir=tmp_path / "blocks")
            with pytest.raises(CorruptionError, match="not a list of files"):
                _ = there.tokenizer_path


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("totals", "rows"), True),
        (("totals", "rows"), "3"),
        (("totals", "rejected"), None),
        (("totals", "rejected"), {"overlong": "1"}),
        (("tokenizer", "pad_token_id"), "0"),
        (("tokenizer", "eos_token_id"), [1]),
        (("files", "lengths.bin", "checksum"), 5),
        (("files", "lengths.bin", "size"), True),
        (("files", "mask_runs.bin"), None),
        (("files",), []),
        (("tokenizer",), 3),
    ],
)
def test_manifest_of_wrong_types_is_refused(
    store: Store, path: tuple[str, ...], wrong: Any
) -> None:
    manifest = json.loads((store.path / "manifest.json").read_text())
    place = manifest
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = wrong
    (store.path / "manifest.json").chmod(0o644)
    (store.path / "manifest.json").write_bytes(encode_manifest(with_digest(manifest)))
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        Store(store.path)


@pytest.mark.parametrize("member", ["document", "rows", "checksums"])
@pytest.mark.parametrize("wrong", [None, "x", [1], {"index.bin": 3}, 1.5, True], ids=repr)
def test_selection_index_of_wrong_types_is_rejected(store: Store, member: str, wrong: Any) -> None:
    view = store.filter("length > 3")
    (path,) = (store.path.parent.parent / "rows").glob("*/kept.json")
    path.chmod(0o644)
    record = {**json.loads(path.read_text())["record"], member: wrong}
    path.write_bytes(ArtifactKind("index", "kept.json").encode(record))
    with pytest.raises(CorruptionError, match=r"kept\.json"):
        store.filter("length > 3")
    assert len(view) == 2
