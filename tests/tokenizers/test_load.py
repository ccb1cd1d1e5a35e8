"""Loading: every kind of source, templates, special tokens, and errors."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenizers
import tokenmill
from tests.programs import python
from tests.tokenizers.families import family, family_json, write_directory
from tokenmill.errors import CacheError, CorruptionError, TokenizerError, UsageError
from tokenmill.tokenizers import loading
from tokenmill.tokenizers.cache import copy_path, keep_copy, load_copy
from tokenmill.tokenizers.encoder import Encoder
from tokenmill.tokenizers.loading import load
from tokenmill.tokenizers.tokenizer import Tokenizer

PreTrainedTokenizerFast = pytest.importorskip("transformers").PreTrainedTokenizerFast

EXAMPLE = Path(tokenmill.__file__).parent / "examples" / "tokenizer"
CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|im_end|>",
    "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
    "pad_token": "<pad>",
    "unk_token": None,
    "add_bos_token": False,
    "chat_template": "{{ bos_token }}config",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "model", CONFIG)


def ids_of(tokenizer: Tokenizer) -> list[int]:
    ids = Encoder(tokenizer, "hf").encode(["<s>Hello world<|im_end|> 你好"]).ids
    return [int(number) for number in ids]


def test_every_kind_of_source_gives_the_same_tokenizer(directory: Path) -> None:
    expected = load(directory, backend="file")
    fast = PreTrainedTokenizerFast.from_pretrained(directory)
    sources: list[Any] = [
        directory, str(directory), directory / "tokenizer.json", fast, expected,
        tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")),
    ]  # fmt: skip
    for source in sources:
        tokenizer = load(source, chat_template=expected.template)
        assert ids_of(tokenizer) == ids_of(expected)
        if not isinstance(source, tokenizers.Tokenizer):
            assert tokenizer.key == expected.key
            assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
            assert tokenizer.pad_token_id == 4
            assert tokenizer.eos_token_id == 3
            assert tokenizer.bos_token_id == 0
    assert load(fast).backend == "transformers"
    assert load(directory).backend == "file"
    assert load(directory, backend="transformers").key == expected.key


def test_special_tokens_are_read_as_transformers_reads_them(directory: Path) -> None:
    (directory / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert load(directory, backend="file").special_tokens == {
        "eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"
    }  # fmt: skip
    decoder = {"0": {"content": "<s>", "special": True}}
    config = {**CONFIG, "added_tokens_decoder": decoder, "extra_special_tokens": {"x_token": "<x>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    special = load(directory, backend="file").special_tokens
    assert (special["eos_token"], special["x_token"]) == ("<|im_end|>", "<x>")


def test_templates_are_found_where_transformers_finds_them(directory: Path) -> None:
    def template(**arguments: Any) -> Any:
        return load(directory, backend="file", **arguments).template

    assert template() == "{{ bos_token }}config"
    named = [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**CONFIG, "chat_template": named}))
    assert template() == {"default": "d", "rag": "r"}
    assert template(chat_template="rag") == "r"
    (directory / "chat_template.jinja").write_text("file")
    assert template() == "file"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert template() == {"default": "file", "tool_use": "tools"}
    assert template() == load(directory, backend="transformers").template
    (directory / "chat_template.jinja").unlink()
    shutil.rmtree(directory / "additional_chat_templates")
    config.write_text(json.dumps({**CONFIG, "chat_template": None}))
    assert template() is None
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert template() == "processor"


def test_template_of_the_caller_may_be_source_or_file(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jinja"
    other.write_text("{{ other }}")
    for template in (other, str(other), "{{ other }}"):
        assert load(directory, chat_template=template).template == "{{ other }}"
    assert load(directory, chat_template="plain words").template == "plain words"
    with pytest.raises(TokenizerError, match="no such chat template"):
        load(directory, chat_template=str(tmp_path / "missing.jinja"))


def test_ambiguous_tokenizer_is_an_error_and_each_choice_works(directory: Path) -> None:
    # GPT2Tokenizer rebuilds the pre-tokenizer, so digits are no longer split one by one.
    digits = {"type": "Digits", "individual_digits": True}
    own = json.loads(family_json("byte_level"))["pre_tokenizer"]
    split = {"type": "Sequence", "pretokenizers": [digits, own]}
    config = {**CONFIG, "tokenizer_class": "GPT2Tokenizer"}
    write_directory(directory, config, pre_tokenizer=split, normalizer=None)
    with pytest.raises(TokenizerError, match="tokenizer_backend='transformers' or") as caught:
        load(directory)
    assert caught.value.path == str(directory)
    file, auto = load(directory, backend="file"), load(directory, backend="transformers")
    assert (file.backend, auto.backend) == ("file", "transformers")
    assert file.key != auto.key
    assert load(directory / "tokenizer.json").key == file.key  # passing the file is a choice


@pytest.mark.parametrize(
    "name", ["phi-3-mini", pytest.param("gpt-4o-o200k", marks=pytest.mark.soak)]
)
def test_real_tokenizers_that_autotokenizer_changes_are_errors(name: str, shared: Path) -> None:
    with pytest.raises(TokenizerError, match="tokenizer_backend='transformers' or"):
        load(shared / "tokenizers" / name)


@pytest.mark.parametrize(
    "name", ["t5-small", "bert-base-uncased", pytest.param("qwen2.5", marks=pytest.mark.soak)]
)
def test_real_tokenizers_that_autotokenizer_does_not_change(name: str, shared: Path) -> None:
    tokenizer = load(shared / "tokenizers" / name)
    assert tokenizer.notes["auto_tokenizer"] == "encodes alike"
    assert load(shared / "tokenizers" / name, backend="transformers").key == tokenizer.key


def test_remote_code_does_not_run_and_the_error_names_the_choices(directory: Path) -> None:
    classes = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    write_directory(directory, {**CONFIG, **classes})
    (directory / "evil.py").write_text(f"open({str(directory / 'ran')!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(TokenizerError, match=r"trust_remote_code=True.*tokenizer_backend='file'"):
        load(directory)
    with pytest.raises(TokenizerError, match="AutoTokenizer cannot load"):
        load(directory, backend="transformers")
    assert load(directory, backend="file").backend == "file"
    assert load(directory / "tokenizer.json").backend == "file"
    assert not (directory / "ran").exists()


def test_without_transformers_the_file_is_used_and_errors_name_the_extra(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "is_installed", lambda: False)
    assert load(directory).backend == "file"
    with pytest.raises(TokenizerError, match=r"pip install 'tokenmill\[hf\]'"):
        load(directory, backend="transformers")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"pip install 'tokenmill\[hf\]'"):
        load(directory)


def test_hub_id_needs_the_library_and_respects_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match="nor on the hub"):
        load("nobody/no-such-tokenizer-here")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(TokenizerError, match=r"pip install 'tokenmill\[hf\]'"):
        load("nobody/no-such-tokenizer-here")


def test_hub_id_becomes_a_directory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    requests: list[Any] = []

    def download(repository: str, **arguments: Any) -> str:
        requests.append((repository, arguments["revision"]))
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("some/model@v1").key == load(directory).key
    assert requests == [("some/model", "v1")]


def test_invalid_tokenizers_are_errors(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"tokenizer must be a directory.* got int"):
        load(42)
    with pytest.raises(UsageError, match=r"tokenizer_backend.*'slow'"):
        load(directory, backend="slow")
    with pytest.raises(TokenizerError, match="no such tokenizer"):
        load(tmp_path / "nowhere")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load(tmp_path, backend="file")
    for bad in (b"{", b"[]", b'{"model": {}}', b"\xff\xfe"):
        (directory / "tokenizer.json").write_bytes(bad)
        with pytest.raises(TokenizerError):
            load(directory, backend="file")
    document = json.loads(family_json("byte_level"))
    document["model"]["dropout"] = 0.1
    (directory / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(TokenizerError, match="random"):
        load(directory, backend="file")
    fast = PreTrainedTokenizerFast.from_pretrained(
        write_directory(directory, CONFIG), split_special_tokens=True
    )
    with pytest.raises(TokenizerError, match="split_special_tokens"):
        load(fast)


def test_pickled_tokenizer_is_small_and_detects_a_changed_file(directory: Path) -> None:
    tokenizer = load(directory)
    key = tokenizer.key
    sent = pickle.dumps(tokenizer)
    assert len(sent) < 4096
    received = pickle.loads(sent)
    assert (received.key, received.template) == (key, tokenizer.template)
    assert ids_of(received) == ids_of(tokenizer)
    (directory / "tokenizer.json").write_bytes(family_json("stripping"))
    with pytest.raises(TokenizerError, match="changed"):
        pickle.loads(sent)
    in_memory = load(tokenizers.Tokenizer.from_str(family_json("byte_level").decode()))
    assert ids_of(pickle.loads(pickle.dumps(in_memory))) == ids_of(in_memory)


@pytest.mark.parametrize("template", ["a\r\nb{{ eos_token }}", {"a": "d", "tool_use": "t"}, None])
def test_copy_has_the_same_identity_and_detects_damage(
    directory: Path, tmp_path: Path, template: Any
) -> None:
    tokenizer = load(directory, backend="file", chat_template=template)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in tokenizer.files().items():
        (copy / name).write_bytes(data)
    again = load(copy, backend="file")
    assert (again.key, again.template) == (tokenizer.key, tokenizer.template)
    for damaged in (copy / "tokenizer.json", copy / "tokenizer_config.json"):
        sound = damaged.read_bytes()
        damaged.write_bytes(sound.replace(b"m_end", b"m_ent"))
        with pytest.raises(CorruptionError, match="expected") as caught:
            load(copy, backend="file")
        assert caught.value.path == str(damaged)
        damaged.write_bytes(sound)


def test_pieces_decode_and_special_ids() -> None:
    tokenizer = family("byte_level")
    text = "<|im_start|>Hello 你好\n<|im_end|>"
    ids = Encoder(tokenizer, "hf").encode([text]).ids
    assert b"".join(tokenizer.pieces(ids)) == text.encode()
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Hello 你好\n"
    assert tokenizer.is_special(ids).tolist() == [1] + [0] * (len(ids) - 2) + [1]
    assert tokenizer.pieces([10**6, -1]) == [b"", b""]
    assert tokenizer.is_special(np.array([10**6, -1])).tolist() == [False, False]
    assert family("fallback_gemma").pieces(
        Encoder(family("fallback_gemma"), "hf").encode(["a 猫"]).ids
    ) == [b"a ", b"\xe7", b"\x8c", b"\xab"]


WITHOUT_TORCH = """
import importlib.util, sys
from tokenmill.tokenizers.loading import without_torch
with without_torch():
    from transformers import AutoTokenizer
    AutoTokenizer.from_pretrained(sys.argv[1])
    hidden = sys.modules["torch"] is None
print(hidden, importlib.util.find_spec("torch").name)  # as an import would, without its time
"""


def test_transformers_without_torch_loads_tokenizers_and_restores_torch() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    done = python(WITHOUT_TORCH, EXAMPLE)
    assert done.stdout == "True torch\n", done.stderr


def test_unusable_copy_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(EXAMPLE, backend="file")
    keep_copy(tokenizer, tmp_path)
    path, card = copy_path(tmp_path, tokenizer.card), tokenizer.card.as_dict()
    assert load_copy(path, card).key == tokenizer.key
    file = path / "tokenizer.json"
    file.chmod(0o644)
    for damaged in (tokenizer.data[:-9], tokenizer.data.replace(b'"merges"', b'"mergez"', 1)):
        file.write_bytes(damaged)
        with pytest.raises(CorruptionError, match="copy"):
            load_copy(path, card)

    # As for every artifact: a failing disk counts as damage, too many open files do not.
    for code, kind in ((errno.EIO, CorruptionError), (errno.EMFILE, CacheError)):

        def broken(*_: object, code: int = code) -> bytes:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr("tokenmill._core.artifact.read_bounded", broken)
        with pytest.raises(kind, match="cannot be read"):
            load_copy(path, card)
