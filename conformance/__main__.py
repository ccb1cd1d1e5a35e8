"""`python -m conformance --trainers DIR`: run the trainers found in DIR and write the page.

Results are stored in ``DIR/.answers``, one file per driver. ``--page-only`` checks them again
without running anything. Trainers run with ``DIR/.venv/bin/python`` if it exists.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.chat.encoder_oracle import deepseek_model
from tests.conftest import unpack_shared

from conformance.checks import Actual, Expected, check_row, difference
from conformance.conversations import Case, all_cases, corpus_cases
from conformance.goldens import run_goldens
from conformance.own_tests import FILES, run_own_tests
from conformance.page import GENERATED, CheckedRow, TrainerReport, render
from conformance.reference import Model
from conformance.trainers import DRIVERS, driver

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "internals" / "conformance.md"
TEMPLATES = ("qwen2.5", "qwen3", "trl/qwen3_instruct_2507@qwen3", "llama3.1", "gemma3",
             "mistral-nemo", "phi-3-mini", "deepseek-v3", "gpt-oss", "deepseek-v3.2")  # fmt: skip
"""Names of tokenizers, or ``template@tokenizer``."""
ENCODERS = {"deepseek-v3.2": "miles/miles/utils/chat_template_utils/templates/encoding_dsv32.py"}
"""Files under TRAINERS that encode the conversations of a model, in place of a template."""
TIMED = "qwen2.5"
TIMED_ROWS = 400
TIMEOUT_S = 3600
LIBRARIES = ("transformers", "tokenizers", "datasets", "torch")


def model_directory(shared: Path, name: str, work: Path, trainers: Path) -> Path:
    """Return the tokenizer's directory, or a copy of it with another template or an encoder."""
    if name in ENCODERS:
        shutil.rmtree(work / "deepseek", ignore_errors=True)
        made = deepseek_model(shared, work)
        (made / "encoding").mkdir()
        shutil.copy(trainers / ENCODERS[name], made / "encoding")
        return made
    template, _, tokenizer = name.partition("@")
    if not tokenizer:
        return shared / "tokenizers" / name
    made = work / name.replace("/", "-")
    made.mkdir(parents=True, exist_ok=True)
    for path in (shared / "tokenizers" / tokenizer).iterdir():
        target = made / path.name
        if path.name != "chat_template.jinja" and not target.exists():
            target.symlink_to(path)
    text = (shared / "templates" / f"{template}.jinja").read_text(encoding="utf-8")
    (made / "chat_template.jinja").write_text(text, encoding="utf-8")
    config = made / "tokenizer_config.json"
    values = json.loads(config.read_text(encoding="utf-8"))
    values.pop("chat_template", None)
    config.unlink()
    config.write_text(json.dumps(values), encoding="utf-8")
    return made


def render_expected(model: Model, cases: Iterable[Case]) -> list[Expected]:
    expected = []
    for case in cases:
        try:
            ids = model.ids(case)
        except ValueError:  # the template itself refuses the row
            continue
        expected.append(Expected(case, ids, model.pieces(ids), model.markers))
    return expected


def python_of(trainers: Path) -> Path:
    """Return the Python of the trainers' environment, or ours."""
    python = trainers / ".venv" / "bin" / "python"
    return python if python.exists() else Path(sys.executable)


def run_driver(name: str, trainers: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Run a driver in its own process and return its result, or the reason why it did not run."""
    module = driver(name)
    root = None if module.CHECKOUT is None else trainers / module.CHECKOUT
    if root is not None and not root.is_dir():
        return {"not_run": f"no directory {module.CHECKOUT} under TRAINERS"}
    paths = [str(root / path) for path in module.PATHS] if root else []
    with tempfile.TemporaryDirectory() as directory:
        job_file, result_file = Path(directory) / "job.json", Path(directory) / "result.json"
        job_file.write_text(json.dumps({**job, "driver": name, "paths": paths}))
        answer = subprocess.run(
            [python_of(trainers), "-m", "conformance.child", job_file, result_file],
            cwd=HERE.parent,
            env={**os.environ, "PYTHONPATH": f"{HERE.parent / 'src'}:{HERE.parent}"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if not result_file.exists():
            last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
            return {"not_run": last[:200]}
        result: dict[str, Any] = json.loads(result_file.read_text())
    result["version"] = describe_version(root, result.get("version", ""))
    return result


def describe_version(root: Path | None, version: str) -> str:
    """Return the commit and date of a checkout, or the version of a package."""
    if root is None or not (root / ".git").exists():
        return version
    shown = subprocess.run(
        ["git", "-C", root, "log", "-1", "--format=%h of %cs"],
        capture_output=True,
        text=True,
        check=False,
    )
    return shown.stdout.strip()


def describe_setup() -> str:
    versions = [f"{name} {metadata.version(name)}" for name in LIBRARIES]
    checkouts = [driver(name).CHECKOUT for name in DRIVERS]
    checkouts += [*(file.checkout for file in FILES), "renderers"]
    directories = ", ".join(f"`{name}`" for name in dict.fromkeys(checkouts) if name)
    return (
        f"Run on {date.today().isoformat()} with {', '.join(versions)}. Directories under "
        f"`TRAINERS`: {directories}; `renderers` is its source distribution, for its tests. If "
        "there is a `.venv`, the trainers run with its Python. TRL, verl, grain and renderers come "
        "from the package index."
    )


def check_trainer(
    name: str,
    result: dict[str, Any],
    models: dict[str, Model],
    expected_rows: dict[str, list[Expected]],
) -> TrainerReport:
    module = driver(name)
    report = TrainerReport(module.NAME, module.HOW, module.TRAINS, result.get("version", ""),
                result.get("not_run"), result.get("timing"))  # fmt: skip
    for template, answers in result.get("answers", {}).items():
        if template not in expected_rows:
            continue
        for one, returned in zip(expected_rows[template], answers, strict=True):
            checked = CheckedRow(template, one.case.name, returned.get("error"))
            if checked.error is None:
                pieces = models[template].pieces(returned["ids"])
                answer = Actual(returned["ids"], returned["mask"], pieces)
                expected = Expected(one.case, one.ids, one.pieces, one.markers,
                                  module.TRAINS)  # fmt: skip
                checked.result = check_row(expected, answer)
                if checked.result.ids != "same":
                    checked.difference = difference(expected, answer)
            report.rows.append(checked)
    return report


def main() -> int:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--trainers", type=Path, required=True, help="directory with checkouts")
    parser.add_argument("--rows", type=int, default=16, help="rows of the corpora per template")
    parser.add_argument("--templates", default=",".join(TEMPLATES))
    parser.add_argument("--drivers", default=",".join(DRIVERS))
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--page-only", action="store_true", help="check the stored results again")
    parser.add_argument(
        "--jobs", type=int, default=1, help="drivers, and files of tests, that run at the same time"
    )
    parser.add_argument(
        "--tests-of",
        default=",".join(dict.fromkeys(file.trainer for file in FILES)),
        help="trainers whose own tests are run again",
    )
    arguments = parser.parse_args()
    python = python_of(arguments.trainers)
    if python != Path(
        sys.executable
    ):  # render with the version of transformers that the trainers use
        paths = {"PYTHONPATH": f"{HERE.parent / 'src'}:{HERE.parent}"}
        os.execve(python, [python, "-m", "conformance", *sys.argv[1:]], {**os.environ, **paths})
    shared = unpack_shared()
    if shared is None:
        raise SystemExit(
            "conformance needs ../shared/data, which does not exist next to this checkout"
        )
    os.environ["HF_HUB_OFFLINE"] = "1"
    results_dir = arguments.trainers / ".answers"
    results_dir.mkdir(exist_ok=True)
    cases = all_cases(shared, arguments.rows)
    names = [name for name in arguments.templates.split(",") if name]
    names = [n for n in names if n not in ENCODERS or (arguments.trainers / ENCODERS[n]).exists()]
    work = results_dir / "models"
    work.mkdir(exist_ok=True)
    directories = {n: model_directory(shared, n, work, arguments.trainers) for n in names}
    models = {name: Model(name, directory) for name, directory in directories.items()}
    expected_rows = {name: render_expected(model, cases) for name, model in models.items()}
    job = {
        "templates": [
            {
                "name": name,
                "directory": str(directories[name]),
                "rows": [q.case.row for q in expected],
            }
            for name, expected in expected_rows.items()
        ],
        "timing": {
            "name": TIMED,
            "directory": str(shared / "tokenizers" / TIMED),
            "rows": [case.row for case in corpus_cases(shared, TIMED_ROWS, ["alpaca_eval_en"])],
        },
    }
    chosen = [] if arguments.page_only else arguments.drivers.split(",")

    def answer(name: str) -> None:
        print(f"{name} …", file=sys.stderr, flush=True)
        result = run_driver(name, arguments.trainers, job)
        (results_dir / f"{name}.json").write_text(json.dumps(result))
        print(f"{name} done", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(answer, [name for name in DRIVERS if name in chosen]))
    reports = []
    for name in DRIVERS:
        path = results_dir / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else {"not_run": "not selected"}
        reports.append(check_trainer(name, result, models, expected_rows))
        print(f"{name}: {reports[-1].summary()}", file=sys.stderr, flush=True)
    again = [] if arguments.page_only else arguments.tests_of.split(",")
    tests = run_own_tests(
        arguments.trainers,
        directories,
        results_dir / "own_tests.json",
        again=again,
        jobs=arguments.jobs,
        corpora=shared / "corpora",
    )
    goldens = run_goldens(arguments.trainers, shared)
    old_page = arguments.page.read_text(encoding="utf-8") if arguments.page.exists() else ""
    written_by_hand = old_page.partition(GENERATED)[0]
    page = render(reports, tests, len(cases), describe_setup(), goldens)
    arguments.page.write_text(written_by_hand + page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
