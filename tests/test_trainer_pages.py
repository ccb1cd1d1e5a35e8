"""The lines that pages show for a trainer work: ours are run, the trainer's are looked up.

Every name in blocks that need a trainer (``sh``, ``yaml``, and ``py``, which is Python with a
trainer) is ours or in the *record* of that trainer (``tests/trainers.json``, see
``scripts/trainer_signatures.py``), which is compared with installed trainers, and with checkouts
below the directory ``TRAINERS``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import glob
import importlib
import importlib.util
import inspect
import json
import os
import re
import shutil
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from scripts import trainer_signatures as recording

import tokenmill as tm
from tests.faults.tools import Zygote
from tests.test_documents import DOCUMENTS, copy_examples

PROJECT = recording.PROJECT
PACKAGE = Path(tm.__file__).parent
RECORD: dict[str, Any] = json.loads(recording.RECORD.read_text(encoding="utf-8"))
PAGES = recording.trainer_pages()
LANGUAGES = {"python", "py", "sh", "toml", "yaml", "text"}


def named(page: recording.Page) -> str:
    return page.path.stem


every_page = pytest.mark.parametrize("page", PAGES, ids=named)
imports_ours = pytest.mark.usefixtures("stand_ins")


# Commands

# What a page says → what stands for it in the directory in which its commands are run.
PLACEHOLDERS = {
    "STORE": "made/store", "PAIRS": "made/pairs", "OTHER": "made/other",
    "ROLLOUTS": "made/rollouts", "MODEL": "tokenizer",
    "DIR": "tokenizer", "CACHE": "cache", "T": "tokenizer", "Qwen/Qwen3-8B": "tokenizer",
    "/path/to/checkpoint": "tokenizer", "/path/to/store": "made/store",
    "/shared/data": "shared", "/shared/tokenizer": "tokenizer", "/shared/cache": "cache",
    "s3://bucket/stores/chat": "pushed", "last_run_prepared/0a1b2c": "theirs",
    "sha256:6f1c": "sha256:6f1c",
}  # fmt: skip

PREPARATIONS = """
import json, os
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
import tokenmill as tm
from tokenmill.cli import main

for name in ("shared", "dump", "data"):
    os.mkdir(name)
os.symlink("../chat.jsonl", "shared/chat.jsonl")
chats = [json.loads(line) for line in open("chat.jsonl")]
turns = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "Two."}]
pq.write_table(pa.Table.from_pylist([{"messages": turns}]), "data/chat.parquet")
with open("pairs.jsonl", "w") as file:
    for n in range(8):
        file.write(json.dumps({"prompt": f"{n}? ", "chosen": f"{n}.", "rejected": "No."}) + "\\n")

whole = tm.prepare(["chat.jsonl", "dirty.jsonl"], tokenizer="tokenizer")
plain = tm.prepare("chat.jsonl", tokenizer="tokenizer")
def record(left_out):
    with open("dump/0.jsonl", "w") as file:
        for number, (chat, row) in enumerate(zip(chats, plain)):
            mask = row.loss_mask.tolist()
            if number not in left_out:
                file.write(json.dumps({
                    "messages": chat["messages"], "tools": chat.get("tools"), "loss_mask": mask,
                    "token_ids": row.input_ids.tolist(), "logprobs": [-0.5 * bit for bit in mask],
                }) + "\\n")
record(())  # answers with reasoning in the history are never sampled like this
found = tm.check_rollouts("dump/0.jsonl", tokenizer="tokenizer").findings
record({finding["row"] for finding in found})

np.save("rewards.npy", np.zeros(len(whole), "float32"))
with open("logps.jsonl", "w") as file:
    for row in whole:
        file.write(json.dumps([0.5] * len(row)) + "\\n")
halves = [np.full(len(row), 0.5, "float32") for row in whole]
whole.attach("ref_logps", halves, producer="sha256:6f1c", per="token")
last = tm.prepare("chat.jsonl", tokenizer="tokenizer", train_on="last_assistant_message")
stores = {
    "made/store": whole, "stores/short": plain, "stores/long": whole, "made/other": last,
    "made/pairs": tm.prepare("pairs.jsonl", tokenizer="tokenizer"),
    "made/rollouts": tm.from_rollouts("dump/0.jsonl", tokenizer="tokenizer"),
}
for name, store in stores.items():
    assert main(["push", str(store.path), name]) == 0
tm.export(plain, "hf", "theirs")
with open("mix.yaml", "w") as file:
    json.dump({"sources": {"short": "stores/short", "long": "stores/long"}}, file)
"""


def shown_commands(path: Path) -> Iterator[tuple[int, list[str]]]:
    for language, line, block in recording.read_page(path).blocks:
        if language in ("sh", "text") and re.search(r"^(\$ )?tokenmill ", block, re.MULTILINE):
            for words in recording.commands(block):
                if words[0] == "tokenmill":
                    yield line, words[1:]


WITH_COMMANDS = [path for path in DOCUMENTS if any(shown_commands(path))]


def as_run(words: list[str], place: Path) -> list[str]:
    found: list[str] = []
    for word in words:
        if word == ">":
            break
        stated = PLACEHOLDERS.get(word.rstrip("/"), word)
        matching = sorted(glob.glob(stated, root_dir=place)) if "*" in stated else []
        found += matching or [stated]
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, library_zygote: Zygote) -> dict[str, Any]:
    place = copy_examples(tmp_path_factory.mktemp("pages"))
    around = {
        "directory": str(place),
        "environment": {"TOKENMILL_CACHE_DIR": str(place.parent / "cache")},
    }
    made = library_zygote.program(PREPARATIONS, **around)
    assert made.exit == 0, made.stderr
    return around


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: str(path.relative_to(PROJECT)))
def test_commands_of_a_document_run(
    path: Path, prepared: dict[str, Any], tmp_path: Path, library_zygote: Zygote
) -> None:
    place = tmp_path / "work"
    shutil.copytree(prepared["directory"], place, symlinks=True)
    write_shown_files(path, place)
    for line, words in shown_commands(path):
        arguments = as_run(words, place)
        if "ray" in arguments:
            pytest.importorskip("ray")
        if "--serve" in arguments:
            arguments.append("--help")  # the server would run until Ctrl-C
        done = library_zygote.one(arguments, **{**prepared, "directory": str(place)})
        assert done.exit == 0, f"{path.name}:{line}: tokenmill {' '.join(words)}\n{done.stderr}"


def write_shown_files(path: Path, place: Path) -> None:
    for _, _, block in recording.read_page(path).blocks:
        for name, text in re.findall(r"(?ms)^\$ cat (\S+)\n(.*?)(?=^\$ |\Z)", block):
            (place / name).write_text(text, encoding="utf-8")


def test_wrong_command_is_detected(library_zygote: Zygote, tmp_path: Path) -> None:
    assert library_zygote.one(["stats", "--no-such-flag"], directory=str(tmp_path)).exit == 2


# Names


@functools.cache
def our_names() -> frozenset[str]:
    """Return the names in our source: functions, classes, parameters, fields, keys."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.arg | ast.keyword):
                found.add(node.arg or "")
            elif isinstance(node, ast.Name | ast.Attribute):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


@functools.cache
def our_flags() -> frozenset[str]:
    from tokenmill.cli import app, commands  # noqa: F401 - registers the commands

    found, waiting = set(), [typer.main.get_command(app.app)]
    while waiting:
        one: Any = waiting.pop()
        if hasattr(one, "list_commands"):
            waiting += [one.get_command(None, name) for name in one.list_commands(None)]
        found |= {flag for option in one.params for flag in (*option.opts, *option.secondary_opts)}
    return frozenset(found)


def _is_integration(name: str) -> bool:
    return any((PACKAGE / "integrations" / entry).exists() for entry in (name, f"{name}.py"))


def is_ours(name: str, shown: frozenset[str]) -> bool:
    if name.startswith("--"):
        return name in our_flags()
    if name.startswith("tokenmill."):
        return True  # another test resolves it
    if "." in name and _is_integration(name.partition(".")[0]):
        with contextlib.suppress(AttributeError, ModuleNotFoundError):
            return ours(f"tokenmill.integrations.{name}") is not None
    if "/" in name:
        return (PROJECT / name).exists()
    return all(part in our_names() or part in shown for part in name.split("."))


@functools.cache
def producer(page_path: Path) -> frozenset[str]:
    page = recording.read_page(page_path)
    found = {"tm", "hf"}
    for language, _, block in page.blocks:
        if language in ("python", "py"):
            for node in ast.walk(ast.parse(recording.without_dots(block))):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    found.add(node.id)
                elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
                elif isinstance(node, ast.arg):
                    found.add(node.arg)
                elif isinstance(node, ast.alias):
                    found.add((node.asname or node.name).rpartition(".")[2])
    return frozenset(found)


PLACES = {"drone_tool_calls", "smilechat_zh", "toy_chat", "takeoff_drone", "CACHE/NAME",
          "tokens.py"}  # fmt: skip


@imports_ours
@every_page
def test_names_on_a_page_exist_in_tokenmill_or_its_trainer(page: recording.Page) -> None:
    known: set[str] = set(PLACES)
    for trainer in page.trainers:
        known |= set(RECORD[trainer]["names"])
    unknown = {
        name: f"{page.path.name}:{line}"
        for name, line in recording.names_of(page).items()
        if name not in known and not is_ours(name, producer(page.path))
    }
    assert not unknown, (
        f"neither ours nor in the record of {', '.join(page.trainers)}: {unknown}; if a trainer has"
        " them, python -m scripts.trainer_signatures DIRECTORY records them"
    )


def test_every_block_has_the_right_language() -> None:
    """Blocks of plain text contain no code."""
    wrong = []
    for path in DOCUMENTS:
        for language, line, block in recording.read_page(path).blocks:
            if language not in LANGUAGES:
                wrong.append(f"{path.name}:{line}: {language or 'no language'}")
            elif language == "text" and re.search(r"^(import|from|python|torchrun) ", block, re.M):
                wrong.append(f"{path.name}:{line}: code as text")
    assert not wrong


# Python that needs a trainer


class _Anything:
    """Base class, function or decorator of a trainer that is not installed."""

    def __new__(cls, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments else super().__new__(cls)


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


STAND_INS = {  # module of ours → the modules that it imports
    "megatron.dataset": ("megatron.core.datasets.megatron_dataset",),
    "renderers": ("renderers.base", "renderers.configs", "pydantic"),
    "tinker": ("chz", "tinker", "tinker_cookbook.supervised.types"),
}


@functools.cache
def ours(dotted: str) -> Any:
    """Resolve a dotted name of tokenmill; for a program that needs its trainer, only find it."""
    parts = dotted.split(".")
    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(dotted) is not None and len(parts) > 3:
            return None  # a module of an adapter, which may be a program
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError as error:
            if str(error.name).startswith("tokenmill"):
                continue
            raise
        for part in parts[cut:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(dotted)


def _is_missing(module: str) -> bool:
    package = module.partition(".")[0]
    return package not in sys.modules and importlib.util.find_spec(package) is None


@pytest.fixture
def stand_ins() -> Iterator[None]:
    """Replace missing trainers, and remove afterwards the modules that imported them."""
    replaced: set[str] = set()
    for own, modules in STAND_INS.items():
        if missing := [module for module in modules if _is_missing(module)]:
            replaced.add(f"tokenmill.integrations.{own}")
            for module in missing:
                parts = module.split(".")
                replaced |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    kept = {name: sys.modules.pop(name) for name in replaced if name in sys.modules}
    sys.modules |= {name: _StandIn(name) for name in replaced if not name.startswith("tokenmill")}
    yield
    for name in replaced:
        sys.modules.pop(name, None)
    sys.modules |= kept


OUR_PATH = re.compile(r"(?<![\w./-])tokenmill(?:\.[A-Za-z_]\w*)+")


@imports_ours
@every_page
def test_dotted_names_of_tokenmill_exist(page: recording.Page) -> None:
    text = page.path.read_text(encoding="utf-8")
    for dotted in {*OUR_PATH.findall(text), *re.findall(r"pkg://([\w.]+)", text)}:
        ours(dotted)
    for name, module in re.findall(r"custom_cls\.path=pkg://(\S+) \S+\.name=(\w+)", text):
        assert callable(ours(f"{name}.{module}"))


def dotted_of(node: ast.expr, origins: dict[str, str]) -> str | None:
    """Return the dotted name of an expression such as ``tm.Bridge``, or None."""
    text = ast.unparse(node)
    first, _, rest = text.partition(".")
    if not re.fullmatch(r"[\w.]+", text) or first not in origins:
        return None
    whole = origins[first] + (f".{rest}" if rest else "")
    return whole if whole.startswith("tokenmill") else None


# Variable of a page's code → the class of ours that it holds.
METHODS = {"bridge": "tokenmill.Bridge", "store": "tokenmill.store.Store"}


def our_calls(block: str) -> Iterator[tuple[ast.Call, Any]]:
    origins = {"tm": "tokenmill", "hf": "tokenmill.integrations.hf", **recording.imported(block)}
    for node in ast.walk(ast.parse(recording.without_dots(block))):
        if not isinstance(node, ast.Call):
            continue
        if (dotted := dotted_of(node.func, origins)) is not None:
            yield node, ours(dotted)
        elif isinstance(node.func, ast.Attribute):
            holder = re.sub(r"\(.*\)$", "", ast.unparse(node.func.value)).rpartition(".")[2]
            if holder in METHODS:
                method = getattr(ours(METHODS[holder]), node.func.attr)
                yield node, functools.partial(method, None)


def binds(callee: Any, shape: list[str]) -> None:
    """Fail if a call with these arguments (see `Files.call`) is not possible."""
    given = [None for part in shape if part == "_"]
    named = {part[:-1]: None for part in shape if part.endswith("=")}
    inspect.signature(callee).bind(*given, **named)


@imports_ours
@every_page
def test_calls_on_a_page_match_our_signatures(page: recording.Page) -> None:
    for language, line, block in page.blocks:
        if language != "py":
            continue
        for call, callee in our_calls(block):
            shape = ["_" for _ in call.args] + [f"{k.arg}=" for k in call.keywords if k.arg]
            try:
                binds(callee, shape)
            except TypeError as error:
                pytest.fail(f"{page.path.name}:{line}: {ast.unparse(call)}: {error}")


def call_that_fills(theirs: list[str]) -> list[str]:
    """Return the call with all parameters of a function, without self."""
    shape, by_name = [], False
    for parameter in theirs[1:]:
        if parameter.startswith("**"):
            continue
        if parameter.startswith("*"):
            by_name = True
        else:
            shape.append(f"{parameter.rstrip('=')}=" if by_name else "_")
    return shape


def signature_of(stated: list[str]) -> Any:
    space: dict[str, Any] = {}
    text = ", ".join(f"{one}None" if one.endswith("=") else one for one in stated)
    exec(f"def function({text}): ...", space)
    return space["function"]


@imports_ours
@every_page
def test_methods_that_a_page_overrides_accept_the_calls_of_the_trainer(
    page: recording.Page,
) -> None:
    for base, methods in recording.overridden(page).items():
        for method, stated in methods.items():
            if base.startswith("tokenmill"):
                continue
            known = [
                RECORD[trainer]["signatures"].get(f"{base}.{method}") for trainer in page.trainers
            ]
            theirs = next((one for one in known if one is not None), None)
            assert theirs is not None, f"{page.path.name}: {base} has no method {method}"
            binds(functools.partial(signature_of(stated), None), call_that_fills(theirs))


# The record

CALLS = [call for call in recording.CALLS if call.trainer in RECORD]
INTERFACES = [
    (trainer, *both) for trainer, pairs in recording.INTERFACES.items() for both in pairs.items()
]


@imports_ours
@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.trainer}-{call.ours}")
def test_our_functions_accept_the_calls_of_the_trainer(call: recording.Call) -> None:
    pytest.importorskip("torch")
    shape = RECORD[call.trainer]["calls"][call.ours]
    callee = ours(call.ours)
    if inspect.isfunction(callee) and "self" in inspect.signature(callee).parameters:
        callee = functools.partial(callee, None)
    binds(callee, shape)


@imports_ours
@pytest.mark.parametrize(("trainer", "theirs", "own"), INTERFACES, ids=lambda value: str(value))
def test_our_class_has_the_methods_that_it_replaces(trainer: str, theirs: str, own: str) -> None:
    pytest.importorskip("torch")
    for method, stated in RECORD[trainer]["interfaces"][theirs].items():
        callee = getattr(ours(own), method, None)
        assert callee is not None, f"{own} has no {method}"
        if not isinstance(inspect.getattr_static(ours(own), method), staticmethod):
            callee = functools.partial(callee, None)
        if method != "__init__":
            binds(callee, call_that_fills(stated))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", recording.TRAINERS)
def test_record_matches_the_trainer(trainer: str) -> None:
    checkouts = os.environ.get("TRAINERS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in strings of trainers
        files = recording.open_trainer(trainer, Path(checkouts) if checkouts else None)
        if files is None:
            pytest.skip(f"{trainer} is not installed, nor below TRAINERS")
        recorded = RECORD[trainer]
        if checkouts is None and files.source != recorded["source"]:
            # A newer release does not fail the test, unless TRAINERS is set.
            pytest.skip(f"recorded at {recorded['source']}, installed is {files.source}")
        found = recording.record_of(trainer, files, PAGES)
    for part in ("names", "signatures", "calls", "interfaces"):
        assert found[part] == recorded[part], (
            f"recorded at {recorded['source']}, {files.source} differs in its {part}"
        )
