"""Run the trainers' own test files with their classes and with ours.

pytest runs each of `FILES` twice in the trainer's checkout: with its own class, and with ours as a
replacement (`conformance.replacements`). Tests that fail in both runs are not counted against us:
they need a GPU, a download, or another version of a library.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import xml.etree.ElementTree
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from conformance.page import OwnTests
from conformance.trainers import driver

HERE = Path(__file__).parent
TIMEOUT_S = 1800


@dataclass(frozen=True)
class File:
    """A test file of a trainer, and what it is run with."""

    trainer: str
    checkout: str
    path: str
    replaced: str
    """What is replaced by what; without ``by``, why nothing is."""
    by: str = ""
    prepare: str = ""
    """A function of `conformance.replacements` that both runs call."""
    keywords: str = ""
    """Argument of pytest's ``-k``; empty runs all tests."""
    paths: tuple[str, ...] = ("",)
    """Directories of the checkout that are added to ``sys.path``."""
    stand_ins: tuple[str, ...] = ()
    apart: bool = False
    """The tests come from a checkout, but the package is installed."""
    package: str = ""
    """Imported before the tests, if they are inside a package of the same name."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Part of a test's name → why it fails with ours."""


SKYRL = {"paths": driver("skyrl_every").PATHS, "stand_ins": driver("skyrl_every").STAND_INS}
SLIME = {"stand_ins": driver("slime").STAND_INS}
VERL = {"paths": (), "stand_ins": driver("verl").STAND_INS, "apart": True}
GRAIN = {"paths": (), "apart": True, "package": "grain"}
STATE = (
    "the test loads the state into a sampler of another seed, which SkyRL accepts; ours raises an "
    "error with both seeds, and resumes exactly with the same one"
)
SESSIONS = "nothing: a registry of sessions behind a server, which ours does not have"
WORDS = "both raise an error, with another message than the test expects"
POSITIONS = (
    "the position of `PrefetchDatasetIterator`, used by every loader and iterator, by `Loader`"
)
ONE_STREAM = (
    "not (per_stream or stratified or epoch_size or balanced or sampling_method or block_warning "
    "or custom_stream or batch_size_exception)"
)
GOLDEN = "the test lists the order that grain's own shuffle gives; ours is another permutation"
PIECES = (
    "the same rows in the same number of packs; ours sorts packs by their first row and keeps "
    "the order of rows in a pack"
)

FILES = (
    File("SkyRL", "SkyRL", "tests/train/test_sft_dataloader.py",
         "`StatefulSequentialSampler`, `DataMixingSampler` by `skyrl.Sampler`", "skyrl_samplers",
         **SKYRL,
         why={
             "test_validates": WORDS,
             "test_rejects_degenerate": WORDS,
             "test_empty_dataset": "both raise an error: ours when the sampler is created, SkyRL "
                                   "when training begins",
             "test_position_only": "a state without a seed does not determine the order: SkyRL "
                                   "warns and guesses, ours raises an error",
             "test_state_dict_resumes": "the test compares the whole state, which is a position in "
                                        "SkyRL; ours also identifies data and order",
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
         "nothing: SkyRL's settings, which ours does not change", **SKYRL),
    File("miles", "miles", "tests/fast/utils/test_mask_utils.py",
         "`MultiTurnLossMaskGenerator` by rows of `tokenmill.prepare`", "miles_masks", **SLIME),
    File("miles", "miles", "tests/fast/rollout/inference_rollout/integration",
         "`RolloutDataSourceWithBuffer` by `miles.DataSource`", "miles_data_source",
         prepare="miles_settings", keywords="not multi_turn and not agent", **SLIME),
    File("miles", "miles", "tests/fast/utils/test_ffd_pack.py",
         "`first_fit_decreasing_pack` by `Pack`", "miles_packing", **SLIME),
    File("miles", "miles", "tests/fast/utils/test_dp_schedule.py",
         "`first_fit_decreasing_pack` by `Pack`", "miles_packing", **SLIME),
    File("miles", "miles", "tests/fast/router/test_linear_trajectory.py", SESSIONS, **SLIME),
    File("miles", "miles", "tests/fast/router/test_tree_trajectory.py", SESSIONS, **SLIME),
    File("miles", "miles", "tests/fast/router/test_tree_assembly_invariants.py", SESSIONS,
         **SLIME),
    File("miles", "miles", "tests/fast/rollout/session/test_samples.py",
         "nothing: it makes samples of such a session; ours reads recorded ones", **SLIME),
    File("miles", "miles", "tests/fast/rollout/generate_utils/test_sample_utils.py",
         "nothing: it joins miles' own samples", **SLIME),
    File("miles", "miles", "tests/fast/ray/rollout/test_train_data_conversion.py",
         "nothing: it runs after the rollout, where miles' own samples become batches", **SLIME),
    File("slime", "slime", "tests/plugin_contracts",
         "`RolloutDataSource` by `miles.DataSource`", "slime_data_source", **SLIME),
    File("slime", "slime", "tests/utils/test_mask_utils.py",
         "`MultiTurnLossMaskGenerator` by rows of `tokenmill.prepare`", "slime_masks", **SLIME),
    File("slime", "slime", "tests/utils/test_loss_mask_type_qwen35.py",
         "nothing: a tokenizer and a template that the test writes in Python", **SLIME),
    File("slime", "slime", "tests/test_read_file_slicing.py",
         "`read_file` by the rows of a source", "slime_files", **SLIME),
    File("slime", "slime", "tests/test_filter_long_prompt.py",
         "nothing: a tokenizer that the test writes in Python", **SLIME),
    File("slime", "slime", "tests/test_dp_schedule.py",
         "`first_fit_pack` by `Pack`", "slime_packing", **SLIME),
    File("slime", "slime", "tests/test_agent/test_trajectory_manager_branching.py",
         "nothing: it records turns of a live session; ours reads recorded ones", **SLIME),
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
         "`get_seqlen_balanced_partitions` by the balance of `MicroBatches`, except partitions of "
         "equal size", "verl_balancing", **VERL),
    File("TRL", "trl-git", "tests/test_data_utils.py",
         "`pack_dataset` with `bfd` and `bfd_split` by `Pack`", "trl_packing",
         why={"TestPackDatasetBfd": PIECES}),
    File("grain", "grain", "grain/_src/python/samplers_test.py",
         "the permutation of `IndexSampler` by our order", "grain_order", **GRAIN,
         why={"test_shuffle": GOLDEN}),
    File("grain", "grain", "grain/_src/python/dataset/transformations/shuffle_test.py",
         "the permutation of `ShuffleMapDataset` by our order", "grain_order", **GRAIN,
         why={"test_cross_version_determinism": GOLDEN}),
    File("grain", "grain", "grain/_src/python/data_loader_test.py", POSITIONS, "grain_positions",
         keywords="DataLoaderTest_0 and (checkpoint or state or single_process or sharding)",
         **GRAIN),
    File("grain", "grain", "grain/_src/python/dataset", POSITIONS, "grain_positions",
         keywords="(checkpoint or state or next_index) and not process_prefetch", **GRAIN,
         why={"test_invalid_checkpoint": WORDS}),
    File("streaming", "streaming", "tests/test_streaming.py",
         "`StreamingDataset`, `StreamingDataLoader` by `Loader`, without batching or sampling "
         "methods of several streams", "streaming_loader", keywords=ONE_STREAM,
         why={"tiny_dataset": "streaming divides an epoch among its canonical nodes and rejects "
                              "one with fewer samples; ours has no such nodes"}),
    File("streaming", "streaming", "tests/test_reader.py",
         "`StreamingDataset` by `Loader`", "streaming_loader"),
    File("streaming", "streaming", "tests/test_partition.py",
         "`get_partitions` by what the `Loader` of every rank hands out", "streaming_partitions",
         keywords="resumption or nodrop_norepeat",
         why={"relaxed_resumption": "the same samples in every global batch for 16 numbers of "
                                    "nodes; the last, short batch of an epoch has another place "
                                    "in the test's array, since ours divides it evenly"}),
    File("streaming", "streaming", "tests/test_shared.py",
         "nothing: it checks the fields of streaming's own state"),
)  # fmt: skip

MODELS = {
    "deepseek-ai/deepseek-coder-1.3b-instruct": "deepseek-v3",
    "Qwen/Qwen2.5-0.5B": "qwen2.5",
    "Qwen/Qwen2.5-0.5B-Instruct": "qwen2.5",
    "Qwen/Qwen2.5-Coder-7B-Instruct": "qwen2.5",
    "Qwen/Qwen3-0.6B": "qwen3",
    "Qwen/Qwen3-8B": "qwen3",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "trl/qwen3_instruct_2507@qwen3",
}
"""Models that the tests name, and our tokenizer and template of the same or a similar model. They
are placed in ``~/models`` and in the cache of the hub's library."""

TYPES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "deepseek-v3": "deepseek_v3",
         "trl/qwen3_instruct_2507@qwen3": "qwen3_moe"}  # fmt: skip
"""``model_type`` of their ``config.json``, which otherwise has the library's defaults."""

ABSENT = ("added_tokens.json", "special_tokens_map.json", "vocab.json",
          "merges.txt", "vocab.txt", "processor_config.json",
          "preprocessor_config.json")  # fmt: skip
"""Files that are marked as missing, since the hub's library would try to download them."""


def _home(directories: Mapping[str, Path], directory: Path, corpora: Path | None = None) -> Path:
    """Create the home directory; its path is part of test names, so it never changes."""
    shutil.rmtree(directory, ignore_errors=True)
    for name, model in MODELS.items():
        if model not in directories:
            continue
        path = directory / "models" / name
        path.mkdir(parents=True)
        for file in directories[model].iterdir():
            (path / file.name).symlink_to(file)
        if not (path / "config.json").exists():
            (path / "config.json").write_text(json.dumps({"model_type": TYPES[model]}))
        cache = directory / "hub" / f"models--{name.replace('/', '--')}"
        (cache / "snapshots").mkdir(parents=True)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text("local")
        (cache / "snapshots" / "local").symlink_to(path)
        absent = cache / ".no_exist" / "local"
        absent.mkdir(parents=True)
        for file in ABSENT:
            (absent / file).touch()
    if corpora is not None:
        _write_gsm8k(corpora / "gsm8k_prompts.jsonl", directory / "data" / "gsm8k")
    return directory


def _write_gsm8k(corpus: Path, directory: Path) -> None:
    """Write GSM8K in the format of verl's own script."""
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in corpus.read_bytes().splitlines()]
    made = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": row["label"]},
            "extra_info": {"split": "train", "index": number},
        }
        for number, row in enumerate(rows)
    ]
    directory.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(made), directory / "train.parquet")


def count(report: Path) -> dict[str, set[str]]:
    """Return test names by outcome; tests in ``reached`` used one of our classes."""
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


def run_file(file: File, trainers: Path, home: Path, *, replace: bool) -> dict[str, set[str]] | str:
    """Run pytest once; return the outcomes, or the reason why there are none."""
    paths = [str(trainers / file.checkout / path) for path in file.paths]
    python = trainers / ".venv" / "bin" / "python"
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        ours = Path(directory) / "ours"  # without our package ``tests``, which would hide theirs
        temporary = Path(directory) / "tmp"
        ours.mkdir()
        temporary.mkdir()
        (ours / "conformance").symlink_to(HERE)
        environment = {
            **os.environ,
            "PYTHONPATH": ":".join([*paths, str(HERE.parent / "src"), str(ours)]),
            "CONFORMANCE_REPLACE": file.by if replace else "",
            "CONFORMANCE_PREPARE": file.prepare,
            "CONFORMANCE_PACKAGE": file.package,
            "CONFORMANCE_STAND_INS": ",".join(file.stand_ins),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "1",
            "HOME": str(home),
            "TMPDIR": str(temporary),  # not shared: tests leave files and locks behind
            "TOKENMILL_CACHE_DIR": str(Path(directory) / "cache"),
            "TOKENMILL_DATE": "2026-11-15",
        }
        chosen = ["--import-mode=importlib"] if file.apart else []
        chosen += ["-k", file.keywords] if file.keywords else []
        try:
            answer = subprocess.run(
                [python if python.exists() else sys.executable, *(["-P"] if file.apart else []),
                 "-m", "pytest", file.path, "-q", *chosen,
                 "-p", "conformance.replacements", "-p", "no:cacheprovider",
                 f"--junitxml={report}", "--timeout=300",
                 "--continue-on-collection-errors", "-o", "addopts="],
                cwd=trainers / file.checkout, env=environment, capture_output=True, text=True,
                timeout=TIMEOUT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not finished after {TIMEOUT_S} s"
        if not report.exists():
            last = (answer.stdout + answer.stderr).strip().splitlines() or ["no output"]
            return last[-1][:160]
        return count(report)


def explain(file: File, name: str) -> str:
    """Return why a test fails with ours."""
    return next((why for part, why in file.why.items() if part in name), "not examined")


def run_own_tests(
    trainers: Path,
    directories: Mapping[str, Path],
    cache: Path,
    *,
    again: Collection[str] = (),
    jobs: int = 1,
    corpora: Path | None = None,
) -> list[OwnTests]:
    """Run the files of the trainers in ``again``; return stored results for the others."""
    saved = json.loads(cache.read_text()) if cache.exists() else []
    known = {(one["trainer"], one["file"]): OwnTests(**one) for one in saved}
    files = {(file.trainer, file.path): file for file in FILES}
    for key, one in known.items():
        if key in files:  # the explanations may have changed
            one.failures = [(name, explain(files[key], name)) for name, _ in one.failures]
    chosen = [file for file in FILES if file.trainer in again]
    if not chosen:
        return list(known.values())
    home = _home(directories, cache.parent / "home", corpora)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some trainers leave files open
    writing = threading.Lock()

    def run_and_save(file: File) -> None:
        one = _run_both(file, trainers, home)
        with writing:
            known[file.trainer, file.path] = one
            cache.write_text(json.dumps([dataclasses.asdict(one) for one in known.values()]))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run_and_save, chosen))
    return [known[key] for key in files if key in known]


def _run_both(file: File, trainers: Path, home: Path) -> OwnTests:
    one = OwnTests(file.trainer, file.path, file.replaced, keywords=file.keywords)
    if not (trainers / file.checkout / file.path).exists():
        one.not_run = f"no {file.checkout}/{file.path} under TRAINERS"
        return one
    print(f"own tests of {one.trainer}: {file.path} …", file=sys.stderr, flush=True)
    alone = run_file(file, trainers, home, replace=False)
    if isinstance(alone, str):
        one.not_run = alone
        return one
    one.passed_alone, one.failed_alone = len(alone["passed"]), len(alone["failed"])
    one.skipped = len(alone["skipped"])
    replaced = run_file(file, trainers, home, replace=True) if file.by else None
    if isinstance(replaced, str):
        one.not_run = replaced
    elif replaced is not None:
        one.passed = len(replaced["passed"])
        one.reached = len(replaced["reached"] & replaced["passed"])
        failed = sorted(replaced["failed"] - alone["failed"])
        one.failures = [(name, explain(file, name)) for name in failed]
    print(f"{one.trainer}: {file.path}: {one}", file=sys.stderr, flush=True)
    return one
