"""The hosts' own test files, run on our classes and on their own.

Each of `FILES` is run twice by pytest in the host's checkout: with its own class, and with ours put
in its place by `conformance.replacements`. Tests that fail with both say nothing of us: they want a
GPU, a download, or another version of a library.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.hosts import driver
from conformance.page import OwnTests

HERE = Path(__file__).parent
TIMEOUT_S = 1200


@dataclass(frozen=True)
class File:
    """A test file of a host, and what of ours takes which place."""

    driver: str
    checkout: str
    path: str
    replaced: str
    by: str
    apart: bool = False
    """The tests come from a checkout, and the package that they test from elsewhere."""


FILES = (
    File("skyrl_every", "SkyRL", "tests/train/test_sft_dataloader.py",
         "`StatefulSequentialSampler`, `DataMixingSampler` by `skyrl.Sampler`", "skyrl_samplers"),
    File("slime", "slime", "tests/plugin_contracts",
         "`RolloutDataSource` by `miles.DataSource`", "slime_data_source"),
    File("verl", "verl-git", "tests/utils/dataset/test_multiturn_sft_dataset_on_cpu.py",
         "`MultiTurnSFTDataset` by `verl.SFTDataset`", "verl_sft", apart=True),
    File("verl", "verl-git", "tests/utils/dataset/test_rl_dataset_on_cpu.py",
         "`RLHFDataset` by `verl.RLDataset`", "verl_rl", apart=True),
)  # fmt: skip

MODELS = {
    "Qwen/Qwen2.5-0.5B": "qwen2.5",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5",
    "Qwen/Qwen2.5-Coder-7B-Instruct": "qwen2.5",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "trl/qwen3_instruct_2507@qwen3",
}
"""Models that the tests name under ``~/models``, and the tokenizers and templates of theirs."""


def _home(places: Mapping[str, Path], directory: Path) -> Path:
    """The same directory for every run: it is part of the tests' names."""
    for name, model in MODELS.items():
        place = directory / "models" / name
        if model in places and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(places[model])
    return directory


def count(report: Path) -> dict[str, set[str]]:
    """Names of tests by outcome, from pytest's report."""
    outcomes: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds else outcome
        outcomes[outcome].add(f"{case.get('classname')}::{case.get('name')}")
    return outcomes


def run_file(file: File, hosts: Path, home: Path, *, replace: bool) -> dict[str, set[str]] | str:
    """One run of pytest; text where there is nothing to count."""
    module = driver(file.driver)
    paths = [str(hosts / (module.CHECKOUT or "") / path) for path in module.PATHS]
    python = hosts / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        environment = {
            **os.environ,
            "PYTHONPATH": ":".join([*paths, str(HERE.parent / "src"), str(HERE.parent)]),
            "CONFORMANCE_REPLACE": file.by if replace else "",
            "CONFORMANCE_STAND_INS": ",".join(module.STAND_INS),
            "HF_HUB_OFFLINE": "1",
            "HOME": str(home),
            "TOKENMILL_CACHE_DIR": str(Path(directory) / "cache"),
            "TOKENMILL_DATE": "2026-11-15",
        }
        answer = subprocess.run(
            [python if python.exists() else sys.executable, *(["-P"] if file.apart else []),
             "-m", "pytest", file.path, "-q", *(["--import-mode=importlib"] if file.apart else []),
             "-p", "conformance.replacements", "-p", "no:cacheprovider",
             f"--junitxml={report}", "--timeout=300"],
            cwd=hosts / file.checkout, env=environment, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        if not report.exists():
            last = (answer.stdout + answer.stderr).strip().splitlines() or ["no word"]
            return last[-1][:160]
        return count(report)


def run_own_tests(
    hosts: Path, places: Mapping[str, Path], kept: Path, *, again: bool
) -> list[OwnTests]:
    """Every file, on our classes and on the host's; or what is kept of the last run."""
    if not again:
        known = json.loads(kept.read_text()) if kept.exists() else []
        return [OwnTests(**one) for one in known]
    results: list[OwnTests] = []
    home = _home(places, kept.parent / "home")
    for file in FILES:
        one = OwnTests(driver(file.driver).NAME, file.path, file.replaced)
        results.append(one)
        if not (hosts / file.checkout / file.path).exists():
            one.not_run = f"no {file.checkout}/{file.path} under HOSTS"
            continue
        print(f"own tests of {one.host}: {file.path} …", file=sys.stderr, flush=True)
        alone = run_file(file, hosts, home, replace=False)
        replaced = run_file(file, hosts, home, replace=True)
        if isinstance(alone, str) or isinstance(replaced, str):
            one.not_run = next(text for text in (alone, replaced) if isinstance(text, str))
            continue
        one.passed = len(replaced["passed"])
        one.failed = len(replaced["failed"] - alone["failed"])
        one.skipped = len(replaced["skipped"])
        one.passed_alone = len(alone["passed"])
        one.failures = sorted(replaced["failed"] - alone["failed"])
        kept.write_text(json.dumps([dataclasses.asdict(one) for one in results]))
    return results
