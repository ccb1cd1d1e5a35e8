"""A hostile tokenizer is a `TokenizerError`: no panic, no abort, no foreign exception."""

from __future__ import annotations

import base64
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.build.making import conversations, write_rows
from tests.sampling import sampled
from tests.tokenizers.families import family_json
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.loading import BACKENDS, load
from tokenmill.tokenizers.tokenizer import Tokenizer

MEMORY_BYTES = 8 << 30  # address space of a child, so that a failed test does not stop the machine

LONG_CHARACTERS = base64.b64encode(bytes(4) + b"x" * 10**6 + b"\0").decode()
Document = dict[str, Any]
Change = Callable[[Document], Any]


def precompiled(charsmap: str) -> Document:
    return {"type": "Precompiled", "precompiled_charsmap": charsmap}


def replacing(pattern: str, content: str, kind: str = "String") -> Document:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def model(document: Document, **members: Any) -> None:
    document["model"].update(members)


def deep(levels: int) -> Any:
    step: Any = {"type": "NFC"}
    for _ in range(levels):
        step = {"type": "Sequence", "normalizers": [step]}
    return step


def add(document: Document, **members: Any) -> None:
    document["added_tokens"] = [{"id": 5, "content": "<x>", "special": True, **members}]


HOSTILE: dict[str, Change] = {
    "panic while loading": lambda d: d.update(normalizer=precompiled("AAAA")),
    "panic of merges": lambda d: model(d, continuing_subword_prefix="x" * 40),
    "panic while encoding": lambda d: d.update(normalizer=precompiled("CAAAAAEAAAAAAAAA")),
    "error while encoding": lambda d: d.update(model={"type": "Unigram", "vocab": []}),
    "id of 1e9": lambda d: d["model"]["vocab"].update({"zebra": 10**9}),
    "id of 4e9": lambda d: d["model"]["vocab"].update({"zebra": 4 * 10**9}),
    "negative id": lambda d: d["model"]["vocab"].update({"zebra": -1}),
    "id of text": lambda d: d["model"]["vocab"].update({"zebra": "7"}),
    "added id of 1e9": lambda d: add(d, id=10**9),
    "added id of text": lambda d: add(d, id="5"),
    "added content of numbers": lambda d: add(d, content=5),
    "added tokens of numbers": lambda d: d.update(added_tokens=[1, 2]),
    "nested 100 levels": lambda d: d.update(normalizer=deep(100)),
    "nested 300 levels": lambda d: d.update(normalizer=deep(300)),
    "nested 100,000 levels": lambda d: d.update(version="DEEP"),
    "empty pattern": lambda d: d.update(normalizer=replacing("", "x" * 10**6)),
    "chain of patterns": lambda d: d.update(
        normalizer={"type": "Sequence", "normalizers": [replacing("a", "a" * 100)] * 8}
    ),
    "chain of expressions": lambda d: d.update(
        normalizer={"type": "Sequence", "normalizers": [replacing("a*", "a", "Regex")] * 40}
    ),
    "long prefix": lambda d: d.update(normalizer={"type": "Prepend", "prepend": "x" * 10**6}),
    "long characters": lambda d: d.update(normalizer=precompiled(LONG_CHARACTERS)),
    "20 GB": lambda d: d.update(version="SPARSE"),
    "merges of numbers": lambda d: model(d, merges=[1, 2, 3]),
    "vocabulary of numbers": lambda d: model(d, vocab=[1, 2, 3]),
}


def write(directory: Path, change: Change) -> Path:
    document = json.loads(family_json("byte_level"))
    change(document)
    text = json.dumps(document).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
    directory.mkdir()
    (directory / "tokenizer.json").write_text(text)
    if "SPARSE" in text:
        os.truncate(directory / "tokenizer.json", 20 << 30)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


PROGRAM = """
import sys
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.loading import load
for directory in sys.argv[2:]:
    try:
        tokenizer = load(directory, backend=sys.argv[1])
        Encoder(tokenizer).encode(["abc é zebra <x>"] * 3)
        result = "accepted"
    except TokenizerError as error:
        result = str(error)
    except BaseException as error:
        result = f"FOREIGN {type(error).__name__} {error}"[:200]
    print(result.replace("\\n", "|"), flush=True)
"""


@pytest.mark.parametrize("backend", sampled(BACKENDS, 2))
def test_hostile_file_is_a_tokenizer_error(tmp_path: Path, backend: str) -> None:
    directories = [write(tmp_path / str(n), change) for n, change in enumerate(HOSTILE.values())]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend, *directories],
        capture_output=True, text=True, preexec_fn=limit_memory,
    )  # fmt: skip
    results = dict(zip(HOSTILE, done.stdout.splitlines(), strict=False))
    assert list(results) == list(HOSTILE), (done.returncode, done.stderr[-2000:], results)
    wrong = {
        name: result
        for name, result in results.items()
        if result.startswith(("accepted", "FOREIGN")) or "tokenizer" not in result.lower()
    }
    wrong.pop("nested 100 levels", None)  # some libraries accept it
    assert not wrong


@pytest.mark.parametrize(
    ("name", "workers"),
    sampled(
        [
            ("panic while loading", "1"), ("panic while loading", "0"),
            ("panic while encoding", "0"), ("panic while encoding", "1"),
            ("id of 1e9", "0"), ("id of 1e9", "1"),
            ("nested 300 levels", "1"), ("nested 300 levels", "0"),
        ],
        2,
    ),
)  # fmt: skip
def test_command_prints_one_line(tmp_path: Path, name: str, workers: str) -> None:
    source = write_rows(tmp_path / "a.jsonl", conversations(3))
    directory = write(tmp_path / "model", HOSTILE[name])
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill", "prepare", source, "--tokenizer", directory,
         "--num-workers", workers, "--cache-dir", tmp_path / "cache", "--json"],
        capture_output=True, text=True, preexec_fn=limit_memory, env={"RUST_BACKTRACE": "0"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["error"]["type"] == "TokenizerError"
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("tokenmill: ") for line in done.stderr.splitlines()) == 1


def test_panic_of_a_loaded_tokenizer_is_a_tokenizer_error(tmp_path: Path) -> None:
    """Also where a caller builds the tokenizer himself and uses its methods."""
    directory = write(tmp_path / "model", HOSTILE["panic while encoding"])
    tokenizer = Tokenizer((directory / "tokenizer.json").read_bytes())
    for use in (lambda: tokenizer.key, lambda: Encoder(tokenizer, "hf").encode(["abc"])):
        with pytest.raises(TokenizerError, match=r"failed to encode\w*: PanicException: index out"):
            use()


def test_interrupt_is_not_a_tokenizer_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    directory = write(tmp_path / "model", lambda document: None)
    monkeypatch.setattr("tokenmill.tokenizers.loading.read_template", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(directory, backend="file")
