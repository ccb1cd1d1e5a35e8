"""One cache, whoever encodes: what a verb gives does not depend on what ran there before it.

AutoTokenizer and the tokenizer.json beside it have one identity where they encode alike, and one
copy in the cache, but they write it down in other bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import tokenmill as tm
from tests.data.making import EXAMPLES, TOKENIZER
from tokenmill.errors import CorruptionError
from tokenmill.inspect.row import view_row
from tokenmill.tokenizers.cache import load_copy
from tokenmill.tokenizers.loading import load
from tokenmill.tokenizers.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")


def _prepare(source: Path, **named: Any) -> Any:
    store = tm.prepare(source, format="messages", **named)
    return [view_row(store, number) for number in range(len(store))], store.rejected


def _prompts(source: Path, **named: Any) -> Any:
    key = {"prompt_key": "messages", "apply_chat_template": True}
    named.pop("executor", None)
    prompts = tm.PromptDataset(source, **key, **named)
    return prompts.lengths.tolist(), [prompt.prompt for prompt in prompts], prompts.rejected


def _lint(source: Path, **named: Any) -> Any:
    report = tm.lint(source, sample=None, format="messages", **named)
    return report.rows_checked, report.findings


VERBS: dict[str, Callable[..., Any]] = {"prepare": _prepare, "prompts": _prompts, "lint": _lint}


def _named(way: str, directory: Path) -> dict[str, Any]:
    if way == "object":
        return {"tokenizer": transformers.AutoTokenizer.from_pretrained(str(directory))}
    return {"tokenizer": directory, "tokenizer_backend": way}


WAYS = ("auto", "file", "transformers", "object")


def _sources(directory: Path) -> tuple[Path, Path]:
    """Two files of other rows, so that nothing of the second was made by the first."""
    lines = (EXAMPLES / "conversations.jsonl").read_bytes().splitlines(keepends=True)
    first, second = directory / "first.jsonl", directory / "second.jsonl"
    first.write_bytes(b"".join(lines[:3]))
    second.write_bytes(b"".join(lines[3:6]))
    return first, second


def _kept(cache: Path) -> dict[str, bytes]:
    assert not list(cache.glob("quarantine/*"))
    return {str(path): path.read_bytes() for path in cache.glob("tokenizers/*/tokenizer.json")}


def _run(verb: str, way: str, source: Path, cache: Path, **more: Any) -> Any:
    named = _named(way, more.pop("tokenizer", TOKENIZER))
    return VERBS[verb](source, cache_dir=cache, **named, **{"executor": "inline", **more})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """What a verb gives in a cache of its own."""

    @functools.cache
    def give(verb: str, way: str) -> Any:
        directory = tmp_path_factory.mktemp("alone")
        _, source = _sources(directory)
        return _normal(_run(verb, way, source, directory / "cache"), directory)

    return give


def _normal(answer: Any, directory: Path) -> str:
    return repr(answer).replace(str(directory), "")


@pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("second", VERBS)
@pytest.mark.parametrize("first", VERBS)
def test_a_verb_after_any_other_gives_what_it_gives_alone(
    first: str, second: str, share: int, tmp_path: Path, alone: Callable[[str, str], Any]
) -> None:
    """One in so many pairs of ways, the other ones for the next pair of verbs."""
    before, source = _sources(tmp_path)
    offset = 3 * list(VERBS).index(first) + list(VERBS).index(second)
    for earlier, later in list(product(WAYS, WAYS))[offset % share :: share]:
        cache = tmp_path / f"{earlier}-{later}"
        _run(first, earlier, before, cache)
        kept = _kept(cache)
        answer = _normal(_run(second, later, source, cache), tmp_path)
        assert answer == alone(second, later), f"{later} after {earlier}"
        assert kept.items() <= _kept(cache).items(), f"{later} after {earlier}"


def test_whole_copy_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    ours = load(TOKENIZER, backend="transformers")
    home = tmp_path / "tokenizers" / ours.key
    home.mkdir(parents=True)
    for template, is_ours in ((ours.template, True), ("{{ messages }}", False)):
        other = Tokenizer(
            (TOKENIZER / "tokenizer.json").read_bytes(),
            template=template,
            special_tokens=ours.special_tokens,
        )
        assert other.checksum != ours.checksum
        for name, data in other.files().items():
            (home / name).write_bytes(data)
        if is_ours:
            assert load_copy(home, ours.card.as_dict()).key == ours.key
        else:
            with pytest.raises(CorruptionError, match="another identity"):
                load_copy(home, ours.card.as_dict())


REAL = (
    "command-r-plus", "deepseek-v3", "gemma3", "gpt-oss", "llama3.1", "mistral-nemo", "qwen2.5",
    "qwen3",
)  # fmt: skip


@pytest.mark.soak  # the bundled tokenizer is one of them, too
@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_that_both_write_down_share_a_cache(
    name: str, shared: Path, tmp_path: Path
) -> None:
    before, source = _sources(tmp_path)
    named = {"tokenizer": shared / "tokenizers" / name, "date": "2026-11-15"}
    prompts = {}
    for first, second in (("file", "transformers"), ("transformers", "file")):
        cache = tmp_path / first
        _run("prepare", first, before, cache, **named)
        kept = _kept(cache)
        prompts[first] = _run("prompts", second, source, cache, **named)
        assert _kept(cache) == kept
    assert prompts["file"] == prompts["transformers"]
