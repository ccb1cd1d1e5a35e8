"""The tools of fault tests, and how tests are skipped by name where one is missing."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import programs

CALLS = ("open", "write", "fsync", "close", "link", "rename", "mkdir")
EVERY = ",".join(CALLS)


@dataclass(frozen=True)
class Outcome:
    exit: int
    late: bool
    seen: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        assert self.stdout, self.stderr
        document: dict[str, Any] = json.loads(self.stdout)
        return document

    @property
    def error(self) -> str | None:
        return self.result["error"]["type"] if self.exit else None


def environment(**more: str) -> dict[str, str]:
    """Of a process without threads of an engine's own, which only make small runs slower."""
    return programs.environment(TOKENIZERS_PARALLELISM="false", **more)


def fault(
    calls: str, directory: Path, nth: int, action: str, code: int = 0, *, sticky: bool = False
) -> str:
    return f"{calls}|{directory}|{nth}|{int(sticky)}|{action}|{code}"


class Findings:
    """Failures of a long loop, which continues after one and reports all of them at its end."""

    def __init__(self) -> None:
        self.tried = 0
        self.found: list[str] = []

    @contextlib.contextmanager
    def of(self, where: str) -> Iterator[None]:
        self.tried += 1
        try:
            yield
        except AssertionError as error:
            self.found.append(f"{where}: {error}")

    def conclude(self) -> None:
        print(f"{self.tried} tries, {len(self.found)} of them failed")
        assert not self.found, "\n\n".join(self.found)


class Zygote:
    """A running zygote, see its module; ``more`` is of its environment."""

    def __init__(self, shim: Path | None, preload: Sequence[str] = (), **more: str) -> None:
        self.shim = shim
        if shim is not None:
            more["LD_PRELOAD"] = str(shim)
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.faults.zygote", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**more),
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            self.close()
            raise RuntimeError("the zygote did not start; its traceback is above")

    def run(self, *runs: dict[str, Any], timeout: float = 60) -> list[Outcome]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self.shim is None and any("fault" in run for run in runs):
            pytest.skip("needs gcc, to compile the shim that makes system calls fail")
        self._process.stdin.write(json.dumps({"runs": runs, "timeout": timeout}) + "\n")
        self._process.stdin.flush()
        outcomes = [Outcome(**detail) for detail in json.loads(self._process.stdout.readline())]
        assert not any(outcome.late for outcome in outcomes), outcomes
        return outcomes

    def one(self, arguments: list[str], **more: Any) -> Outcome:
        (outcome,) = self.run({"arguments": arguments, **more})
        return outcome

    def program(self, source: str, *arguments: object, **more: Any) -> Outcome:
        """Run a program of Python, in place of ``python -c`` where imports are not the point."""
        (outcome,) = self.run(
            {"program": source, "arguments": [str(one) for one in arguments], **more}
        )
        return outcome

    def read_back(self, cache: Path) -> dict[str, Any]:
        """Return what a new reader finds in a cache; fail if a published file is incomplete."""
        (outcome,) = self.run({"call": "tests.faults.world:read_back", "argument": str(cache)})
        assert outcome.exit == 0, outcome.stdout + outcome.stderr
        return outcome.result

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it may be gone already
            self._process.stdin.write("\n")
            self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@functools.cache
def compile_shim() -> Path | None:
    """The shim as a library, or None without a compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    made = Path(tempfile.mkdtemp(prefix="tokenmill-shim-")) / "shim.so"
    source = Path(__file__).parent / "shim.c"
    done = subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", made, source, "-ldl"], capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return made


def start_command(arguments: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tokenmill", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
    )


def finish(command: subprocess.Popen[str], seconds: float = 100) -> Outcome:
    stdout, stderr = command.communicate(timeout=seconds)
    return Outcome(command.returncode, False, 0, stdout, stderr)


def run_mounted(zygote: Zygote, before: str, arguments: list[str], after: str = "true") -> Outcome:
    """A command between two shell scripts, the first of which may mount what it likes."""
    argument = {"before": before, "arguments": arguments, "after": after}
    (outcome,) = zygote.run({"call": "tests.faults.tools:among_mounts", "argument": argument})
    return outcome


def among_mounts(argument: dict[str, Any]) -> int:
    from tokenmill.cli import main

    assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
    before = f"mount --make-rprivate / && {argument['before']}"
    subprocess.run(["sh", "-ec", before], check=True)
    code = main(argument["arguments"])
    subprocess.run(["sh", "-ec", argument["after"]], check=True)
    return code


def require_strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    if subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True).returncode:
        pytest.skip("strace may not trace here")


@functools.cache
def _may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, capture_output=True).returncode == 0


def require_mounts() -> None:
    if not _may_mount():
        pytest.skip("needs mount namespaces (unshare --mount)")
