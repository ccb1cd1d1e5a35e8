"""Drivers, stand-ins, the trainers' own tests, and golden files."""

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
from conformance.checks import Actual, Expected, check_row
from conformance.conversations import plant
from conformance.own_tests import FILES, File, run_file, run_own_tests
from conformance.page import OwnTests, render
from conformance.reference import Model
from conformance.stand_ins import stand_in
from conformance.trainers import DRIVERS, driver, from_labels, in_halves, one_by_one

from conformance import child, goldens, own_tests
from tests.build.making import conversations
from tests.chat import small_encoders
from tests.data.making import TOKENIZER, write_rows

NAMES = ("NAME", "CHECKOUT", "PATHS", "PACKAGE", "STAND_INS", "TRAINS", "HOW", "prepare")


def test_every_driver_has_all_constants_and_imports_no_trainer(tmp_path: Path) -> None:
    before = set(sys.modules)
    for name in DRIVERS:
        module = driver(name)
        assert all(hasattr(module, expected) for expected in NAMES), name
        assert module.TRAINS in ("every", "last")
    trainers = {"verl", "skyrl", "swift", "slime", "miles", "axolotl", "nemo_rl", "openrlhf", "trl"}
    assert not (set(sys.modules) - before) & trainers
    directory = Path(importlib.import_module("conformance.trainers").__path__[0])
    assert set(DRIVERS) == {path.stem for path in directory.glob("*.py")} - {"__init__"}
    assert len({driver(name).NAME for name in DRIVERS}) == len(DRIVERS)
    answer = run_driver("skyrl_last", tmp_path, {"templates": [], "timing": {}})
    assert answer == {"not_run": "no directory SkyRL under TRAINERS"}


def test_a_python_encoder_in_place_of_a_template(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = tmp_path / "model"
    shutil.copytree(TOKENIZER, model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (model / "encoding").mkdir()
    code = Path(small_encoders.__file__).read_text().replace("def merging", "def encode_messages")
    (model / "encoding" / "encoding_small.py").write_text(code)
    judge = Model("small", model)
    cases = [plant("plain", row) for row in conversations(2)]
    answers = driver("tokenmill").prepare([case.row for case in cases], judge.tokenizer, "small")
    for case, answer in zip(cases, answers, strict=True):
        ids = judge.ids(case)
        assert judge.text(case.row["messages"]).startswith("<s><|user|>Zqv000kx")
        assert not isinstance(answer, str), answer
        expected = Expected(case, ids, judge.pieces(ids), judge.markers)
        result = check_row(expected, Actual(*answer, judge.pieces(answer[0])))
        assert (result.ids, result.faults) == ("same", []), result


def refuse(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    if row["n"] == 2:
        raise KeyError("content")
    return [row["n"]], [1]


def test_errors_are_assigned_to_the_rows_that_raise_them() -> None:
    rows = [{"n": n} for n in range(5)]
    expected = [([0], [1]), ([1], [1]), "KeyError: 'content'", ([3], [1]), ([4], [1])]
    assert one_by_one(rows, refuse) == expected
    assert in_halves(rows, lambda some: [refuse(row) for row in some]) == expected


def test_stand_ins_are_empty_and_never_hide_installed_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    stand_in(["no_such_gpu_library", "colorsys"])
    module: Any = importlib.import_module("no_such_gpu_library.deep.inside")
    assert isinstance(module.Thing, type)

    @module.decorate
    def function() -> int:
        return 7

    class Child(module.Thing):
        pass

    assert function() == 7
    assert isinstance(Child(), Child)
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)
    with pytest.raises(ImportError):
        importlib.import_module("no_such_other_library")
    for name in [name for name in sys.modules if name.startswith("no_such_gpu_library")]:
        del sys.modules[name]


def test_replacements_exist() -> None:
    source = Path(importlib.import_module("conformance").__path__[0]) / "replacements.py"
    text = source.read_text(encoding="utf-8")
    expected = {name for file in FILES for name in (file.by, file.prepare) if name}
    assert [name for name in expected if f"def {name}() -> None:" not in text] == []


CLASSES = "class RolloutDataSource:\n    pass\nclass RolloutDataSourceWithBuffer:\n    pass\n"


def write_trainer(trainers: Path, **files: str) -> None:
    checkout = trainers / "trainer"
    empty = ("slime/__init__", "slime/rollout/__init__", "transformers/__init__",
             "transformers/utils/__init__", "transformers/utils/import_utils")  # fmt: skip
    files = {**dict.fromkeys(empty, ""), "slime/rollout/data_source": CLASSES, **files}
    for name, text in files.items():
        path = checkout / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run_trainer(
    trainers: Path, path: str, *, replace: bool = True, **chosen: Any
) -> dict[str, set[str]]:
    file = File("trainer", "trainer", path, "", "slime_data_source", **chosen)
    found = run_file(file, trainers, trainers, replace=replace)
    assert isinstance(found, dict)
    return {kind: {name.rpartition("::")[2] for name in names} for kind, names in found.items()}


def test_replacement_precedes_conftest_and_its_users_are_reported(
    tmp_path: Path,
) -> None:
    tests = (
        "import pytest\n"
        "import tests.helpers_of_the_trainer\n"
        "from conftest import RolloutDataSource\n"
        "def test_of_something_else():\n    pass\n"
        "def test_for_later():\n    pytest.skip()\n"
        "def test_of_the_class():\n"
        "    assert RolloutDataSource.__init__ is not object.__init__\n"
        "    with pytest.raises(Exception):\n"
        "        RolloutDataSource(None)\n"
        "def test_of_their_own():\n    RolloutDataSource()\n"
    )
    conftest = "from slime.rollout.data_source import RolloutDataSource"
    # `tests` has no __init__.py there, so an installed package of that name would hide it.
    files = {"conftest": conftest, "test_trainer": tests, "tests/helpers_of_the_trainer": ""}
    write_trainer(tmp_path, **files)
    alone = run_trainer(tmp_path, "test_trainer.py", replace=False)
    ours = run_trainer(tmp_path, "test_trainer.py")
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
    write_trainer(tmp_path, test_broken="import no_such_library\n", test_trainer=tests)
    ours = run_trainer(tmp_path, ".", keywords="chosen")
    assert ours["passed"] == {"test_chosen_place", "test_chosen_worker"}
    assert ours["reached"] == {"test_chosen_worker"}
    assert len(ours["failed"]) == 1  # a file that cannot be imported does not stop the others


def store_results(directory: Path, *known: OwnTests) -> Path:
    path = directory / "own_tests.json"
    path.write_text(json.dumps([dataclasses.asdict(one) for one in known]))
    return path


def test_failures_of_a_stored_run_get_the_current_explanation(tmp_path: Path) -> None:
    file = next(file for file in FILES if file.why)
    part, why = next(iter(file.why.items()))
    path = store_results(
        tmp_path,
        OwnTests(file.trainer, file.path, "", failures=[(f"a::{part}_more", "not examined")]),
        OwnTests("other", file.path, "", failures=[(f"a::{part}", "old reason")]),
    )
    again = run_own_tests(tmp_path, {}, path)
    assert [one.failures for one in again] == [
        [(f"a::{part}_more", why)], [[f"a::{part}", "old reason"]],
    ]  # fmt: skip


def test_trainers_that_do_not_run_again_keep_their_results(tmp_path: Path) -> None:
    first, other = FILES[0], next(file for file in FILES if file.trainer != FILES[0].trainer)
    path = store_results(
        tmp_path,
        OwnTests(first.trainer, first.path, "", passed_alone=7),
        OwnTests(other.trainer, other.path, "", passed_alone=5),
        OwnTests(other.trainer, "a file that is in the list no more", ""),
    )
    again = run_own_tests(tmp_path / "missing", {}, path, again=[other.trainer])
    assert (again[0].trainer, again[0].file, again[0].passed_alone) == (
        first.trainer,
        first.path,
        7,
    )
    rerun = [one for one in again if one.trainer == other.trainer]
    assert [one.file for one in rerun] == [
        one.path for one in FILES if one.trainer == other.trainer
    ]
    assert all(str(one.not_run).startswith("no ") for one in rerun)
    written = {(one["trainer"], one["file"]): one for one in json.loads(path.read_text())}
    assert written[first.trainer, first.path]["passed_alone"] == 7
    assert written[other.trainer, other.path]["passed_alone"] == 0


def test_models_and_rows_are_in_the_home_directory(tmp_path: Path) -> None:
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
    (module,) = table.to_pylist()
    assert module["prompt"] == [{"role": "user", "content": row["prompt"]}]
    assert module["reward_model"]["ground_truth"] == "2"


def test_untimed_context_is_used_except_for_timing(
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


def write_corpus(trainers: Path, **config: Any) -> None:
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
    path = trainers / goldens.CORPUS
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(corpus))


DROPS_THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}"
    "{% else %}{{ m.content.split('</think>')[-1].strip() }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_golden_file_is_compared_with_bridge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tokenizers" / "ours"
    shutil.copytree(TOKENIZER, model)
    (model / "chat_template.jinja").write_text(DROPS_THINKING)
    monkeypatch.setattr(goldens, "TEMPLATES", {"ours": "tokenizers/ours"})
    assert goldens.run_goldens(tmp_path, tmp_path) == f"no {goldens.CORPUS} under TRAINERS"
    write_corpus(tmp_path)
    results = goldens.run_goldens(tmp_path, tmp_path)
    assert not isinstance(results, str)
    assert [(one.case, one.actual) for one in results] == [("thinking", False), ("plain", True)]
    assert "Hm." in results[0].detail
    section = render([], [], 1, goldens=results).split("### Golden files")[1]
    text = " ".join(section.split())
    assert "1 results are equal, 0 conversations are refused here, 1 results differ" in text
    assert "| thinking | kept | rewritten |" in section
    assert "| plain |" not in section
    write_corpus(tmp_path, thinking_retention="all")  # not a setting of a template
    assert goldens.run_goldens(tmp_path, tmp_path) == []


def test_swift_rows_have_calls_as_separate_turns() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "ok"},
    ]
    row = driver("ms_swift").swift_row({"messages": messages, "tools": [1]})
    roles = [message["role"] for message in row["messages"]]
    assert (roles, row["tools"]) == (["user", "tool_call", "tool_response"], [1])


def test_masks_of_trainers_mark_the_trained_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels become a mask; OpenRLHF's mask is shifted by one token."""
    assert from_labels([5, 6, 7], [-100, 6, 0]) == ([5, 6, 7], [0, 1, 1])
    torch = pytest.importorskip("torch")
    mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
    items = [(torch.tensor([[1, 2, 3, 4]]), None, mask)]
    module = SimpleNamespace(SFTDataset=lambda *given, **named: items)
    for name in ("openrlhf", "openrlhf.datasets", "openrlhf.datasets.sft_dataset"):
        monkeypatch.setitem(sys.modules, name, module)
    rows = driver("openrlhf").prepare([{"messages": []}], None, "")
    assert rows == [([1, 2, 3, 4], [0, 0, 1, 1])]
