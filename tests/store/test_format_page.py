"""`format_reader`, written from docs/internals/format.md alone, reads our stores."""

from __future__ import annotations

import ast
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import EXAMPLES, INLINE, TOKENIZER, conversation, small_cuts, write_rows
from tests.store import format_reader
from tests.store.format_reader import InvalidStore, StoreFiles, canonical, read_sidecar
from tests.store.making import flip, make_columns, make_store
from tokenmill._core import fingerprint
from tokenmill.store import Store
from tokenmill.store.transfer import copy_store

Document = dict[str, Any]


def weighted(number: int) -> Document:
    row = conversation(number)
    if number % 4 == 0:
        row["messages"][1]["weight"] = 0.3
    return row


def pair(number: int, **more: Any) -> Document:
    prompt, answer = conversation(number)["messages"]
    answers = {
        name: [{**answer, "content": f"{name} {answer['content']}", **more}]
        for name in ("chosen", "rejected")
    }
    return {"id": number, "prompt": [prompt], **answers}


def prepare(source: Any, cache: Path, **given: Any) -> Store:
    options = {"cache_dir": cache, "keep_columns": ("id",), **INLINE, **given}
    return tm.prepare(source, str(TOKENIZER), **options)


def of_rows(root: Path, rows: list[Any], **given: Any) -> Store:
    return prepare(write_rows(root / "rows.jsonl", rows), root / "cache", **given)


def plain(root: Path) -> Store:
    sources = [EXAMPLES / "conversations.jsonl", EXAMPLES / "dirty.jsonl"]
    return prepare(sources, root / "cache")


def columnar(root: Path) -> Store:
    pq.write_table(pa.Table.from_pylist([conversation(n) for n in range(9)]), root / "rows.parquet")
    return prepare(
        root / "rows.parquet", root / "cache", chat_template_kwargs={"x": [1e16, 0.00001]}
    )


def made(root: Path) -> Store:
    """Rows without tokens or trained from the first on, a slice without rows, too many roles."""
    texts = ['"é"', "null", "2", '{"b":[1.5]}']
    columns = make_columns([4, 0, 2, 300_000], extra={"a": texts})
    names = tuple(f"role {number}" for number in range(200))
    many = replace(columns, roles=names, turn_roles=np.arange(12, dtype=np.int16) * 16)
    return make_store(root / "cache", [columns, make_columns([]), many])


def seen(root: Path, rows: list[Document]) -> Store:
    """Rows of which the first ones show an image each."""
    from tests.build.image_rows import Album
    from tests.media import processors

    album = Album(root)
    for number, row in enumerate(rows[:8]):
        first = (row.get("prompt") or row["messages"])[0]
        first["content"] = f"<image>{first['content']}"
        row["images"] = [album.name(number % 4)]
    source = write_rows(root / "rows.jsonl", rows)
    how = {
        "cache_dir": root / "cache",
        "keep_columns": ("id",),
        "executor": "inline",
        "progress": False,
    }
    return tm.prepare(str(source), processor=processors.make("llava"), **how)


def mixed(root: Path) -> Store:
    rows = [pair(n) if n % 3 else conversation(n) for n in range(40)]
    return of_rows(root, [*rows, *map(conversation, range(60, 90))])


def weighted_pairs() -> list[Document]:
    return [pair(n, weight=1 + n % 2) for n in range(12)]


KINDS: dict[str, Callable[[Path], Store]] = {
    "plain": plain,
    "columnar": columnar,
    "groups": mixed,
    "weights": lambda root: of_rows(
        root, [*map(weighted, range(30)), *map(conversation, range(60, 90)), "{"]
    ),
    "groups_and_weights": lambda root: of_rows(root, weighted_pairs(), max_length=120),
    "made": made,
    "copied": lambda root: Store(copy_store(of_rows(root, [conversation(1)]), root / "copy")),
    "media": lambda root: seen(root, [conversation(n) for n in range(60)]),
    "media_groups": lambda root: seen(root, [pair(n) for n in range(12)]),
    "media_weights": lambda root: seen(root, [weighted(n) for n in range(12)]),
    "media_groups_and_weights": lambda root: seen(root, weighted_pairs()),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    with pytest.MonkeyPatch.context() as patch:
        small_cuts(patch)
        return {name: make(tmp_path_factory.mktemp(name)) for name, make in KINDS.items()}


def served(store: Store) -> list[format_reader.Row]:
    parts, digests, answers = [], [], []
    names = ("label", "score", "margin", "prompt_tokens")
    for at, (_, columns) in enumerate(store.columns(["part", "digest", *names])):
        parts += columns["part"].tolist()
        digests += columns["digest"].tolist()
        said = [[None if x != x else x for x in columns[name].tolist()] for name in names]
        rows = list(zip(*said, strict=True))
        has_groups = store.slice_at(at).record.groups is not None
        answers += rows if has_groups else [None] * len(rows)
    found = []
    for number, row in enumerate(store):
        origin = row.origin
        found.append(
            format_reader.Row(
                row.input_ids.tolist(), row.loss_mask.tolist(), row.weights.tolist(),
                list(row.turns), row.extra, place(store, origin), parts[number], digests[number],
                answers[number],
                [
                    [one.kind, one.reference, one.digest, one.width, one.height, one.start,
                     one.count, None if one.grid is None else list(one.grid)]
                    for one in row.media
                ],
            )
        )  # fmt: skip
    return found


def place(store: Store, origin: tm.Origin) -> tuple[Any, ...]:
    source = store.sources.index(origin.path)
    return source, origin.row, origin.line, origin.offset, origin.length


@pytest.mark.parametrize("kind", KINDS)
def test_reader_of_the_page_reads_what_the_library_serves(
    stores: dict[str, Store], kind: str
) -> None:
    store = stores[kind]
    files = StoreFiles(store.path)
    assert list(files.rows()) == served(store)
    assert len(store) > 0
    expected = [(place(store, o), reason, text) for o, reason, text in store.rejected_rows()]
    assert list(files.rejected()) == expected


def test_slices_with_and_without_extra_columns_are_among_the_stores(
    stores: dict[str, Store],
) -> None:
    def extras(name: str) -> set[tuple[bool, bool, bool]]:
        readers = map(stores[name].slice_at, range(len(stores[name].table)))
        records = [reader.record for reader in readers]
        return {(one.groups is not None, one.has_weights, one.has_media) for one in records}

    none = (False, False, False)
    assert extras("groups") == {none, (True, False, False)}
    assert extras("weights") == {none, (False, True, False)}
    assert extras("media") == {none, (False, False, True)}
    for name in ("plain", "weights"):
        assert stores[name].rejected


@pytest.mark.parametrize("kind", ["plain", "groups", "weights"])
def test_reader_of_the_page_follows_the_digests_to_the_sources(
    stores: dict[str, Store], kind: str
) -> None:
    store = stores[kind]
    contents = [Path(path or "").read_bytes() for path in store.sources]
    files = StoreFiles(store.path)
    files.check_sources(contents)
    assert len(store.table) > len(contents)
    at = store[len(store) // 2].origin
    source = store.sources.index(at.path)
    edited = bytearray(contents[source])
    edited[(at.offset or 0) + 5] ^= 1
    contents[source] = bytes(edited)
    with pytest.raises(InvalidStore, match="slice key"):
        files.check_sources(contents)


@pytest.mark.parametrize("per", ["row", "token"])
def test_reader_of_the_page_reads_what_is_attached(
    stores: dict[str, Store], per: str, tmp_path: Path
) -> None:
    store = stores["groups"]
    count = len(store) if per == "row" else int(store.lengths.sum())
    values = np.random.default_rng(4).normal(size=count).astype(np.float32)
    values[3] = np.inf
    sidecar = store.attach(f"of_{per}", values, producer="a seed", per=per)
    name, producer, found = read_sidecar(sidecar.path, StoreFiles(store.path))
    assert (name, producer) == (sidecar.name, "a seed")
    served = values if per == "row" else sidecar.batch(range(len(store)))
    assert found == [value.tolist() for value in served]
    for name in ("values.f32", "sidecar.json"):
        shutil.copytree(sidecar.path, tmp_path / name / sidecar.path.name)
        flip(tmp_path / name / sidecar.path.name / name, 77)
        with pytest.raises(InvalidStore):
            read_sidecar(tmp_path / name / sidecar.path.name, StoreFiles(store.path))


@pytest.mark.parametrize("kind", ["groups_and_weights", "copied"])
def test_damage_to_any_file_is_noticed(stores: dict[str, Store], kind: str, tmp_path: Path) -> None:
    path = stores[kind].path
    root = path if kind == "copied" else path.parent.parent
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    root, path = copy, copy / path.relative_to(root)
    StoreFiles(path)
    rng = random.Random(kind)
    damaged = [*path.glob("*.*"), *(root / "slices").rglob("*.*")]
    assert len(damaged) > 10
    for file in damaged:
        if file.name == "proof.json":
            continue
        for bit in rng.sample(range(8 * file.stat().st_size), min(8, file.stat().st_size)):
            whole = flip(file, bit)
            with pytest.raises(InvalidStore):
                StoreFiles(path)
            file.write_bytes(whole)
        for other in (whole[:-1], whole + b"\0"):
            file.write_bytes(other)
            with pytest.raises(InvalidStore):
                StoreFiles(path)
        file.unlink()
        with pytest.raises(InvalidStore):
            StoreFiles(path)
        file.write_bytes(whole)
    StoreFiles(path)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
@example([1e16, 9.9e15, 1e-5, 9.9e-6, -0.0, 5e-324, 1.5e300, 2.0])
@example({"\ud7ff": 1, "\ue000": 2, "\U00010000": 3, "\x7f\x1f/": '\u2028"\\\b'})
def test_canonical_json_is_as_the_page_says(value: Any) -> None:
    assert canonical(value).encode() == fingerprint.canonical(value)


def test_reader_of_the_page_uses_nothing_of_ours() -> None:
    allowed = {"__future__", "collections", "dataclasses", "decimal", "hashlib", "json", "numpy",
               "pathlib", "typing", "xxhash"}  # fmt: skip
    for node in ast.walk(ast.parse(Path(format_reader.__file__).read_text("utf-8"))):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert str(node.module).split(".")[0] in allowed
