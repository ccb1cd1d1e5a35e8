"""Tests of the language of the repository and the size of the API."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import glossary
from scripts.glossary import PROJECT, old_words, tracked

import tokenmill

WRITTEN_BY_A_COMMAND = "docs/internals/conformance.md"
PAGES = [name for name in tracked() if name.endswith(".md") and name != WRITTEN_BY_A_COMMAND]


def test_no_old_word_is_left() -> None:
    words = list(old_words(tracked()))
    assert not words, "\n".join(words)


def test_old_words_are_reported_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.md").write_text("A line\nwith a wrong word and WRONG_NAME.\n")
    monkeypatch.setattr(glossary, "PROJECT", tmp_path)
    monkeypatch.setattr(glossary, "OLD_WORDS", re.compile("wrong"))
    monkeypatch.setattr(glossary, "OLD_IDENTIFIERS", re.compile("WRONG_NAME"))
    assert list(old_words(["a.md"])) == ["a.md:2: wrong", "a.md:2: WRONG_NAME"]


@pytest.mark.parametrize("line", ["def test_row_{}_once():", "x = a_{}(y)", "_{}()"])
def test_old_words_are_found_inside_identifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    (tmp_path / "a.py").write_text(line.format("sett" + "led"))
    monkeypatch.setattr(glossary, "PROJECT", tmp_path)
    assert len(list(old_words(["a.py"]))) == 1


@pytest.mark.parametrize(
    ("function", "maximum"),
    [(tokenmill.prepare, 34), (tokenmill.Loader, 20), (tokenmill.PromptDataset, 24)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_number_of_parameters_is_bounded(function: Callable[..., Any], maximum: int) -> None:
    assert len(inspect.signature(function).parameters) <= maximum


def test_number_of_public_names_is_bounded() -> None:
    assert len(tokenmill.__all__) <= 32


def test_readme_is_short() -> None:
    assert len((PROJECT / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


@pytest.mark.parametrize("name", PAGES)
def test_lines_of_pages_are_short(name: str) -> None:
    """Lines have at most 100 characters, except in tables; targets of links do not count."""
    lines = (PROJECT / name).read_text(encoding="utf-8").splitlines()
    texts = {
        number: re.sub(r"\]\([^)]*\)|https?://\S+", "", line)
        for number, line in enumerate(lines, 1)
    }
    long = [n for n, text in texts.items() if len(text) > 100 and not text.lstrip().startswith("|")]
    assert not long, f"{name}: lines {long}"
