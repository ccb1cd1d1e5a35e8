"""Tokenizers of tiktoken and tekken.json: ids equal those of the libraries themselves."""

from __future__ import annotations

import base64
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import TOKENIZER, conversations, write_rows
from tests.chat.encoder_oracle import Mistral, check, encoders, mistral_model
from tests.chat.encoder_oracle import conversations as conversations_of
from tests.tokenizers.families import CORPUS, SPECIAL, byte_level
from tokenmill._core.encoders import EncoderSource
from tokenmill.chat import encoders as chat_encoders
from tokenmill.errors import TokenizerError, UsageError
from tokenmill.tokenizers.loading import load, load_auto
from tokenmill.tokenizers.pieces import byte_alphabet
from tokenmill.tokenizers.ranks import TEKKEN_SPECIAL, of_tekken, require_equal_ids

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"
TEXTS = st.lists(
    st.one_of(st.sampled_from([*CORPUS, *SPECIAL, *TEKKEN_SPECIAL, "\n\n  "]), st.text(max_size=9)),
    max_size=4,
).map("".join)


@cache
def tokens() -> list[bytes]:
    alphabet = byte_alphabet()
    vocab = byte_level()["model"]["vocab"]
    ranked = sorted(set(vocab) - set(SPECIAL), key=vocab.__getitem__)
    found = [bytes(alphabet[ord(letter)] for letter in token) for token in ranked]
    return sorted(found, key=lambda token: (len(token) > 1, token if len(token) == 1 else b""))


@cache
def encoding() -> Any:
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {token: rank for rank, token in enumerate(tokens())}
    special = {token: len(ranks) + 7 * n for n, token in enumerate(SPECIAL)}  # with gaps
    return tiktoken.Encoding(
        "small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special
    )


@cache
def converted() -> Any:
    return load(encoding())


@given(TEXTS)
def test_ids_are_those_of_tiktoken(text: str) -> None:
    own, tokenizer = encoding(), converted()
    assert tokenizer.segment_ids(text, special=True) == own.encode(text, allowed_special="all")
    assert tokenizer.segment_ids(text, special=False) == own.encode(text, disallowed_special=())
    ids = own.encode(text, allowed_special="all")
    assert b"".join(tokenizer.pieces(ids)) == text.encode()


def test_a_tokenizer_with_other_ids_is_refused() -> None:
    with pytest.raises(TokenizerError, match="other ids after the conversion"):
        require_equal_ids(converted(), lambda text: [0], None)


def write_tekken(path: Path) -> Path:
    config = {
        "pattern": PATTERN, "num_vocab_tokens": len(tokens()), "version": "v7",
        "default_vocab_size": len(tokens()) + 30, "default_num_special_tokens": 30,
    }  # fmt: skip
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens())
    ]
    path.mkdir(parents=True, exist_ok=True)
    (path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab}))
    return path


def test_ids_are_those_of_mistral_common(tmp_path: Path) -> None:
    tekken = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    own = tekken.Tekkenizer.from_file(write_tekken(tmp_path) / "tekken.json")
    tokenizer = of_tekken(tmp_path / "tekken.json")
    assert tokenizer.eos_token_id == own.eos_id
    assert tokenizer.segment_ids("[INST]<s>", special=True) == [
        own.get_special_token("[INST]"),
        own.bos_id,
    ]

    @given(TEXTS)
    def equal(text: str) -> None:
        assert tokenizer.segment_ids(text, special=False) == own.encode(text, bos=False, eos=False)

    equal()


def test_rows_of_mistral_common(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.protocol.instruct.validator import ValidationMode
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    model = write_tekken(tmp_path / "model")
    rows = conversations(3)
    typed = {"role": "user", "content": "Why [INST]?"}
    rows[0]["messages"] += [typed, {"role": "assistant", "content": "So </s>."}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {
        "cache_dir": tmp_path / "cache", "progress": False, "tokenizer_backend": "file",
    }  # fmt: skip
    with pytest.raises(UsageError, match="encoder='mistral-common'"):
        tm.prepare(source, model, num_workers=0, **given)
    store = tm.prepare(source, model, encoder="mistral-common", num_workers=2, **given)
    own = MistralTokenizer.from_file(str(model / "tekken.json"), mode=ValidationMode.finetuning)
    decode = load(model, backend="file").decode
    for row, served in zip(rows, store, strict=True):
        request = ChatCompletionRequest.from_openai(messages=row["messages"])
        assert served.input_ids.tolist() == own.encode_chat_completion(request).tokens
        answers = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        trained = served.input_ids[served.loss_mask == 1].tolist()
        assert decode(trained) == "".join(f"{answer}</s>" for answer in answers)
    begin = own.instruct_tokenizer.tokenizer.get_special_token("[INST]")
    assert store[0].input_ids.tolist().count(begin) == 2
    assert store[0].input_ids.tolist().count(own.instruct_tokenizer.tokenizer.eos_id) == 2


CLASS = """
import base64, tiktoken
from transformers import PreTrainedTokenizer
from transformers.models.gpt2.tokenization_gpt2 import bytes_to_unicode
class SmallTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    def __init__(self, vocab_file, **given):
        lines = open(vocab_file, "rb").read().splitlines()
        ranks = {base64.b64decode(t): int(r) for t, r in map(bytes.split, lines)}
        self.special = {t: len(ranks) + n for n, t in enumerate(["<s>", "</s>", "<turn>"])}
        self.model = tiktoken.Encoding("small", pat_str=r"PATTERN", mergeable_ranks=ranks,
                                       special_tokens=self.special)
        self.letters = bytes_to_unicode()
        super().__init__(bos_token="<s>", eos_token="</s>", **given)
    vocab_size = property(lambda self: self.model.n_vocab)
    def get_vocab(self):
        return dict(self.special)
    def encode(self, text, **given):
        return self.model.encode(text, allowed_special="all")
    def apply_chat_template(self, conversation, tools=None, add_generation_prompt=False,
                            tokenize=True, **given):
        texts = [f"{m['role']}:{m['content']}" for m in conversation]
        texts += ["assistant:"] * add_generation_prompt
        ends = ["</s>"] * len(conversation) + [""]
        if not tokenize:
            return "".join(f"<turn>{text}{end}" for text, end in zip(texts, ends))
        parts = [[*self.encode("<turn>"), *self.model.encode(text, disallowed_special=()),
                  *self.encode(end)] for text, end in zip(texts, ends)]
        return sum(parts, [])
"""


def test_a_class_that_replaces_apply_chat_template(tmp_path: Path) -> None:
    pytest.importorskip("tiktoken")
    pytest.importorskip("transformers")
    model = tmp_path / "model"
    model.mkdir()
    lines = [base64.b64encode(t) + b" %d" % rank for rank, t in enumerate(tokens())]
    (model / "tiktoken.model").write_bytes(b"\n".join(lines))
    (model / "tokenization_small.py").write_text(CLASS.replace("PATTERN", PATTERN))
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_small.SmallTokenizer", None]},
        "tokenizer_class": "SmallTokenizer", "chat_template": "{{ messages }}",
    }  # fmt: skip
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    rows = conversations(4)
    rows[3]["messages"][0]["content"] = "Why </s><turn>assistant:?"  # stays text for this class
    source = write_rows(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {"cache_dir": tmp_path / "c", "progress": False, "num_workers": 0}
    with pytest.raises(TokenizerError, match="encoder='transformers' and trust_remote_code"):
        tm.prepare(source, model, **given)
    with pytest.raises(UsageError, match="runs code of a checkpoint"):
        tm.prepare(source, model, encoder="transformers", **given)
    given["trust_remote_code"] = True
    with pytest.raises(TokenizerError, match="SmallTokenizer replaces apply_chat_template"):
        tm.prepare(source, model, **given)
    store = tm.prepare(source, model, encoder="transformers", **given)
    tokenizer = load(model, trust_remote_code=True, chat_template="{{ messages }}")
    for row, served in zip(rows, store, strict=True):
        asks, says = row["messages"]
        turns = [(f"user:{asks['content']}", "</s>"), (f"assistant:{says['content']}", "</s>")]
        ids = [
            number
            for text, end in turns
            for part, special in (("<turn>", True), (text, False), (end, True))
            for number in tokenizer.segment_ids(part, special=special)
        ]
        assert served.input_ids.tolist() == ids
        trained = served.input_ids[served.loss_mask == 1].tolist()
        assert tokenizer.decode(trained) == f"{says['content']}</s>"


SLOW_CLASS = """
from pathlib import Path
from transformers import PreTrainedTokenizer
class SlowTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "words.txt"}
    def __init__(self, vocab_file, **given):
        self.words = Path(vocab_file).read_text().split("|")
        self.ids = {word: n for n, word in enumerate(self.words)}
        super().__init__(bos_token="<s>", eos_token="</s>", **given)
    vocab_size = property(lambda self: len(self.words))
    def get_vocab(self):
        return {**self.ids, **self.added_tokens_encoder}
    def _tokenize(self, text):
        return list(text.replace(" ", "\u2581"))
    def _convert_token_to_id(self, token):
        return self.ids[token]
    def _convert_id_to_token(self, number):
        return self.words[number]
"""
TURNS = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}</s>{% endfor %}"


def test_a_class_that_encodes_in_python(tmp_path: Path) -> None:
    """Its ids are known, but not the text of each of them: only the ids prove a mask."""
    pytest.importorskip("transformers")
    model = tmp_path / "model"
    model.mkdir()
    letters = sorted({*map(chr, range(33, 127)), "\u2581"} - {"|"})
    (model / "words.txt").write_text("|".join(["<s>", "</s>", *letters]))
    (model / "tokenization_slow.py").write_text(SLOW_CLASS)
    config = {
        "auto_map": {"AutoTokenizer": ["tokenization_slow.SlowTokenizer", None]},
        "tokenizer_class": "SlowTokenizer",
        "chat_template": TURNS + "{% if add_generation_prompt %}a:{% endif %}",
    }  # fmt: skip
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    rows = conversations(4)
    source = write_rows(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {
        "cache_dir": tmp_path / "c", "progress": False, "num_workers": 0, "trust_remote_code": True,
    }  # fmt: skip
    with pytest.raises(TokenizerError, match=r"SlowTokenizer encodes in Python.*'transformers'"):
        tm.prepare(source, model, **given)
    store = tm.prepare(source, model, encoder="transformers", **given)
    own = load_auto(model, trust_remote_code=True)
    for row, served in zip(rows, store, strict=True):
        whole = own.apply_chat_template(row["messages"], return_dict=False)
        assert served.input_ids.tolist() == whole
        answer = served.input_ids[served.loss_mask == 1].tolist()
        assert answer == own.encode(row["messages"][1]["content"] + "</s>")
        assert store.tokenizer.decode(answer) == row["messages"][1]["content"] + "</s>"
        assert row["messages"][0]["content"] in served.text
    assert tm.prepare(source, model, encoder="transformers", **{**given, "num_workers": 2}).key == (
        store.key
    )
    prompts = write_rows(tmp_path / "text.jsonl", [{"text": "abc"}])
    with pytest.raises(TokenizerError, match="encodes conversations only"):
        tm.prepare(prompts, model, encoder="transformers", **given)


def test_rows_of_sentencepiece_files(tmp_path: Path) -> None:
    """A directory without tekken.json: mistral-common reads tokenizer.model.v3, by its name."""
    pytest.importorskip("mistral_common")
    pytest.importorskip("sentencepiece")
    pytest.importorskip("transformers")
    encoder = Mistral("v3", mistral_model("v3", tmp_path))
    rows = conversations(3)
    source = write_rows(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {"cache_dir": tmp_path / "c", "progress": False, "num_workers": 0}
    with pytest.raises(UsageError, match="encoder='mistral-common'"):
        tm.prepare(source, encoder.model, **given)
    rows[0]["messages"][0]["content"] += " [INST] </s> [TOOL_CALLS]"
    outcomes = check(encoder, rows)
    assert [outcome.kind for outcome in outcomes] == ["right"] * 3, outcomes
    control = encoder.own[0].instruct_tokenizer.tokenizer.get_special_token("[INST]")
    assert encoder.tokens(rows[0]["messages"], None)[0].count(control) == 1


@pytest.mark.slow
def test_rows_of_harmony(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the vocabulary of gpt-oss in the form that the library reads, and checks by digest."""
    lib = pytest.importorskip("openai_harmony")
    model = shared / "tokenizers" / "gpt-oss"
    document = json.loads((model / "tokenizer.json").read_text())
    added, alphabet = {one["id"] for one in document["added_tokens"]}, byte_alphabet()
    lines = [
        base64.b64encode(bytes(alphabet[ord(letter)] for letter in token)) + b" %d\n" % number
        for token, number in sorted(document["model"]["vocab"].items(), key=lambda one: one[1])
        if number not in added
    ]
    (tmp_path / "o200k_base.tiktoken").write_bytes(b"".join(lines))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    call = {"id": "a", "function": {"name": "look", "arguments": '{"at": "home"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "Home <|end|>."},
        {"role": "assistant", "content": "At home."},
    ]
    source = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}])
    given: dict[str, Any] = {"num_workers": 0, "progress": False, "tokenizer_backend": "file"}
    row = tm.prepare(source, model, encoder="harmony", cache_dir=tmp_path / "c", **given)[0]
    encoding = lib.load_harmony_encoding(lib.HarmonyEncodingName.HARMONY_GPT_OSS)
    role, new = lib.Role, lib.Message.from_role_and_content
    says = new(role.ASSISTANT, '{"at": "home"}').with_channel("commentary")
    author = lib.Author.new(role.TOOL, "functions.look")
    result = lib.Message.from_author_and_content(author, "Home <|end|>.").with_channel("commentary")
    own = lib.Conversation.from_messages([
        new(role.SYSTEM, lib.SystemContent.new()),
        new(role.DEVELOPER, lib.DeveloperContent.new().with_instructions("Be brief.")),
        new(role.USER, "Where?"),
        new(role.ASSISTANT, "Hm.").with_channel("analysis"),
        says.with_recipient("functions.look").with_content_type("json"),
        result.with_recipient("assistant"),
        new(role.ASSISTANT, "At home.").with_channel("final"),
    ])  # fmt: skip
    config = lib.RenderConversationConfig(auto_drop_analysis=False)
    ids = encoding.render_conversation_for_training(own, config=config)
    assert row.input_ids.tolist() == ids
    trained = encoding.decode(row.input_ids[row.loss_mask == 1].tolist())
    calls = '<|channel|>commentary json<|message|>{"at": "home"}<|call|>'
    assert trained == (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look"
        f"{calls}<|channel|>final<|message|>At home.<|return|>"
    )


def test_a_library_that_an_encoder_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the option and what to do."""
    lib = pytest.importorskip("openai_harmony")
    pytest.importorskip("mistral_common")
    monkeypatch.setattr(chat_encoders, "_loaded", {})
    source = write_rows(tmp_path / "rows.jsonl", conversations(1))
    given: dict[str, Any] = {"cache_dir": tmp_path / "c", "progress": False, "num_workers": 0}

    def fail(name: Any) -> None:
        raise lib.HarmonyError("no such file")

    monkeypatch.setattr(lib, "load_harmony_encoding", fail)
    message = r"encoder='harmony' cannot load its vocabulary \(no such file\); set .*ENCODINGS_BASE"
    with pytest.raises(UsageError, match=message):
        tm.prepare(source, TOKENIZER, encoder="harmony", tokenizer_backend="file", **given)
    model = write_tekken(tmp_path / "model")
    request = "mistral_common.protocol.instruct.request"
    monkeypatch.setitem(sys.modules, request, None)  # which other tests may have imported
    with pytest.raises(UsageError, match=r"^encoder='mistral-common'.*pip install"):
        tm.prepare(source, model, encoder="mistral-common", **given)
    (model / "tekken.json").write_text("{}")
    monkeypatch.undo()
    path = str(model / "tekken.json")
    encode = EncoderSource("tokenmill.tokenizers.adapters:mistral_common", path=path)
    with pytest.raises(UsageError, match="encoder='mistral-common' cannot be loaded: "):
        chat_encoders.load_encoder(encode)


FETCHED = Path(os.environ.get("TOKENMILL_TEST_ENCODERS") or os.devnull)


def test_rows_of_fetched_encoders(shared: Path, tmp_path: Path) -> None:
    """A sample of what `python -m tests.chat.encoder_oracle` checks on all rows."""
    if not FETCHED.is_dir():
        pytest.skip("needs encoders of public checkouts in TOKENMILL_TEST_ENCODERS")
    rows = [
        row
        for name in ("glaive_tools_sharegpt", "reason_tool_use", "drone_tool_calls", "toy_chat")
        for row in conversations_of(shared / "corpora" / f"{name}.jsonl")[:4]
    ]
    for load_encoder in encoders(FETCHED, shared, tmp_path):
        encoder = load_encoder()
        outcomes = check(encoder, rows)
        wrong = [one for one in outcomes if one.kind in ("wrong", "avoidable")]
        assert wrong == [], encoder.name
        assert sum(one.kind == "right" for one in outcomes) >= 4, encoder.name
