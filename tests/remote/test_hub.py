"""Datasets of the hub by name and split: against a stand-in for the hub on loopback.

The stand-in has the part of the hub's HTTP interface that huggingface_hub uses (revisions, trees,
files by ranges). Each test uses a new process, because that library reads its environment when it
is imported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill
from tests.build.making import TOKENIZER, conversations
from tests.remote.servers import Handler, RangeServer, serving
from tokenmill.errors import SourceError, UsageError
from tokenmill.sources.discover import parse_address

COMMIT = {"main": "a" * 40, "v1": "b" * 40, "refs/convert/parquet": "c" * 40}
CARD = """---
license: mit
configs:
- config_name: default
  data_files:
  - split: train
    path: data/part-*.parquet
  - split: test
    path: data/held.parquet
- config_name: extra
  data_files: other/*.parquet
---
# Words
"""


class Hub(RangeServer):
    """Serves ``root/<owner>/<name>/<commit>/…`` as the hub would."""

    def answer(self, handler: Handler) -> bool:
        path = unquote(urlsplit(handler.path).path)
        info = re.fullmatch(r"/api/datasets/(\w+/\w+)(?:/revision/(.+))?", path)
        tree = re.fullmatch(r"/api/datasets/(\w+/\w+)/tree/(\w+)/?(.*)", path)
        file = re.fullmatch(r"/datasets/(\w+/\w+)/resolve/(\w+)/(.+)", path)
        if file and not (self.root / file[1] / COMMIT.get(file[2], file[2]) / file[3]).is_file():
            handler.send_response(404)
            handler.send_header("X-Error-Code", "EntryNotFound")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        elif file:
            commit = COMMIT.get(file[2], file[2])
            headers = {"X-Repo-Commit": commit}
            handler.send_path(self.root / file[1] / commit / file[3], handler.fault, headers)
        elif tree and (self.root / tree[1] / tree[2]).is_dir():
            deep = "recursive=true" in handler.path.lower()
            handler.send_body(json.dumps(self.tree(*tree.groups(), deep)).encode())
        elif info and (found := self.info(info[1], info[2] or "main")):
            handler.send_body(json.dumps(found).encode())
        else:
            handler.send_response(404)
            handler.send_header("X-Error-Code", "RepoNotFound")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
        return True

    def info(self, repo: str, revision: str) -> dict[str, Any] | None:
        commit = COMMIT.get(revision, revision)
        root = self.root / repo / commit
        if not root.is_dir():
            return None
        names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        return {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in names]}

    def tree(self, repo: str, commit: str, inner: str, deep: bool) -> list[dict[str, Any]]:
        root = self.root / repo / commit
        return [
            {
                "type": "directory" if path.is_dir() else "file",
                "path": path.relative_to(root).as_posix(),
                "size": 0 if path.is_dir() else path.stat().st_size,
                "oid": "0" * 40,
            }
            for path in (root / inner).glob("**/*" if deep else "*")
        ]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with serving(Hub(tmp_path_factory.mktemp("hub"))) as server:
        assert isinstance(server, Hub)
        yield server


def put(hub: Hub, repo: str, name: str, data: list[Any] | str, commit: str = "main") -> None:
    path = hub.root / "owner" / repo / COMMIT[commit] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(data, str):
        path.write_text(data)
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(data), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in data))


ASK = """
import json, sys
import tokenmill as tm
answers = {}
for address in sys.argv[1:]:
    try:
        rows = tm.open_rows(address)
        paths = [file.path for file in rows.files]
        answers[address] = {"rows": len(rows), "last": rows[-1], "paths": paths}
    except tm.TokenmillError as error:
        answers[address] = {"error": type(error).__name__, "message": str(error)}
print(json.dumps(answers))
"""


def child(hub: Hub, *arguments: str, offline: str = "0") -> Any:
    """Return the JSON that a new process prints, with the stand-in as its hub."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(tokenmill.__file__).parent.parent),
        "HF_ENDPOINT": hub.url("").rstrip("/"),
        "HF_HUB_OFFLINE": offline,
        "HF_HOME": str(hub.root / "home"),
    }
    command = [sys.executable, *arguments]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def test_split_of_a_dataset_is_prepared_at_the_commit_it_had(hub: Hub) -> None:
    put_words(hub)
    hub.reset()
    flags = ("--tokenizer", str(TOKENIZER), "--tokenizer-backend", "file", "--num-workers", "2")
    made = child(hub, "-m", "tokenmill", "prepare", "owner/words:train", *flags, "--json")
    assert made["rows_out"] == 50
    proof = json.loads((Path(made["path"]) / "proof.json").read_text())
    assert proof["paths"] == WORDS
    assert all(COMMIT["main"] in path for path, _ in hub.requests)


ROWS = conversations(60)
WORDS = [
    f"hf://datasets/owner/words@{COMMIT['main']}/data/train-0000{n}-of-00002.parquet"
    for n in range(2)
]


def put_words(hub: Hub) -> None:
    put(hub, "words", "data/train-00000-of-00002.parquet", ROWS[:25])
    put(hub, "words", "data/train-00001-of-00002.parquet", ROWS[25:50])
    put(hub, "words", "data/test-00000-of-00001.parquet", ROWS[50:])


SHARDS = ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet", "x.parquet"]
LAYOUTS: list[tuple[list[str], str, dict[str, list[str]]]] = [
    (SHARDS, "", {"train": SHARDS[:1], "test": SHARDS[1:2]}),
    (["train/a.parquet", "train/deep/b.parquet", "test/c.parquet", "notes.py"], "",
     {"train": ["train/a.parquet", "train/deep/b.parquet"], "test": ["test/c.parquet"]}),
    (["one/train.parquet", "two/train.parquet"],
     "- config_name: one\n  data_dir: one\n- config_name: two\n  data_dir: two\n",
     {"one/train": ["one/train.parquet"], "two/train": ["two/train.parquet"]}),
    (["a.parquet", "deep/b.parquet"], "- config_name: default\n  data_files: '*.parquet'\n",
     {"": ["a.parquet"], "default/train": ["a.parquet"]}),
    (["test.parquet", "in/train.parquet"],
     "- config_name: default\n  data_files:\n  - split: train\n    path: '**/train*'\n"
     "  - split: test\n    path: '**/test*'\n",
     {"train": ["in/train.parquet"], "test": ["test.parquet"]}),
]  # fmt: skip
RESOLVED = {
    f"owner/layout{number}:{split}".rstrip(":"): [
        f"hf://datasets/owner/layout{number}@{COMMIT['main']}/{name}" for name in names
    ]
    for number, (_, _, splits) in enumerate(LAYOUTS)
    for split, names in splits.items()
}
REFUSED = {
    "field": ("data_files: a.jsonl\n  field: inner", "sets 'field', which changes rows"),
    "csv": ("data_files: b.csv", "b.csv has an unknown format"),
    "none": ("data_files: none*.jsonl", "`datasets` finds no files"),
}
CONVERTED = "hf://datasets/owner/tagged@refs/convert/parquet/default/train/*.parquet"


@pytest.fixture(scope="module")
def answers(hub: Hub) -> Any:
    """Open all datasets of this module in one process."""
    put_words(hub)
    put(hub, "card", "data/part-0.parquet", ROWS[:3])
    put(hub, "card", "data/held.parquet", ROWS[3:5])
    put(hub, "card", "other/x.parquet", ROWS[5:9])
    put(hub, "card", "README.md", CARD)
    put(hub, "tagged", "notes.txt", [])
    put(hub, "tagged", "default/train/0000.parquet", ROWS[:7], commit="refs/convert/parquet")
    put(hub, "tagged", "words.jsonl", ROWS[:4], commit="v1")
    for number, (files, configs, _) in enumerate(LAYOUTS):
        for name in files:
            put(hub, f"layout{number}", name, ROWS[:1])
        if configs:
            put(hub, f"layout{number}", "README.md", f"---\nconfigs:\n{configs}---\n# Words\n")
    for repo, (card, _) in REFUSED.items():
        put(hub, repo, "a.jsonl", ROWS[:2])
        put(hub, repo, "b.csv", [])
        head = "---\nconfigs:\n- config_name: default\n  "
        put(hub, repo, "README.md", f"{head}{card}\n---\n")
    return child(
        hub, "-c", ASK, f"owner/words@{COMMIT['main']}:train[:1000]",
        "hf://datasets/owner/words:test[2:]", "owner/words", "owner/card:train",
        "owner/card:extra/train", "owner/card:validation", "owner/card:extra",
        "owner/card:nowhere/train", "owner/tagged", CONVERTED, "owner/tagged@v1",
        "hf://datasets/owner/tagged@v1/*.jsonl", "nobody/nothing:train", *RESOLVED,
        *(f"owner/{repo}:train" for repo in REFUSED),
    )  # fmt: skip


def test_split_and_slice_of_a_dataset(answers: Any) -> None:
    short = answers[f"owner/words@{COMMIT['main']}:train[:1000]"]
    assert short == {"rows": 50, "last": ROWS[49], "paths": WORDS}
    long = answers["hf://datasets/owner/words:test[2:]"]
    assert (long["rows"], long["last"]) == (8, ROWS[59])
    assert answers["owner/words"]["error"] == "UsageError"
    assert "owner/words:" in answers["owner/words"]["message"]


def test_dataset_card_defines_the_files_of_a_split(answers: Any) -> None:
    assert answers["owner/card:train"]["rows"] == 3
    assert answers["owner/card:extra/train"]["rows"] == 4
    unknown = answers["owner/card:validation"]["message"]
    assert "no split 'validation'. Splits: train, test" in unknown
    assert "no split 'extra'" in answers["owner/card:extra"]["message"]
    other = answers["owner/card:nowhere/train"]
    assert other["error"] == "UsageError"
    assert "['default', 'extra']" in other["message"]


def test_revision_and_conversion_of_the_hub(answers: Any) -> None:
    assert answers["owner/tagged"]["error"] in ("UsageError", "SourceMissing")
    assert answers[CONVERTED]["rows"] == 7
    assert COMMIT["refs/convert/parquet"] in answers[CONVERTED]["paths"][0]
    tagged = answers["owner/tagged@v1"]
    assert tagged["paths"] == [f"hf://datasets/owner/tagged@{COMMIT['v1']}/words.jsonl"]
    assert (tagged["rows"], answers["hf://datasets/owner/tagged@v1/*.jsonl"]["rows"]) == (4, 4)
    nobody = answers["nobody/nothing:train"]
    assert nobody["error"] == "SourceMissing"
    assert "no such dataset" in nobody["message"]


def test_splits_of_hub_datasets_are_resolved_at_one_commit(answers: Any) -> None:
    assert {address: answers[address].get("paths") for address in RESOLVED} == RESOLVED


@pytest.mark.parametrize("repo", REFUSED)
def test_dataset_card_without_readable_files_is_refused(answers: Any, repo: str) -> None:
    answer = answers[f"owner/{repo}:train"]
    assert answer["error"] == ("SourceMissing" if repo == "none" else "UsageError")
    assert REFUSED[repo][1] in answer["message"]


def test_offline_is_an_immediate_error(hub: Hub) -> None:
    answer = child(hub, "-c", ASK, "owner/words:train", offline="1")["owner/words:train"]
    assert answer["error"] == "SourceError"
    assert answer["message"].startswith(
        "owner/words:train: no such local file or directory, and the "
    )
    assert "HF_HUB_OFFLINE is set" in answer["message"]
    assert "hf download owner/words --repo-type dataset" in answer["message"]
    assert "attempts" not in answer["message"]


def test_unreachable_hub_is_a_one_line_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also for long network errors of other libraries."""

    class Unreachable:
        def repo_info(self, *arguments: Any, **options: Any) -> Any:
            raise ConnectionError("cannot reach the host\nmore of it\n\nanother paragraph" * 9)

    monkeypatch.setattr("huggingface_hub.HfApi", Unreachable)
    for asked, here in (("nobody/nothing:train", True), ("hf://datasets/nobody/nothing/x", False)):
        with pytest.raises(SourceError) as caught:
            tokenmill.open_rows(asked)
        message = str(caught.value)
        assert message.startswith(f"{asked}: ")
        assert ("no such local file or directory" in message) == here
        assert (
            "ConnectionError: cannot reach the host); to work offline, pass local files" in message
        )
        assert "\n" not in message
        assert "paragraph" not in message


@pytest.mark.parametrize(
    ("text", "repo", "revision", "split"),
    [
        ("owner/name", "owner/name", None, None),
        ("owner/name:train", "owner/name", None, "train"),
        ("owner/name@v1.2:config/train[:10]", "owner/name", "v1.2", "config/train"),
        ("owner/name@refs/pr/3:train@[5:]", "owner/name", "refs/pr/3", "train"),
        ("hf://datasets/owner/name@main", "owner/name", "main", None),
        ("hf://datasets/name:train[:10%]", "name", None, "train"),
    ],
)
def test_hub_address_is_parsed_as_documented(
    text: str, repo: str, revision: str | None, split: str | None
) -> None:
    address = parse_address(text)
    assert (address.repo, address.revision) == (repo, revision)
    assert address.split == split
    assert (address.selection is not None) == ("[" in text)


def test_names_of_local_files_are_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for text in ("data/chat", "owner/chat.jsonl", "owner/chat.jsonl.gz", "./chat", "a/b/c"):
        assert not parse_address(text).repo
    with pytest.raises(UsageError, match="cannot have a step"):
        parse_address("owner/name:train[1:2:3]")
