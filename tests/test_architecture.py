"""Sizes, layers, lazy imports, public names, the tree of exceptions."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import importlib.util
import pydoc
import re
import tomllib
from pathlib import Path

import pytest

import tokenmill
from tests.build.making import EXAMPLES, INLINE, TOKENIZER
from tests.programs import python
from tokenmill import errors

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = Path(tokenmill.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("pyarrow", "jinja2", "tokenizers", "fastokens", "transformers", "datasets",
         "torch", "ray", "pandas", "trl")  # fmt: skip
MOST_LINES = 1100  # a file ends where its subject ends; this only keeps giants out
DOTTED = re.compile(r"tokenmill\.(\w+)[\w.]*(:\w+)?")

VERBS = ("check_rollouts", "export", "from_rollouts", "lint", "open_rows", "open_store", "prepare",
         "prepare_part", "mix", "split", "to_hf")  # fmt: skip
NOUNS = ("Bridge", "Loader", "Origin", "Pack", "PromptDataset", "Recipe")
EXCEPTIONS = ("TokenmillError", "UsageError", "SourceError", "SourceMissing", "SourceChanged",
              "RowError", "TokenizerError", "TemplateError", "BridgeError", "CacheError",
              "CorruptionError", "NonDeterminismError", "WorkerError", "StateError")  # fmt: skip


def run(program: str, *arguments: str | Path) -> str:
    answer = python(program, *arguments)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


@functools.cache
def said_by(path: Path) -> tuple[str, list[str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    named = [text for text in strings if isinstance(text, str) and DOTTED.fullmatch(text)]
    return ast.get_docstring(tree) or "", named


def test_files_stay_small() -> None:
    long = {}
    for room in ("src", "tests", "benchmarks", "conformance", "scripts"):
        for path in (PROJECT / room).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MOST_LINES:
                long[str(path.relative_to(PROJECT))] = lines
    assert not long, f"over {MOST_LINES} lines: {long}"


def layers() -> dict[str, int]:
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    stated = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {
        room.strip(" ()"): number
        for number, layer in enumerate(stated)
        for room in layer.split("|")
    }


def test_every_room_stands_in_a_layer() -> None:
    rooms = {path.stem for path in PACKAGE.glob("*.py")}
    rooms |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms - {"__init__", "__main__"} <= set(layers())


def test_no_module_is_named_by_a_string_in_a_room_that_may_not_import_it() -> None:
    """What import-linter cannot see: a name for `import_module`, or for a worker's entry."""
    layer, upwards = layers(), []
    for path in MODULES:
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in said_by(path)[1]:
            other = DOTTED.fullmatch(name)[1]  # type: ignore[index]
            if room not in layer or other not in layer:
                continue
            if other != room and layer[other] <= layer[room]:
                upwards.append((str(path.relative_to(PACKAGE)), name))
    assert not upwards


def test_reading_names_load_none_of_the_heavy_libraries() -> None:
    program = (
        "import sys; from tokenmill import open_store, Loader;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(program) == "[]\n"


@pytest.mark.slow
def test_reading_a_store_loads_none_of_the_heavy_libraries(tmp_path: Path) -> None:
    store = tokenmill.prepare(EXAMPLES / "conversations.jsonl", TOKENIZER, **INLINE)
    read = (
        "import sys; from tokenmill import open_store, Loader;"
        "store = open_store(sys.argv[1]); row = store[len(store) // 2];"
        "batch = next(iter(Loader(store, batch_size=4)));"
        "assert batch['input_ids'].shape[0] == 4; assert len(row.input_ids);"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(read, store.path) == "[]\n"


def test_public_names_are_importable_sorted_and_listed() -> None:
    assert {*VERBS, *NOUNS, *EXCEPTIONS} <= set(tokenmill.__all__) <= set(dir(tokenmill))
    assert list(tokenmill.__all__) == sorted(tokenmill.__all__)
    assert [name for name in tokenmill.__all__ if not hasattr(tokenmill, name)] == []
    assert all(getattr(tokenmill, name).__doc__ for name in (*VERBS, *NOUNS, *EXCEPTIONS))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = tokenmill.nonsense


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Name → (parent in our tree, builtin parent), as the docstring of `errors` draws it."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^ {4}([│ ├└─]*)(\w+Error|Source\w+)(?: \((\w+)\))?(?:\s|$)", line)
        if not found:
            continue
        depth = len(found[1]) // 4
        above[depth:] = [found[2]]
        tree[found[2]] = (above[depth - 1] if depth else None, found[3])
    return tree


def test_exceptions_are_the_drawn_tree() -> None:
    real: dict[str, tuple[str | None, str | None]] = {}
    for name, cls in vars(errors).items():
        if not (isinstance(cls, type) and issubclass(cls, errors.TokenmillError)):
            continue
        ours = [base.__name__ for base in cls.__bases__ if base.__module__ == errors.__name__]
        theirs = [
            base.__name__ for base in cls.__bases__ if vars(builtins).get(base.__name__) is base
        ]
        assert len(ours) <= 1
        is_root = cls is errors.TokenmillError
        real[name] = (ours[0] if ours else None, None if is_root else theirs[0])
    assert drawn_tree() == real
    assert set(real) == set(EXCEPTIONS)


def test_version_is_one_and_the_same() -> None:
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    changes = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changes, re.MULTILINE)
    assert newest is not None
    assert tokenmill.__version__ == settings["project"]["version"] == newest[1]


@pytest.mark.parametrize("folder", ["benchmarks", "conformance", "scripts"])
def test_names_that_are_imported_beside_the_package_exist(folder: str) -> None:
    """Nobody runs the benchmarks when a name moves; doors to hosts are left out, they load much."""
    missing = []
    for path in sorted((PROJECT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            home = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if home.partition(".")[0] != "tokenmill" or "integrations" in home:
                continue
            module = importlib.import_module(home)
            has_modules = hasattr(module, "__path__")
            missing += [
                f"{path.relative_to(PROJECT)}: {home}.{one.name}"
                for one in node.names
                if not hasattr(module, one.name)
                and not (has_modules and importlib.util.find_spec(f"{home}.{one.name}"))
            ]
    assert missing == []


def test_functions_on_the_architecture_page_exist() -> None:
    page = (PROJECT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"\| `([a-z_]+\.[\w.]+)` \|", page)
    assert len(named) > 20
    assert [name for name in named if pydoc.locate(f"tokenmill.{name}") is None] == []


def test_tests_on_the_page_of_guarantees_exist() -> None:
    page = (PROJECT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+/test_\w+\.py)`", page)
    assert len(named) > 20
    assert [name for name in named if not (PROJECT / "tests" / name).is_file()] == []
