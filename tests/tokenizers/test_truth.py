"""Whether a tokenizer's files tell one truth: what they name, and what AutoTokenizer can load."""

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
        ({}, {"model_type": "brand_new"}, False),  # which class that implies is not known
        ({"tokenizer_class": "BrandNewTokenizer"}, None, False),
        ({"tokenizer_class": "LlamaTokenizerFast"}, None, False),
        ({**GENERIC, "auto_map": {"AutoTokenizer": ["own.Own", None]}}, None, False),
        ({**GENERIC, "auto_map": ["own.Own", None]}, None, False),
        ({**GENERIC, "auto_map": {"AutoConfig": "own.Config"}}, None, True),
    ],
)
def test_file_that_autotokenizer_refuses_is_used_only_where_it_is_complete(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    model: dict[str, Any] | None,
    complete: bool,
) -> None:
    pytest.importorskip("transformers")
    directory = write_directory(tmp_path, config)

    def refuses(*_: object, **__: object) -> None:
        raise loading.AutoTokenizerError("ImportError: some class is missing")

    monkeypatch.setattr(loading, "load_auto", refuses)
    if model is not None:
        (directory / "config.json").write_text(json.dumps(model))
    if complete:
        assert "some class is missing" in load(directory).notes["auto_tokenizer"]
        return
    with pytest.raises(TokenizerError, match=r"some class is missing.*tokenizer_backend='file'"):
        load(directory)
    with pytest.raises(TokenizerError) as caught:
        load(directory, trust_remote_code=True)
    assert "trust_remote_code=True" not in caught.value.message  # it was given: no choice any more
    assert load(directory, backend="file").backend == "file"


def added(**ids: int) -> dict[str, Any]:
    decoder = {str(number): {"content": f"<|{name}|>"} for name, number in ids.items()}
    return {**GENERIC, "added_tokens_decoder": decoder}


TRUTHS: dict[str, tuple[dict[str, Any], str | None]] = {
    # What lies beside tokenizer.json, which knows <|im_start|> as 2, and the token that is wrong.
    "same": ({"tokenizer_config.json": added(im_start=2, im_end=3)}, None),
    "config lacks": ({"tokenizer_config.json": added(im_start=2, tool=900)}, "'<|tool|>' as id 9"),
    "config other id": ({"tokenizer_config.json": added(im_start=3)}, "has it as id 2"),
    "added same": ({"added_tokens.json": {"<s>": 0, "<|im_end|>": 3}}, None),
    "added lacks": ({"added_tokens.json": {"<tool>": 900}}, "added_tokens.json names .*lacks it"),
    "added other id": ({"added_tokens.json": {"<s>": 1}}, "'<s>' as id 1.*has it as id 0"),
    "map same": ({"special_tokens_map.json": {"eos_token": "<|im_end|>", "unk_token": ""}}, None),
    "map lacks": ({"special_tokens_map.json": {"pad_token": {"content": "[PAD]"}}}, r"'\[PAD\]'"),
    "map list": ({"special_tokens_map.json": {"additional": ["<s>", "<x>"]}}, "'<x>', but"),
    # Words that the vocabulary holds and encodes as one token; and one that no merges lead to.
    "word": ({"special_tokens_map.json": {"eos_token": "o"}}, None),
    "word other id": ({"added_tokens.json": {"o": 3}}, "'o' as id 3"),
    "out of reach": ({"added_tokens.json": {"<|call|>": 700}}, r"'<\|call\|>' as id 700.*lacks"),
    "no number": ({"added_tokens.json": {"<s>": "zero"}}, "the id 'zero'"),
}


@pytest.mark.parametrize("backend", ["auto", "file", "without transformers"])
@pytest.mark.parametrize("name", TRUTHS)
def test_tokens_named_beside_the_file_must_be_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, backend: str
) -> None:
    model = json.loads(family_json("byte_level"))["model"]
    model["vocab"]["<|call|>"] = 700
    directory = write_directory(tmp_path, GENERIC, model=model)
    files, wrong = TRUTHS[name]
    for file, content in files.items():
        (directory / file).write_text(json.dumps(content))
    if backend == "without transformers":
        monkeypatch.setattr(loading, "is_installed", lambda: False)
    chosen = "file" if backend == "file" else "auto"
    if wrong is None:
        assert load(directory, backend="file").backend == "file"
        if name != "word":  # AutoTokenizer makes a special token of it, which is seen as well
            assert load(directory, backend=chosen).backend == "file"
        return
    with pytest.raises(TokenizerError, match=wrong) as caught:
        load(directory, backend=chosen)
    if name == "no number":
        return
    assert "tokenizer_backend='transformers'" in caught.value.message
    assert caught.value.path == str(directory)
    # Who names the file itself takes it as it stands.
    assert "tokenizer.json" in load(directory / "tokenizer.json").notes["named_tokens"]


def test_token_that_only_transformers_knows_is_encoded_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    directory = write_directory(tmp_path, added(im_start=2, tool=559))
    tokenizer = load(directory, backend="transformers")
    assert Encoder(tokenizer, "hf").encode(["<|tool|>"]).ids.tolist() == [559]


def test_unknown_token_of_the_model_need_not_be_a_text(tmp_path: Path) -> None:
    for name in ("fallback_gemma", "unigram"):
        added_tokens = json.loads(family_json(name))["added_tokens"]
        without = [token for token in added_tokens if token["content"] != "<unk>"]
        directory = write_directory(tmp_path / name, {}, name, added_tokens=without)
        (directory / "special_tokens_map.json").write_text(json.dumps({"unk_token": "<unk>"}))
        assert load(directory, backend="file").backend == "file"


def test_real_tokenizer_whose_directory_names_tokens_that_its_file_lacks(shared: Path) -> None:
    directory = shared / "tokenizers" / "chatglm3"
    for backend in ("auto", "file"):
        with pytest.raises(TokenizerError, match=r"\[gMASK\].*trust_remote_code=True"):
            load(directory, backend=backend)
    assert load(directory / "tokenizer.json").backend == "file"
