"""Data-consistency tests for the prompt datasets of miles: eager, lazy, and through resumes.

One file without dependencies besides miles, pytest and torch. Copy it to ``tests/fast/utils/`` and
run it with pytest. It tests ``miles.utils.data:Dataset``; name others, separated by commas:

    MILES_DATASETS=miles.utils.data:Dataset,miles.utils.data:LazyDataset pytest <this file>

The expected samples come from `expected_samples`, which reads the whole file, and from
`random.Random`. A dataset that reads samples on request passes if it serves the same samples.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
data = pytest.importorskip("miles.utils.data")

DATASETS = os.environ.get("MILES_DATASETS", "miles.utils.data:Dataset").split(",")
ROWS, SEED = 23, 42
BROKEN = {0: (), 1: (7,), 30: (0, 3, 6, 9, 12, 15, 22)}  # lines that are not JSON, by percent


class Tokenizer:
    """Words as tokens; the template prints roles and contents."""

    name_or_path = "words"

    def apply_chat_template(self, messages: Any, tools: Any = None, **_: Any) -> str:
        printed = "".join(f"<{turn['role']}>{turn['content']}" for turn in messages)
        return f"{json.dumps(tools) if tools else ''}{printed}<assistant>"

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[len(word) for word in text.split(" ")] for text in texts]}


OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"prompt_key": "text", "label_key": "label"},
    "messages": {"prompt_key": "messages", "label_key": "label", "tool_key": "tools"},
    "rendered": {"prompt_key": "text", "label_key": "label", "apply_chat_template": True},
    "tools": {
        "prompt_key": "messages",
        "label_key": "label",
        "tool_key": "tools",
        "apply_chat_template": True,
    },
    "limited": {"prompt_key": "text", "label_key": "label", "max_length": 9},
}


def line(number: int) -> str:
    words = " ".join(["wörter", "漢字", "words"][(number + k) % 3] for k in range(number % 13 + 1))
    text = f"{number}: {words}"
    row = {
        "text": text,
        "messages": [{"role": "user", "content": text}],
        "label": f"{number:03d}",
        "metadata": {"number": number, "nested": {"list": [number, None, 1.5]}},
    }
    if number % 2:
        row["tools"] = [{"type": "function", "function": {"name": f"tool_{number}"}}]
    if number % 5 == 4:
        del row["metadata"]
    return json.dumps(row, ensure_ascii=number % 3 == 0)


@pytest.fixture(scope="module", params=BROKEN, ids=lambda percent: f"{percent}%")
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    lines = [line(n) if n not in BROKEN[request.param] else '{"text": ' for n in range(ROWS)]
    lines.insert(11, "")
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")  # no line break at the end
    return str(file)


@pytest.fixture(params=DATASETS)
def kind(request: pytest.FixtureRequest) -> Any:
    module, _, name = request.param.partition(":")
    return getattr(importlib.import_module(module), name)


def open_dataset(kind: Any, path: str, options: str = "text") -> Any:
    given = {"processor": None, "max_length": None, "seed": SEED, **OPTIONS[options]}
    return kind(path, Tokenizer(), **given)


def expected_samples(path: str, options: str = "text") -> list[tuple[Any, ...]]:
    given, found = OPTIONS[options], []
    for text in Path(path).read_text(encoding="utf-8").split("\n"):
        try:
            row = json.loads(text)
        except json.JSONDecodeError:
            continue
        prompt, metadata = row[given["prompt_key"]], row.get("metadata") or {}
        if given.get("tool_key") and "tools" in row:
            metadata = {**metadata, "tools": row["tools"]}
        if given.get("apply_chat_template"):
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            prompt = Tokenizer().apply_chat_template(turns, metadata.get("tools"))
        if len(str(prompt).split(" ")) <= given.get("max_length", ROWS):
            found.append((prompt, row["label"], metadata))
    return found


def content(sample: Any) -> tuple[Any, ...]:
    return sample.prompt, sample.label, sample.metadata


def contents(samples: Any) -> list[tuple[Any, ...]]:
    return [content(sample) for sample in samples]


def checksum(samples: Any) -> str:
    text = json.dumps(contents(samples), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def in_epoch(samples: list[Any], epoch: int) -> list[Any]:
    permutation = list(range(len(samples)))
    random.Random(SEED + epoch).shuffle(permutation)
    return [samples[number] for number in permutation]


# Samples


@pytest.mark.parametrize("options", OPTIONS)
def test_every_sample_is_that_of_the_file(kind: Any, path: str, options: str) -> None:
    dataset, expected = open_dataset(kind, path, options), expected_samples(path, options)
    assert len(dataset) == len(dataset.samples) == len(expected) > 5
    assert contents(dataset.samples) == expected
    for number in (*range(len(expected)), -1, -len(expected)):
        assert content(dataset[number]) == expected[number]
    for number in (len(expected), -len(expected) - 1):
        with pytest.raises(IndexError):
            dataset[number]


@pytest.mark.parametrize("given", ["3:9", ":5", "-4:", "5:5", "2:-2"])
def test_slices_of_a_file(kind: Any, path: str, given: str) -> None:
    start, stop = (int(bound) if bound else None for bound in given.split(":"))
    if (start or 0) < 0 or (stop or 0) < 0:
        pytest.skip("eager reading takes no negative bounds")
    dataset = open_dataset(kind, f"{path}@[{given}]")
    assert contents(dataset.samples) == expected_samples(path)[start:stop]


def test_slices_of_samples_are_those_of_a_list(kind: Any, path: str) -> None:
    dataset, expected = open_dataset(kind, path), expected_samples(path)
    for start, stop in itertools.product((None, 0, 4, 17, 99), repeat=2):
        assert contents(dataset.samples[start:stop]) == expected[start:stop]


def test_reading_in_any_order_any_number_of_times(kind: Any, path: str) -> None:
    dataset, expected = open_dataset(kind, path), expected_samples(path)
    rng = random.Random(1)
    for _ in range(100):
        number = rng.randrange(len(expected))
        sample = copy.deepcopy(dataset[number])
        assert content(sample) == expected[number]
        sample.metadata["changed"] = True  # as a rollout does with its copy


# Order


def test_epochs_are_permutations_of_seed_and_epoch_alone(kind: Any, path: str) -> None:
    expected = expected_samples(path)
    for epochs in ((0, 1, 2), (2,), (1, 0, 2), (2, 2, 0)):
        dataset = open_dataset(kind, path)
        for epoch in epochs:
            random.random()  # the global state must not matter
            dataset.shuffle(epoch)
            assert contents(dataset.samples) == in_epoch(expected, epoch)
            assert content(dataset[3]) == in_epoch(expected, epoch)[3]


def test_instances_do_not_influence_each_other(kind: Any, path: str) -> None:
    one, other = open_dataset(kind, path), open_dataset(kind, path)
    one.shuffle(1)
    assert contents(other.samples) == expected_samples(path)
    other.shuffle(2)
    assert contents(one.samples) == in_epoch(expected_samples(path), 1)


def test_checksums_of_epochs_are_equal_in_another_process(kind: Any, path: str) -> None:
    program = (
        "import pickle, sys; kind, path = pickle.load(sys.stdin.buffer);"
        "import test_dataset_consistency as own; dataset = own.open_dataset(kind, path)\n"
        "for epoch in range(3): dataset.shuffle(epoch); print(own.checksum(dataset.samples))"
    )
    dataset, expected = open_dataset(kind, path), []
    for epoch in range(3):
        dataset.shuffle(epoch)
        expected.append(checksum(dataset.samples))
    assert len(set(expected)) == 3
    search = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps((kind, path)),
        env={**os.environ, "PYTHONPATH": search, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().split()[-3:] == expected


# Workers


class Shuffled(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return content(self.dataset[number])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [0, 2, 3])
def test_workers_read_the_same_epoch(kind: Any, path: str, workers: int) -> None:
    dataset = open_dataset(kind, path)
    dataset.shuffle(1)
    expected = in_epoch(expected_samples(path), 1)
    assert content(dataset[0]) == expected[0]  # files are open before the fork
    loader = torch.utils.data.DataLoader(
        Shuffled(dataset), batch_size=4, num_workers=workers, collate_fn=list
    )
    assert [sample for batch in loader for sample in batch] == expected


def test_pickled_datasets_continue(kind: Any, path: str) -> None:
    dataset = open_dataset(kind, path)
    dataset.shuffle(3)
    again = pickle.loads(pickle.dumps(dataset))
    assert contents(again.samples) == in_epoch(expected_samples(path), 3)
    again.shuffle(4)
    assert contents(again.samples) == in_epoch(expected_samples(path), 4)


# Resume, through the data source that saves and loads


@pytest.fixture
def make_source(kind: Any, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    sources = pytest.importorskip("miles.rollout.data_source")
    monkeypatch.setattr(sources, "load_tokenizer", lambda *_, **__: Tokenizer())
    monkeypatch.setattr(sources, "load_processor", lambda *_, **__: None)
    monkeypatch.setattr(sources, "Dataset", kind)
    names = (
        "hf_checkpoint", "chat_template_path", "dump_details", "multimodal_keys", "tool_key",
        "rollout_max_prompt_len", "apply_chat_template_kwargs",
    )  # fmt: skip
    args = SimpleNamespace(
        **dict.fromkeys(names), rollout_global_dataset=True, rollout_shuffle=True, prompt_data=path,
        input_key="text", label_key="label", metadata_key="metadata", apply_chat_template=False,
        rollout_seed=SEED, n_samples_per_prompt=2, save=str(tmp_path), load=str(tmp_path),
    )  # fmt: skip
    return lambda: sources.RolloutDataSource(args)


def taken(source: Any, count: int) -> list[tuple[Any, ...]]:
    """Contents and indices; samples must be equal in a group, and independent of each other."""
    found = []
    for group in source.get_samples(count):
        assert len({checksum([sample]) for sample in group}) == 1
        indices = [(sample.group_index, sample.index) for sample in group]
        found.append((*copy.deepcopy(content(group[0])), indices))
        for sample in group:
            assert "changed" not in sample.metadata
            sample.metadata["changed"] = True  # as a rollout does
    return found


def uninterrupted(make_source: Any, steps: int, size: int) -> list[tuple[Any, ...]]:
    source = make_source()
    return [sample for _ in range(steps) for sample in taken(source, size)]


def test_prompts_are_those_of_the_epochs(make_source: Any, path: str) -> None:
    samples = expected_samples(path)
    expected = [sample for epoch in range(3) for sample in in_epoch(samples, epoch)]
    found = uninterrupted(make_source, 2 * len(samples) // 5, 5)
    assert [sample[:3] for sample in found] == expected[: len(found)]
    assert [sample[3] for sample in found] == [
        [(number, 2 * number), (number, 2 * number + 1)] for number in range(len(found))
    ]


@pytest.mark.parametrize("size", [1, 3, 8])
def test_resume_at_every_step(make_source: Any, size: int) -> None:
    """A new source after every step equals one that is never stopped."""
    steps = 2 * ROWS // size + 1
    expected, found = uninterrupted(make_source, steps, size), []
    for step in range(steps):
        source = make_source()
        if step:
            source.load(step - 1)
        found += taken(source, size)
        source.save(step)
    assert found == expected


def test_batch_size_may_change_on_resume(make_source: Any) -> None:
    """As with 1, 2, 4 and then 3 engines."""
    sizes = [4, 4, 8, 8, 16, 16, 12, 12]
    expected, found = uninterrupted(make_source, sum(sizes), 1), []
    for step, size in enumerate(sizes):
        source = make_source()
        if step:
            source.load(step - 1)
        found += taken(source, size)
        source.save(step)
    assert found == expected


def test_loading_an_old_state_repeats_its_samples(make_source: Any) -> None:
    source = make_source()
    expected = []
    for step in range(9):
        source.save(step)
        expected.append(taken(source, 7))
    for step in (5, 0, 8, 3):
        source.load(step)
        assert taken(source, 7) == expected[step]
