"""Errors of the command line: messages and exit codes."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from tests.build.making import TOKENIZER, conversations, write_rows
from tests.cli.harness import ARGUMENT, QUICK, Shell
from tokenmill.errors import UsageError

WRONG = {
    "no command": [],
    "unknown command": ["mill"],
    "no cache command": ["cache"],
    "unknown flag": ["prepare", "SRC", *QUICK, "--no-such-flag"],
    "column without role": ["prepare", "SRC", *QUICK, "--column", "chat"],
    "no tokenizer": ["prepare", "SRC"],
    "no source": ["prepare", *QUICK],
    "no source for why": ["why", *QUICK],
    "no source for rows": ["rows"],
    "neither a store nor a mixture": ["stats"],
    "not a number": ["prepare", "SRC", *QUICK, "--max-length", "long"],
    "not positive": ["prepare", "SRC", *QUICK, "--max-length", "0"],
    "unknown choice": ["prepare", "SRC", *QUICK, "--format", "sheet"],
    "train_on the format cannot satisfy": [
        "prepare", "SRC", *QUICK, "--format", "text", "--train-on", "completion",
    ],
    "negative workers": ["prepare", "SRC", *QUICK, "--num-workers", "-1"],
    "no date": ["prepare", "SRC", *QUICK, "--date", "tomorrow"],
    "kwargs no JSON": ["prepare", "SRC", *QUICK, "--chat-template-kwargs", "{"],
    "kwargs no object": ["prepare", "SRC", *QUICK, "--chat-template-kwargs", "[1]"],
    "share no number": ["prepare", "SRC", *QUICK, "--max-rejected", "few"],
    "share over all": ["prepare", "SRC", *QUICK, "--max-rejected", "101%"],
    "count negative": ["prepare", "SRC", *QUICK, "--max-rejected", "-1"],
    "column twice": ["prepare", "SRC", *QUICK, "--keep-columns", "id", "--keep-columns", "id"],
    "private and gone": ["prepare", "SRC", *QUICK, "--disable-cache"],
    "private and forced": [
        "prepare", "SRC", *QUICK, "--disable-cache", "--force-recache", "--out", "OUT",
    ],
    "not a store": ["inspect", "TMP"],
    "row out of range": ["inspect", "STORE", "--row", "20"],
    "row far below": ["inspect", "STORE", "--row", "-21"],
    "source row out of range": ["rows", "SRC", "--row", "20"],
    "no duration": ["cache", "gc", "--grace", "soon"],
    "no such store to collect": ["cache", "gc", "--store", "0" * 40],
    "unknown pack method": ["stats", "STORE", "--pack", "512", "--method", "tetris"],
    "pack length 0": ["stats", "STORE", "--pack", "0"],
}  # fmt: skip

BAD = {
    "missing file": (["prepare", "/no/such.jsonl", *QUICK], "SourceMissing", "/no/such.jsonl"),
    "missing rows": (["rows", "/no/such.jsonl"], "SourceMissing", "/no/such.jsonl"),
    "missing store": (["stats", "/no/such"], "SourceMissing", "/no/such"),
    "missing recipe": (["prepare", "--config", "/no/r.yaml"], "SourceMissing", "/no/r.yaml"),
    "missing tokenizer": (["prepare", "SRC", "--tokenizer", "/no/t"], "TokenizerError", "/no/t"),
    "empty file": (["prepare", "EMPTY", *QUICK], "SourceMissing", "EMPTY"),
    "only blank lines": (["prepare", "BLANK", *QUICK], "SourceMissing", "BLANK"),
}


@pytest.fixture
def places(tmp_path: Path, chat: Path, dirty: Path, store: Path) -> dict[str, str]:
    empty, blank = tmp_path / "empty.jsonl", tmp_path / "blank.jsonl"
    empty.write_bytes(b"")
    blank.write_bytes(b"\n  \n\t\r\n")
    paths = {"SRC": chat, "STORE": store, "TMP": tmp_path, "OUT": tmp_path / "out",
             "EMPTY": empty, "BLANK": blank, "DIRTY": dirty}  # fmt: skip
    return {name: str(path) for name, path in paths.items()}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_exits_with_2(shell: Shell, places: dict[str, str], case: str) -> None:
    arguments = [places.get(argument, argument) for argument in WRONG[case]]
    as_text = shell(*arguments)
    assert as_text.code == 2, as_text
    assert as_text.out == ""
    assert "tokenmill: " in as_text.err
    assert "Traceback" not in as_text.err
    as_json = shell(*arguments, "--json")
    assert as_json.code == 2
    assert as_json.error["type"] == "UsageError"


@pytest.mark.parametrize("case", BAD)
def test_bad_data_exits_with_1(shell: Shell, places: dict[str, str], case: str) -> None:
    command, kind, path = BAD[case]
    arguments = [places.get(argument, argument) for argument in command]
    as_text = shell(*arguments)
    assert as_text.code == 1, as_text
    assert "Traceback" not in as_text.err
    as_json = shell(*arguments, "--json")
    assert as_json.code == 1
    assert as_json.error["type"] == kind
    assert as_json.error["path"] == places.get(path, path)


def test_max_rejected_applies_to_builds_and_hits(shell: Shell, dirty: Path, tmp_path: Path) -> None:
    for attempt in ("build", "hit"):
        refused = shell("prepare", dirty, *QUICK, "--max-rejected", "29%", "--json")
        assert refused.code == 1, attempt
        assert refused.error["type"] == "SourceError"
        assert "3 of 10 rows were rejected" in refused.error["message"]
        # The results so far are printed with the error, and the summary on stderr.
        assert refused.json["rejected"] == {"bad_json": 1, "bad_shape": 1, "trailing_user": 1}
        assert refused.json["hit"] == (attempt == "hit")
        assert "dirty.jsonl:8" in refused.err
    out = tmp_path / "out"
    assert shell("prepare", dirty, *QUICK, "--max-rejected", "2", "--out", out).code == 1
    assert not out.exists()
    assert shell("prepare", dirty, *QUICK, "--max-rejected", "3", "--json").code == 0
    assert shell("prepare", dirty, *QUICK, "--max-rejected", "30%", "--json").code == 0


def test_max_rejected_0_names_the_first_rejected_row(shell: Shell, dirty: Path) -> None:
    for _ in ("build", "hit"):
        refused = shell("prepare", dirty, *QUICK, "--max-rejected", "0", "--json")
        assert refused.code == 1
        error = refused.error
        assert (error["type"], error["path"]) == ("RowError", str(dirty))
        assert (error["row"], error["line"]) == (7, 8)
        assert error["offset"] == dirty.read_bytes().index(b'{"messages": [\n')


def test_no_row_left_exits_with_1(shell: Shell, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "bad.jsonl", ['{"messages": 1}', "nonsense"])
    refused = shell("prepare", source, *QUICK, "--json")
    assert refused.code == 1
    assert refused.json["rows_out"] == 0
    message = refused.error["message"]
    assert "no row left: all 2 were rejected (1 bad_json, 1 bad_shape)" in message
    assert "the first, for bad_shape: " in message
    assert (refused.error["path"], refused.error["line"]) == (str(source), 1)
    assert (refused.error["row"], refused.error["offset"]) == (0, 0)


def test_summary_groups_by_reason_with_example_and_hint(shell: Shell, tmp_path: Path) -> None:
    bad = ['{"messages": 7}'] * 3 + ["{"]
    source = write_rows(tmp_path / "some.jsonl", [*conversations(2), *bad])
    lines = shell("prepare", source, *QUICK).err.splitlines()
    assert "4 of 6 rows rejected (66.7%)" in lines[1]
    assert lines[2].split()[:2] == ["3", "bad_shape"]
    assert "--column messages=NAME" in lines[2]
    assert f"{source}:3: " in lines[4]
    assert lines[5].split()[:2] == ["1", "bad_json"]
    assert f"{source}:6: " in lines[7]
    assert len(lines) == 10


def test_flag_overrides_recipe_even_with_the_default(
    shell: Shell, chat: Path, tmp_path: Path
) -> None:
    config = tmp_path / "recipe.yaml"
    config.write_text(
        f"sources: chat.jsonl\ntokenizer: {TOKENIZER}\ntokenizer_backend: file\n"
        "turn_end: turn\nexecutor: inline\nmax_rejected: 1%\n"
    )
    of_recipe = shell("prepare", "--config", config, "--json").json["key"]
    overridden = shell("prepare", "--config", config, "--turn-end", "stop", "--json").json["key"]
    assert of_recipe == shell("prepare", chat, *QUICK, "--turn-end", "turn", "--json").json["key"]
    assert overridden == shell("prepare", chat, *QUICK, "--json").json["key"]
    assert shell("why", "--config", config, "--json").json["key"] == of_recipe
    assert shell("why", config, "--json").json["key"] == of_recipe, (
        "a recipe may be the only source"
    )
    config.write_text(config.read_text().replace("chat.jsonl", "nothing.jsonl"))
    assert shell("prepare", chat, "--config", config, "--json").json["key"] == of_recipe


def test_lint_leaves_the_options_of_a_recipe(
    shell: Shell, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def lint(sources: str, **options: Any) -> None:
        calls.append((sources, options.get("reference")))
        raise UsageError("seen")

    monkeypatch.setattr("tokenmill.inspect.lint.run.lint", lint)
    assert shell("lint", "recipe.yaml").code == 2
    assert shell("lint", "recipe.yaml", "--reference").code == 2
    assert calls == [("recipe.yaml", None), ("recipe.yaml", True)]


def test_verify_names_corrupt_files_and_exits_with_1(
    shell: Shell, store: Path, tmp_path: Path
) -> None:
    cache = shutil.copytree(store.parent.parent, tmp_path / "copy")
    copy = cache / "stores" / store.name
    assert shell("verify", copy, "--json").json["ok"]
    [tokens] = [path for path in cache.glob("slices/*/*.arrow") if ".meta." not in path.name]
    data = bytearray(tokens.read_bytes())
    data[len(data) // 2] ^= 1
    tokens.chmod(0o644)
    tokens.write_bytes(data)
    answer = shell("verify", copy, "--json")
    assert answer.code == 1
    assert set(answer.json) == {"ok", "checked_bytes", "errors"}
    assert not answer.json["ok"]
    [error] = answer.json["errors"]
    assert (error["type"], error["path"]) == ("CorruptionError", str(tokens))
    people = shell("verify", copy)
    assert people.code == 1
    assert "CORRUPT" in people.err
    assert tokens.name in people.err


def test_bug_prints_one_json_object(
    shell: Shell, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("tokenmill.store.Store.check_everything", broken)
    with pytest.raises(ZeroDivisionError):
        shell("verify", store, "--json")
    assert '"type": "ZeroDivisionError"' in capsys.readouterr().out


PACKED = ("export", "STORE", "--format", "packed-parquet", "--out", "OUT", "--length")
NAMED = {
    "row too long to pack": (
        ["stats", "STORE", "--pack", "9", "--oversize", "error"], "set --oversize drop | trunc",
    ),
    "row too long to export": (
        [*PACKED, "9"], "set --oversize drop | truncate | split or a larger length",
    ),
    "field of a pack": ([*PACKED, "0"], "--length must be a positive integer, got 0"),
    "choice of a pack": (
        ["stats", "STORE", "--pack", "9", "--oversize", "x"],
        "'--oversize': 'x' is not one of 'error', 'drop', 'truncate', 'split'",
    ),
    "choice of a recipe": (
        ["prepare", "SRC", *QUICK, "--turn-end", "late"],
        "'--turn-end': 'late' is not one of 'stop', 'turn'",
    ),
    "number of a recipe": (
        ["prepare", "SRC", *QUICK, "--max-length", "0"],
        "--max-length must be a positive integer, got 0",
    ),
    "role twice": (
        ["prepare", "SRC", *QUICK, "--column", "text=a", "--column", "text=b"],
        "--column must be ROLE=COLUMN, each role once, got text=a, text=b",
    ),
    "name of one word": (["prepare", "SRC", *QUICK, "--date", "today"], "--date must be like"),
    "two of a recipe": (
        ["prepare", "SRC", *QUICK, "--disable-cache", "--force-recache", "--out", "OUT"],
        "--disable-cache and --force-recache cannot be combined",
    ),
    "prompts": (
        ["prompts", "SRC", *QUICK, "--multimodal-keys", '{"smell": "x"}'],
        "--multimodal-keys must be a mapping of image, video or audio",
    ),
    "number": (
        [*PACKED, "600", "--layout", "megatron-bridge", "--pad-multiple", "7"],
        "must be a multiple of --pad-multiple 7",
    ),
    "role of no column": (
        ["prepare", "SRC", *QUICK, "--column", "foo=bar"], "unknown roles in --column: foo; known",
    ),
    "length of packs": (PACKED[:-1], "--format packed-parquet needs --length"),
    "rejected rows": (
        ["prepare", "DIRTY", *QUICK, "--max-rejected", "1"], "more than --max-rejected 1",
    ),
    "format of answers": (
        ["prepare", "SRC", *QUICK, "--expand", "turns", "--format", "kto"],
        "--expand turns splits conversations into rows",
    ),
    "argument of a recipe": (
        ["prepare", "SRC", *QUICK, "--format", "text", "--train-on", "completion"],
        "--train-on completion cannot be used",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_messages_name_flags_instead_of_arguments(
    shell: Shell, places: dict[str, str], case: str
) -> None:
    call, message = NAMED[case]
    refused = shell(*[places.get(argument, argument) for argument in call], "--json")
    assert refused.code == (2 if refused.error["type"] == "UsageError" else 1)
    assert message in refused.error["message"]
    assert not re.search(r"Pack|None|Value error", refused.error["message"])
    assert message in refused.err


def test_no_text_of_the_source_names_an_argument_as_python_code() -> None:
    """Errors name arguments by tuples, see `TokenmillError`; docstrings are not printed."""
    package = Path(tokenmill.__file__).parent
    found = [
        f"{path.name}:{node.lineno}: {node.value}"
        for path in sorted(package.rglob("*.py"))
        for node in texts_of(ast.parse(path.read_text(encoding="utf-8")))
        if ARGUMENT.search(node.value)
    ]
    assert not found, "\n".join(found)


def texts_of(tree: ast.AST) -> Iterator[ast.Constant]:
    """Return the strings of a module, without the strings that are statements."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node
