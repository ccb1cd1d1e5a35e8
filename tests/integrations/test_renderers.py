"""`renderers`: chat templates without a class of that package, as its renderers."""

from __future__ import annotations

import logging
import pickle
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import tokenizers
from tests.build.making import EXAMPLES, TOKENIZER
from tests.chat.conversations import DATE, SPECIAL, TOOLS, zoo
from tests.chat.loop_oracle import TemplateRaised
from tests.chat.scoring import oracle
from tests.chat.templates import CHATML, GENERATION, INST, RETURNING, THINKING, TRIMMING, UNCLOSED
from tokenmill.chat.thinking import TAG
from tokenmill.chat.thinking import THINKING as THINK
from tokenmill.errors import RowError, UsageError
from tokenmill.tokenizers.tokenizer import Tokenizer

base = pytest.importorskip("renderers.base")

from renderers import CustomRendererConfig, DefaultRendererConfig, create_renderer  # noqa: E402
from renderers.base import RenderedTokens, build_training_sample  # noqa: E402

from tokenmill.integrations.renderers import TemplateRenderer, TemplateRendererConfig  # noqa: E402

# Templates of models for which the package has no renderer of its own.
MODELS = (
    "Apertus-8B-Instruct", "Bielik-11B-v3.0-Instruct", "Cohere2MoE",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use", "GigaChat3.1-10B-A1.8B", "Kimi-K3",
    "LFM2.5-8B-A1B", "MiMo-VL", "Mistral-Small-3.2-24B-Instruct-2506", "NVIDIA-Nemotron-Nano-v2",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder",
    "Reka-Edge", "ibm-granite-granite-3.3-2B-Instruct", "ibm-granite-granite-4.1",
    "llama-cpp-rwkv-world", "meetkai-functionary-medium-v3.2", "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Mistral-Nemo-Instruct-2407", "muse-glimmer", "openbmb-MiniCPM5-1B",
    "unsloth-mistral-Devstral-Small-2507",
)  # fmt: skip
OTHERS = (
    "tokenizers/chatglm3", "tokenizers/command-r-plus", "tokenizers/gemma3",
    "wild/vllm__examples_tool_chat_template_hunyuan_a13b",
    "wild/vllm__examples_tool_chat_template_internlm2_tool",
    "wild/vllm__examples_tool_chat_template_granite_20b_fc",
    "wild/transformers__src_transformers_models_ernie4_5_convert_ernie4_5_tokenizer.py__L20",
)  # fmt: skip
# Kimi K3 prints the results of several calls in the turn of the first one.
TOGETHER = {"models/Kimi-K3"}
NAMES = [*(f"models/{name}" for name in MODELS), *OTHERS]
OWN = {"chatml": CHATML, "thinking": THINKING, "trimming": TRIMMING, "returning": RETURNING,
       "generation": GENERATION, "inst": INST, "unclosed": UNCLOSED}  # fmt: skip


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def answer(number: int, content: str) -> dict[str, Any]:
    name = {"name": "get_weather", "tool_call_id": f"call{number:05}"}
    return {"role": "tool", "content": content, **name}


def turn(role: str, content: str, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


CASES: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "plain": ([turn("user", "Alfa?"), turn("assistant", "Bravo."), turn("user", "Charlie user?"),
               turn("assistant", "Delta, \u00fc\u4f60.")], None),
    "system": ([turn("system", "Echo."), turn("user", "Foxtrot"), turn("assistant", "Golf\n\n1."),
                turn("user", "Hotel"), turn("assistant", "India")], None),
    "thinking": ([turn("user", "Juliett?"),
                  turn("assistant", "Kilo.", reasoning_content="Lima, hm."),
                  turn("user", "Mike?"),
                  turn("assistant", "November.", reasoning_content="Oscar.")], None),
    "call": ([turn("user", "Papa?"), turn("assistant", "", tool_calls=[call(1, "Quebec")]),
              answer(1, "Romeo"), turn("assistant", "Sierra.")], TOOLS),
    "calls": ([turn("system", "Tango."), turn("user", "Uniform?"),
               turn("assistant", "Victor.", tool_calls=[call(1, "Whiskey"), call(2, 'X "ray"')]),
               answer(1, "Yankee"), answer(2, "Zulu"), turn("assistant", "Xenon."),
               turn("user", "One?"), turn("assistant", "Two.")], TOOLS),
}  # fmt: skip


@cache
def tokenizer_of(template: str) -> Tokenizer:
    made = tokenizers.Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    tags = {tag for tag in TAG.findall(template) if "think" not in tag.lower()}
    made.add_special_tokens(sorted(tags | {*SPECIAL.values()}))
    return Tokenizer(made.to_str().encode(), template=template, special_tokens=SPECIAL)


def own_words(*messages: dict[str, Any]) -> set[str]:
    """Words of the alphabet in messages, each of them in one message only.

    Their first letter may be in one token with text of the message before.
    """
    return set(re.findall(r"\b[A-Z]([a-z]{3,})\b", str(messages)))


class Tried:
    """One template, tried on the cases; `wrong` lists what is not as promised."""

    def __init__(self, name: str, source: str) -> None:
        self.name, self.wrong, self.counts = name, [], Counter[str]()
        tokenizer = tokenizer_of(source)
        self.renderer = TemplateRenderer(tokenizer, TemplateRendererConfig(date=DATE))
        self.oracle = oracle(name, source)
        self.encode = lambda text: tokenizer.reference.encode(text, add_special_tokens=False).ids
        self.decode = tokenizer.decode
        assert isinstance(self.renderer, base.Renderer)

    def require(self, case: str, what: str, *, holds: bool) -> None:
        self.counts[what] += holds
        if not holds:
            self.wrong.append(f"{self.name}, {case}: {what}")

    def all_cases(self) -> None:
        stops = self.renderer.get_stop_token_ids()
        self.require(
            "",
            "stop tokens are special",
            holds=bool(self.renderer.bridge.tokenizer.is_special(stops).all()),
        )
        for case, (messages, tools) in CASES.items():
            try:
                text = self.oracle.plain(messages, tools)
            except TemplateRaised:
                self.counts["the template raises"] += 1
                continue
            try:
                rendered = self.renderer.render(messages, tools=tools)
            except RowError as error:
                self.counts[error.reason] += 1
                continue
            self.whole(case, messages, tools, text, rendered)
            for k, message in enumerate(messages):
                if message["role"] == "assistant":
                    self.step(case, messages, tools, k, rendered)

    def whole(
        self, case: str, messages: Any, tools: Any, text: str, rendered: RenderedTokens
    ) -> None:
        ids = rendered.token_ids
        self.require(case, "ids of the template", holds=ids == self.encode(text))
        sizes = {len(rendered.message_indices), len(rendered.sampled_mask), len(ids)}
        assert sizes == {len(ids)}
        assert rendered.is_content == [] or len(rendered.is_content) == len(ids)
        assert rendered.message_roles == [message["role"] for message in messages]
        sample = build_training_sample(self.renderer, messages, tools=tools, ensure_final_stop=True)
        self.require(
            case, "training sample", holds=sample.loss_mask[: len(ids)] == rendered.sampled_mask
        )
        added = sample.token_ids[len(ids) :]
        closed = rendered.sampled_mask[-1] or any(rendered.sampled_mask)
        assert closed
        assert added in ([], self.renderer.get_stop_token_ids()[:1])
        self.counts["stop added by the package"] += bool(added)
        spans = rendered.message_token_spans()
        assert len(spans) == len(messages)
        for k, message in enumerate(messages):
            own = [i for i, owner in enumerate(rendered.message_indices) if owner == k]
            shown = self.decode([ids[i] for i in own])
            words = {word for word in own_words(message) if word in text}  # but dropped thinking
            others = own_words(*(m for m in messages if m is not message))
            # Some templates print a system message in the turn of another message.
            system = own_words(*(m for m in messages if m["role"] == "system"))
            held = words <= {word for word in words if word in shown} | system
            held &= not any(word in shown for word in others - system)
            held |= self.name in TOGETHER and message["role"] == "tool"
            self.require(case, "words of a message", holds=held)
            if message["role"] == "assistant":
                sampled = self.decode([ids[i] for i in own if rendered.sampled_mask[i]])
                held = all(word in sampled for word in words)
                self.require(case, "sampled words", holds=held)
            elif rendered.is_content:
                content = self.decode([ids[i] for i in own if rendered.is_content[i]])
                held = message["content"][1:] in content or message["content"] not in text
                held |= not content and message["role"] == "system"
                held &= not any(word in content for word in others)
                self.require(case, "content", holds=held and not TAG.search(content))
        trained = {rendered.message_indices[i] for i, on in enumerate(rendered.sampled_mask) if on}
        roles = {messages[k]["role"] for k in trained}
        self.require(case, "only answers are sampled", holds=roles == {"assistant"})

    def step(self, case: str, messages: Any, tools: Any, k: int, rendered: RenderedTokens) -> None:
        """Sample answer k as the template prints it; parse it, and continue after it."""
        bridge, decode = self.renderer.bridge, self.decode
        prompt = self.renderer.render_ids(messages[:k], tools=tools, add_generation_prompt=True)
        expected = self.oracle.plain(messages[:k], tools, add_generation_prompt=True)
        self.require(case, "ids of the prompt", holds=prompt == self.encode(expected))
        try:
            alone = self.renderer.render(messages[: k + 1], tools=tools)
        except RowError as error:
            self.counts[error.reason] += 1
            return
        sampled = [
            i for i, on in enumerate(alone.sampled_mask) if on and alone.message_indices[i] == k
        ]
        if alone.token_ids[: len(prompt)] != prompt or not sampled:
            self.counts["another prompt"] += 1  # the template prints the turn without the prompt
            return
        completion = alone.token_ids[len(prompt) : sampled[-1] + 1]
        self.parsed(case, messages[k], prompt, completion, tools)
        stop = next(
            (j for j in range(k + 1, len(messages)) if messages[j]["role"] == "assistant"), None
        )
        if stop is None:
            return
        new = messages[k + 1 : stop]
        rewrite = bridge.rewrite(messages[:stop], tools)
        following = self.renderer.render_ids(
            messages[:stop], tools=tools, add_generation_prompt=True
        )
        stable = following[: len(prompt) + len(completion)] == prompt + completion
        if rewrite is None:
            self.require(case, "prefix stability", holds=stable)
        found = self.renderer.bridge_to_next_turn(prompt, completion, new, tools=tools)
        if found is None:
            self.counts["not bridged"] += 1
            self.counts["not bridged although stable"] += stable
            return
        self.require(case, "bridge", holds=found.token_ids == following)
        size = len(prompt) + len(completion)
        assert found.message_indices[:size] == [-1] * size
        assert not any(found.sampled_mask)
        assert found.message_roles == [message["role"] for message in new]
        # Kimi K3 prints the results of all calls in the turn of the first: owners are then unsure.
        exact = bool(found.is_content)
        for j, message in enumerate(new):
            owners = enumerate(found.message_indices)
            own = [i for i, k in owners if (k == j and found.is_content[i] if exact else k >= 0)]
            text = decode([found.token_ids[i] for i in own])
            self.require(case, "new message", holds=message["content"].strip() in text)
        # Where a call ends with another token, a part of it is continued as an answer.
        is_closed = completion[-1] in self.renderer.get_stop_token_ids()
        if is_closed and not messages[k].get("tool_calls"):
            cut = self.renderer.bridge_to_next_turn(prompt, completion[:-1], new, tools=tools)
            if cut is not None:
                self.require(case, "bridge after a length limit", holds=cut.token_ids == following)

    def parsed(self, case: str, message: Any, prompt: Any, completion: Any, tools: Any) -> None:
        try:
            found = self.renderer.parse_response(completion, tools=tools, prompt_ids=prompt)
        except UsageError:
            self.counts["unknown form"] += 1
            return
        calls = [(one.name, one.arguments) for one in found.tool_calls]
        expected = [(*one["function"].values(),) for one in message.get("tool_calls", ())]
        holds = (found.content, calls) == (message["content"], expected)
        if not found.reasoning_complete:  # the prompt opens the thinking, the template ignores it
            self.counts["thinking that never ends"] += 1
            holds = message["content"] in found.reasoning_content
            self.require(
                case,
                "open thinking",
                holds=holds and THINK.search(self.decode(prompt[-9:])) is not None,
            )
            return
        reasoning = message.get("reasoning_content")
        holds &= found.reasoning_content in (reasoning, None)
        holds &= reasoning is None or (found.reasoning_content == reasoning) == (
            reasoning in self.decode([*prompt, *completion])
        )
        self.require(case, "round trip", holds=holds)


def total(names: list[str], sources: dict[str, str]) -> Counter[str]:
    counts, wrong = Counter[str](), []
    for name in names:
        tried = Tried(name, sources[name])
        tried.all_cases()
        counts, wrong = counts + tried.counts, wrong + tried.wrong
    print(len(names), "templates:", dict(counts))
    assert not wrong, "\n".join(wrong)
    return counts


def sources_of(shared: Path) -> dict[str, str]:
    wild = {
        f"wild/{path.stem}": path.read_text("utf-8") for path in (shared / "wild").glob("*.jinja")
    }
    return zoo(shared) | wild


@pytest.mark.soak
def test_thirty_templates_without_a_class(shared: Path) -> None:
    assert len(set(NAMES)) == 30
    counts = total(NAMES, sources_of(shared))
    assert counts["ids of the template"] > 90
    assert counts["round trip"] > 130
    assert counts["bridge"] > 90
    assert counts["not bridged"] < 10


def test_some_templates_without_a_class(shared: Path) -> None:
    """Calls after a marker, in a list and as XML; reasoning; a system message in another turn."""
    some = ("models/Bielik-11B-v3.0-Instruct", "models/NVIDIA-Nemotron-Nano-v2",
            "models/Qwen3-Coder", "models/mistralai-Mistral-Nemo-Instruct-2407",
            "tokenizers/gemma3")  # fmt: skip
    counts = total([*some, *OWN], {**sources_of(shared), **OWN})
    assert counts["bridge"] == counts["prefix stability"] > 20
    assert counts["round trip"] > 40


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(EXAMPLES / "tokenizer")


def custom(**options: Any) -> Any:
    path = "tokenmill.integrations.renderers.TemplateRenderer"
    return CustomRendererConfig(import_path=path, **options)


def test_the_package_loads_it_by_its_config(tokenizer: Any, tmp_path: Path) -> None:
    messages = CASES["thinking"][0]
    plain = create_renderer(tokenizer, custom())
    assert isinstance(plain, TemplateRenderer)
    default = create_renderer(tokenizer, DefaultRendererConfig())
    assert plain.render_ids(messages) == default.render_ids(messages)
    file = tmp_path / "template.jinja"
    file.write_text(THINKING + "{% if shout %}!{% endif %}", encoding="utf-8")
    config = custom(chat_template=str(file), shout=True)
    loud, calm = (
        create_renderer(tokenizer, config, chat_template_kwargs=kwargs)
        for kwargs in ({}, {"shout": False})
    )
    assert loud.render_ids(messages) == [*calm.render_ids(messages), *tokenizer.encode("!")]
    again = pickle.loads(pickle.dumps(loud))
    assert again.render(messages) == loud.render(messages)
    with pytest.raises(UsageError, match="the template decides"):
        create_renderer(tokenizer, custom(thinking_retention="all"))


def test_an_encoder_renders(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "encoder.py"
    file.write_text(
        "def encode(messages, tools=None, add_generation_prompt=False):\n"
        "    text = ''.join(f\"<|im_start|>{m['role']}\\n{m['content']}<|im_end|>\\n\""
        " for m in messages)\n"
        "    return text + ('<|im_start|>assistant\\n' if add_generation_prompt else '')\n",
        encoding="utf-8",
    )
    renderer = create_renderer(tokenizer, custom(encoder=f"{file}:encode"))
    messages = CASES["plain"][0]
    rendered = renderer.render(messages)
    expected = create_renderer(tokenizer, custom(chat_template=CHATML)).render(messages)
    assert rendered.token_ids == expected.token_ids
    assert rendered.sampled_mask == expected.sampled_mask
    assert rendered.is_content == []


def test_what_cannot_be_proven_is_an_error_or_unknown() -> None:
    """Unknown masks and forms are never guessed."""
    dropping = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}\n{% endfor %}"
    renderer = TemplateRenderer(tokenizer_of(dropping))
    messages = [turn("user", "Alfa?"), turn("assistant", "Bravo.")]
    with pytest.raises(RowError) as raised:
        renderer.render(messages)
    assert raised.value.reason == "template_drops_content"
    prompt = renderer.render([*messages, turn("user", "Charlie")], add_generation_prompt=True)
    assert prompt.sampled_mask == prompt.is_content == []
    assert {*prompt.message_indices} == {-1}
    assert renderer.get_stop_token_ids() == [renderer.bridge.tokenizer.eos_token_id]
    xml = CHATML.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<call>"
                         "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
                         "<{{ k }}>{{ v }}{% endfor %}</call>{% endfor %}")  # fmt: skip
    renderer = TemplateRenderer(tokenizer_of(xml))
    ids = renderer.bridge.tokenizer.reference.encode("Bravo.<|im_end|>").ids
    assert renderer.parse_response(ids).content == "Bravo."
    with pytest.raises(UsageError, match=r"cannot be parsed: it prints '<call>quibble_a"):
        renderer.parse_response(ids, tools=TOOLS)


def test_broken_calls_have_a_status(shared: Path) -> None:
    source = sources_of(shared)["models/Bielik-11B-v3.0-Instruct"]
    renderer = TemplateRenderer(tokenizer_of(source))
    whole = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    texts = {
        whole: ["ok"],
        f"{whole}\n{whole}": ["ok", "ok"],
        whole.replace("\n", "").replace(": ", ":"): ["ok"],
        whole.removesuffix("</tool_call>"): ["unclosed_block"],
        whole.replace('"it"', '"it'): ["invalid_json"],
        "<tool_call>\nlook": ["malformed_structure"],
        "no call": [],
    }
    for text, statuses in texts.items():
        ids = renderer.bridge.tokenizer.reference.encode(f"Well. {text}<|im_end|>").ids
        found = renderer.parse_response(ids, tools=TOOLS)
        assert [call.status for call in found.tool_calls] == statuses, text
        assert found.content == ("Well." if statuses else "Well. no call")
        assert all(call.raw in text for call in found.tool_calls)


def test_bridge_returns_none_where_it_proves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    renderer = TemplateRenderer(tokenizer_of(THINKING))
    messages = [turn("user", "Alfa?")]
    prompt = renderer.render_ids(messages, add_generation_prompt=True)
    encode = renderer.bridge.tokenizer.reference.encode
    ids = encode("Hm.\n</think>\n\nBravo.<|im_end|>").ids
    new = [turn("user", "Charlie?")]
    with caplog.at_level(logging.INFO, logger="tokenmill.integrations.renderers"):
        assert renderer.bridge_to_next_turn(prompt, ids, new) is None  # the template drops thinking
    assert "has to be rendered again" in caplog.text
    for case in ((prompt, ids, []), (prompt, ids, [turn("assistant", "No.")]), ([], ids, new),
                 ([1, *prompt], ids, new), (prompt, [], new)):  # fmt: skip
        assert renderer.bridge_to_next_turn(*case) is None
    open_thinking = renderer.parse_response(encode("Hm.").ids, prompt_ids=prompt)
    assert (open_thinking.reasoning_content, open_thinking.reasoning_complete) == ("Hm.", False)
    closed = renderer.parse_response(ids, prompt_ids=prompt)
    assert (closed.reasoning_content, closed.content) == ("Hm.", "Bravo.")
