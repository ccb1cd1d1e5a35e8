"""The entry of the executors' tests: it does what a payload says; a worker imports nothing else.

With ``in_rest`` it does so in the rest of the task. Faults that must happen once leave a mark in a
directory, so that the retry finds it and goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import pkgutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tokenmill.errors import RowError, UsageError

FAULTS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSTOP": lambda: signal.raise_signal(signal.SIGSTOP),  # this very thread goes no further
    "exit": lambda: os._exit(7),
    "exit0": lambda: os._exit(0),
    "sys.exit": lambda: sys.exit(3),
    "MemoryError": lambda: bytearray(1 << 60),
}


def once(mark: str | None) -> bool:
    """True for the first caller only; without a mark, always."""
    if mark is None:
        return True
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def hold_interpreter(seconds: float) -> None:
    text = ctypes.create_string_buffer(b"x" * (1 << 22))
    strlen = ctypes.PyDLL(None).strlen  # unlike CDLL's, its calls do not release the lock
    end = time.monotonic() + seconds
    sys.setswitchinterval(3600)  # and no thread gets it between two calls
    while time.monotonic() < end:
        strlen(text)
    sys.setswitchinterval(0.005)


def open_worker(options: dict[str, Any]) -> Any:
    if options.get("bad"):
        raise UsageError("options are bad", path="recipe.yaml")
    if options.get("broken"):
        raise KeyError("broken")
    if "opened" in options:
        Path(options["opened"], str(os.getpid())).touch()
    if "die_starting" in options and once(options.get("mark")):
        FAULTS[options["die_starting"]]()
    return Worker(options)


def open_with_thread(options: dict[str, Any]) -> Any:
    """Open another entry and leave a thread, so that the server cannot fork."""
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return pkgutil.resolve_name(options["wrapped"])(options)


def open_engines(options: dict[str, Any]) -> Any:
    """Load both engines; a task uses them with threads."""
    import fastokens

    import tokenizers

    data = Path(options["tokenizer"], "tokenizer.json").read_text()
    reference = tokenizers.Tokenizer.from_str(data)
    fast = fastokens.Tokenizer.from_json_str(data)
    loaded = len(os.listdir("/proc/self/task"))  # with the thread of the heartbeat

    def encode(payload: dict[str, Any]) -> dict[str, Any]:
        os.sched_setaffinity(0, payload["cores"])
        ids = [e.ids for e in reference.encode_batch(payload["texts"], add_special_tokens=False)]
        flat, _ = fast.encode_batch_flat(payload["texts"])
        return {"ids": ids, "fast": memoryview(flat).cast("B").hex(), "loaded": loaded,
                "threads": len(os.listdir("/proc/self/task")), "server": os.getppid()}  # fmt: skip

    return encode


class Worker:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def __call__(self, payload: dict[str, Any]) -> dict[str, Any]:
        do = functools.partial(getattr(self, payload["do"]), payload)
        return do if payload.get("in_rest") else do()

    def close(self) -> None:
        if "closed" in self.options:
            Path(self.options["closed"], str(os.getpid())).touch()
        if self.options.get("close_fails"):
            raise RuntimeError("close failed for the test's sake")

    def square(self, payload: dict[str, Any]) -> dict[str, Any]:
        if "fault" in payload and payload["when"] == "start" and once(payload.get("mark")):
            FAULTS[payload["fault"]]()
        value = payload["value"] ** 2
        if "fault" in payload and payload["when"] == "middle" and once(payload.get("mark")):
            time.sleep(0.05)
            FAULTS[payload["fault"]]()
        return {"value": value, "pair": (value, [str(value)])}

    def raise_row_error(self, payload: dict[str, Any]) -> dict[str, Any]:
        error = RowError("bad row", reason="bad_json", path="a.jsonl", row=3, line=4, offset=99)
        error.add_note("a note")
        raise error

    def raise_foreign(self, payload: dict[str, Any]) -> dict[str, Any]:
        raise ZeroDivisionError("for the test's sake")

    def unencodable(self, payload: dict[str, Any]) -> dict[str, Any]:
        return {"value": object()}

    def no_dict(self, payload: dict[str, Any]) -> Any:
        return [1, 2]

    def shout(self, payload: dict[str, Any]) -> dict[str, Any]:
        line = "x" * 1000
        for i in range(payload["lines"]):
            print(line, file=sys.stdout if i % 2 else sys.stderr)
        sys.stdout.flush()
        os.write(1, b"\x00\x00\x00\x05 not a frame\n")
        os.system("echo from a child; echo from a child >&2")
        if payload.get("fault"):
            print("the last words" + "y" * payload.get("long", 0), file=sys.stderr, flush=True)
            FAULTS[payload["fault"]]()
        return {"lines": payload["lines"]}

    def sleep(self, payload: dict[str, Any]) -> dict[str, Any]:
        if "pids" in payload:
            Path(payload["pids"], str(os.getpid())).touch()
        if payload.get("hold"):
            hold_interpreter(payload["seconds"])
        else:
            time.sleep(payload["seconds"])
        return {"slept": payload["seconds"]}

    def meet(self, payload: dict[str, Any]) -> Any:
        """Be seen; in the rest, wait until the next task was. Says how many rests ran at once."""
        place = Path(payload["place"])
        (place / f"begun-{payload['value']}").touch()

        def rest() -> dict[str, Any]:
            resting = place / f"resting-{payload['value']}"
            resting.touch()
            until = time.monotonic() + 20
            while payload["next"] and not (place / f"begun-{payload['value'] + 1}").exists():
                if time.monotonic() > until:
                    raise UsageError(f"nothing was begun while task {payload['value']} waited")
                time.sleep(0.01)
            time.sleep(0.1)  # the next task's rest would be seen by now
            at_once = len(list(place.glob("resting-*")))
            resting.unlink()
            return {"at_once": at_once}

        return rest

    def linger(self, payload: dict[str, Any]) -> Any:
        """Die, or leave a rest that another task's death overtakes."""
        if "fault" in payload:
            time.sleep(0.2)  # until the parent has seen that only a rest was left before
            FAULTS[payload["fault"]]()
        return functools.partial(self.sleep, {"seconds": 0.5})

    def leave_child(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Fork a child that keeps the channel open, then die."""
        if once(payload["mark"]):
            child = os.fork()
            if child == 0:
                time.sleep(20)
                os._exit(0)
            Path(payload["child"]).write_text(str(child))
            FAULTS["SIGKILL"]()
        return {"value": 1}

    def describe(self, payload: dict[str, Any]) -> dict[str, Any]:
        import tokenmill.errors

        return {
            "pid": os.getpid(),
            "server": os.getppid(),
            "cores": sorted(os.sched_getaffinity(0)),
            "tokenmill": tokenmill.errors.__file__,
            "path": sys.path,
            "shared_memory": shared_memory_of("self"),
            "env": dict(os.environ),
        }

    def import_engine(self, payload: dict[str, Any]) -> dict[str, Any]:
        import tokenizers

        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        return {"ids": [e.ids for e in words.encode_batch([payload["text"]] * 100)][-1]}


def shared_memory_of(pid: int | str) -> list[str]:
    """Shared memory that a process has mapped or open; in directories of /dev/shm tests write."""
    held = [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            held.append(os.readlink(fd))
    return sorted({path for path in held if os.path.dirname(path) == "/dev/shm"})
