"""AutoTokenizer is compared before the build, and the result is remembered."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import tokenmill as tm
from tests.programs import python
from tokenmill.errors import CacheError, TokenizerError
from tokenmill.tokenizer import recall
from tokenmill.work import identity as identify

EXAMPLES = Path(tm.__file__).parent / "examples"
ROWS = EXAMPLES / "conversations.jsonl"


def test_comparison_is_remembered(tmp_path: Path) -> None:
    store = tm.prepare(ROWS, tokenizer=EXAMPLES / "tokenizer", cache_dir=tmp_path, num_workers=1)
    card = recall(EXAMPLES / "tokenizer", cache_dir=tmp_path, backend="auto")
    assert card is not None
    assert card.key == store.manifest["tokenizer"]["identity"]


def test_real_tokenizer_that_autotokenizer_changes_is_refused_by_a_local_build(
    shared: Path, tmp_path: Path
) -> None:
    tokenizer = shared / "tokenizers" / "phi-3-mini"
    with pytest.raises(TokenizerError, match="tokenizer_backend='file'"):
        tm.prepare(ROWS, tokenizer=tokenizer, cache_dir=tmp_path, num_workers=1)
    assert not list((tmp_path / "stores").glob("*"))


WITHOUT_TORCH = """
import importlib.util, sys
from tokenmill.tokenizer.auto_tokenizer import without_torch
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


def test_copy_that_the_disk_cannot_read_is_the_caches_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("tokenmill.tokenizer.load", broken)
    with pytest.raises(CacheError, match="cannot be read"):
        identify.load_copy(tmp_path, {})
