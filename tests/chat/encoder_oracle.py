"""Check the rows of released encoders: every id, and which ids are trained.

The oracle calls an encoder itself, and records what its own function for one assistant message
returns. These pieces are the mask. `tokenmill.prepare` must give the same ids and mask for every
row of the shared corpora, or reject the row for a reason that the oracle finds as well:

- refused: the encoder raises an error on the row or on a prompt of it, or it has no prompt there;
- history: the encoder prints the messages before an answer differently once it is there;
- dropped: the encoder does not print the reasoning of the last answer.

`python -m tests.chat.encoder_oracle DIR [CORPUS ...]` prints the table. DIR has encoders of public
checkouts: those of DeepSeek and Kimi K3 in vLLM or SGLang, the class of Kimi's tokenizer in
axolotl. mistral-common needs no file, but it has no tekken.json of a version above 3: the oracle
changes the version of its own.
"""

from __future__ import annotations

import base64
import copy
import importlib.util
import itertools
import json
import shutil
import sys
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.build.calls import run_recipe
from tokenmill.chat import ChatSpec
from tokenmill.chat.shapes import Conversation, read_row
from tokenmill.errors import RowError
from tokenmill.tokenizers.pieces import byte_alphabet

Message = dict[str, Any]
Range = tuple[int, int]
ASKS = ("user", "tool", "developer")
MISTRAL = ("v2", "v3", "v7", "v3 tekken", "v7 tekken", "v11 tekken", "v13 tekken")


class Outcome(NamedTuple):
    """``kind``: right, wrong, avoidable (rejected without a reason), or one of the reasons."""

    kind: str
    detail: str = ""


def module_of(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"oracle_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Encoder:
    """One encoder with its tokenizer, as a checkpoint has them."""

    expand = "none"  # "turns" where it prints earlier messages differently once more follow

    def __init__(self, name: str, model: Path, **options: Any) -> None:
        self.name, self.model, self.options = name, model, options

    def encode(self, messages: list[Message], tools: Any, prompt: bool) -> Any:
        """Return text or ids from the encoder itself."""
        raise NotImplementedError

    def serve(self, messages: list[Message], prompt: bool) -> Any:
        """Call the encoder as a server does."""
        return self.encode(messages, None, prompt)

    def tokens(self, messages: list[Message], tools: Any) -> tuple[list[int], list[Range]]:
        """Return the ids, and for every assistant message the range of ids that it printed."""
        raise NotImplementedError

    def transform(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


class DeepSeek(Encoder):
    """`encode_messages` prints text, and `render_message` each message of it."""

    def __init__(self, path: Path, mode: str, model: Path) -> None:
        import tokenizers

        kwargs = {"thinking_mode": mode}
        super().__init__(f"{path.stem} {mode}", model, encoder=f"{path}:encode_messages",
                         encoder_kwargs=kwargs, trust_remote_code=True)  # fmt: skip
        self.expand = "turns" if mode == "thinking" else "none"
        self.mode, self.module = mode, module_of(path)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))

    def encode(self, messages: list[Message], tools: Any, prompt: bool) -> str:
        messages = copy.deepcopy(messages)
        if prompt and (not messages or messages[-1]["role"] not in ASKS):
            raise ValueError("no prompt")
        if tools:
            if messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = tools
        return str(self.module.encode_messages(messages, thinking_mode=self.mode))

    def tokens(self, messages: list[Message], tools: Any) -> tuple[list[int], list[Range]]:
        own, pieces = self.module.render_message, []

        def record(index: int, given: list[Message], *others: Any, **named: Any) -> Any:
            piece = own(index, given, *others, **named)
            pieces.append((given[index]["role"], piece))
            return piece

        self.module.render_message = record
        try:
            text = self.encode(messages, tools, False)
        finally:
            self.module.render_message = own
        at = len(text) - sum(len(piece) for _, piece in pieces)
        spans = []
        for role, piece in pieces:
            if role == "assistant":
                spans.append((at, at + len(piece)))
            at += len(piece)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        stops = [stop for _, stop in encoding.offsets]
        return encoding.ids, [tuple(bisect_right(stops, at) for at in span) for span in spans]


class Segments(Encoder):
    """Kimi K3: `build_chat_segments` returns segments; tiktoken encodes each on its own."""

    def __init__(self, path: Path, thinking: bool, model: Path) -> None:
        super().__init__(f"{path.stem} {'thinking' if thinking else 'chat'}", model,
                         encoder=f"{path}:build_chat_segments",
                         encoder_kwargs={"thinking": thinking}, trust_remote_code=True)  # fmt: skip
        self.thinking, self.module = thinking, module_of(path)
        names = "_render_assistant_segments", "_render_assistant"  # in the checkpoint, in vLLM
        [self.name_of_turn] = (name for name in names if hasattr(self.module, name))
        self.encoding = tiktoken_of(model)

    def encode(self, messages: list[Message], tools: Any, prompt: bool) -> list[int]:
        return [n for one in self._segments(messages, tools, prompt) for n in self._ids(one)]

    def _segments(self, messages: list[Message], tools: Any, prompt: bool = False) -> list[Any]:
        return list(self.module.build_chat_segments(
            copy.deepcopy(messages), tools, add_generation_prompt=prompt, thinking=self.thinking
        ))  # fmt: skip

    def _ids(self, segment: Any) -> list[int]:
        given: dict[str, Any] = {"allowed_special": "all"}
        if not segment.allow_special:
            given = {"disallowed_special": ()}
        return list(self.encoding.encode(segment.text, **given))

    def tokens(self, messages: list[Message], tools: Any) -> tuple[list[int], list[Range]]:
        own, turns = getattr(self.module, self.name_of_turn), []

        def record(*given: Any, **named: Any) -> Any:
            turns.append(own(*given, **named))
            return turns[-1]

        setattr(self.module, self.name_of_turn, record)
        try:
            segments = self._segments(messages, tools)
        finally:
            setattr(self.module, self.name_of_turn, own)
        ids = [self._ids(segment) for segment in segments]
        ends = [0, *itertools.accumulate(map(len, ids))]
        places = {id(segment): k for k, segment in enumerate(segments)}
        opened, closed = 3, 4  # segments of the opening tag, and of the end of a message
        return [*itertools.chain(*ids)], [
            (ends[places[id(turn[0])] + opened], ends[places[id(turn[-1])] + 1 + closed])
            for turn in turns
        ]  # fmt: skip


def with_ids(row: dict[str, Any], form: str) -> dict[str, Any]:
    """Give calls and their results the ids that an encoder accepts, by name and number."""
    ids: list[str] = []
    for message in row["messages"]:
        if calls := message.get("tool_calls"):
            ids = [form.format(call["function"]["name"], n) for n, call in enumerate(calls)]
            for call, number in zip(calls, ids, strict=True):
                call["id"] = number
            ids.reverse()
        if message["role"] == "tool":
            message["tool_call_id"] = ids.pop() if ids else form.format("none", 99999)
    return row


class Mistral(Encoder):
    """mistral-common returns ids, and its instruct tokenizer those of an assistant message."""

    def __init__(self, version: str, model: Path) -> None:
        from mistral_common.protocol.instruct.validator import ValidationMode
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

        super().__init__(f"mistral-common {version}", model, encoder="mistral-common")
        self.expand = "none" if version == "v13 tekken" else "turns"
        [file] = [*model.glob("tekken.json"), *model.glob("tokenizer.model.v*")]
        modes = ValidationMode.test, ValidationMode.finetuning
        self.own = [MistralTokenizer.from_file(str(file), mode=mode) for mode in modes]

    def transform(self, row: dict[str, Any]) -> dict[str, Any]:
        return with_ids(row, "call{1:05d}")  # it accepts nine letters or digits

    def encode(self, messages: list[Message], tools: Any, prompt: bool) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        known = ("role", "content", "tool_calls", "tool_call_id", "name")
        given = [
            {name: m[name] for name in known if m.get(name) is not None}
            for m in copy.deepcopy(messages)
        ]
        request = ChatCompletionRequest.from_openai(messages=given, tools=copy.deepcopy(tools))
        return list(self.own[not prompt].encode_chat_completion(request).tokens)

    def tokens(self, messages: list[Message], tools: Any) -> tuple[list[int], list[Range]]:
        instruct = self.own[True].instruct_tokenizer
        own, turns = instruct.encode_assistant_message, []

        def record(*given: Any, **named: Any) -> Any:
            turns.append(own(*given, **named))
            return turns[-1]

        instruct.encode_assistant_message = record
        try:
            ids = self.encode(messages, tools, False)
        finally:
            del instruct.encode_assistant_message
        ranges, at = [], 0
        for turn in turns:
            while ids[at : at + len(turn)] != turn:
                at += 1
            ranges.append((at, at + len(turn)))
            at += len(turn)
        return ids, ranges


class Kimi(Encoder):
    """Kimi K2: a class that replaces `encode` and `apply_chat_template`."""

    def __init__(self, model: Path) -> None:
        from tokenmill.tokenizers.loading import load_auto

        super().__init__("tokenization_kimi", model, encoder="transformers", trust_remote_code=True)
        self.tokenizer = load_auto(model, trust_remote_code=True)

    def transform(self, row: dict[str, Any]) -> dict[str, Any]:
        return with_ids(row, "functions.{0}:{1}")  # it prints the ids of calls, not their names

    def encode(self, messages: list[Message], tools: Any, prompt: bool) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            copy.deepcopy(messages), tools=tools, add_generation_prompt=prompt, tokenize=False
        )
        return list(self.tokenizer.encode(text))

    def serve(self, messages: list[Message], prompt: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )

    def tokens(self, messages: list[Message], tools: Any) -> tuple[list[int], list[Range]]:
        ids = self.encode(messages, tools, False)
        ranges = []
        end = self.tokenizer.encode("<|im_end|>")
        for k, message in enumerate(messages):
            if message["role"] == "assistant":
                start = len(self.encode(messages[:k], tools, True))
                after = self.encode(messages[: k + 1], tools, False)
                stop = len(after) if after == ids[: len(after)] else start
                while ids[stop - 1 : stop] != end:
                    stop -= 1
                ranges.append((start, stop))
        return ids, ranges


# Models


def tiktoken_of(model: Path) -> Any:
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    config = json.loads((model / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    return tiktoken.Encoding(
        "shared", pat_str=PATTERN, mergeable_ranks=load_tiktoken_bpe(str(model / "tiktoken.model")),
        special_tokens={one["content"]: int(number) for number, one in config.items()},
    )  # fmt: skip


# Without a class, transformers loads a tiktoken.model with this pattern.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_TOKENS = (
    "[BOS]", "[EOS]", "[PAD]", "[UNK]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>",
    "<|start_header_id|>", "<|end_header_id|>", "[EOT]", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|open|>", "<|close|>", "<|sep|>",
    "<|end_of_msg|>", "<|kimi_image_placeholder|>", "<think>", "</think>",
)  # fmt: skip


def deepseek_model(shared: Path, work: Path) -> Path:
    """Return V3's tokenizer with the tokens of V3.2 and V4 in its unused places."""
    model = work / "deepseek"
    model.mkdir()
    text = (shared / "tokenizers" / "deepseek-v3" / "tokenizer.json").read_text()
    document = json.loads(text)
    names = iter(["<think>", "</think>", "｜DSML｜"])
    for token in document["added_tokens"]:
        if "place▁holder" in token["content"] and (name := next(names, None)):
            document["model"]["vocab"].pop(token["content"], None)
            token["content"] = name
    (model / "tokenizer.json").write_text(json.dumps(document))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<｜end▁of▁sentence｜>"}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def kimi_model(shared: Path, work: Path, code: Path | None) -> Path:
    """Return Qwen's byte-level vocabulary as a tiktoken.model, with Kimi's control tokens."""
    model = work / ("kimi" if code else "k3")
    model.mkdir(exist_ok=True)
    vocab = json.loads((shared / "tokenizers" / "qwen2.5" / "tokenizer.json").read_text())
    alphabet = byte_alphabet()
    ranked = sorted(vocab["model"]["vocab"].items(), key=lambda one: one[1])
    tokens = [bytes(alphabet[ord(letter)] for letter in token) for token, _ in ranked]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (model / "tiktoken.model").write_bytes(b"".join(lines))
    flags = {"special": True, "normalized": False, "lstrip": False, "rstrip": False}
    config: dict[str, Any] = {
        "added_tokens_decoder": {
            str(len(tokens) + n): {"content": text, **flags, "single_word": False}
            for n, text in enumerate(KIMI_TOKENS)
        },
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
    }  # fmt: skip
    if code is not None:
        shutil.copy(code, model)
        config["auto_map"] = {"AutoTokenizer": [f"{code.stem}.TikTokenTokenizer", None]}
        config["tokenizer_class"] = "TikTokenTokenizer"
        [template] = shared.glob("templates/*/kimi_k25_fixed.jinja")
        config["chat_template"] = template.read_text()
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def mistral_model(version: str, work: Path) -> Path:
    """Return a file of mistral-common, or its tekken.json under another version."""
    import mistral_common

    data = Path(mistral_common.__file__).parent / "data"
    number, _, is_tekken = version.partition(" ")
    model = work / version.replace(" ", "-")
    model.mkdir()
    if not is_tekken:
        [file] = data.glob(f"*.model.{number}")
        shutil.copy(file, model / f"tokenizer.model.{number}")
        shutil.copy(file, model / "tokenizer.model")
        config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        return model
    document = json.loads((data / "tekken_240911.json").read_text())
    document["config"]["version"] = number
    document.pop("image", None)
    if number not in ("v3", "v7"):
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        names = [one["token_str"] for one in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
        names += [name for name in ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
                  if name not in names]  # fmt: skip
        document["special_tokens"] = [
            {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
        ]
    (model / "tekken.json").write_text(json.dumps(document))
    return model


def encoders(directory: Path, shared: Path, work: Path) -> Iterator[Callable[[], Encoder]]:
    """Yield a function for every encoder, which loads it."""
    model = deepseek_model(shared, work)
    for path in sorted(directory.glob("*.py")):
        text = path.read_text()
        if "def encode_messages" in text:
            for mode in ("chat", "thinking"):
                yield lambda path=path, mode=mode: DeepSeek(path, mode, model)
        elif "def build_chat_segments" in text:
            for on in (False, True):
                yield lambda path=path, on=on: Segments(path, on, kimi_model(shared, work, None))
        elif "class TikTokenTokenizer" in text:
            yield lambda path=path: Kimi(kimi_model(shared, work, path))
    for version in MISTRAL:
        yield lambda version=version: Mistral(version, mistral_model(version, work))


# Rows


def conversations(path: Path) -> list[dict[str, Any] | None]:
    """Return the rows of a corpus as OpenAI messages, up to the last answer; None for others."""
    rows: list[Any] = []
    for line in path.read_text().rstrip("\n").split("\n"):
        try:
            content = read_row(json.loads(line), ChatSpec())
        except RowError:
            content = None
        if not isinstance(content, Conversation):
            rows.append(None)
            continue
        messages = [_openai(message) for message in content.messages]
        while messages and messages[-1]["role"] != "assistant":
            messages.pop()
        tools = [
            one if "function" in one else {"type": "function", "function": one}
            for one in content.tools or ()
        ]
        rows.append({"messages": messages, "tools": tools} if tools else {"messages": messages})
    return rows


def _openai(message: Message) -> Message:
    message = copy.deepcopy(message)
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return message


def samples(row: dict[str, Any], expand: str) -> Iterator[tuple[list[Message], list[int]]]:
    """Yield conversations and the numbers of their trained messages."""
    messages = row["messages"]
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    if expand == "turns":
        yield from ((messages[: k + 1], [k]) for k in answers)
    elif answers:
        yield messages, answers


def expected(
    encoder: Encoder, messages: list[Message], trained: list[int], tools: Any
) -> tuple[list[int], list[int]] | str:
    """Return ids and mask, or the reason why the encoder cannot train the conversation."""
    try:
        ids, ranges = encoder.tokens(messages, tools)
        whole = encoder.encode(messages, tools, False)
        prompts = [encoder.encode(messages[:k], tools, True) for k in trained]
    except Exception:  # an encoder can raise whatever Python can
        return "refused"
    if any(whole[: len(prompt)] != prompt for prompt in prompts):
        return "history"
    last = messages[-1]
    if len(messages) - 1 in trained and (last.get("reasoning_content") or "").strip():
        other = {**last, "reasoning_content": "other", "reasoning": "other"}
        if encoder.encode([*messages[:-1], other], tools, False) == whole:
            return "dropped"
    answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    mask = [0] * len(ids)
    for k, (start, stop) in zip(answers, ranges, strict=True):
        if k in trained:
            mask[start:stop] = [1] * (stop - start)
    return ids, mask


def check(encoder: Encoder, rows: Iterable[dict[str, Any]]) -> list[Outcome]:
    """Prepare the rows, and compare every one with the encoder itself."""
    rows = [encoder.transform(copy.deepcopy(row)) for row in rows]
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"cache_dir": Path(work) / "cache", "progress": False, "executor": "inline"}
        store = run_recipe(
            source, str(encoder.model), expand=encoder.expand, raise_for_rejections=False, **given,
            **encoder.options,
        ).store  # fmt: skip
        served: dict[int, list[Any]] = {}
        for one in store:
            served.setdefault(one.origin.row, []).append(one)
        rejected: dict[int, list[str]] = {}
        for origin, reason, detail in store.rejected_rows():
            rejected.setdefault(origin.row, []).append(f"{reason}: {detail}")
        outcomes = []
        for number, row in enumerate(rows):
            found, refused = iter(served.get(number, ())), iter(rejected.get(number, ()))
            for messages, trained in samples(row, encoder.expand):
                answer = expected(encoder, messages, trained, row.get("tools"))
                outcomes.append(_compare(encoder, answer, found, refused))
            if next(found, None) is not None:
                outcomes.append(Outcome("wrong", f"row {number} has samples of no answer"))
    return outcomes


def _compare(
    encoder: Encoder, answer: Any, found: Iterator[Any], refused: Iterator[str]
) -> Outcome:
    if isinstance(answer, str):
        reason = next(refused, None)
        if reason is None:
            return Outcome("wrong", f"a row is served that is {answer}")
        has_mode = "thinking_mode" in encoder.options.get("encoder_kwargs", ())
        is_bare = has_mode and answer == "dropped" and "'thinking'" not in reason
        remedy = "no remedy: " if is_bare else ""
        return Outcome("wrong" if remedy else answer, remedy + reason)
    one = next(found, None)
    if one is None:
        return Outcome("avoidable", next(refused, "lost"))
    if (one.input_ids.tolist(), one.loss_mask.tolist()) == answer:
        return Outcome("right")
    which = "mask" if one.input_ids.tolist() == answer[0] else "ids"
    return Outcome("wrong", f"other {which} in {one.origin}")


def main() -> None:
    from tests.conftest import unpack_shared

    shared = unpack_shared()
    assert shared is not None, "needs the shared data"
    corpora = {
        path.stem: path for path in sorted(shared.glob("corpora/*.jsonl"))
        if not sys.argv[2:] or path.stem in sys.argv[2:]
    }  # fmt: skip
    rows = {name: [row for row in conversations(path) if row] for name, path in corpora.items()}
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as work:
        for load in encoders(Path(sys.argv[1]), shared, Path(work)):
            encoder = load()
            for name, given in rows.items():
                outcomes = check(encoder, given) if given else []
                kinds = Counter(outcome.kind for outcome in outcomes)
                totals += kinds
                expand = f"expand={encoder.expand}"
                print(f"{encoder.name:32} {expand:13} {name:24} {dict(kinds)}", flush=True)
                for outcome in outcomes:
                    if outcome.kind in ("wrong", "avoidable"):
                        print(f"    {outcome.kind}: {outcome.detail[:400]}")
                        break
    print(dict(totals))


if __name__ == "__main__":
    main()
