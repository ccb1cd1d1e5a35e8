"""AutoTokenizer is compared before the build, and the result is remembered."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import tokenmill as tm
from tests.programs import python
from tokenmill.errors import CacheError, CorruptionError
from tokenmill.tokenizer import copy_path, keep_copy, load, load_copy

EXAMPLES = Path(tm.__file__).parent / "examples"
ROWS = EXAMPLES / "conversations.jsonl"


WITHOUT_TORCH = """
import importlib.util, sys
from tokenmill.tokenizer.loading import without_torch
with without_torch():
    from transformers import AutoTokenizer
    AutoTokenizer.from_pretrained(sys.argv[1])
    hidden = sys.modules["torch"] is None
print(hidden, importlib.util.find_spec("torch").name)  # as an import would, without its time
"""


def test_transformers_without_torch_loads_tokenizers_and_gives_torch_back() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    done = python(WITHOUT_TORCH, EXAMPLES / "tokenizer")
    assert done.stdout == "True torch\n", done.stderr


def test_copy_that_cannot_be_used_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load(EXAMPLES / "tokenizer", backend="file")
    keep_copy(tokenizer, tmp_path)
    path, card = copy_path(tmp_path, tokenizer.card), tokenizer.card.as_dict()
    assert load_copy(path, card).key == tokenizer.key
    file = path / "tokenizer.json"
    file.chmod(0o644)
    for damaged in (tokenizer.data[:-9], tokenizer.data.replace(b'"merges"', b'"mergez"', 1)):
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="copy"):
            load_copy(path, card)

    # As for every artifact: a disk that fails is damage, too many open files are not.
    for code, kind in ((errno.EIO, CorruptionError), (errno.EMFILE, CacheError)):

        def broken(*_: object, code: int = code) -> bytes:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Path, "read_bytes", broken)
        with pytest.raises(kind, match="cannot be read"):
            load_copy(path, card)
