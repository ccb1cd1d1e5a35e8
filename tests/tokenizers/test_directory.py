"""Directories of tokenizers: files that contradict each other, and AutoTokenizer failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tokenizers.families import family_json, write_directory
from tokenmill.errors import TokenizerError
from tokenmill.tokenizers import loading
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.loading import load

GENERIC = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.mark.parametrize(
    ("config", "model", "complete"),
    [
        (GENERIC, {"model_type": "brand_new"}, True),
        ({"tokenizer_class": "TokenizersBackend"}, None, True),
        ({}, None, True),
        ({}, {"model_type": "brand_new"}, False),  # the model type may imply a class
        ({"tokenizer_class": "BrandNewTokenizer"}, None, False),
        ({"tokenizer_class": "LlamaTokenizerFast"}, None, False),
        ({**GENERIC, "auto_map": {"AutoTokenizer": ["own.Own", None]}}, None, False),
        ({**GENERIC, "auto_map": ["own.Own", None]}, None, False),
        ({**GENERIC, "auto_map": {"AutoConfig": "own.Config"}}, None, True),
    ],
)
def test_file_that_autotokenizer_cannot_load_is_used_only_if_it_is_complete(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    model: dict[str, Any] | None,
    complete: bool,
) -> None:
    pytest.importorskip("transformers")
    directory = write_directory(tmp_path, config)

    def fail(*_: object, **__: object) -> None:
        raise loading.AutoTokenizerError("ImportError: some class is missing")

    monkeypatch.setattr(loading, "load_auto", fail)
    if model is not None:
        (directory / "config.json").write_text(json.dumps(model))
    if complete:
        assert "some class is missing" in load(directory).notes["auto_tokenizer"]
        return
    with pytest.raises(TokenizerError, match=r"some class is missing.*tokenizer_backend='file'"):
        load(directory)
    with pytest.raises(TokenizerError) as caught:
        load(directory, trust_remote_code=True)
    assert "trust_remote_code=True" not in caught.value.message  # it is set already
    assert load(directory, backend="file").backend == "file"


def added(**ids: int) -> dict[str, Any]:
    decoder = {str(number): {"content": f"<|{name}|>"} for name, number in ids.items()}
    return {**GENERIC, "added_tokens_decoder": decoder}


FILES: dict[str, tuple[dict[str, Any], str | None]] = {
    # Other files of the directory, and the error. In tokenizer.json, <|im_start|> has the id 2.
    "same": ({"tokenizer_config.json": added(im_start=2, im_end=3)}, None),
    "config lacks": ({"tokenizer_config.json": added(im_start=2, tool=900)}, "tool.* with id 900"),
    "config other id": ({"tokenizer_config.json": added(im_start=3)}, "has it with id 2"),
    "added same": ({"added_tokens.json": {"<s>": 0, "<|im_end|>": 3}}, None),
    "added lacks": ({"added_tokens.json": {"<tool>": 900}}, "added_tokens.json defines.*does not"),
    "added other id": ({"added_tokens.json": {"<s>": 1}}, "'<s>' with id 1.*has it with id 0"),
    "map same": ({"special_tokens_map.json": {"eos_token": "<|im_end|>", "unk_token": ""}}, None),
    "map lacks": ({"special_tokens_map.json": {"pad_token": {"content": "[PAD]"}}}, r"'\[PAD\]'"),
    "map list": ({"special_tokens_map.json": {"additional": ["<s>", "<x>"]}}, "'<x>', but"),
    # Words that the vocabulary encodes as one token, and one that no merges produce.
    "word": ({"special_tokens_map.json": {"eos_token": "o"}}, None),
    "word other id": ({"added_tokens.json": {"o": 3}}, "'o' with id 3"),
    "unreachable": ({"added_tokens.json": {"<|call|>": 700}}, r"call.* with id 700.*does not"),
    "no number": ({"added_tokens.json": {"<s>": "zero"}}, "must be an integer, got 'zero'"),
}


@pytest.mark.parametrize("backend", ["auto", "file", "without transformers"])
@pytest.mark.parametrize("name", FILES)
def test_tokens_of_other_files_must_be_in_tokenizer_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    model = json.loads(family_json("byte_level"))["model"]
    model["vocab"]["<|call|>"] = 700
    directory = write_directory(tmp_path, GENERIC, model=model)
    files, wrong = FILES[name]
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content))
    if backend == "without transformers":
        monkeypatch.setattr(loading, "is_installed", lambda: False)
    chosen = "file" if backend == "file" else "auto"
    if wrong is None:
        assert load(directory, backend="file").backend == "file"
        if name != "word":  # AutoTokenizer makes it a special token, which is another error
            assert load(directory, backend=chosen).backend == "file"
        return
    with pytest.raises(TokenizerError, match=wrong) as caught:
        load(directory, backend=chosen)
    if name == "no number":
        return
    assert "tokenizer_backend='transformers'" in caught.value.message
    assert caught.value.path == str(directory)
    # Passing the file itself skips this check.
    assert "tokenizer.json" in load(directory / "tokenizer.json").notes["named_tokens"]


def test_transformers_encodes_a_token_that_only_the_config_defines(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    directory = write_directory(tmp_path, added(im_start=2, tool=559))
    tokenizer = load(directory, backend="transformers")
    assert Encoder(tokenizer, "hf").encode(["<|tool|>"]).ids.tolist() == [559]


def test_unknown_token_of_the_model_need_not_be_reachable(tmp_path: Path) -> None:
    for name in ("fallback_gemma", "unigram"):
        added_tokens = json.loads(family_json(name))["added_tokens"]
        without = [token for token in added_tokens if token["content"] != "<unk>"]
        directory = write_directory(tmp_path / name, {}, name, added_tokens=without)
        (directory / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
        assert load(directory, backend="file").backend == "file"


def test_real_directory_with_tokens_that_tokenizer_json_lacks(shared: Path) -> None:
    directory = shared / "tokenizers" / "chatglm3"
    for backend in ("auto", "file"):
        with pytest.raises(TokenizerError, match=r"\[gMASK\].*trust_remote_code=True"):
            load(directory, backend=backend)
    assert load(directory / "tokenizer.json").backend == "file"
