"""`python -m conformance --hosts DIR`: run the hosts that are there, judge, write the page.

Answers are kept in ``DIR/.answers``, one file per driver, so that ``--page-only`` judges and writes
again without running, and a run of some drivers leaves the others' as they were. Hosts run under
``DIR/.venv/bin/python`` where there is one: an environment with what they import, beside ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.conftest import unpack_shared

from conformance.conversations import Case, all_cases, corpus_cases
from conformance.goldens import hold
from conformance.hosts import DRIVERS, driver
from conformance.judge import Answer, Question, difference, judge
from conformance.own_tests import FILES, run_own_tests
from conformance.page import Host, Judged, render
from conformance.reference import Model

HERE = Path(__file__).parent
TEMPLATES = ("qwen2.5", "qwen3", "trl/qwen3_instruct_2507@qwen3", "llama3.1", "gemma3",
             "mistral-nemo", "phi-3-mini", "deepseek-v3", "gpt-oss")  # fmt: skip
"""Tokenizers with templates of their own, or ``template@tokenizer``."""
TIMED = "qwen2.5"
TIMED_ROWS = 400
TIMEOUT_S = 3600
LIBRARIES = ("transformers", "tokenizers", "datasets", "torch")


def model_directory(shared: Path, name: str, work: Path) -> Path:
    """The tokenizer's directory, or a copy of it with another template."""
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


def ask(model: Model, cases: Iterable[Case]) -> list[Question]:
    """The rows that the model's own template renders."""
    questions = []
    for case in cases:
        try:
            ids = model.ids(case)
        except ValueError:  # nobody can be judged by a row that the template itself refuses
            continue
        questions.append(Question(case, ids, model.pieces(ids), model.glue))
    return questions


def python_of(hosts: Path) -> Path:
    """The Python that hosts run with: their own, or ours."""
    python = hosts / ".venv" / "bin" / "python"
    return python if python.exists() else Path(sys.executable)


def run_driver(name: str, hosts: Path, job: dict[str, Any]) -> dict[str, Any]:
    """One driver in a process of its own; what keeps it from running is its result."""
    module = driver(name)
    root = None if module.CHECKOUT is None else hosts / module.CHECKOUT
    if root is not None and not root.is_dir():
        return {"not_run": f"no directory {module.CHECKOUT} under HOSTS"}
    paths = [str(root / path) for path in module.PATHS] if root else []
    with tempfile.TemporaryDirectory() as directory:
        given, made = Path(directory) / "job.json", Path(directory) / "made.json"
        given.write_text(json.dumps({**job, "driver": name, "paths": paths}))
        answer = subprocess.run(
            [python_of(hosts), "-m", "conformance.child", given, made],
            cwd=HERE.parent,
            env={**os.environ, "PYTHONPATH": f"{HERE.parent / 'src'}:{HERE.parent}"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if not made.exists():
            last = (answer.stderr.strip().splitlines() or ["no word"])[-1]
            return {"not_run": last[:200]}
        result: dict[str, Any] = json.loads(made.read_text())
    result["version"] = describe_version(root, result.get("version", ""))
    return result


def describe_version(root: Path | None, version: str) -> str:
    """The commit of a checkout with its date, or the version of a package."""
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
    """When, with which libraries, and how to lay the hosts out."""
    versions = [f"{name} {metadata.version(name)}" for name in LIBRARIES]
    checkouts = [driver(name).CHECKOUT for name in DRIVERS]
    checkouts += [*(file.checkout for file in FILES), "renderers"]
    places = ", ".join(f"`{name}`" for name in dict.fromkeys(checkouts) if name)
    return (
        f"Judged on {date.today().isoformat()}; the hosts, ours and the judge with "
        f"{', '.join(versions)}. Directories under `HOSTS`: {places}; `renderers` is its source "
        "distribution, for its tests. A `.venv` there is the Python that the hosts run with. TRL, "
        "verl, grain and renderers come from the package index."
    )


def judge_host(
    name: str, result: dict[str, Any], models: dict[str, Model], asked: dict[str, list[Question]]
) -> Host:
    """All answers of a host, judged."""
    module = driver(name)
    host = Host(module.NAME, module.HOW, module.TRAINS, result.get("version", ""),
                result.get("not_run"), result.get("timing"))  # fmt: skip
    for template, answers in result.get("answers", {}).items():
        if template not in asked:
            continue
        for question, given in zip(asked[template], answers, strict=True):
            judged = Judged(template, question.case.name, given.get("error"))
            if judged.error is None:
                pieces = models[template].pieces(given["ids"])
                answer = Answer(given["ids"], given["mask"], pieces)
                wanted = Question(question.case, question.ids, question.pieces, question.glue,
                                  module.TRAINS)  # fmt: skip
                judged.verdict = judge(wanted, answer)
                if judged.verdict.ids != "same":
                    judged.difference = difference(wanted, answer)
            host.rows.append(judged)
    return host


def main() -> int:
    """Run, judge, write."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--hosts", type=Path, required=True, help="directory with checkouts")
    parser.add_argument("--rows", type=int, default=16, help="rows of the corpora per template")
    parser.add_argument("--templates", default=",".join(TEMPLATES))
    parser.add_argument("--drivers", default=",".join(DRIVERS))
    parser.add_argument("--page", type=Path, default=HERE.parent / "docs" / "conformance.md")
    parser.add_argument("--page-only", action="store_true", help="judge the kept answers again")
    parser.add_argument(
        "--jobs", type=int, default=1, help="drivers, and files of tests, that run at the same time"
    )
    parser.add_argument(
        "--tests-of",
        default=",".join(dict.fromkeys(file.host for file in FILES)),
        help="hosts whose own tests are run again",
    )
    arguments = parser.parse_args()
    python = python_of(arguments.hosts)
    if python != Path(sys.executable):  # whoever judges renders with the library that the hosts use
        paths = {"PYTHONPATH": f"{HERE.parent / 'src'}:{HERE.parent}"}
        os.execve(python, [python, "-m", "conformance", *sys.argv[1:]], {**os.environ, **paths})
    shared = unpack_shared()
    if shared is None:
        raise SystemExit("conformance needs ../shared/data, which is not beside this checkout")
    os.environ["HF_HUB_OFFLINE"] = "1"
    kept = arguments.hosts / ".answers"
    kept.mkdir(exist_ok=True)
    cases = all_cases(shared, arguments.rows)
    names = [name for name in arguments.templates.split(",") if name]
    places = {name: model_directory(shared, name, kept / "models") for name in names}
    models = {name: Model(name, place) for name, place in places.items()}
    asked = {name: ask(model, cases) for name, model in models.items()}
    job = {
        "templates": [
            {"name": name, "directory": str(places[name]), "rows": [q.case.row for q in questions]}
            for name, questions in asked.items()
        ],
        "timing": {
            "name": TIMED,
            "directory": str(shared / "tokenizers" / TIMED),
            "rows": [case.row for case in corpus_cases(shared, TIMED_ROWS, ["alpaca_eval_en"])],
        },
    }
    asked_for = [] if arguments.page_only else arguments.drivers.split(",")

    def answer(name: str) -> None:
        print(f"{name} …", file=sys.stderr, flush=True)
        result = run_driver(name, arguments.hosts, job)
        (kept / f"{name}.json").write_text(json.dumps(result))
        print(f"{name} done", file=sys.stderr, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(answer, [name for name in DRIVERS if name in asked_for]))
    hosts = []
    for name in DRIVERS:
        path = kept / f"{name}.json"
        result = json.loads(path.read_text()) if path.exists() else {"not_run": "not asked for"}
        hosts.append(judge_host(name, result, models, asked))
        print(f"{name}: {hosts[-1].summary()}", file=sys.stderr, flush=True)
    again = [] if arguments.page_only else arguments.tests_of.split(",")
    tests = run_own_tests(arguments.hosts, places, kept / "own_tests.json", again=again,
                          jobs=arguments.jobs, corpora=shared / "corpora")  # fmt: skip
    goldens = hold(arguments.hosts, shared)
    page = render(hosts, tests, len(cases), describe_setup(), goldens)
    arguments.page.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
