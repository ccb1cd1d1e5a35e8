"""The key is the content: what must change it and what must not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.build.making import TOKENIZER, conversations, write_rows
from tests.core.test_options import EVERYTHING
from tests.programs import python
from tokenmill.build.calls import explain_recipe

# Changes the source or the tokenizer in place and returns further arguments.
Change = Callable[[Path, Path], dict[str, Any]]

BASE = {"chat_template_kwargs": {"enable_thinking": True}, "date": "2026-11-14"}


def same_size_edit(source: Path, tokenizer: Path) -> dict[str, Any]:
    """One letter, same size, same mtime to the nanosecond."""
    before = source.stat()
    data = source.read_bytes()
    at = data.index(b"amber")
    source.write_bytes(data[:at] + b"AMBER" + data[at + 5 :])
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = source.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    return {}


def one_merge(source: Path, tokenizer: Path) -> dict[str, Any]:
    """No row of the source uses it; tests/tokenizers/test_identity.py has all other changes."""
    path = tokenizer / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["model"]["merges"].pop()
    path.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    return {}


def own_template(source: Path, tokenizer: Path) -> dict[str, Any]:
    path = source.parent / "own.jinja"
    path.write_text((tokenizer / "chat_template.jinja").read_text() + "{# mine #}")
    return {"chat_template": str(path)}


def given(**arguments: Any) -> Change:
    return lambda source, tokenizer: arguments


def appended(source: Path, tokenizer: Path) -> dict[str, Any]:
    with open(source, "a") as file:
        file.write(json.dumps(conversations(1, first=77)[0]) + "\n")
    return {}


def swapped_rows(source: Path, tokenizer: Path) -> dict[str, Any]:
    lines = source.read_text().splitlines()
    write_rows(source, [lines[1], lines[0], *lines[2:]])
    return {}


CHANGES: dict[str, Change] = {
    "same-size edit, mtime restored": same_size_edit,
    "row appended": appended,
    "rows swapped": swapped_rows,
    "one merge": one_merge,
    "own template": own_template,
    **{name: given(**{name: value}) for name, value in EVERYTHING.items()},
    "chat_template_kwargs gone": given(chat_template_kwargs=None),
    "train_on everything": given(train_on="everything"),
    "overlong": given(max_length=64, overlong="truncate"),
    "keep one": given(keep_columns=("id",)),
    "keep in another order": given(keep_columns=("t", "id")),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "chat.jsonl", conversations(12))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TOKENIZER, tmp_path / "tokenizer"))


def key_of(source: Path, tokenizer: Any, **arguments: Any) -> str:
    stated = {"tokenizer_backend": "file", "executor": "inline", **BASE, **arguments}
    return str(explain_recipe(str(source), tokenizer, **stated)["key"])


def test_one_change_matrix_gives_every_case_a_key_of_its_own(
    source: Path, tokenizer: Path, tmp_path: Path
) -> None:
    keys = {"nothing": key_of(source, str(tokenizer))}
    kept = shutil.copytree(tokenizer, tmp_path / "kept"), shutil.copy2(source, tmp_path / "kept.l")
    for name, change in CHANGES.items():
        # In place, in the cache that has seen the original under the same path.
        arguments = change(source, tokenizer)
        keys[name] = key_of(source, str(tokenizer), **arguments)
        shutil.copy2(kept[1], source)
        shutil.rmtree(tokenizer)
        shutil.copytree(kept[0], tokenizer)
        assert key_of(source, str(tokenizer)) == keys["nothing"], f"{name}: undone, yet another key"
    by_key: dict[str, list[str]] = {}
    for name, key in keys.items():
        by_key.setdefault(key, []).append(name)
    shared = [names for names in by_key.values() if len(names) > 1]
    assert not shared, f"cases with one key: {shared}"


PROGRAM = """
import json, sys
from tokenmill.build.calls import run_recipe
given = json.loads(sys.argv[3])
print(run_recipe(sys.argv[1], sys.argv[2], progress=False, tokenizer_backend="file",
                 executor="inline", **given).store.key)
"""
ENVIRONMENT = {"PYTHONHASHSEED": "77", "TZ": "Asia/Kathmandu", "LC_ALL": "C", "HOSTNAME": "x"}


def test_process_environment_changes_no_key(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    relative = os.path.relpath(source, other)
    environment = ENVIRONMENT | {"TOKENMILL_CACHE_DIR": str(tmp_path / "another")}
    done = python(PROGRAM, relative, TOKENIZER, json.dumps(BASE), cwd=other, **environment)
    assert done.stdout.strip() == key_of(source, str(TOKENIZER)), done.stderr


def test_renamed_tokenizer_and_idle_option_change_no_key(source: Path, tokenizer: Path) -> None:
    key = key_of(source, str(TOKENIZER))
    assert key_of(source, str(TOKENIZER), overlong="truncate") == key, "without a limit"
    moved = tokenizer.rename(tokenizer.parent / "another name")
    assert key_of(source, str(moved)) == key
    assert key_of(source, str(moved / "tokenizer.json")) == key
