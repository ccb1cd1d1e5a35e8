"""`python -m conformance.child JOB OUT`: run one driver in its own process.

The job (JSON) has the driver's name, the trainer's paths, and the directory and rows of each
template. The output (JSON) has the result of each row, and the time and memory for plain rows of
one template, without imports and without loading the tokenizer.
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

from conformance.stand_ins import stand_in
from conformance.trainers import describe, driver


def _status(name: str) -> int:
    """Return a field of the process status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _timed(module: Any, job: dict[str, Any]) -> dict[str, Any] | None:
    """Measure processor time and memory of one plain row and of all.

    Returns None if the trainer does not serve all of them.
    """
    from transformers import AutoTokenizer

    timing = job["timing"]
    tokenizer = AutoTokenizer.from_pretrained(timing["directory"])
    try:
        module.prepare(timing["rows"][:1], tokenizer, timing["name"])  # without the time of imports
        begin = time.process_time()
        module.prepare(timing["rows"][:1], tokenizer, timing["name"])
        first = time.process_time() - begin
        Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
        resident, begin = _status("VmRSS"), time.process_time()
        prepared = module.prepare(timing["rows"], tokenizer, timing["name"])
        seconds = time.process_time() - begin
    except Exception:  # the results of the rows have the error
        return None
    if any(isinstance(one, str) for one in prepared):
        return None
    grown = _status("VmHWM") - resident
    return {"first": first, "seconds": seconds, "grown": grown, "rows": len(prepared)}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Prepare the rows of every template, or return why the trainer cannot be imported."""
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
        except Exception as error:  # the trainer accepts no row of this template
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
    warnings.filterwarnings("ignore")
    logging.disable(logging.ERROR)
    os.environ["HF_HUB_OFFLINE"] = "1"
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(job)))


if __name__ == "__main__":
    main()
