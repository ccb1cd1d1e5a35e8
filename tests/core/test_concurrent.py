"""Many processes publish one name at the same time: one wins, and every process gets the result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import environment

WRITERS = 4
ROUNDS = 12

PROGRAM = """
import errno, os, sys
from pathlib import Path
from tokenmill._core.publish import Staging; from tokenmill._core import publish
root, way, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3].encode()
if way == "rename":
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "no hard links here")
    os.link = refuse
with Staging(root) as staging:
    print("ready", flush=True)
    for line in sys.stdin:  # a line from the parent starts a round in all processes at once
        number = int(line)
        if way == "directory":
            staging.write(f"{number}/owner", name)
            staged = staging.path / str(number)
        else:
            staged = staging.write(f"{number}", name)
        print(int(staging.publish(staged, root / "published" / f"{number}")), flush=True)
"""


@pytest.mark.parametrize("way", ["link", "rename", "directory"])
def test_concurrent_publishers_agree_on_one_winner(way: str, tmp_path: Path) -> None:
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, tmp_path, way, f"writer-{number}"],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )
        for number in range(WRITERS)
    ]  # fmt: skip
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for round_number in range(ROUNDS):
            for writer in writers:
                assert writer.stdin is not None
                writer.stdin.write(f"{round_number}\n")
            answers = [writer.stdout.readline() for writer in writers if writer.stdout]
            published = tmp_path / "published" / str(round_number)
            owner = published / "owner" if way == "directory" else published
            assert answers.count("1\n") == 1, answers
            assert answers.count("0\n") == WRITERS - 1
            assert owner.read_text() == f"writer-{answers.index('1' + chr(10))}"
    finally:
        for writer in writers:
            writer.communicate()
    assert [writer.returncode for writer in writers] == [0] * WRITERS
    assert list((tmp_path / "staging").iterdir()) == []
