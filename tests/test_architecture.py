"""Tests of file sizes, layers, lazy imports, public names and the exception tree."""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import pydoc
import re
from pathlib import Path

import pytest

import tokenmill
from tests.build.making import EXAMPLES, INLINE, TOKENIZER
from tests.programs import python
from tokenmill import errors

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = Path(tokenmill.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = ("pyarrow", "jinja2", "tokenizers", "fastokens", "transformers", "datasets",
         "torch", "ray", "pandas", "trl")  # fmt: skip
MAX_LINES = 1100  # a longer file covers two subjects
DOTTED = re.compile(r"tokenmill\.(\w+)[\w.]*(:\w+)?")

PUBLIC = {
    "prepare", "open_store", "open_rows", "concat", "mix", "Loader", "Pack", "MicroBatches",
    "Align", "PromptDataset", "Prompt", "Bridge", "check_rollouts", "from_rollouts", "lint",
    "export", "push", "pull", "to_hf", "Recipe", "Store", "View", "Row", "Origin", "Media",
    "Mixture", "Sidecar", "TokenmillError", "errors",
}  # fmt: skip
EXCEPTIONS = ("TokenmillError", "UsageError", "SourceError", "SourceMissing", "SourceChanged",
              "RowError", "TokenizerError", "TemplateError", "BridgeError", "CacheError",
              "CorruptionError", "MissingFileError", "NonDeterminismError", "WorkerError",
              "StateError")  # fmt: skip


def run(program: str, *arguments: str | Path) -> str:
    done = python(program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_in_strings(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [text for text in strings if isinstance(text, str) and DOTTED.fullmatch(text)]


def test_files_stay_small() -> None:
    long = {}
    for package in ("src", "tests", "benchmarks", "conformance", "contrib", "scripts"):
        for path in (PROJECT / package).rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_LINES:
                long[str(path.relative_to(PROJECT))] = lines
    assert not long, f"over {MAX_LINES} lines: {long}"


def layers() -> dict[str, int]:
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    declared = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return {
        package.strip(" ()"): number
        for number, layer in enumerate(declared)
        for package in layer.split("|")
    }


def test_every_package_has_a_layer() -> None:
    packages = {path.stem for path in PACKAGE.glob("*.py")}
    packages |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages - {"__init__", "__main__"} <= set(layers())


def test_strings_name_only_modules_that_the_package_may_import() -> None:
    """Import-linter does not see names for `import_module` or for the entry of a worker."""
    layer, upwards = layers(), []
    for path in MODULES:
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in modules_in_strings(path):
            other = DOTTED.fullmatch(name)[1]  # type: ignore[index]
            if package not in layer or other not in layer:
                continue
            if other != package and layer[other] <= layer[package]:
                upwards.append((str(path.relative_to(PACKAGE)), name))
    assert not upwards


def test_importing_reading_names_loads_no_heavy_library() -> None:
    program = (
        "import sys; from tokenmill import open_store, Loader;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run(program) == "[]\n"


@pytest.mark.slow
def test_reading_a_store_loads_no_heavy_library(tmp_path: Path) -> None:
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
    assert set(tokenmill.__all__) == PUBLIC <= set(dir(tokenmill))
    assert list(tokenmill.__all__) == sorted(tokenmill.__all__)
    assert [name for name in tokenmill.__all__ if not hasattr(tokenmill, name)] == []
    assert all(getattr(tokenmill, name).__doc__ for name in PUBLIC)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = tokenmill.nonsense


def drawn_tree() -> dict[str, tuple[str | None, str | None]]:
    """Return name → (parent, builtin parent) from the tree in the docstring of `errors`."""
    tree: dict[str, tuple[str | None, str | None]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}([│ ├└─]*)(\w+Error|Source\w+)(?: \((\w+)\))?(?:\s|$)", line)
        if not match:
            continue
        depth = len(match[1]) // 4
        above[depth:] = [match[2]]
        tree[match[2]] = (above[depth - 1] if depth else None, match[3])
    return tree


def test_docstring_shows_the_exception_tree() -> None:
    real: dict[str, tuple[str | None, str | None]] = {}
    for name, cls in vars(errors).items():
        if not (isinstance(cls, type) and issubclass(cls, errors.TokenmillError)):
            continue
        own = [base.__name__ for base in cls.__bases__ if base.__module__ == errors.__name__]
        builtin = [
            base.__name__ for base in cls.__bases__ if vars(builtins).get(base.__name__) is base
        ]
        assert len(own) <= 1
        is_root = cls is errors.TokenmillError
        real[name] = (own[0] if own else None, None if is_root else builtin[0])
    assert drawn_tree() == real
    assert set(real) == set(EXCEPTIONS)


def test_version_is_the_same_everywhere() -> None:
    settings = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    changes = (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changes, re.MULTILINE)
    assert newest is not None
    assert tokenmill.__version__ == settings["project"]["version"] == newest[1]


@pytest.mark.parametrize("folder", ["benchmarks", "conformance", "scripts"])
def test_names_imported_by_other_folders_exist(folder: str) -> None:
    """Benchmarks rarely run. Integrations are skipped, because their imports are slow."""
    missing = []
    for path in sorted((PROJECT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if name.partition(".")[0] != "tokenmill" or "integrations" in name:
                continue
            module = importlib.import_module(name)
            has_modules = hasattr(module, "__path__")
            missing += [
                f"{path.relative_to(PROJECT)}: {name}.{one.name}"
                for one in node.names
                if not hasattr(module, one.name)
                and not (has_modules and importlib.util.find_spec(f"{name}.{one.name}"))
            ]
    assert missing == []


def test_functions_on_the_architecture_page_exist() -> None:
    page = (PROJECT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"\| `([a-z_]+\.[\w.]+)` \|", page)
    assert len(named) > 20
    assert [name for name in named if pydoc.locate(f"tokenmill.{name}") is None] == []


def test_tests_on_the_guarantees_page_exist() -> None:
    page = (PROJECT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named = re.findall(r"`(\w+/test_\w+\.py)`", page)
    assert len(named) > 20
    assert [name for name in named if not (PROJECT / "tests" / name).is_file()] == []
