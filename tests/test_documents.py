"""Run the Python blocks of README.md and docs/, each document in its own process.

The blocks of a document form one program. It runs in a directory with ``chat.jsonl``,
``dirty.jsonl``, ``prompts.jsonl`` and the directory ``tokenizer``.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripts.trainer_signatures import PROJECT, read_page

import tokenmill
from tests.faults.tools import Zygote

PACKAGE = Path(tokenmill.__file__).parent
PROCESSING = ["transformers.processing_utils"]
DOCUMENTS = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]


def program_of(path: Path) -> str:
    lines = [""] * len(path.read_text(encoding="utf-8").splitlines())
    for language, fence, block in read_page(path).blocks:
        if language == "python":
            code = block.splitlines()
            lines[fence : fence + len(code)] = code
    return "\n".join(lines).rstrip() + "\n"


def test_program_of_keeps_python_and_line_numbers(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("# a\n```python\nx = 1\n```\nb\n```sh\nls\n```\n```python\nprint(x)\n```\n")
    assert program_of(document) == "\n\nx = 1\n\n\n\n\n\n\nprint(x)\n"


def copy_examples(directory: Path) -> Path:
    target = directory / "work"
    shutil.copytree(PACKAGE / "examples", target)
    (target / "conversations.jsonl").rename(target / "chat.jsonl")
    return target


@pytest.mark.usefixtures("identified")
@pytest.mark.parametrize(
    "path",
    [path for path in DOCUMENTS if program_of(path).strip()],
    ids=lambda path: str(path.relative_to(PROJECT)),
)
def test_document_runs(path: Path, tmp_path: Path, library_zygote: Zygote, own_cache: Path) -> None:
    program = program_of(path)
    done = library_zygote.program(
        program,
        directory=str(copy_examples(tmp_path)),
        environment={"TOKENMILL_CACHE_DIR": str(own_cache)},
        # Imported in the parent, because these imports take seconds.
        imports=PROCESSING if re.search("Processor|SFTTrainer", program) else [],
    )
    assert done.exit == 0, f"{path.name} (lines as in the document):\n{done.stderr}"


def test_failing_document_is_reported_with_its_line(library_zygote: Zygote, tmp_path: Path) -> None:
    failed = library_zygote.program("import sys\n\nassert sys.argv[1:]\n", directory=str(tmp_path))
    assert failed.exit == 1
    assert "line 3, in <module>\nAssertionError" in failed.stderr
    ended = library_zygote.program("import sys; sys.exit(len(sys.argv[1]))", "four")
    assert (ended.exit, ended.stderr) == (4, "")


def test_readme_names_both_commands_on_its_first_screen() -> None:
    first_screen = (PROJECT / "README.md").read_text(encoding="utf-8").splitlines()[:25]
    commands = {line.split("#")[0].strip() for line in first_screen}
    assert {"make demo", "make test"} <= commands


UNITS = {"×": "x", "s": "s", "ms": "ms", "MiB": "MiB", "GiB": "GiB", "%": "%", "MB/s": "MB/s"}


# Row of the README's table → the benchmarks' figures that it states, in the order it does.
FIGURES = {
    "chat to tokens, one process": ["chat: ours / SkyRL's tokenization"],
    "preparing 800 MB, 2 workers": ["build: prepare / datasets.map"],
    "opening 5M rows of JSONL": [
        "rows: first open, 5M rows",
        "rows: first open, peak memory, 5M rows",
        "rows: first open, peak memory, datasets",
    ],
    "one random tokenized row": ["build: store[i] / datasets row"],
    "packing 1M rows into 8,192": ["serve: packing per row, ours against trl bfd (1M rows)"],
}


def stated(readme: str) -> dict[str, list[tuple[str, str]]]:
    """Row of a table → the numbers in it that have a unit."""
    found = {}
    for line in readme.splitlines():
        claims = re.findall(r"([\d.,]*\d) ?(×|ms\b|s\b|MiB|GiB|MB/s|%)", line)
        if line.startswith("|") and claims:
            found[line.split("|")[1].strip()] = claims
    return found


def test_readme_states_the_figures_that_the_benchmarks_printed_under_their_names() -> None:
    results = json.loads((PROJECT / "benchmarks" / "results.json").read_text(encoding="utf-8"))
    printed: dict[str, dict[str, Any]] = {}
    for figure in results["figures"]:
        printed.setdefault(f"{figure['section']}: {figure['name']}", figure)
    rows = stated((PROJECT / "README.md").read_text(encoding="utf-8"))
    assert set(rows) == set(FIGURES), "every figure of the README has a name in FIGURES"
    for row, claims in rows.items():
        expected = [
            (f"{printed[name]['value']:,.{len(number.partition('.')[2])}f}", printed[name]["unit"])
            for name, (number, _) in zip(FIGURES[row], claims, strict=True)
        ]
        assert [(number, UNITS[unit]) for number, unit in claims] == expected, row
