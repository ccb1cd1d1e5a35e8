"""Drivers keep one contract, stand-ins give way, pytest's reports are counted."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
from conformance.__main__ import run_driver
from conformance.hosts import DRIVERS, driver, from_labels, in_halves, one_by_one
from conformance.own_tests import FILES, File, run_file, run_own_tests
from conformance.page import OwnTests, render
from conformance.stand_ins import stand_in

from conformance import child, goldens, own_tests
from tests.data.making import TOKENIZER, write_rows

NAMES = ("NAME", "CHECKOUT", "PATHS", "PACKAGE", "STAND_INS", "TRAINS", "HOW", "prepare")


def test_every_driver_keeps_the_contract_and_imports_no_host(tmp_path: Path) -> None:
    before = set(sys.modules)
    for name in DRIVERS:
        module = driver(name)
        assert all(hasattr(module, wanted) for wanted in NAMES), name
        assert module.TRAINS in ("every", "last")
    hosts = {"verl", "skyrl", "swift", "slime", "miles", "axolotl", "nemo_rl", "openrlhf", "trl"}
    assert not (set(sys.modules) - before) & hosts
    place = Path(importlib.import_module("conformance.hosts").__path__[0])
    assert set(DRIVERS) == {path.stem for path in place.glob("*.py")} - {"__init__"}
    assert len({driver(name).NAME for name in DRIVERS}) == len(DRIVERS)
    answer = run_driver("skyrl_last", tmp_path, {"templates": [], "timing": {}})
    assert answer == {"not_run": "no directory SkyRL under HOSTS"}


def refuse(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    if row["n"] == 2:
        raise KeyError("content")
    return [row["n"]], [1]


def test_raising_rows_are_told_apart_from_the_others() -> None:
    rows = [{"n": n} for n in range(5)]
    wanted = [([0], [1]), ([1], [1]), "KeyError: 'content'", ([3], [1]), ([4], [1])]
    assert one_by_one(rows, refuse) == wanted
    assert in_halves(rows, lambda some: [refuse(row) for row in some]) == wanted


def test_stand_ins_are_empty_and_never_hide_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    stand_in(["no_such_gpu_library", "colorsys"])
    made: Any = importlib.import_module("no_such_gpu_library.deep.inside")
    assert isinstance(made.Thing, type)

    @made.decorate
    def function() -> int:
        return 7

    class Child(made.Thing):
        pass

    assert function() == 7
    assert isinstance(Child(), Child)
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)
    with pytest.raises(ImportError):
        importlib.import_module("no_such_other_library")
    for name in [name for name in sys.modules if name.startswith("no_such_gpu_library")]:
        del sys.modules[name]


def test_replacements_are_there() -> None:
    source = Path(importlib.import_module("conformance").__path__[0]) / "replacements.py"
    text = source.read_text(encoding="utf-8")
    wanted = {name for file in FILES for name in (file.by, file.prepare) if name}
    assert [name for name in wanted if f"def {name}() -> None:" not in text] == []


CLASSES = "class RolloutDataSource:\n    pass\nclass RolloutDataSourceWithBuffer:\n    pass\n"


def write_host(hosts: Path, **files: str) -> None:
    checkout = hosts / "host"
    empty = ("slime/__init__", "slime/rollout/__init__", "transformers/__init__",
             "transformers/utils/__init__", "transformers/utils/import_utils")  # fmt: skip
    files = {**dict.fromkeys(empty, ""), "slime/rollout/data_source": CLASSES, **files}
    for name, text in files.items():
        path = checkout / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run_host(hosts: Path, path: str, *, replace: bool = True, **chosen: Any) -> dict[str, set[str]]:
    file = File("host", "host", path, "", "slime_data_source", **chosen)
    found = run_file(file, hosts, hosts, replace=replace)
    assert isinstance(found, dict)
    return {kind: {name.rpartition("::")[2] for name in names} for kind, names in found.items()}


def test_replacement_comes_before_conftest_and_tests_that_reach_it_are_known(
    tmp_path: Path,
) -> None:
    tests = (
        "import pytest\n"
        "import tests.helpers_of_the_host\n"
        "from conftest import RolloutDataSource\n"
        "def test_of_something_else():\n    pass\n"
        "def test_for_later():\n    pytest.skip()\n"
        "def test_of_the_class():\n"
        "    assert RolloutDataSource.__init__ is not object.__init__\n"
        "    with pytest.raises(Exception):\n"
        "        RolloutDataSource(None)\n"
        "def test_of_their_own():\n    RolloutDataSource()\n"
    )
    taken = "from slime.rollout.data_source import RolloutDataSource"
    # `tests` is no package there: a package of that name elsewhere would hide it.
    files = {"conftest": taken, "test_host": tests, "tests/helpers_of_the_host": ""}
    write_host(tmp_path, **files)
    alone = run_host(tmp_path, "test_host.py", replace=False)
    ours = run_host(tmp_path, "test_host.py")
    always = {"test_of_something_else"}
    assert alone["passed"] == always | {"test_of_their_own"}
    assert alone["failed"] == {"test_of_the_class"}
    assert ours["passed"] == always | {"test_of_the_class"}
    assert ours["failed"] == {"test_of_their_own"}
    assert ours["reached"] == {"test_of_the_class", "test_of_their_own"}
    assert alone["skipped"] == ours["skipped"] == {"test_for_later"}


def test_chosen_tests_run_with_a_temporary_directory_of_their_own(tmp_path: Path) -> None:
    tests = (
        "import multiprocessing, tempfile\n"
        "from slime.rollout import data_source\n"
        "def test_left_out():\n    pass\n"
        "def test_chosen_place():\n"
        f"    assert tempfile.gettempdir() != {tempfile.gettempdir()!r}\n"
        "def make():\n"
        "    try:\n        data_source.RolloutDataSource(None)\n"
        "    except Exception:\n        pass\n"
        "def test_chosen_worker():\n"
        "    worker = multiprocessing.get_context('fork').Process(target=make)\n"
        "    worker.start()\n"
        "    worker.join()\n"
    )
    write_host(tmp_path, test_broken="import no_such_library\n", test_host=tests)
    ours = run_host(tmp_path, ".", keywords="chosen")
    assert ours["passed"] == {"test_chosen_place", "test_chosen_worker"}
    assert ours["reached"] == {"test_chosen_worker"}
    assert len(ours["failed"]) == 1  # a file that cannot be imported keeps no other from running


def keep(path: Path, *known: OwnTests) -> Path:
    kept = path / "own_tests.json"
    kept.write_text(json.dumps([dataclasses.asdict(one) for one in known]))
    return kept


def test_failures_of_a_kept_run_are_explained_anew(tmp_path: Path) -> None:
    file = next(file for file in FILES if file.why)
    part, why = next(iter(file.why.items()))
    kept = keep(
        tmp_path,
        OwnTests(file.host, file.path, "", failures=[(f"a::{part}_more", "not looked at")]),
        OwnTests("other", file.path, "", failures=[(f"a::{part}", "said then")]),
    )
    again = run_own_tests(tmp_path, {}, kept)
    assert [one.failures for one in again] == [
        [(f"a::{part}_more", why)], [[f"a::{part}", "said then"]],
    ]  # fmt: skip


def test_hosts_that_do_not_run_again_keep_what_was_counted(tmp_path: Path) -> None:
    first, other = FILES[0], next(file for file in FILES if file.host != FILES[0].host)
    kept = keep(
        tmp_path,
        OwnTests(first.host, first.path, "", passed_alone=7),
        OwnTests(other.host, other.path, "", passed_alone=5),
        OwnTests(other.host, "a file that is in the list no more", ""),
    )
    again = run_own_tests(tmp_path / "no hosts", {}, kept, again=[other.host])
    assert (again[0].host, again[0].file, again[0].passed_alone) == (first.host, first.path, 7)
    anew = [one for one in again if one.host == other.host]
    assert [one.file for one in anew] == [one.path for one in FILES if one.host == other.host]
    assert all(str(one.not_run).startswith("no ") for one in anew)
    written = {(one["host"], one["file"]): one for one in json.loads(kept.read_text())}
    assert written[first.host, first.path]["passed_alone"] == 7
    assert written[other.host, other.path]["passed_alone"] == 0


def test_models_and_rows_are_where_tests_look_for_them(tmp_path: Path) -> None:
    model = tmp_path / "qwen3"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    row = {"prompt": "1\u2028+ 1?", "label": "2"}
    write_rows(tmp_path / "gsm8k_prompts.jsonl", [row])
    home = own_tests._home({"qwen3": model}, tmp_path / "home", tmp_path)
    hub = pytest.importorskip("huggingface_hub")
    found = hub.try_to_load_from_cache("Qwen/Qwen3-8B", "tokenizer.json", cache_dir=home / "hub")
    assert found is not None
    assert Path(found).read_text() == "{}"
    models = home / "models" / "Qwen"
    assert (models / "Qwen3-8B" / "tokenizer.json").exists()
    assert not (models / "Qwen2.5-0.5B").exists()
    assert json.loads((models / "Qwen3-8B" / "config.json").read_text()) == {"model_type": "qwen3"}
    assert not (model / "config.json").exists()
    assert set(own_tests.MODELS.values()) <= set(own_tests.TYPES)
    table = pyarrow.parquet.read_table(home / "data" / "gsm8k" / "train.parquet")
    (made,) = table.to_pylist()
    assert made["prompt"] == [{"role": "user", "content": row["prompt"]}]
    assert made["reward_model"]["ground_truth"] == "2"


def test_answers_are_given_in_the_context_of_the_driver_and_times_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    seen: list[tuple[str, bool]] = []
    inside = False

    @contextlib.contextmanager
    def untimed() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    def prepare(rows: list[Any], tokenizer: Any, template: str) -> list[Any]:
        seen.append((template, inside))
        return [([1], [1]) for _ in rows]

    module = SimpleNamespace(STAND_INS=(), PACKAGE="no_such", prepare=prepare, untimed=untimed)
    monkeypatch.setattr(child, "driver", lambda name: module)
    one = {"directory": str(TOKENIZER), "rows": [{}]}
    job = {"driver": "any", "paths": [], "templates": [{**one, "name": "answered"}],
           "timing": {**one, "name": "timed"}}  # fmt: skip
    child.run(job)
    assert set(seen) == {("answered", True), ("timed", False)}


def write_corpus(hosts: Path, **config: Any) -> None:
    def scenario(answer: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
        return {"messages": messages, "append": [{"role": "user", "content": "And?"}]}

    corpus = {
        "scenarios": {
            "thinking": scenario("<think>\nHm.\n</think>\n\nHello."),
            "plain": scenario("Hello."),
        },
        "cases": [
            {"id": name, "model": "ours", "config": {"name": "ours", **config},
             "scenario": name, "stable": True}
            for name in ("thinking", "plain")
        ],
    }  # fmt: skip
    path = hosts / goldens.CORPUS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(corpus))


DROPS_THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1].strip() }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_goldens_of_others_are_held_against_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tokenizers" / "ours"
    shutil.copytree(TOKENIZER, model)
    (model / "chat_template.jinja").write_text(DROPS_THINKING)
    monkeypatch.setattr(goldens, "TEMPLATES", {"ours": "tokenizers/ours"})
    assert goldens.hold(tmp_path, tmp_path) == f"no {goldens.CORPUS} under HOSTS"
    write_corpus(tmp_path)
    found = goldens.hold(tmp_path, tmp_path)
    assert not isinstance(found, str)
    assert [(one.case, one.found) for one in found] == [("thinking", False), ("plain", True)]
    assert "Hm." in found[0].detail
    section = render([], [], 1, goldens=found).split("## Goldens")[1]
    assert "1 answers are the same, 0 conversations are refused here, 1 answers differ" in section
    assert "| thinking | stands | is rewritten |" in section
    assert "| plain |" not in section
    write_corpus(tmp_path, thinking_retention="all")  # a setting that no template knows
    assert goldens.hold(tmp_path, tmp_path) == []


def test_swift_rows_have_calls_as_turns_of_their_own() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "ok"},
    ]
    row = driver("ms_swift").swift_row({"messages": messages, "tools": [1]})
    roles = [message["role"] for message in row["messages"]]
    assert (roles, row["tools"]) == (["user", "tool_call", "tool_response"], [1])


def test_masks_of_hosts_say_which_tokens_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels become a mask; OpenRLHF says at each token whether the *next* one is trained."""
    assert from_labels([5, 6, 7], [-100, 6, 0]) == ([5, 6, 7], [0, 1, 1])
    torch = pytest.importorskip("torch")
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    items = [(torch.tensor([[1, 2, 3, 4]]), None, mask)]
    module = SimpleNamespace(SFTDataset=lambda *given, **named: items)
    for name in ("openrlhf", "openrlhf.datasets", "openrlhf.datasets.sft_dataset"):
        monkeypatch.setitem(sys.modules, name, module)
    rows = driver("openrlhf").prepare([{"messages": []}], None, "")
    assert rows == [([1, 2, 3, 4], [0, 0, 1, 1])]
