"""A process that has everything imported and forks a fresh one for every command.

It reads requests (JSON, one per line) from its standard input, forks a child per run, lets all
children of a request start at the same moment, waits for them and answers with how each ended. A
child has read nothing of any cache and loaded no engine, so it is as fresh as a new interpreter.

A run is a command line of tokenmill, or ``call`` with a function's name and one argument, or
``program`` with the source of one and its arguments. Its ``fault`` arms the shim that the zygote
was started with; the modules of its ``imports`` are imported in the zygote.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from pathlib import Path
from typing import Any


def preload(more: list[str]) -> None:
    """Import all of tokenmill but the integrations, and what it imports lazily."""
    import tokenmill

    packages = pkgutil.iter_modules(tokenmill.__path__, "tokenmill.")
    skipped = ("tokenmill.integrations", "tokenmill.__main__")
    names = [package.name for package in packages if package.name not in skipped]
    for name in list(names):
        inside = getattr(importlib.import_module(name), "__path__", ())
        names += [found.name for found in pkgutil.walk_packages(inside, f"{name}.")]
    lazily = ["jinja2", "tokenizers", "rich.console", "tests.faults.world"]
    for name in [*more, *names, *lazily]:
        importlib.import_module(name)
    import numpy
    import pyarrow

    pyarrow.array(numpy.zeros(1))  # what pyarrow itself imports on first use
    from tokenmill.cli import main

    # A command that touches no cache, for what the command line imports on first use.
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        main(["cache", "list", "--cache-dir", empty, "--json"])


def run_program(source: str, arguments: list[str]) -> int:
    """Run a program as an interpreter would that was started for it; its exit code."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the zygote's own
    main_module = types.ModuleType("__main__")
    sys.modules["__main__"] = main_module
    sys.argv = ["-c", *arguments]
    sys.path[0] = ""
    code: Any = 0
    try:
        exec(compile(source, "<program>", "exec"), main_module.__dict__)
    except SystemExit as left:
        code = left.code or 0
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    return int(code)


def live(run: dict[str, Any], directory: Path, gate: int) -> None:
    code = 70
    try:
        os.setsid()
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(directory / name, os.O_WRONLY | os.O_CREAT), number)
        os.environ.update(run.get("environment", {}))
        os.chdir(run.get("directory", "."))
        if "umask" in run:
            os.umask(run["umask"])
        os.read(gate, 1)
        time.sleep(run.get("delay", 0.0))
        shim = ctypes.CDLL(None) if run.get("fault") else None
        if shim is not None:
            shim.tokenmill_arm(run["fault"].encode())
        if "call" in run:
            module, _, function = run["call"].partition(":")
            code = getattr(importlib.import_module(module), function)(run["argument"])
        elif "program" in run:
            code = run_program(run["program"], run.get("arguments", []))
        else:
            from tokenmill.cli import main

            code = main(run["arguments"])
        if shim is not None:
            seen = shim.tokenmill_seen()
            shim.tokenmill_arm(None)
            (directory / "seen").write_text(str(seen))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def import_once(names: list[str]) -> None:
    if not sys.modules.keys() >= set(names):
        for name in names:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()


def answer(request: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    import_once([name for run in request["runs"] for name in run.get("imports", ())])
    gate, opening = os.pipe()
    children = []
    for number, run in enumerate(request["runs"]):
        place = directory / str(number)
        place.mkdir()
        pid = os.fork()
        if pid == 0:
            os.close(opening)
            live(run, place, gate)
        children.append((pid, place))
    os.close(opening)
    os.close(gate)
    deadline = time.monotonic() + request["timeout"]
    return [ending(pid, place, deadline) for pid, place in children]


def ending(pid: int, place: Path, deadline: float) -> dict[str, Any]:
    late = False
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > deadline:
            late = True
            os.kill(pid, signal.SIGCONT)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    texts = {}
    for name in ("stdout", "stderr", "seen"):
        path = place / name
        texts[name] = path.read_text() if path.exists() else ""
    seen = int(texts.pop("seen") or 0)
    return {"exit": os.waitstatus_to_exitcode(status), "late": late, "seen": seen, **texts}


def main() -> None:
    preload(sys.argv[1:])
    gc.collect()
    gc.freeze()  # what is imported is nothing that a child's collector would have to walk through
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "\n":  # an end that no copy of the pipe in some forked process can hold up
            break
        with tempfile.TemporaryDirectory(prefix="tokenmill-zygote-") as directory:
            print(json.dumps(answer(json.loads(line), Path(directory))), flush=True)


if __name__ == "__main__":
    main()
