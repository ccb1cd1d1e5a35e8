"""Encoders of libraries. Each function takes a path and returns an encoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill._core.encoders import cached_ids
from tokenmill._core.optional import optional
from tokenmill.errors import UsageError

Encode = Callable[..., list[int]]


def transformers(path: str) -> Encode:
    """Return the `apply_chat_template` of a tokenizer's own class."""
    from tokenmill.tokenizers.loading import load_auto, tiktoken_in

    tokenizer = load_auto(Path(path), trust_remote_code=True)

    def encode(
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        result = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            **kwargs,
        )
        return list(result if isinstance(result, list) else result["input_ids"])

    if tiktoken_in(tokenizer) is not None or hasattr(tokenizer, "backend_tokenizer"):
        encode.text = partial(tokenizer.apply_chat_template, tokenize=False)  # type: ignore[attr-defined]
    return encode


def mistral_common(path: str) -> Encode:
    """Return mistral-common's encoding of chat requests, with the tokenizer of a tekken.json."""
    with optional("mistral_common", ("encoder", "mistral-common")):
        from mistral_common.protocol.instruct.request import ChatCompletionRequest
        from mistral_common.protocol.instruct.validator import ValidationMode
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    modes = ValidationMode.test, ValidationMode.finetuning
    by_mode = {mode: MistralTokenizer.from_file(path, mode=mode) for mode in modes}
    for each in by_mode.values():  # a prompt of a row repeats the texts of the row
        texts: Any = each.instruct_tokenizer.tokenizer
        texts.encode = cached_ids(texts.encode)

    def encode(
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        is_whole = messages[-1]["role"] == "assistant" and not add_generation_prompt
        request = ChatCompletionRequest.from_openai(
            messages=[_openai(message) for message in messages], tools=tools, **kwargs
        )
        tokens = by_mode[modes[is_whole]].encode_chat_completion(request).tokens
        return [int(number) for number in tokens]

    return encode


def _openai(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the members that mistral-common knows."""
    names = ("role", "content", "tool_calls", "tool_call_id", "name")
    return {name: message[name] for name in names if message.get(name) is not None}


def harmony(path: str) -> Encode:
    """Return openai-harmony's encoding of gpt-oss; `path` is not read.

    Reasoning before the last answer that a user message follows is dropped, as in its prompts.
    """
    with optional("openai_harmony", ("encoder", "harmony")):
        import openai_harmony as lib
    try:
        encoding = lib.load_harmony_encoding(lib.HarmonyEncodingName.HARMONY_GPT_OSS)
    except lib.HarmonyError as error:
        raise UsageError(
            ("encoder", "harmony"), f" cannot load its vocabulary ({error}); set the environment"
            " variable TIKTOKEN_ENCODINGS_BASE to a directory with o200k_base.tiktoken",
        ) from error  # fmt: skip
    role = lib.Role

    def of_assistant(message: dict[str, Any], *, thinks: bool) -> list[Any]:
        def says(text: str, channel: str) -> Any:
            return lib.Message.from_role_and_content(role.ASSISTANT, text).with_channel(channel)

        calls = [call["function"] for call in message.get("tool_calls") or ()]
        parts = []
        if thinks and message.get("reasoning_content"):
            parts.append(says(message["reasoning_content"], "analysis"))
        if message.get("content"):
            parts.append(says(message["content"], "commentary" if calls else "final"))
        for call in calls:
            part = says(call["arguments"], "commentary")
            part = part.with_recipient(f"functions.{call['name']}").with_content_type("json")
            parts.append(part)
        return parts

    def encode(
        messages: list[dict[str, Any]],
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        last = max((k for k, m in enumerate(messages) if m["role"] == "user"), default=0)
        system = lib.SystemContent.new()
        for name, value in kwargs.items():
            kind = lib.ReasoningEffort if name == "reasoning_effort" else str
            system = getattr(system, f"with_{name}")(kind(value))
        turns = [lib.Message.from_role_and_content(role.SYSTEM, system)]
        if tools or (messages and messages[0]["role"] in ("system", "developer")):
            developer = lib.DeveloperContent.new()
            if messages[0]["role"] in ("system", "developer"):
                developer = developer.with_instructions(messages[0]["content"])
            if functions := [tool.get("function", tool) for tool in tools or ()]:
                developer = developer.with_function_tools([
                    lib.ToolDescription.new(
                        one["name"], one.get("description") or "", one.get("parameters")
                    )
                    for one in functions
                ])  # fmt: skip
            turns.append(lib.Message.from_role_and_content(role.DEVELOPER, developer))
        names: dict[Any, str] = {}
        for k, message in enumerate(messages):
            for call in message.get("tool_calls") or ():
                names[call.get("id")] = call["function"]["name"]
            if message["role"] == "assistant":
                turns += of_assistant(message, thinks=k > last)
            elif message["role"] == "tool":
                name = message.get("name") or names[message.get("tool_call_id")]
                author = lib.Author.new(role.TOOL, f"functions.{name}")
                turn = lib.Message.from_author_and_content(author, message["content"])
                turns.append(turn.with_channel("commentary").with_recipient("assistant"))
            elif message["role"] == "user":
                turns.append(lib.Message.from_role_and_content(role.USER, message["content"]))
            elif k:
                raise ValueError("a system message must be the first one")
        conversation = lib.Conversation.from_messages(turns)
        if add_generation_prompt:
            return list(encoding.render_conversation_for_completion(conversation, role.ASSISTANT))
        config = lib.RenderConversationConfig(auto_drop_analysis=False)
        return list(encoding.render_conversation_for_training(conversation, config=config))

    return encode
