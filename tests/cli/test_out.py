"""`--out DIR`: a self-contained copy that does not need the cache."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cli.harness import QUICK, Shell
from tokenmill import open_store


def test_out_is_a_self_contained_store(shell: Shell, chat: Path, own_cache: Path) -> None:
    out, moved = chat.parent / "out", chat.parent / "other" / "moved"
    prepared = shell("prepare", chat, *QUICK, "--keep-columns", "id", "--out", out, "--json").json
    assert prepared["path"] == str(out)
    expected = [
        row.input_ids.tolist() for row in open_store(own_cache / "stores" / prepared["key"])
    ]
    shutil.rmtree(own_cache)
    moved.parent.mkdir()
    out.rename(moved)
    copy = open_store(moved)
    assert copy.key == prepared["key"]
    assert [row.input_ids.tolist() for row in copy] == expected
    assert [row.extra["id"] for row in copy] == list(range(20))
    assert shell("verify", moved, "--json").json["ok"]
    assert shell("inspect", moved, "--row", "1").code == 0
    assert shell("stats", moved).code == 0


def test_out_loads_as_a_hugging_face_dataset(shell: Shell, chat: Path, own_cache: Path) -> None:
    from datasets import load_from_disk

    out = chat.parent / "out"
    assert shell("prepare", chat, *QUICK, "--disable-cache", "--out", out).code == 0
    assert not own_cache.exists() or not any(own_cache.iterdir())
    dataset = load_from_disk(str(out))
    assert dataset.column_names == ["input_ids", "loss_mask"]
    copy = open_store(out)
    assert dataset["input_ids"][:] == [row.input_ids.tolist() for row in copy]
    assert dataset["loss_mask"][:] == [row.loss_mask.tolist() for row in copy]


def test_out_keeps_the_same_store_and_refuses_another(
    shell: Shell, chat: Path, dirty: Path
) -> None:
    out = chat.parent / "out"
    for _ in range(2):
        assert shell("prepare", chat, *QUICK, "--out", out).code == 0
    refused = shell("prepare", dirty, *QUICK, "--out", out, "--json")
    assert refused.code == 2
    assert refused.error["path"] == str(out)
    full = chat.parent
    assert shell("prepare", chat, *QUICK, "--out", full).code == 2


def test_disable_cache_of_a_recipe_needs_out(shell: Shell, chat: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"sources: {chat}\ntokenizer: {QUICK[1]}\ndisable_cache: true\n")
    answer = shell("prepare", recipe)
    assert answer.code == 2
    assert "--disable-cache removes the store" in answer.err
