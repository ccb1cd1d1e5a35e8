"""Tests of distributions, dependency versions, commit hooks and the threat model."""

from __future__ import annotations

import os
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from scripts import lowest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = PROJECT / "src" / "tokenmill"
SETTINGS = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))


def files_under(directory: Path) -> set[str]:
    return {
        path.relative_to(PROJECT).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling")
    return tmp_path_factory.mktemp("dist")


def test_wheel_contains_exactly_the_files_of_the_package(dist: Path) -> None:
    from hatchling.builders.wheel import WheelBuilder

    [path] = WheelBuilder(str(PROJECT)).build(directory=str(dist), versions=["standard"])
    with zipfile.ZipFile(path) as wheel:
        names = set(wheel.namelist())
        [entry] = [name for name in names if name.endswith("entry_points.txt")]
        assert "tokenmill = tokenmill.cli:main" in wheel.read(entry).decode()
    packed = {f"src/{name}" for name in names if ".dist-info/" not in name}
    assert packed == files_under(PACKAGE)
    client = "src/tokenmill/inspect/page/client"
    assert packed >= {f"{client}/page.html", f"{client}/page.css", f"{client}/main.js"}
    examples = "src/tokenmill/examples"
    assert packed >= {f"{examples}/conversations.jsonl", f"{examples}/tokenizer/tokenizer.json"}
    assert "src/tokenmill/py.typed" in packed
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_source_distribution_contains_sources_tests_and_docs(dist: Path) -> None:
    from hatchling.builders.sdist import SdistBuilder

    [path] = SdistBuilder(str(PROJECT)).build(directory=str(dist), versions=["standard"])
    with tarfile.open(path) as source:
        packed = {member.name.partition("/")[2] for member in source.getmembers()}
    for directory in ("src", "tests", "scripts", "docs", "benchmarks", "conformance", "contrib"):
        assert files_under(PROJECT / directory) <= packed, directory
    assert packed >= {"pyproject.toml", "Makefile", "LICENSE", "README.md", "SECURITY.md"}
    assert packed >= {"constraints.txt", "mkdocs.yml", "CHANGELOG.md", ".pre-commit-config.yaml"}


def test_every_core_dependency_has_one_lower_and_no_upper_bound() -> None:
    declared = SETTINGS["project"]["dependencies"]
    pinned = list(lowest.floors(declared))
    assert [pin.replace("==", ">=", 1) for pin in pinned] == declared
    for extra in SETTINGS["project"]["optional-dependencies"].values():
        assert not [
            requirement
            for requirement in extra
            if re.search(r"[<~!]|==", requirement.partition(";")[0])
        ]


def test_tested_pythons_are_those_of_the_classifiers() -> None:
    listed = " ".join(SETTINGS["project"]["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)", listed)
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    assert (
        re.findall(r"python(3\.\d+)", makefile.partition("PYTHONS :=")[2].split("\n")[0])
        == versions
    )
    assert SETTINGS["project"]["requires-python"] == f">={versions[0]}"
    least = f"sys.version_info < (3, {versions[0].partition('.')[2]})"
    for path in ("Makefile", "scripts/lowest.py"):
        assert least in (PROJECT / path).read_text(encoding="utf-8"), path


@pytest.mark.parametrize("requirement", ["numpy", "numpy<3", "numpy>=1,<3", "numpy==1.26"])
def test_dependency_without_a_single_lower_bound_is_refused(requirement: str) -> None:
    with pytest.raises(SystemExit, match="exactly one lower bound: numpy"):
        list(lowest.floors([requirement]))


def test_lowest_runs_the_tests_that_need_no_extra() -> None:
    packages = ["chat", "integrations", "test_architecture.py", "conftest.py", "remote", "store"]
    assert lowest.core_tests(packages) == [
        "tests/chat",
        "tests/store",
        "tests/test_architecture.py",
    ]
    tools = lowest.tools(SETTINGS["project"]["optional-dependencies"]["test"])
    assert len(tools) == len(lowest.TOOLS)
    assert set(lowest.WITH_EXTRAS) <= {path.name for path in (PROJECT / "tests").iterdir()}


def test_lowest_skips_a_python_that_is_not_installed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert lowest.main(["python3.99"]) == 1  # no Python was tested
    assert "lowest versions on python3.99: skipped" in capsys.readouterr().out


def test_lowest_finds_a_python_of_pyenv_that_is_not_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert lowest.interpreter("python3.99") is None
    [refusing, installed] = [
        tmp_path / "shims" / "python3.99",
        tmp_path / "versions" / "3.99.0" / "bin" / "python3.99",
    ]
    for path, command in ((refusing, "exit 127"), (installed, "echo 3.99.0")):
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(refusing.parent), prepend=os.pathsep)
    assert lowest.interpreter("python3.99") == (installed, "3.99.0")
    assert lowest.interpreter(str(installed)) == (str(installed), "3.99.0")
    assert lowest.interpreter(str(refusing)) is None


def test_commit_hooks_are_the_lines_of_make_check() -> None:
    makefile = (PROJECT / "Makefile").read_text(encoding="utf-8")
    [recipe] = re.findall(r"^check:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    lines = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    text = (PROJECT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    [repository] = yaml.safe_load(text)["repos"]
    assert repository["repo"] == "local"  # no download
    assert [hook["entry"] for hook in repository["hooks"]] == lines
    for hook in repository["hooks"]:
        assert hook["language"] == "system"
        assert hook["always_run"]
        assert not hook["pass_filenames"]


def test_tests_in_the_threat_model_exist() -> None:
    text = (PROJECT / "docs" / "internals" / "threat-model.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert len(named) > 20
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (PROJECT / path).is_file()
        or f"\ndef {name}(" not in (PROJECT / path).read_text(encoding="utf-8")
    ]
    assert not missing
    for line in text.splitlines():  # every defence has a test
        if line.startswith("| ") and "---" not in line and "could" not in line:
            assert "`tests/" in line, line
