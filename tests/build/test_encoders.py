"""Rows that a Python encoder prints: proven masks, keys, workers, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenmill as tm
from tests.build.making import TOKENIZER, conversations, prepare, run, write_rows
from tests.chat import small_encoders
from tests.cli.harness import Shell
from tokenmill._core.id_text import id_text, ids_of
from tokenmill.chat import ChatSpec, Renderer
from tokenmill.chat.turns import ATOM, common_prefix
from tokenmill.errors import UsageError
from tokenmill.tokenizers.encoders import template_or_encoder
from tokenmill.tokenizers.loading import load

FILE = Path(small_encoders.__file__)
WORKERS: dict[str, Any] = {"executor": "local", "num_workers": 2}
OWN_TOKENIZER = {"tokenizer": str(TOKENIZER / "tokenizer.json")}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}


def file(name: str) -> str:
    return f"{FILE}:{name}"


def trained(row: Any) -> list[str]:
    """The text of every run of trained tokens."""
    decode = load(TOKENIZER, backend="file").decode
    runs: list[list[int]] = [[]]
    for token, bit in zip(row.input_ids.tolist(), row.loss_mask.tolist(), strict=True):
        if bit:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [decode(ids) for ids in runs if ids]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "chat.jsonl", conversations(20))


# What a row may be named by, and its key


def test_file_module_and_object_give_the_same_rows(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    by_file = prepare(source, encoder=file("plain"), cache_dir=cache)
    copied = tmp_path / "copied" / FILE.name
    copied.parent.mkdir()
    shutil.copy(FILE, copied)
    again = run(source, encoder=f"{copied}:plain", cache_dir=cache)
    assert again.store.key == by_file.key
    assert again.hit
    for encoder in ("tests.chat.small_encoders:plain", small_encoders.plain):
        store = prepare(source, encoder=encoder, cache_dir=cache)
        assert [r.input_ids.tolist() for r in store] == [r.input_ids.tolist() for r in by_file]
        assert [r.loss_mask.tolist() for r in store] == [r.loss_mask.tolist() for r in by_file]
    copied.write_text(copied.read_text() + "\n# changed\n")
    changed = {
        prepare(source, encoder=f"{copied}:plain", cache_dir=cache).key,
        prepare(source, encoder=file("plain"), encoder_kwargs={"name": "a"}, cache_dir=cache).key,
        prepare(source, encoder=file("segments"), cache_dir=cache).key,
        prepare(source, cache_dir=cache).key,
        by_file.key,
    }
    assert len(changed) == 5


def test_workers_give_the_same_store(source: Path, tmp_path: Path) -> None:
    stores = [
        prepare(source, encoder=file("plain"), cache_dir=tmp_path / name, **given)
        for name, given in (("inline", {}), ("workers", WORKERS))
    ]
    assert stores[0].key == stores[1].key
    assert trained(stores[1][3]) == [f"{conversations(20)[3]['messages'][1]['content']}<|im_end|>"]


def test_files_beside_an_encoder_are_part_of_it(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(FILE, folder / "base.py")
    (folder / "outer.py").write_text("from .base import plain\n")
    keys = [prepare(source, encoder=f"{folder}/outer.py:plain", cache_dir=tmp_path / "c").key]
    base = (folder / "base.py").read_text()
    (folder / "base.py").write_text(base.replace("<|im_end|>", "<|im_start|>"))
    store = prepare(source, encoder=f"{folder}/outer.py:plain", cache_dir=tmp_path / "c", **WORKERS)
    assert store.key not in keys
    assert trained(store[0])[0].endswith("<|im_start|>")


def closure(end: Any) -> Callable[..., str]:
    def encode(messages: Any, tools: Any = None, add_generation_prompt: bool = False) -> str:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}{end}" for m in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    return encode


def test_an_object_works_in_this_process(source: Path, tmp_path: Path) -> None:
    one, other = (
        prepare(source, encoder=closure(end), cache_dir=tmp_path) for end in ("</s>", "<")
    )
    assert one.key != other.key
    assert trained(one[0])[0].endswith("</s>")
    with pytest.raises(UsageError, match="num_workers=0"):
        prepare(source, encoder=closure("!"), cache_dir=tmp_path, **WORKERS)
    with pytest.raises(UsageError, match="without a fingerprint"):
        prepare(source, encoder=closure(object()), cache_dir=tmp_path)


def test_code_of_a_checkpoint_needs_trust(source: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(TOKENIZER, model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (model / "encoding").mkdir()
    text = FILE.read_text().replace("def merging", "def encode_messages")
    (model / "encoding" / "encoding_small.py").write_text(text)
    given: dict[str, Any] = {
        "cache_dir": tmp_path / "cache", "tokenizer_backend": "file", "num_workers": 0,
        "progress": False,
    }  # fmt: skip
    with pytest.raises(UsageError) as error:
        tm.prepare(source, model, **given)
    named = "encoder='encoding/encoding_small.py:encode_messages' and trust_remote_code"
    assert named in str(error.value)
    with pytest.raises(UsageError, match=r"chat_template.*encoding_small\.py:encode_messages"):
        tm.Bridge(str(model), tokenizer_backend="file")
    encoder = "encoding/encoding_small.py:encode_messages"
    for path in (encoder, str(model / encoder)):
        with pytest.raises(UsageError, match=r"code of a checkpoint.*trust_remote_code=True"):
            tm.prepare(source, model, encoder=path, **given)
        store = tm.prepare(source, model, encoder=path, trust_remote_code=True, **given)
        assert len(store) == 20


@pytest.mark.parametrize(
    ("files", "options"),
    [
        ({"encoding/encoding_v4.py": "def encode_messages(): ..."},
         ", or encoder='encoding/encoding_v4.py:encode_messages' and trust_remote_code"),
        ({"tiktoken.model": "", "encoding_k3.py": "def build_chat_segments(): ..."},
         ", or encoder='encoding_k3.py:build_chat_segments' and trust_remote_code"),
        ({"tekken.json": "{}"}, ", or encoder='mistral-common'"),
        ({"tokenizer.model.v7": ""}, ", or encoder='mistral-common'"),
        ({"tiktoken.model": "", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
         ", or encoder='transformers' and trust_remote_code"),
        ({"config.json": '{"model_type": "gpt_oss"}'}, ", or encoder='harmony'"),
        ({"tiktoken.model": "", "config.json": '{"model_type": "other"}'}, ""),
    ],
)  # fmt: skip
def test_a_directory_without_a_template_names_the_encoder(
    source: Path, tmp_path: Path, files: dict[str, Any], options: str
) -> None:
    model = tmp_path / "model"
    (model / "encoding").mkdir(parents=True)
    shutil.copy(TOKENIZER / "tokenizer.json", model)
    if "auto_map" in files:
        config = {"auto_map": files.pop("auto_map")}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (model / name).write_text(text)
    given: dict[str, Any] = {"tokenizer_backend": "file"}
    calls: list[Callable[[], Any]] = [
        partial(tm.Bridge, str(model), **given),
        partial(tm.prepare, source, model, cache_dir=tmp_path, num_workers=0, **given),
    ]
    for call in calls:
        with pytest.raises(UsageError) as error:
            call()
        assert str(error.value).endswith(f" Set chat_template{options}.")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"encoder": "no/such.py:encode"}, "does not exist"),
        ({"encoder": file("missing")}, "AttributeError: module 'small_encoders' has no attribute"),
        ({"encoder": "no_such_module:encode"}, "cannot be imported"),
        ({"encoder": "json:no_such_name"}, "cannot be loaded"),
        ({"encoder": "json:__name__"}, "must be callable, got str"),
        ({"encoder": "encode"}, "must be 'path/to/file.py:callable'"),
        ({"encoder": 7}, "must be 'path/to/file.py:callable'"),
        ({"encoder_kwargs": {"a": 1}}, "needs encoder"),
        ({"encoder": file("plain"), "chat_template": "x"}, "cannot be combined"),
        ({"encoder": file("plain"), "chat_template_kwargs": {"a": 1}}, "use encoder_kwargs"),
        ({"encoder": file("plain"), "date": "2026-11-15"}, "use encoder_kwargs"),
        ({"encoder": file("plain"), "encoder_kwargs": {"a": object()}}, "encoder_kwargs"),
        ({"encoder": file("counting")}, "must return a text.* got dict"),
        ({"encoder": file("packing")}, "must return a text.* got bytes"),
        ({"encoder": file("weighing")}, "must return a text.* got list of float"),
    ],
)
def test_options_that_cannot_be_applied(
    source: Path, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prepare(source, cache_dir=tmp_path, **given)


# Proofs

WORDS = st.sampled_from(
    ["yes", "no", " a", "b\n", "<|im_end|>", "</think>", "é", "look", "x", "{}"]
)
TEXT = st.lists(WORDS, min_size=1, max_size=4).map("".join)


@st.composite
def dialogs(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXT)})
    for number in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(TEXT)})
        if draw(st.integers(0, 2)) == 0:
            calls = [
                {"id": f"{number}{n}", "type": "function",
                 "function": {"name": draw(WORDS), "arguments": json.dumps({"at": draw(TEXT)})}}
                for n in range(draw(st.integers(1, 2)))
            ]  # fmt: skip
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": draw(TEXT)}
                for call in draw(st.permutations(calls))
            ]
        messages.append({"role": "assistant", "content": draw(TEXT)})
    return messages


def renderer_of(encoder: str, tokenizer: Any = None, **options: Any) -> Renderer:
    kwargs = options.pop("encoder_kwargs", None)
    source = template_or_encoder(None, file(encoder), kwargs, None, trust_remote_code=False)
    return Renderer(ChatSpec(**options), source, tokenizer=tokenizer)


@settings(max_examples=60)
@given(dialogs())
@pytest.mark.parametrize(("encoder", "end"), [("plain", "<|im_end|>"), ("merging", "</s>")])
def test_trained_text_is_that_of_each_assistant_message(
    encoder: str, end: str, messages: list[dict[str, Any]]
) -> None:
    before = json.dumps(messages)
    rendering = renderer_of(encoder).render([{"messages": messages}])
    assert json.dumps(messages) == before
    assert rendering.rejected == []
    [text], [spans] = rendering.texts, rendering.spans
    whole = getattr(small_encoders, encoder)(json.loads(before))
    assert text == whole
    own = [small_encoders._body(m) + end for m in messages if m["role"] == "assistant"]
    assert [text[start:stop] for start, stop in spans or ()] == own
    rendering.notes.pop("arguments_as_text", None)  # the check is on the text of some calls
    assert rendering.notes == {"rows_encoder": 1, "proven_by_prompts": 1, "renderer": "encoder"}


def test_calls_and_tools_have_the_form_of_openai() -> None:
    """The row's own text of arguments is kept; objects are written as text."""
    own = '{"b":1,  "a": 2}'
    for arguments, text in ((own, own), ({"b": 1, "a": 2}, '{"b": 1, "a": 2}')):
        call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
        messages = [{"role": "user", "content": "Look."},
                    {"role": "assistant", "content": "", "tool_calls": [call]}]  # fmt: skip
        row = {"messages": messages, "tools": [{"name": "look"}]}
        rendering = renderer_of("plain").render([row])
        assert rendering.rejected == []
        assert f"<call>look({text})</call>" in rendering.texts[0]
        assert (
            '<tool>{"type": "function", "function": {"name": "look"}}</tool>'
            in (rendering.texts[0])
        )


def reasons(rendering: Any) -> list[str]:
    return [f"{error.reason}: {error.message}" for _, _, error in rendering.rejected]


def test_history_that_drops_thinking_is_rejected_with_its_remedy() -> None:
    def says(text: str, thought: str) -> dict[str, Any]:
        return {"role": "assistant", "content": text, "reasoning_content": thought}

    asks = {"role": "user", "content": "Why?"}
    row = {"messages": [asks, says("One.", "First."), asks, says("Two.", "Second.")]}
    [reason] = reasons(renderer_of("merging").render([row]))
    assert reason.startswith("template_drops_content: the encoder does not print the reasoning of")
    assert reason.endswith("encoder_kwargs {'thinking_mode': 'thinking'} prints reasoning")
    thinking = partial(renderer_of, "merging", encoder_kwargs={"thinking_mode": "thinking"})
    twice = {"messages": [asks, {**says("One.", "First."), "reasoning": "First."}]}
    assert thinking().render([row, twice]).texts == ["<s><|user|>Why?<|assistant|><think>"
                                                     "First.</think>One.</s>"]  # fmt: skip
    [reason] = reasons(thinking().render([row]))
    assert reason.startswith("mask_unproven: the text does not continue the generation prompt of ")
    for part in ("<think>", "</think>", "expand turns", "{'thinking_mode': 'chat'}"):
        assert part in reason
    other = {"messages": [{"role": "user", "content": "What?"}, says("Three.", "Third.")]}
    rendering = thinking(expand="turns").render([row, other])
    assert [
        [text[slice(*span)] for span in spans or ()]
        for text, spans in zip(rendering.texts, rendering.spans, strict=True)
    ] == [[f"{said}</s>"] for said in ("First.</think>One.", "Second.</think>Two.",
                                       "Third.</think>Three.")]  # fmt: skip
    kept = thinking(train_on="last_assistant_message").render([row])
    assert kept.rejected == []
    bare = {"messages": [asks, {"role": "assistant", "content": "One."}]}
    [reason] = reasons(thinking().render([bare]))
    assert reason.startswith("template_error: the encoder failed (ValueError: no reasoning after")
    assert "encoder_kwargs {'thinking_mode': 'chat'}" in reason
    assert renderer_of("merging").render([bare]).rejected == []


def test_tools_switch_off_the_dropping_of_thinking() -> None:
    """The tools reach `merging` in a system message, as it has no parameter for them."""
    says = [{"role": "assistant", "content": text, "reasoning_content": f"{text}?"}
            for text in ("One.", "Two.")]  # fmt: skip
    asks = {"role": "user", "content": "Why?"}
    messages = [asks, says[0], asks, says[1]]
    renderer = renderer_of("merging", encoder_kwargs={"thinking_mode": "thinking"})
    [reason] = reasons(renderer.render([{"messages": messages}]))
    assert reason.startswith("mask_unproven: the text does not continue the generation prompt of ")
    system = {"role": "system", "content": "Be brief."}
    for first, printed in (([], ""), ([system], "Be brief.")):
        row = {"messages": [*first, *messages], "tools": [{"name": "look"}]}
        rendering = renderer.render([row])
        assert rendering.rejected == []
        [text], [spans] = rendering.texts, rendering.spans
        tool = '{"type": "function", "function": {"name": "look"}}'
        assert text.startswith(f"<s>{printed}{tool}<|user|>Why?<|assistant|><think>One.?</think>")
        trained = [text[start:stop] for start, stop in spans or ()]
        assert trained == ["One.?</think>One.</s>", "Two.?</think>Two.</s>"]


def test_an_empty_text_stays_empty_in_the_second_pass() -> None:
    """`exclusive` raises an error if a unique word replaces the empty text."""
    calls = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    row = {"messages": [{"role": "user", "content": "Look."}, calls]}
    rendering = renderer_of("exclusive").render([row])
    assert rendering.rejected == []
    calls["content"] = "Yes."
    [reason] = reasons(renderer_of("exclusive").render([row]))
    assert reason.startswith("template_error: the encoder failed (ValueError: text beside a call")


def test_another_message_in_a_turn_is_rejected() -> None:
    row = {"messages": conversations(1)[0]["messages"]}
    [reason] = reasons(renderer_of("leaking").render([row]))
    assert reason.startswith("mask_unproven: the encoder prints another message in turn 1")
    # The same form again passes without another check; a leak in another form is found.
    renderer = renderer_of("leaking_systems")
    plain, system = {"role": "user", "content": "Why?"}, {"role": "system", "content": "Be brief."}
    says = {"role": "assistant", "content": "So."}
    given = [[plain, plain, says], [plain, plain, says], [system, plain, says]]
    rendering = renderer.render([{"messages": messages} for messages in given])
    assert len(rendering.texts) == 2
    [reason] = reasons(rendering)
    assert reason.startswith("mask_unproven: the encoder prints another message in turn 2")
    calls = [row["messages"][0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    [reason] = reasons(renderer_of("dropping").render([{"messages": calls}]))
    assert reason.startswith("template_drops_content: ")


def test_a_prompt_that_nothing_asks_for_is_rejected() -> None:
    """`merging` prompts after user and tool messages only."""
    says = {"role": "assistant", "content": "One."}
    row = {"messages": [{"role": "user", "content": "Why?"}, says, says]}
    [reason] = reasons(renderer_of("merging").render([row]))
    assert "no generation prompt after such a message" in reason


# Segments and ids


@pytest.mark.parametrize("name", ["segments", "segment_objects"])
def test_user_text_in_segments_has_no_control_tokens(name: str, tmp_path: Path) -> None:
    typed = "Say <|im_end|>\n<|im_start|>assistant\nhello"
    messages = [{"role": "user", "content": typed}, {"role": "assistant", "content": typed}]
    source = write_rows(tmp_path / "rows.jsonl", [{"messages": messages}, *conversations(3)])
    store = prepare(source, encoder=file(name), cache_dir=tmp_path / "cache")
    tokenizer = load(TOKENIZER, backend="file")
    expected: list[int] = []
    for text, special in small_encoders.segments(messages):
        expected += tokenizer.segment_ids(text, special=special)
    row = store[0]
    assert row.input_ids.tolist() == expected
    start, end = (tokenizer.segment_ids(t, special=True) for t in ("<|im_start|>", "<|im_end|>"))
    assert len(start) == len(end) == 1
    assert expected.count(start[0]) == expected.count(end[0]) == 2
    assert trained(row) == [f"{typed}<|im_end|>"]
    assert row.turns[-1] == ("assistant", len(expected) // 2, len(expected))
    text = prepare(source, encoder=file("plain"), cache_dir=tmp_path / "cache")[0]
    assert text.input_ids.tolist().count(end[0]) == 4  # the same row as text


def test_ids_of_an_encoder_are_the_ids_of_the_row(tmp_path: Path) -> None:
    rows = [*conversations(3), {"text": "plain text"}]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {"encoder": file("numbers"), "encoder_kwargs": OWN_TOKENIZER}
    store = prepare(source, cache_dir=tmp_path / "cache", **given, **WORKERS)
    tokenizer = load(TOKENIZER, backend="file")
    for row, served in zip(rows[:3], store, strict=False):
        assert served.input_ids.tolist() == small_encoders.numbers(row["messages"], **OWN_TOKENIZER)
        assert trained(served) == [f"{row['messages'][1]['content']}<|im_end|>"]
    assert store[3].input_ids.tolist()[:-1] == tokenizer.segment_ids("plain text", special=True)
    assert store[3].loss_mask.tolist() == [1] * len(store[3].input_ids)


def test_ids_beyond_the_vocabulary_are_rejected(tmp_path: Path, source: Path) -> None:
    def encode(messages: Any, tools: Any = None, add_generation_prompt: bool = False) -> list[int]:
        ids = small_encoders.numbers(messages, tools, add_generation_prompt, **OWN_TOKENIZER)
        return [*ids, 1_000_000] if len(messages) == 2 else ids

    done = run(source, encoder=encode, cache_dir=tmp_path / "cache", raise_for_rejections=False)
    _, reason, detail = next(iter(done.store.rejected_rows()))
    assert (reason, len(done.store)) == ("mask_unproven", 0)
    assert "the encoder returned the id 1000000" in detail


@given(st.lists(st.integers(0, 0xFFFFF), max_size=20))
def test_ids_survive_as_text(ids: list[int]) -> None:
    text = id_text(ids)
    assert ids_of(text).tolist() == ids
    assert text.strip() == text
    assert len(text) == len(ids)


# Everywhere a template is used


def test_prompts_of_an_encoder(tmp_path: Path) -> None:
    rows = [{"text": [{"role": "user", "content": c}]} for c in ("Why?", "How <|im_end|>?")]
    source = write_rows(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {
        "apply_chat_template": True, "tokenizer_backend": "file", "cache_dir": tmp_path / "cache",
        "num_workers": 0,
    }  # fmt: skip
    tokenizer = load(TOKENIZER, backend="file")
    for name in ("plain", "segments"):
        prompts = tm.PromptDataset(source, TOKENIZER, encoder=file(name), **given)
        for one in (prompts, pickle.loads(pickle.dumps(prompts))):
            # Typed control tokens stay text only as ids, so a prompt that is text has none.
            assert one.rejected == ({} if name == "plain" else {"mask_unproven": 1})
            text = one[0].prompt
            assert isinstance(text, str)
            assert one[0].length == len(tokenizer.segment_ids(text, special=True))
            assert text.startswith("<|im_start|>user\nWhy?<|im_end|>")
            assert text.endswith("<|im_start|>assistant\n")
    keys = {tm.PromptDataset(source, TOKENIZER, encoder=file("plain"), encoder_kwargs=kwargs,
                             **given).key for kwargs in (None, {"name": "a"})}  # fmt: skip
    assert len(keys) == 2


def test_a_bridge_continues_in_the_ids_of_an_encoder() -> None:
    asks, more = {"role": "user", "content": "Why?"}, {"role": "user", "content": "How?"}
    bridge = tm.Bridge(str(TOKENIZER), tokenizer_backend="file", encoder=file("plain"))
    ids = bridge.prompt([asks])
    assert bridge.tokenizer.decode(ids) == small_encoders.plain([asks], None, True)
    answer = bridge.tokenizer.segment_ids("So.<|im_end|>", special=True)
    whole = bridge.extend([*ids, *answer], [more])
    messages = [asks, {"role": "assistant", "content": "So."}, more]
    assert bridge.tokenizer.decode(whole) == small_encoders.plain(messages, None, True)
    assert pickle.loads(pickle.dumps(bridge)).prompt([asks]) == ids
    # The messages of an environment may have arguments as objects.
    call = {**CALL, "function": {"name": "look", "arguments": {"at": "x"}}}
    calls = [{"role": "assistant", "content": "", "tool_calls": [one]} for one in (CALL, call)]
    texts = {bridge.tokenizer.decode(bridge.prompt([asks, message, more])) for message in calls}
    assert len(texts) == 1
    assert '<call>look({"at": "x"})</call>' in texts.pop()


def test_rollouts_are_compared_with_an_encoder(tmp_path: Path) -> None:
    tokenizer = load(TOKENIZER, backend="file")
    messages = conversations(1)[0]["messages"]
    prompt = tokenizer.segment_ids(small_encoders.plain(messages[:1], None, True), special=True)
    answer = tokenizer.segment_ids(f"{messages[1]['content']}<|im_end|>", special=True)
    mask = [0] * len(prompt) + [1] * len(answer)
    row = {"messages": messages, "token_ids": [*prompt, *answer], "loss_mask": mask}
    given: dict[str, Any] = {
        "tokenizer_backend": "file", "num_workers": 0, "cache_dir": tmp_path / "cache",
        "encoder": file("plain"), "progress": False,
    }  # fmt: skip
    source = write_rows(tmp_path / "rollouts.jsonl", [row])
    report = tm.check_rollouts([str(source)], str(TOKENIZER), **given)
    assert (report.trajectories, report.findings, dict(report.rejected)) == (1, [], {})
    other = tm.check_rollouts(
        [str(source)], str(TOKENIZER), **{**given, "encoder_kwargs": {"name": "bot"}}
    )
    assert other.findings


def test_lint_and_commands_take_an_encoder(source: Path, tmp_path: Path, shell: Shell) -> None:
    report = tm.lint(
        source, TOKENIZER, encoder=file("plain"), tokenizer_backend="file", num_workers=0,
        cache_dir=tmp_path / "cache", progress=False,
    )  # fmt: skip
    assert not report.of("error")
    dropped = write_rows(
        tmp_path / "calls.jsonl",
        [{"messages": [{"role": "user", "content": "Look."},
                       {"role": "assistant", "content": "Yes.", "tool_calls": [CALL]}]}],
    )  # fmt: skip
    report = tm.lint(
        dropped, TOKENIZER, encoder=file("dropping"), tokenizer_backend="file", num_workers=0,
        cache_dir=tmp_path / "cache", progress=False,
    )  # fmt: skip
    assert {finding.rule for finding in report.findings} & {
        "template_drops_tool_calls", "template_drops_content",
    }  # fmt: skip
    flags = ["--tokenizer", TOKENIZER, "--tokenizer-backend", "file", "--encoder", file("plain"),
             "--encoder-kwargs", '{"name": "bot"}', "--cache-dir", tmp_path / "cache",
             "--num-workers", "0"]  # fmt: skip
    done = shell("prepare", source, *flags, "--json")
    store = tm.open_store(done.json["path"])
    assert "<|im_start|>bot\n" in store[0].text


def test_a_recipe_names_an_encoder_relative_to_its_file(source: Path, tmp_path: Path) -> None:
    shutil.copy(FILE, tmp_path / "own.py")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"sources: [chat.jsonl]\ntokenizer: {TOKENIZER}\nencoder: own.py:plain\n"
        "encoder_kwargs: {name: bot}\ntokenizer_backend: file\nexecutor: inline\n"
    )
    store = tm.prepare(recipe, cache_dir=tmp_path / "cache", progress=False)
    assert "<|im_start|>bot\n" in store[0].text


UNITS = st.lists(st.sampled_from(["<think>", "</think>", "\n", "ab", "a", " ", "<", "[INST]", "|"]))


@given(UNITS, UNITS, UNITS)
def test_common_prefix_consists_of_whole_units(
    base: list[str], one: list[str], other: list[str]
) -> None:
    left, right = "".join([*base, *one]), "".join([*base, *other])
    expected = ""
    for a, b in zip(ATOM.findall(left), ATOM.findall(right), strict=False):
        if a != b:
            break
        expected += a
    whole = left if right.startswith(left) else right if left.startswith(right) else expected
    assert common_prefix(left, right) == whole
