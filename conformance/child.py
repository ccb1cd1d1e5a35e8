"""`python -m conformance.child JOB OUT`: one driver, in a process of its own.

The job is JSON: the driver's name, the host's paths, and per template its directory and its rows.
Out goes one JSON document: what the host answered for each row, and the seconds and the memory that
it took for plain rows of one template, without imports and without loading the tokenizer.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from conformance.hosts import describe, driver
from conformance.stand_ins import stand_in


def _status(name: str) -> int:
    """A line of the process's own account, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _timed(module: Any, job: dict[str, Any]) -> dict[str, Any] | None:
    """Processor time and memory of plain rows; None where the host does not serve them all.

    Of one row, which shows what a call costs before its first row, and of all.
    """
    from transformers import AutoTokenizer

    timing = job["timing"]
    tokenizer = AutoTokenizer.from_pretrained(timing["directory"])
    try:
        module.prepare(timing["rows"][:1], tokenizer, timing["name"])  # imports are no part of it
        begin = time.process_time()
        module.prepare(timing["rows"][:1], tokenizer, timing["name"])
        first = time.process_time() - begin
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
        resident, begin = _status("VmRSS"), time.process_time()
        prepared = module.prepare(timing["rows"], tokenizer, timing["name"])
        seconds = time.process_time() - begin
    except Exception:  # said by the answers, which come from the same call
        return None
    if any(isinstance(one, str) for one in prepared):
        return None
    grown = _status("VmHWM") - resident
    return {"first": first, "seconds": seconds, "grown": grown, "rows": len(prepared)}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Prepare the rows of every template; a host that cannot be imported says why."""
    from transformers import AutoTokenizer

    sys.path[:0] = job["paths"]
    module = driver(job["driver"])
    stand_in(module.STAND_INS)
    answers: dict[str, Any] = {}
    for template in job["templates"]:
        tokenizer = AutoTokenizer.from_pretrained(template["directory"])
        try:
            with getattr(module, "untimed", contextlib.nullcontext)():
                prepared = module.prepare(template["rows"], tokenizer, template["name"])
        except ImportError as error:
            return {"not_run": describe(error)}
        except Exception as error:  # a host that takes none of the rows of this template
            prepared = [describe(error)] * len(template["rows"])
        answers[template["name"]] = [
            {"error": one} if isinstance(one, str) else {"ids": one[0], "mask": one[1]}
            for one in prepared
        ]
    return {"answers": answers, "timing": _timed(module, job), "version": _version(module)}


def _version(module: Any) -> str:
    try:
        return importlib.metadata.version(module.PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main() -> None:
    """Run the job of the command line."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    os.environ["HF_HUB_OFFLINE"] = "1"
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(job)))


if __name__ == "__main__":
    main()
