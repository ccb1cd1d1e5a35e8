"""Which files a split of a hub repository has: held against `datasets` itself."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.errors import SourceError, TokenmillError, UsageError
from tokenmill.source import splits
from tokenmill.source.splits import Configuration, Splits, configurations, split_files

Card = list[dict[str, Any]]


def ours(files: Sequence[str], card: Card, name: str | None = None) -> Splits:
    """Split → files, by our rules."""
    text = f"---\n{yaml.safe_dump({'configs': card})}---\n# A dataset\n" if card else ""
    found = configurations(text, "", "owner/name")
    chosen = next((one for one in found if one.name == name), found[0] if found else None)
    return split_files(files, chosen, "owner/name")


def theirs(root: Path, files: Sequence[str], card: Card, name: str | None = None) -> Splits:
    """Split → files, as `datasets` resolves the same repository on a disk.

    It stops at any configuration that is broken, so the card it sees has the wanted one alone, and
    the format, which it would infer from a look at all files, is given.
    """
    from datasets import load
    from datasets.utils.metadata import MetadataConfigs
    from huggingface_hub import DatasetCardData

    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    if card:
        wanted = [one for one in card if one["config_name"] == name]
        stated = MetadataConfigs.from_dataset_card_data(DatasetCardData(configs=wanted))
        (found,), _ = load.create_builder_configs_from_metadata_configs(
            "datasets.packaged_modules.parquet.parquet", stated, base_path=str(root)
        )
    else:
        module = load.LocalDatasetModuleFactory(str(root)).get_module()
        (found,) = module.builder_configs_parameters.builder_configs
    found._resolve_data_files(str(root), None)
    return {
        str(split): list(dict.fromkeys(Path(file).relative_to(root).as_posix() for file in names))
        for split, names in found.data_files.items()
    }


WORDS = ("train", "test", "dev", "val", "validation", "training", "eval", "testing", "data",
         "part", "train-1", "my_test", "contest", "trained", "test.v2", "x-dev-y", ".hidden",
         "__pycache__")  # fmt: skip
FORMS = (
    ".parquet",
    ".jsonl",
    ".jsonl.gz",
    ".json",
    ".csv",
    ".txt",
    ".py",
    "",
    ".png",
    ".parquet.bak",
)
names = st.builds(
    lambda word, tail, form: word + tail + form,
    st.sampled_from(WORDS),
    st.sampled_from(["", "", "-00000-of-00002", "-00001-of-00002", "_0", ".old"]),
    st.sampled_from([".parquet"] * 4 + [".jsonl"] * 2 + [*FORMS]),
)
directories = st.lists(st.sampled_from(WORDS), max_size=2)
paths = st.builds(lambda above, name: "/".join([*above, name]), directories, names)
sharded = st.builds(
    lambda split, number: f"data/{split}-{number:05d}-of-00002.parquet",
    st.sampled_from(["train", "test", "random", "validation", "train_sft", "not-a-name"]),
    st.integers(0, 1),
)


def consistent(files: list[str]) -> bool:
    """Whether no name is a file and a directory."""
    above = {"/".join(f.split("/")[:n]) for f in files for n in range(1, f.count("/") + 1)}
    return not above & set(files)


repositories = (
    st.lists(paths | paths | sharded, min_size=1, max_size=8, unique=True)
    .map(sorted)
    .filter(consistent)
)
patterns = st.sampled_from(
    ["*.parquet", "**/*.parquet", "**", "data/*", "data/**", "train/**", "**/train*", "*", "?rain*",
     "data/{train,test}*.parquet", "{train,test}.parquet", "train.parquet", "./train.parquet",
     "**/test*", "data/train-*", "[td]*/*", "[!d]*.parquet", "*/*.jsonl", "**/*.jsonl*", "data/",
     "data", "**.parquet", ".hidden/*", "**/.hidden*", "__*/*", "part*/**/*.parquet"]
)  # fmt: skip
data_files = (
    patterns
    | st.lists(patterns, min_size=1, max_size=2)
    | st.lists(
        st.fixed_dictionaries(
            {
                "split": st.sampled_from(["train", "test", "validation"]),
                "path": patterns | st.lists(patterns, min_size=1, max_size=2),
            }
        ),
        min_size=1,
        max_size=2,
        unique_by=lambda one: str(one["split"]),
    )
)
chosen_files = st.fixed_dictionaries({"data_files": data_files})
chosen_directory = st.fixed_dictionaries(
    {"data_dir": st.sampled_from(["data", "train", "part", "./data", "data/", "data/train"])},
    optional={"data_files": data_files},
)
cards = st.lists(chosen_files | chosen_directory, max_size=2).map(
    lambda several: [{"config_name": f"c{n}", **one} for n, one in enumerate(several)]
)
DECLARED = (
    "by its name",  # a file of two splits
    "matches no data file",  # `datasets` gives an empty split unless it infers formats from it
    "has no data files",
    "none holds data",
    "different formats",
)
"""Refusals where `datasets` goes on: it would guess, or give a split without rows."""


repositories_with_cards = given(files=repositories, card=cards, which=st.integers(0, 1))


@pytest.mark.slow
@settings(max_examples=60)
@repositories_with_cards
def test_splits_are_those_of_datasets(
    tmp_path_factory: pytest.TempPathFactory, files: list[str], card: Card, which: int
) -> None:
    compare_with_datasets(tmp_path_factory.getbasetemp() / "repository", files, card, which)


@pytest.mark.soak
@settings(max_examples=4000)
@repositories_with_cards
def test_splits_are_those_of_datasets_at_length(
    tmp_path_factory: pytest.TempPathFactory, files: list[str], card: Card, which: int
) -> None:
    compare_with_datasets(tmp_path_factory.getbasetemp() / "repository", files, card, which)


def compare_with_datasets(root: Path, files: list[str], card: Card, which: int) -> None:
    name = card[which % len(card)]["config_name"] if card else None
    try:
        expected = theirs(root, files, card, name)
    except (ValueError, FileNotFoundError, TypeError) as error:
        expected, refused = {}, error
    try:
        found = ours(files, card, name)
    except TokenmillError as error:
        assert not expected or any(known in str(error) for known in DECLARED), (expected, error)
        return
    if found:
        assert expected, refused
    ours_only = {split: some for split, some in found.items() if _is_rows(some)}
    if ours_only:
        assert list(found.items()) == list(expected.items())


def _is_rows(files: list[str]) -> bool:
    return any(ending in file for file in files for ending in (".parquet", ".json"))


@pytest.mark.parametrize(
    ("files", "card", "expected"),
    [
        pytest.param(
            ["a/train.parquet", "b/train.parquet", "b/test.parquet"],
            [{"config_name": "a", "data_dir": "a"}, {"config_name": "b", "data_dir": "b"}],
            {"train": ["a/train.parquet"]},
            id="configurations-by-directory-stay-apart",
        ),
        pytest.param(
            ["x.parquet", "nested/y.parquet"],
            [{"config_name": "a", "data_files": "*.parquet"}],
            {"train": ["x.parquet"]},
            id="star-stays-in-its-directory",
        ),
        pytest.param(
            ["train-0.parquet", "test-0.parquet", "more/train-1.parquet"],
            [
                {
                    "config_name": "a",
                    "data_files": [
                        {"split": "train", "path": "**/train*.parquet"},
                        {"split": "test", "path": "**/test*.parquet"},
                    ],
                }
            ],
            {"train": ["more/train-1.parquet", "train-0.parquet"], "test": ["test-0.parquet"]},
            id="double-star-reaches-the-root",
        ),
        pytest.param(
            ["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet", "dev.jsonl"],
            [],
            {
                "train": ["data/train-00000-of-00002.parquet"],
                "test": ["data/test-00000-of-00001.parquet"],
            },
            id="shards-before-words",
        ),
        pytest.param(
            ["train/dev.jsonl", "dev/x.jsonl", "constrained.jsonl"],
            [],
            {"train": ["train/dev.jsonl"], "validation": ["dev/x.jsonl"]},
            id="directories-before-files",
        ),
        pytest.param(
            ["a.jsonl", "b.jsonl", "c.parquet", "script.py"],
            [],
            {"train": ["a.jsonl", "b.jsonl"]},
            id="the-format-of-most",
        ),
    ],
)
def test_named_layouts_are_resolved_as_datasets_does(
    tmp_path: Path, files: list[str], card: Card, expected: Splits
) -> None:
    name = card[0]["config_name"] if card else None
    assert theirs(tmp_path / "r", files, card, name) == expected
    assert ours(files, card, name) == expected


@pytest.mark.parametrize(
    ("files", "config", "message"),
    [
        (["a.parquet"], {"data_files": "{a,b}*.parquet"}, "braces are no part"),
        (["a.parquet"], {"data_files": "b.parquet"}, "matches no data file"),
        (["a.parquet"], {"data_files": "**.parquet"}, "stands alone"),
        (["a.parquet"], {"data_files": "../a.parquet"}, "leads out of the repository"),
        (["a.parquet"], {"data_files": "https://host/a.parquet"}, "leads out of the repository"),
        (["a.parquet"], {"data_dir": "/etc"}, "leads out of the repository"),
        (["a.parquet"], {"data_dir": "b"}, "has no data files in 'b'"),
        (["a.parquet"], {"data_files": {"train": "a.parquet"}}, "neither a pattern"),
        (["a.parquet"], {"data_files": [{"split": "a b", "path": "*"}]}, "no name"),
        (["a.json"], {"data_files": "a.json", "field": "rows"}, "changes rows"),
        (["train-test.parquet"], {"data_dir": "."}, "of the splits train and test"),
    ],
)
def test_what_cannot_be_resolved_is_refused(
    files: list[str], config: dict[str, Any], message: str
) -> None:
    with pytest.raises((UsageError, SourceError), match=message) as caught:
        ours(files, [{"config_name": "a", **config}])
    assert caught.value.path == "owner/name"


def test_file_of_two_splits_is_refused_without_a_card() -> None:
    with pytest.raises(UsageError, match=r"eval-train\.jsonl is of the splits train and test"):
        split_files(["eval-train.jsonl"], None, "owner/name")


def test_card_is_read_as_the_hub_s_library_reads_it(tmp_path: Path) -> None:
    from datasets.load import LocalDatasetModuleFactory

    (tmp_path / "a.parquet").touch()
    (tmp_path / "b.parquet").touch()
    readme = "  \r\n---\r\nconfigs:\r\n- config_name: r\r\n  data_files: a.parquet\r\n---  \r\ntext"
    standalone = "configs:\n- config_name: s\n  data_files: b.parquet\n"
    for texts in ((readme, ""), (readme, standalone), ("no head", standalone), ("---\nx", "")):
        for name, text in zip(("README.md", ".huggingface.yaml"), texts, strict=True):
            (tmp_path / name).write_bytes(text.encode())
        module = LocalDatasetModuleFactory(str(tmp_path)).get_module()
        found = module.builder_configs_parameters.metadata_configs or {}
        assert [one.name for one in configurations(*texts, "w")] == list(found)
    assert configurations(readme, standalone, "w") == [
        Configuration("s", "", {"train": ["b.parquet"]}, False)
    ]


def test_every_ending_that_datasets_reads_is_known_here() -> None:
    """An ending that is missing would leave its files out of the count of formats."""
    from datasets.packaged_modules import _EXTENSION_TO_MODULE

    known = {f".{ending}" for ending in splits._DATA}
    assert set(_EXTENSION_TO_MODULE) - known == {".md", ".toml", ".eval"}
