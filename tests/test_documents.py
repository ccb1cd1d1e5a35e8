"""The Python blocks of README.md and docs/*.md run, each document in a process of its own.

A block opens with exactly three backticks and `python`; anything else (`text`, `sh`, `yaml`) is
prose. The blocks of a document are one program, run in a directory that holds what the examples
bundle: ``chat.jsonl``, ``dirty.jsonl``, ``prompts.jsonl`` and the directory ``tokenizer``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

PROJECT = Path(__file__).resolve().parent.parent
PACKAGE = Path(tokenmill.__file__).parent
DOCUMENTS = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]


def program_of(document: str) -> str:
    """The document with every line blanked that is not Python, so that line numbers stay true."""
    lines, inside, fence = [], False, False
    for line in document.splitlines():
        if line.startswith("```"):
            fence, inside = not fence, not fence and line.strip() == "```python"
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines) + "\n"


def test_program_of_keeps_python_and_line_numbers() -> None:
    document = "# a\n```python\nx = 1\n```\nprose\n```sh\nls\n```\n```python\nprint(x)\n```\n"
    assert program_of(document) == "\n\nx = 1\n\n\n\n\n\n\nprint(x)\n\n"


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    place = tmp_path / "work"
    shutil.copytree(PACKAGE / "examples", place)
    (place / "conversations.jsonl").rename(place / "chat.jsonl")
    return place


@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if program_of(path.read_text(encoding="utf-8")).strip()],
    ids=lambda path: str(path.relative_to(PROJECT)),
)
def test_document_runs(path: Path, workplace: Path) -> None:
    # Not the bare stem: inspect.py would stand in the way of the standard library.
    program = workplace / f"document_{path.stem}.py"
    program.write_text(program_of(path.read_text(encoding="utf-8")), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    answer = subprocess.run(
        [sys.executable, program], cwd=workplace, env=environment, capture_output=True, text=True
    )
    assert answer.returncode == 0, f"{path.name} (lines as in the document):\n{answer.stderr}"


def test_readme_names_both_commands_on_its_first_screen() -> None:
    first_screen = (PROJECT / "README.md").read_text(encoding="utf-8").splitlines()[:25]
    commands = {line.split("#")[0].strip() for line in first_screen}
    assert {"make demo", "make test"} <= commands


UNITS = {"×": "x", "s": "s", "ms": "ms", "MiB": "MiB", "GiB": "GiB", "%": "%", "MB/s": "MB/s"}


def test_readme_holds_no_figure_that_the_benchmarks_did_not_print() -> None:
    results = json.loads((PROJECT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    readme = (PROJECT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if line.startswith("|")]
    claims = re.findall(r"([\d.,]*\d) ?(×|ms\b|s\b|MiB|GiB|MB/s|%)", "\n".join(rows))
    assert len(claims) >= 10
    for number, unit in claims:
        digits = len(number.partition(".")[2])
        printed = {
            f"{figure['value']:,.{digits}f}"
            for figure in results["figures"]
            if figure["unit"] == UNITS[unit]
        }
        assert number in printed, f"README says {number} {unit}, the last whole run printed none"
