"""Run commands in this process or in a new one, and capture their output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import tokenmill
from tests.build.making import TOKENIZER
from tests.programs import environment
from tokenmill.cli import main

ERROR = {"type", "message", "path", "row", "line", "offset"}
# Flags that keep `prepare` and `why` in this process and avoid importing transformers.
QUICK = ("--tokenizer", str(TOKENIZER), "--tokenizer-backend", "file", "--executor", "inline")
# An argument of `prepare` as Python code, which the command line must print as a flag.
ARGUMENT = re.compile(rf"(?<![\w.-])({'|'.join(signature(tokenmill.prepare).parameters)})=")


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The JSON object on stdout, which must be the only output."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        assert self.out.count("\n") == 1, "one object, one line"
        return document

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == ERROR
        return dict(error)


class Shell:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path) -> Answer:
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        printed = self._capsys.readouterr()
        assert not ARGUMENT.search(printed.err)
        return Answer(code, printed.out, printed.err)


def process(*arguments: str | Path, **variables: str) -> Answer:
    """Run `python -m tokenmill` in a new process."""
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", *map(str, arguments)],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Answer(done.returncode, done.stdout, done.stderr)
