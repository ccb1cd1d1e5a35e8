"""One contract for everything that is kept sealed in a cache.

Selection and length indexes, row indexes, seekable copies, notes and memos: each is
published whole or not at all, by however many writers; whatever is not what was written is either
refused with an error that names the file and says what to do, or taken for absent and made again.
``sealed.json`` holds one of each as format 1 has them, byte by byte: they must be read.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.store.making import make_columns, make_store
from tokenmill.data.choices import filtered
from tokenmill.data.prompt_lengths import LengthIndex, Rejection, publish_lengths
from tokenmill.data.view import View
from tokenmill.errors import CacheError, CorruptionError
from tokenmill.sources.bytefile import LocalFile
from tokenmill.sources.copy import CopyFile, write_copy
from tokenmill.sources.index import Index, Shelf, index_key, write_index
from tokenmill.sources.scan import LineScan
from tokenmill.store import Store
from tokenmill.tokenizers.cache import Comparison, read_fact, write_fact

GOLDEN = Path(__file__).with_name("sealed.json")
KEY = "0123456789abcdef0123" * 2
LINES_FILE = Path(__file__).with_name("lines.jsonl")
LINES = LINES_FILE.read_bytes()
DOCUMENT = {"prompts": 1, "sources": ["x"]}
LENGTHS = np.array([4, -1, 9], np.int32)
BAD_ROW = Rejection(1, "bad_shape", "no prompt: é")


def select(root: Path) -> View:
    stores = list((root / "stores").glob("*"))
    store = Store(stores[0]) if stores else make_store(root, [make_columns([3, 4, 5])])
    return filtered(store, "length > 3")


def make_selection(root: Path) -> Path:
    return root / "rows" / select(root).key


def read_selection(place: Path) -> Any:
    view = select(place.parent.parent)
    return [len(row) for row in view], view.lengths.tolist(), view.trained.tolist()


def make_lengths(root: Path) -> Path:
    serving = {"template": "{{ messages }}", "special_tokens": {"eos_token": "</s>"}}
    return publish_lengths(root, DOCUMENT, [(LENGTHS, [BAD_ROW])], serving)


def read_lengths(place: Path) -> Any:
    index = LengthIndex(place, DOCUMENT)
    return index.lengths.tolist(), list(index.rejections()), index.rejected, index.template


def make_row_index(root: Path) -> Path:
    document = write_index(Shelf(root), LineScan(LocalFile(str(LINES_FILE))))
    return Shelf(root).place(index_key(document.digest))


def read_row_index(place: Path) -> Any:
    index = Index(place)
    for page in range(index.pages):
        index.check_page(page)
    return index.document.rows, list(index.starts[:4]), index.block(0).digest


def make_copy(root: Path) -> Path:
    return Shelf(root).place(write_copy([LINES, LINES], Shelf(root)))


def read_copy(place: Path) -> Any:
    return CopyFile(place, "original").pread(1 << 20, 0)


def make_note(root: Path) -> Path:
    Shelf(root).write_note(KEY, {"rows": 3, "index": KEY, "path": "é"})
    return Shelf(root).place(KEY)


def read_note(place: Path) -> Any:
    return Shelf(place.parent.parent).note(place.name)


def make_memo(root: Path) -> Path:
    write_fact(root, KEY, Comparison("it adds a token"))
    return root / "tokenizers" / "memo" / f"{KEY}.json"


def read_memo(place: Path) -> Any:
    return read_fact(place.parents[2], KEY, Comparison)


class Kind(NamedTuple):
    """One kind of sealed thing.

    Attributes:
        make: Publishes it under a root, or leaves what is there; gives where it is.
        read: All that it says; None where what cannot be admitted is as good as absent.
        remade: Whether it is: then making it again mends it.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    remade: bool = False


KINDS = {
    "selection index": Kind(make_selection, read_selection),
    "length index": Kind(make_lengths, read_lengths),
    "row index": Kind(make_row_index, read_row_index),
    "copy": Kind(make_copy, read_copy),
    "note": Kind(make_note, read_note, remade=True),
    "memo": Kind(make_memo, read_memo, remade=True),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())


def files_of(place: Path) -> dict[str, bytes]:
    """Every file of a sealed thing, by its path below the root."""
    root = place.parents[2] if place.parent.name == "memo" else place.parents[1]
    paths = [place] if place.is_file() else sorted(place.rglob("*"))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("name", KINDS)
def test_what_format_1_holds_is_read_and_still_written(name: str, root: Path) -> None:
    golden = json.loads(GOLDEN.read_text())[name]
    place = KINDS[name].make(root)
    made, wanted = files_of(place), KINDS[name].read(place)
    assert wanted is not None
    assert sorted(made) == sorted(golden)
    if name != "copy":  # the compressor's bytes are its own version's
        assert {path: data.hex() for path, data in made.items()} == golden
    for path in made:
        (root / path).unlink()
        (root / path).write_bytes(bytes.fromhex(golden[path]))
    assert KINDS[name].read(place) == wanted


def damages_of(good: bytes) -> list[bytes | None]:
    places = range(0, len(good), max(1, len(good) // 40))
    flipped = [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in places]
    return [*flipped, good[:-1], good + b"\0", b"", None]


@every_kind
def test_any_damage_is_refused_by_name_or_made_again(kind: Kind, root: Path) -> None:
    place = kind.make(root)
    wanted, made = kind.read(place), files_of(place)
    for path, good in made.items():
        for damage in damages_of(good):
            (root / path).unlink()
            if damage is not None:
                (root / path).write_bytes(damage)
            if kind.remade:
                assert kind.read(place) is None
                assert kind.make(root) == place
                assert files_of(place) == made
            else:
                with pytest.raises(CorruptionError, match=r"again|rehash=True") as caught:
                    kind.read(place)
                assert str(caught.value.path).startswith(str(place))
                (root / path).write_bytes(good)
    assert kind.read(place) == wanted


@every_kind
def test_link_that_leads_out_of_the_cache_is_followed_nowhere(
    kind: Kind, root: Path, tmp_path: Path
) -> None:
    place = kind.make(root)
    for path in files_of(place):
        shutil.move(root / path, tmp_path / "outside")
        (root / path).symlink_to(tmp_path / "outside")
        try:
            assert kind.read(place) is None
        except CacheError as error:
            assert "symbolic link leads out of the cache" in str(error)
        (root / path).unlink()
        shutil.move(tmp_path / "outside", root / path)


@every_kind
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "link"])
def test_full_disk_at_any_step_publishes_nothing(
    kind: Kind, call: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(root))  # a selection has no other place to go
    place = kind.make(root)
    whole = files_of(place)
    real, left = getattr(os, call), 0

    def fail(*arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    for allowed in range(60):
        shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        left = allowed
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            patch.setattr("tokenmill._core.process.tempfile.tempdir", str(root))
            try:
                kind.make(root)
            except CacheError as error:
                assert "disk is full" in str(error)
        if place.exists():
            assert files_of(place) == whole
        if left >= 0:
            break
    assert left >= 0
    kind.make(root)
    assert files_of(place) == whole


@every_kind
def test_eight_writers_leave_one_and_nothing_beside_it(kind: Kind, root: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        (place,) = set(threads.map(lambda _: kind.make(root), range(8)))
    assert kind.read(place) is not None
    assert not list((root / "staging").iterdir())
    assert not (root / "quarantine").exists()


def test_one_that_this_user_may_not_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_note(tmp_path)
    read = Path.read_bytes

    def refused(path: Path) -> bytes:
        if path.parent == place:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refused)
        make_note(tmp_path)
    assert not (tmp_path / "quarantine").exists()
    assert read_note(place) is not None
