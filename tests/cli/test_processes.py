"""Commands as processes: start, colours, pipes, Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.build.making import conversations, small_cuts, write_rows
from tests.cli.harness import QUICK, Shell, process
from tests.programs import environment, python
from tokenmill import open_store
from tokenmill.cli import main

HEAVY = ("pyarrow", "transformers", "torch", "tokenizers", "jinja2", "numpy", "fastokens",
         "datasets", "ray", "pandas", "trl")  # fmt: skip
ESCAPE = "\x1b["

# Slices of 8 KiB, so that the build takes long enough to be interrupted.
SMALL_SLICES = """
import sys
from tests.build.making import small_cuts
class Patch:
    setattr = staticmethod(setattr)
small_cuts(Patch)
from tokenmill.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from tokenmill.cli import main; code = main(['--help']);"
        f"print('LOADED', sorted(set(sys.modules) & set({HEAVY!r})), code)"
    )
    done = python(program)
    assert done.stdout.endswith("LOADED [] 0\n"), done.stdout + done.stderr
    assert "prepare" in done.stdout


def test_python_m_tokenmill_runs_the_command() -> None:
    answer = process("--version")
    assert answer.code == 0
    assert re.fullmatch(r"tokenmill \d+\.\d+\.\d+\S*\n", answer.out)


def test_output_to_a_pipe_has_marks_instead_of_colours(shell: Shell, store: Path) -> None:
    answer = shell("inspect", store, "--row", "2")
    assert ESCAPE not in answer.out + answer.err
    trained = "".join(re.findall(r"⟦(.+?)⟧(?!:)", answer.out, re.DOTALL))
    row = open_store(store)[2]
    assert trained.endswith("<|im_end|>")
    assert f"{len(row.input_ids)} tokens" in answer.out
    assert f"{int(row.loss_mask.sum())} trained" in answer.out
    assert "── assistant" in answer.out
    assert "·" in trained


def on_terminal(*arguments: str | Path, **more: str) -> tuple[int, str]:
    """Run a command on a new terminal; return the exit code and the output."""
    parent, child = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "tokenmill", *map(str, arguments)],
        env=environment(TERM="xterm-256color", COLUMNS="100", **more),
        stdin=child, stdout=child, stderr=child,
    )  # fmt: skip
    os.close(child)
    output = b""
    while True:
        try:
            piece = os.read(parent, 1 << 16)
        except OSError:  # the last process has closed the terminal
            break
        if not piece:
            break
        output += piece
    os.close(parent)
    return running.wait(timeout=60), output.decode()


@pytest.mark.parametrize("more", [{}, {"NO_COLOR": "1"}], ids=["colour", "NO_COLOR"])
def test_output_to_a_terminal_has_colours_without_no_color(
    store: Path, more: dict[str, str]
) -> None:
    code, output = on_terminal("inspect", store, "--row", "2", **more)
    assert code == 0
    if more:
        assert not re.search(r"\x1b\[[0-9;]*3\dm", output), "a colour despite NO_COLOR"
        assert "⟦" in output
    else:
        assert "\x1b[32m" in output
        assert "⟦" not in output


def test_rows_are_escaped_on_a_terminal_and_unchanged_in_a_pipe(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    source = tmp_path / "bad.jsonl"
    bad = b'{"a": \x1b]0;title\x07\x1b[2J\xff\xc2\x9b31m \xe2\x80\xaeback'
    good = '{"a": "\x9b2J \u202eback"}'.encode()  # allowed in JSON
    source.write_bytes(bad + b"\n" + good + b"\n")
    for row, raw, code in ((0, bad, 1), (1, good, 0)):
        exit_code, output = on_terminal("rows", source, "--row", str(row), NO_COLOR="1")
        assert exit_code == code
        assert '{"a": ' in output
        assert not re.findall("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e]", output)
        main(["rows", str(source), "--row", str(row)])
        assert capsysbinary.readouterr().out == raw + b"\n"


def test_closed_pipe_ends_the_command_quietly(store: Path) -> None:
    command = f"'{sys.executable}' -m tokenmill inspect '{store}' --row 0 --json | head -c 1"
    for piped in (command, f"'{sys.executable}' -m tokenmill stats '{store}' | head -1"):
        done = subprocess.run(
            ["bash", "-c", piped], env=environment(), capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        assert "BrokenPipe" not in done.stderr


def test_interrupt_while_modules_are_imported_has_no_traceback() -> None:
    interrupted = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'tokenmill.cli.commands.stats':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from tokenmill.cli import main\n"
        "sys.exit(main(['cache', 'list']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", interrupted], env=environment(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_interrupt_keeps_finished_slices_and_stops_workers(
    shell: Shell, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "long.jsonl", conversations(4_000, words=8))
    running = subprocess.Popen(
        [sys.executable, "-c", SMALL_SLICES, "prepare", source, *QUICK[:4], "--num-workers", "2",
         "--json"],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not list(own_cache.glob("slices/*/*.json")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    children = psutil.Process(running.pid).children(recursive=True)
    assert children, "no worker processes"
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    assert "to continue from finished work" in err
    assert json.loads(out)["error"]["type"] == "KeyboardInterrupt"
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    finished = len(list(own_cache.glob("slices/*/*.json")))
    assert not (own_cache / "stores").exists()
    small_cuts(monkeypatch)
    detail = shell("prepare", source, *QUICK, "--json").json
    assert detail["rows_out"] == 4_000
    assert 0 < finished < detail["slices"]
    assert detail["slices_built"] == detail["slices"] - finished
    assert len(open_store(detail["path"])) == 4_000
