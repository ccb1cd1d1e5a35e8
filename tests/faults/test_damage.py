"""Tests of corrupt caches in builds: an error, and `force_recache` repairs them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.conftest import Clean
from tests.faults.tools import Zygote
from tests.faults.world import image, prepare_arguments
from tests.sampling import sampled
from tokenmill.store.layout import CHECKED_FILES, MANIFEST, TABLE


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.Random(path.suffix).randrange(len(data))] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rebuild(zygote: Zygote, clean: Clean, cache: Path) -> None:
    rebuilt = zygote.one(prepare_arguments(clean.sources, cache, "--force-recache"))
    assert rebuilt.exit == 0, rebuilt.stderr
    assert image(cache) == clean.image
    zygote.read_back(cache)


@pytest.mark.parametrize("damage", [flip, cut, empty, Path.unlink])
def test_corrupt_slices_are_refused_then_quarantined_and_rebuilt(
    zygote: Zygote, clean: Clean, cache: Path, damage: Callable[[Path], None]
) -> None:
    records = sorted((cache / "slices").rglob("*.json"))
    damage(records[0])
    damage(records[1].with_suffix(".arrow"))
    damage(records[2].with_suffix(".meta.arrow"))
    # As a slice another store shares: a miss must not take it for good either.
    verified = zygote.one(["verify", str(next((cache / "stores").iterdir())), "--json"])
    assert verified.exit == 1
    assert len(verified.result["errors"]) == 3
    rebuild(zygote, clean, cache)
    quarantined = {p.name.partition(".")[0] for p in (cache / "quarantine").iterdir()}
    # Without its record a slice is only missing.
    broken = records[1:3] if damage is Path.unlink else records[:3]
    assert quarantined == {record.stem for record in broken}
    assert zygote.one(["verify", str(next((cache / "stores").iterdir())), "--json"]).exit == 0


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *sampled(((name, flip) for name in (MANIFEST, *CHECKED_FILES)), 2),
        (MANIFEST, Path.unlink),
        (TABLE, cut),
    ],
)
def test_corrupt_store_directory_is_refused_then_replaced(
    zygote: Zygote, clean: Clean, cache: Path, name: str, damage: Callable[[Path], None]
) -> None:
    store = next((cache / "stores").iterdir())
    damage(store / name)
    refused = zygote.one(prepare_arguments(clean.sources, cache))
    if (name, damage) != (MANIFEST, Path.unlink):  # without a manifest there is no store: a miss
        assert refused.exit == 1
        assert refused.error == "CorruptionError"
        assert name in refused.result["error"]["path"]
    rebuild(zygote, clean, cache)
    assert [p.name.partition(".")[0] for p in (cache / "quarantine").iterdir()] == [store.name]


def test_corrupt_slice_is_rebuilt_while_committing(
    zygote: Zygote, clean: Clean, cache: Path
) -> None:
    shutil.rmtree(cache / "stores")
    flip(sorted((cache / "slices").rglob("*.json"))[0])
    sorted((cache / "slices").rglob("*.meta.arrow"))[-1].write_bytes(b"short")
    outcome = zygote.one(prepare_arguments(clean.sources, cache))
    assert outcome.exit == 0, outcome.stderr
    assert outcome.result["slices_built"] == 2
    assert image(cache) == clean.image


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_copy_of_the_tokenizer_makes_no_wrong_tokens(
    zygote: Zygote, clean: Clean, cache: Path, name: str
) -> None:
    for part in ("slices", "stores"):
        shutil.rmtree(cache / part)
    (copy,) = (p for p in (cache / "tokenizers").iterdir() if p.name != "memo")
    text = (copy / name).read_text()
    # Still a tokenizer, only another one.
    changed = text.replace("assistant", "assistent") if "config" in name else swap_ids(text)
    assert changed != text
    (copy / name).write_text(changed)
    outcome = zygote.one(prepare_arguments(clean.sources, cache))
    assert outcome.exit == 0, outcome.stderr
    assert image(cache) == clean.image
    assert [p.name.partition(".")[0] for p in (cache / "quarantine").iterdir()] == [copy.name]


def swap_ids(text: str) -> str:
    document = json.loads(text)
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    return json.dumps(document)
