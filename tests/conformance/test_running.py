"""What runs the hosts: drivers keep one contract, stand-ins give way, pytest's reports are counted.

The hosts themselves are no part of the tests; a driver of our own stands for them.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conformance.__main__ import run_driver
from conformance.hosts import DRIVERS, driver, from_labels, in_halves, one_by_one
from conformance.own_tests import FILES, count
from conformance.stand_ins import stand_in

NAMES = ("NAME", "CHECKOUT", "PATHS", "PACKAGE", "STAND_INS", "TRAINS", "HOW", "prepare")


def test_every_driver_keeps_the_contract_and_imports_no_host() -> None:
    before = set(sys.modules)
    for name in DRIVERS:
        module = driver(name)
        assert all(hasattr(module, wanted) for wanted in NAMES), name
        assert module.TRAINS in ("every", "last")
    hosts = {"verl", "skyrl", "swift", "slime", "miles", "axolotl", "nemo_rl", "openrlhf", "trl"}
    assert not (set(sys.modules) - before) & hosts
    modules = {path.stem for path in Path(importlib.import_module("conformance.hosts").__path__[0])
               .glob("*.py")}  # fmt: skip
    assert set(DRIVERS) == modules - {"__init__"}
    assert len({driver(name).NAME for name in DRIVERS}) == len(DRIVERS)


def test_missing_checkout_is_skipped_by_name(tmp_path: Path) -> None:
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


def test_labels_become_a_mask() -> None:
    assert from_labels([5, 6, 7], [-100, 6, 0]) == ([5, 6, 7], [0, 1, 1])


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


def test_reports_of_pytest_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="good"/>'
        '<testcase classname="a" name="bad"><failure/></testcase>'
        '<testcase classname="a" name="broken"><error/></testcase>'
        '<testcase classname="a" name="later"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    assert count(report) == {
        "passed": {"a::good"}, "failed": {"a::bad", "a::broken"}, "skipped": {"a::later"},
    }  # fmt: skip


def test_replacements_are_there() -> None:
    source = Path(importlib.import_module("conformance").__path__[0]) / "replacements.py"
    text = source.read_text(encoding="utf-8")
    assert all(f"def {file.by}() -> None:" in text for file in FILES)


def test_swift_rows_have_calls_as_turns_of_their_own() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "ok"},
    ]
    row = driver("ms_swift").swift_row({"messages": messages, "tools": [1]})
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "tool_call", "tool_response"]
    assert row["tools"] == [1]


def test_openrlhf_mask_is_shifted_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask says of each place whether the *next* token is trained."""
    torch = pytest.importorskip("torch")

    class SFTDataset(list[Any]):
        def __init__(self, *given: Any, **named: Any) -> None:
            mask = torch.tensor([[0.0, 1.0, 1.0, 0.0]])
            super().__init__([(torch.tensor([[1, 2, 3, 4]]), None, mask)])

    module = SimpleNamespace(SFTDataset=SFTDataset)
    for name in ("openrlhf", "openrlhf.datasets", "openrlhf.datasets.sft_dataset"):
        monkeypatch.setitem(sys.modules, name, module)
    rows = driver("openrlhf").prepare([{"messages": []}], None, "")
    assert rows == [([1, 2, 3, 4], [0, 0, 1, 1])]
