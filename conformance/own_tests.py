"""The hosts' own test files, run on our classes and on their own.

Each of `FILES` is run twice by pytest in the host's checkout: with its own class, and with ours put
in its place by `conformance.replacements`. Tests that fail with both say nothing of us: they want a
GPU, a download, or another version of a library.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from conformance.hosts import driver
from conformance.page import OwnTests

HERE = Path(__file__).parent
TIMEOUT_S = 1800


@dataclass(frozen=True)
class File:
    """A test file of a host, and what of ours takes which place."""

    host: str
    checkout: str
    path: str
    replaced: str
    """What is replaced by what; or, without ``by``, why nothing is."""
    by: str = ""
    paths: tuple[str, ...] = ("",)
    """What of the checkout goes onto the path of modules."""
    stand_ins: tuple[str, ...] = ()
    apart: bool = False
    """The tests come from a checkout, and the package that they test from elsewhere."""
    package: str = ""
    """Imported before the tests are, where they lie inside of a package of the same name."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Part of a test's name → why it fails with ours."""


SKYRL = {"paths": driver("skyrl_every").PATHS, "stand_ins": driver("skyrl_every").STAND_INS}
SLIME = {"stand_ins": driver("slime").STAND_INS}
VERL = {"paths": (), "stand_ins": driver("verl").STAND_INS, "apart": True}
GRAIN = {"paths": (), "apart": True, "package": "grain"}
STATE = (
    "the test loads the state into a sampler of another seed, which SkyRL's generator forgives; "
    "ours refuses it and says both seeds, and goes on exactly with the same one"
)
WORDS = "refused by both, in other words than the test looks for"
GOLDEN = "the test lists the order that grain's own shuffle gives; ours is another permutation"
PIECES = (
    "the same rows in the same number of packs; ours numbers packs by their first row and keeps "
    "the order of rows inside of one"
)

FILES = (
    File("SkyRL", "SkyRL", "tests/train/test_sft_dataloader.py",
         "`StatefulSequentialSampler`, `DataMixingSampler` by `skyrl.Sampler`", "skyrl_samplers",
         **SKYRL,
         why={
             "test_validates": WORDS,
             "test_rejects_degenerate": WORDS,
             "test_empty_dataset": "refused by both: by ours when the sampler is made, by SkyRL "
                                   "when training begins",
             "test_position_only": "a state without its seed says not in which order it stands: "
                                   "SkyRL warns and guesses, ours refuses",
             "test_state_dict_resumes": "the test states the whole of SkyRL's state, a position; "
                                        "ours also says of which data and order it is",
             "resume": STATE,
         }),
    File("SkyRL", "SkyRL", "tests/train/test_sft_tokenization.py",
         "`tokenize_chat_example` by a row of `tokenmill.prepare`", "skyrl_tokenization", **SKYRL,
         why={"non_contiguous": "the same tokens are trained; SkyRL's window begins with the "
                                "untrained generation prompt, ours with the first trained token"}),
    File("SkyRL", "SkyRL", "tests/train/test_sft_packing_collate.py",
         "nothing: SkyRL's own collator takes our rows", **SKYRL),
    File("SkyRL", "SkyRL", "tests/train/test_sft_pretokenized.py",
         "nothing: it reads files of SkyRL's own form; ours reads stores", **SKYRL),
    File("SkyRL", "SkyRL", "tests/train/test_sft_config.py",
         "nothing: SkyRL's settings, which ours does not touch", **SKYRL),
    File("miles", "miles", "tests/fast/utils/test_mask_utils.py",
         "`MultiTurnLossMaskGenerator` by rows of `tokenmill.prepare`", "miles_masks", **SLIME),
    File("miles", "miles", "tests/fast/router/test_linear_trajectory.py",
         "nothing: a registry of sessions behind a server, which ours has not", **SLIME),
    File("miles", "miles", "tests/fast/router/test_tree_trajectory.py",
         "nothing: a registry of sessions behind a server, which ours has not", **SLIME),
    File("slime", "slime", "tests/plugin_contracts",
         "`RolloutDataSource` by `miles.DataSource`", "slime_data_source", **SLIME),
    File("slime", "slime", "tests/utils/test_mask_utils.py",
         "`MultiTurnLossMaskGenerator` by rows of `tokenmill.prepare`", "slime_masks", **SLIME),
    File("slime", "slime", "tests/test_agent/test_trajectory_manager_branching.py",
         "nothing: it records turns of a live session; ours reads what was recorded", **SLIME),
    File("verl", "verl-git", "tests/utils/dataset/test_multiturn_sft_dataset_on_cpu.py",
         "`MultiTurnSFTDataset` by `verl.SFTDataset`", "verl_sft", **VERL),
    File("verl", "verl-git", "tests/utils/dataset/test_rl_dataset_on_cpu.py",
         "`RLHFDataset` by `verl.RLDataset`", "verl_rl", **VERL),
    File("verl", "verl-git", "tests/utils/dataset/test_rl_collate_fn_on_cpu.py",
         "nothing: verl's own function collates our rows", **VERL),
    File("verl", "verl-git", "tests/utils/dataset/test_create_rl_sampler_on_cpu.py",
         "nothing: it makes samplers from verl's settings", **VERL),
    File("verl", "verl-git", "tests/utils/dataset/test_sft_dataset_on_cpu.py",
         "nothing: the class is no longer in the package", **VERL),
    File("verl", "verl-git", "tests/utils/test_seqlen_balancing.py",
         "`get_seqlen_balanced_partitions` by the balance of `MicroBatches`, but for partitions of "
         "equally many rows", "verl_balancing", **VERL),
    File("TRL", "trl-git", "tests/test_data_utils.py",
         "`pack_dataset` with `bfd` and `bfd_split` by `Pack`", "trl_packing",
         why={"TestPackDatasetBfd": PIECES}),
    File("grain", "grain", "grain/_src/python/samplers_test.py",
         "the permutation of `IndexSampler` by our order", "grain_order", **GRAIN,
         why={"test_shuffle": GOLDEN}),
    File("grain", "grain", "grain/_src/python/dataset/transformations/shuffle_test.py",
         "the permutation of `ShuffleMapDataset` by our order", "grain_order", **GRAIN,
         why={"test_cross_version_determinism": GOLDEN}),
    File("streaming", "streaming", "tests/test_streaming.py",
         "`StreamingDataset`, `StreamingDataLoader` of one stream by `Loader`", "streaming_loader"),
)  # fmt: skip

MODELS = {
    "Qwen/Qwen2.5-0.5B": "qwen2.5",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5",
    "Qwen/Qwen2.5-Coder-7B-Instruct": "qwen2.5",
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "trl/qwen3_instruct_2507@qwen3",
}
"""Models that the tests name, and the tokenizers and templates that we have of theirs: under
``~/models``, and where the hub's library keeps what it has fetched."""

ABSENT = ("config.json", "added_tokens.json", "special_tokens_map.json", "vocab.json",
          "merges.txt", "vocab.txt", "processor_config.json",
          "preprocessor_config.json")  # fmt: skip
"""Files that the hub's library is to know as missing: it would ask for them and find no network."""


def _home(places: Mapping[str, Path], directory: Path) -> Path:
    """The same directory for every run: it is part of the tests' names."""
    for name, model in MODELS.items():
        place = directory / "models" / name
        if model in places and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(places[model])
        kept = directory / "hub" / f"models--{name.replace('/', '--')}"
        if model in places and not kept.exists():
            (kept / "snapshots").mkdir(parents=True)
            (kept / "refs").mkdir()
            (kept / "refs" / "main").write_text("local")
            (kept / "snapshots" / "local").symlink_to(places[model])
            absent = kept / ".no_exist" / "local"
            absent.mkdir(parents=True)
            for file in ABSENT:
                (absent / file).touch()
    return directory


def count(report: Path) -> dict[str, set[str]]:
    """Names of tests by outcome, from pytest's report; ``reached`` are those that came to ours."""
    outcomes: dict[str, set[str]] = {
        "passed": set(), "failed": set(), "skipped": set(), "reached": set(),
    }  # fmt: skip
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "passed"
        outcome = "skipped" if "skipped" in kinds else outcome
        name = f"{case.get('classname')}::{case.get('name')}"
        outcomes[outcome].add(name)
        if any(one.get("name") == "ours" for one in case.iter("property")):
            outcomes["reached"].add(name)
    return outcomes


def run_file(file: File, hosts: Path, home: Path, *, replace: bool) -> dict[str, set[str]] | str:
    """One run of pytest; text where there is nothing to count."""
    paths = [str(hosts / file.checkout / path) for path in file.paths]
    python = hosts / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        ours = Path(directory) / "ours"  # without our own package of tests, which would hide theirs
        ours.mkdir()
        (ours / "conformance").symlink_to(HERE)
        environment = {
            **os.environ,
            "PYTHONPATH": ":".join([*paths, str(HERE.parent / "src"), str(ours)]),
            "CONFORMANCE_REPLACE": file.by if replace else "",
            "CONFORMANCE_PACKAGE": file.package,
            "CONFORMANCE_STAND_INS": ",".join(file.stand_ins),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "1",
            "HOME": str(home),
            "TOKENMILL_CACHE_DIR": str(Path(directory) / "cache"),
            "TOKENMILL_DATE": "2026-11-15",
        }
        importlib_mode = ["--import-mode=importlib"] if file.apart else []
        try:
            answer = subprocess.run(
                [python if python.exists() else sys.executable, *(["-P"] if file.apart else []),
                 "-m", "pytest", file.path, "-q", *importlib_mode,
                 "-p", "conformance.replacements", "-p", "no:cacheprovider",
                 f"--junitxml={report}", "--timeout=300", "-o", "addopts="],
                cwd=hosts / file.checkout, env=environment, capture_output=True, text=True,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"no end within {TIMEOUT_S} s"
        if not report.exists():
            last = (answer.stdout + answer.stderr).strip().splitlines() or ["no word"]
            return last[-1][:160]
        return count(report)


def explain(file: File, name: str) -> str:
    """Why a test fails with ours, as far as somebody has looked."""
    return next((why for part, why in file.why.items() if part in name), "not looked at")


def run_own_tests(
    hosts: Path, places: Mapping[str, Path], kept: Path, *, again: bool, jobs: int = 1
) -> list[OwnTests]:
    """Every file, on our classes and on the host's; or what is kept of the last run."""
    if not again:
        known = json.loads(kept.read_text()) if kept.exists() else []
        tests = [OwnTests(**one) for one in known]
        for one, file in itertools.product(tests, FILES):
            if (one.host, one.file) == (file.host, file.path):  # said anew, as it is known today
                one.failures = [(name, explain(file, name)) for name, _ in one.failures]
        return tests
    home = _home(places, kept.parent / "home")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some hosts leave files open

    def judge(file: File) -> OwnTests:
        return _judge(file, hosts, home)

    with ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(judge, FILES))
    kept.write_text(json.dumps([dataclasses.asdict(one) for one in results]))
    return results


def _judge(file: File, hosts: Path, home: Path) -> OwnTests:
    """One file, on the host's own classes and on ours."""
    one = OwnTests(file.host, file.path, file.replaced)
    if not (hosts / file.checkout / file.path).exists():
        one.not_run = f"no {file.checkout}/{file.path} under HOSTS"
        return one
    print(f"own tests of {one.host}: {file.path} …", file=sys.stderr, flush=True)
    alone = run_file(file, hosts, home, replace=False)
    if isinstance(alone, str):
        one.not_run = alone
        return one
    one.passed_alone, one.failed_alone = len(alone["passed"]), len(alone["failed"])
    one.skipped = len(alone["skipped"])
    replaced = run_file(file, hosts, home, replace=True) if file.by else None
    if isinstance(replaced, str):
        one.not_run = replaced
    elif replaced is not None:
        one.passed = len(replaced["passed"])
        one.reached = len(replaced["reached"] & replaced["passed"])
        failed = sorted(replaced["failed"] - alone["failed"])
        one.failures = [(name, explain(file, name)) for name in failed]
    print(f"{one.host}: {file.path}: {one}", file=sys.stderr, flush=True)
    return one
