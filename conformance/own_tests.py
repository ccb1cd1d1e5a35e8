"""The hosts' own test files, run on our classes and on their own.

Each of `FILES` is run twice by pytest in the host's checkout: with its own class, and with ours put
in its place by `conformance.replacements`. Tests that fail with both say nothing of us: they want a
GPU, a download, or another version of a library.
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
    prepare: str = ""
    """What both runs need: a function of `conformance.replacements`, too."""
    keywords: str = ""
    """Which tests of the file, as pytest's ``-k`` takes it; empty for all."""
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
SESSIONS = "nothing: a registry of sessions behind a server, which ours has not"
WORDS = "refused by both, in other words than the test looks for"
POSITIONS = (
    "the position of `PrefetchDatasetIterator`, beneath every loader and iterator, by `Loader`"
)
ONE_STREAM = (
    "not (per_stream or stratified or epoch_size or balanced or sampling_method or block_warning "
    "or custom_stream or batch_size_exception)"
)
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
         "nothing: it makes samples of such a session; ours reads what was recorded", **SLIME),
    File("miles", "miles", "tests/fast/rollout/generate_utils/test_sample_utils.py",
         "nothing: it joins miles' own samples", **SLIME),
    File("miles", "miles", "tests/fast/ray/rollout/test_train_data_conversion.py",
         "nothing: it is behind the rollout, where miles' own samples become batches", **SLIME),
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
    File("grain", "grain", "grain/_src/python/data_loader_test.py", POSITIONS, "grain_positions",
         keywords="DataLoaderTest_0 and (checkpoint or state or single_process or sharding)",
         **GRAIN),
    File("grain", "grain", "grain/_src/python/dataset", POSITIONS, "grain_positions",
         keywords="(checkpoint or state or next_index) and not process_prefetch", **GRAIN,
         why={"test_invalid_checkpoint": WORDS}),
    File("streaming", "streaming", "tests/test_streaming.py",
         "`StreamingDataset`, `StreamingDataLoader` by `Loader`, where no batching or sampling "
         "method of several streams is stated", "streaming_loader", keywords=ONE_STREAM,
         why={"tiny_dataset": "streaming divides an epoch among its canonical nodes, and refuses "
                              "one with fewer samples; ours has no such nodes, and serves it"}),
    File("streaming", "streaming", "tests/test_reader.py",
         "`StreamingDataset` by `Loader`", "streaming_loader"),
    File("streaming", "streaming", "tests/test_partition.py",
         "`get_partitions` by what the `Loader` of every rank hands out", "streaming_partitions",
         keywords="resumption or nodrop_norepeat",
         why={"relaxed_resumption": "the same samples in every global batch under 16 numbers of "
                                    "nodes; an epoch's last, short batch lies differently in the "
                                    "test's array, since ours shares it out evenly"}),
    File("streaming", "streaming", "tests/test_shared.py",
         "nothing: it counts up the fields of streaming's own state; ours refuses a state that it "
         "did not write"),
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
"""Models that the tests name, and the tokenizers and templates that we have of theirs, or of a
relative: under ``~/models``, and where the hub's library keeps what it has fetched."""

TYPES = {"qwen2.5": "qwen2", "qwen3": "qwen3", "deepseek-v3": "deepseek_v3",
         "trl/qwen3_instruct_2507@qwen3": "qwen3_moe"}  # fmt: skip
"""What their ``config.json`` says that they are; the rest of it are the library's defaults."""

ABSENT = ("added_tokens.json", "special_tokens_map.json", "vocab.json",
          "merges.txt", "vocab.txt", "processor_config.json",
          "preprocessor_config.json")  # fmt: skip
"""Files that the hub's library is to know as missing: it would ask for them and find no network."""


def _home(places: Mapping[str, Path], directory: Path, corpora: Path | None = None) -> Path:
    """The same directory for every run: it is part of the tests' names."""
    shutil.rmtree(directory, ignore_errors=True)
    for name, model in MODELS.items():
        if model not in places:
            continue
        place = directory / "models" / name
        place.mkdir(parents=True)
        for file in places[model].iterdir():
            (place / file.name).symlink_to(file)
        if not (place / "config.json").exists():
            (place / "config.json").write_text(json.dumps({"model_type": TYPES[model]}))
        kept = directory / "hub" / f"models--{name.replace('/', '--')}"
        (kept / "snapshots").mkdir(parents=True)
        (kept / "refs").mkdir()
        (kept / "refs" / "main").write_text("local")
        (kept / "snapshots" / "local").symlink_to(place)
        absent = kept / ".no_exist" / "local"
        absent.mkdir(parents=True)
        for file in ABSENT:
            (absent / file).touch()
    if corpora is not None:
        _write_gsm8k(corpora / "gsm8k_prompts.jsonl", directory / "data" / "gsm8k")
    return directory


def _write_gsm8k(corpus: Path, directory: Path) -> None:
    """GSM8K in the form that verl's script for it gives its rows."""
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
            "TMPDIR": str(temporary),  # what tests leave behind, locks too, is theirs alone
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
    hosts: Path,
    places: Mapping[str, Path],
    kept: Path,
    *,
    again: Collection[str] = (),
    jobs: int = 1,
    corpora: Path | None = None,
) -> list[OwnTests]:
    """Every file, on our classes and on the host's; of hosts not to run again what is kept."""
    given = json.loads(kept.read_text()) if kept.exists() else []
    known = {(one["host"], one["file"]): OwnTests(**one) for one in given}
    files = {(file.host, file.path): file for file in FILES}
    for place, one in known.items():
        if place in files:  # said anew, as it is known today
            one.failures = [(name, explain(files[place], name)) for name, _ in one.failures]
    chosen = [file for file in FILES if file.host in again]
    if not chosen:
        return list(known.values())
    home = _home(places, kept.parent / "home", corpora)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # some hosts leave files open
    writing = threading.Lock()

    def judge(file: File) -> None:
        one = _judge(file, hosts, home)
        with writing:
            known[file.host, file.path] = one
            kept.write_text(json.dumps([dataclasses.asdict(one) for one in known.values()]))

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(judge, chosen))
    return [known[place] for place in files if place in known]


def _judge(file: File, hosts: Path, home: Path) -> OwnTests:
    """One file, on the host's own classes and on ours."""
    one = OwnTests(file.host, file.path, file.replaced, keywords=file.keywords)
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
