"""The reference: what transformers or a model's own encoder renders, and how it delimits turns."""

from __future__ import annotations

import copy
import re
import runpy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from conformance.conversations import Case, forms

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")
THINKING = re.compile(rb"\s*<think>.*", re.DOTALL)


@dataclass(frozen=True)
class TurnMarkers:
    """What a template prints around an answer."""

    header: bytes
    """The end of the generation prompt, without white space."""
    end_of_turn_ids: frozenset[int]
    """Empty if the template has none."""


class Model:
    def __init__(self, name: str, directory: Path) -> None:
        from transformers import AutoTokenizer

        self.name = name
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(directory))
        self.encoder: Any = None
        for path in (directory / "encoding").glob("*.py"):
            self.encoder = runpy.run_path(str(path))["encode_messages"]

    def text(self, messages: list[dict[str, Any]], tools: Any = None, prompt: bool = False) -> str:
        """Render a conversation with the template, or with the encoder of the directory.

        An encoder prints the generation prompt by itself, and the tools of the system message.
        """
        if self.encoder is None:
            return str(self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False
            ))  # fmt: skip
        messages = copy.deepcopy(messages)
        if tools:
            if messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": ""})
            messages[0]["tools"] = tools
        return str(self.encoder(messages, thinking_mode="chat"))

    def ids(self, case: Case) -> list[int]:
        """Return the ids of the whole conversation, encoded by transformers.

        Of all forms of the row, the first of which the template prints the most words.

        Raises:
            ValueError: The template refuses every form.
        """
        tools = case.row.get("tools")
        best, most = None, -1
        for row in forms(case.row):
            try:
                text = self.text(row["messages"], tools)
            except Exception:  # a template may raise anything
                continue
            printed = sum(word.text in text for word in case.words)
            if printed > most:
                best, most = row["messages"], printed
        if best is None:
            raise ValueError(f"the template of {self.name} refuses {case.name}")
        if self.encoder is not None:
            text = self.text(best, tools)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        options = {"tools": tools, "return_dict": False}
        return list(self.tokenizer.apply_chat_template(best, tokenize=True, **options))

    def pieces(self, ids: list[int]) -> list[bytes]:
        return [self._piece(token) for token in ids]

    def _piece(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added
        text = self.tokenizer.convert_ids_to_tokens(token) or ""
        if self._byte_level:
            return bytes(self._bytes_of[char] for char in text if char in self._bytes_of)
        if single := BYTE_TOKEN.match(text):
            return bytes.fromhex(single[1])
        return text.replace("▁", " ").encode()

    @cached_property
    def _added(self) -> dict[int, bytes]:
        decoder = self.tokenizer.added_tokens_decoder
        return {number: str(token.content).encode() for number, token in decoder.items()}

    @cached_property
    def _byte_level(self) -> bool:
        return "ByteLevel" in self.tokenizer.backend_tokenizer.decoder.__repr__()

    @cached_property
    def _bytes_of(self) -> dict[str, int]:
        """Return the alphabet of byte-level vocabularies."""
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
        rest = [byte for byte in range(256) if byte not in plain]
        return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(rest)}

    @cached_property
    def markers(self) -> TurnMarkers:
        """Find the header and the end-of-turn tokens with a conversation of two answers."""
        question = [{"role": "user", "content": "Zqv000kx"}]
        answer = {"role": "assistant", "content": "Zqv001kx"}
        messages = [*question, answer, {"role": "user", "content": "Zqv002kx"},
                {"role": "assistant", "content": "Zqv003kx"}]  # fmt: skip
        text, plain = self.text(messages), self.text(question)
        prompt = self.text(question, prompt=True)
        header = prompt[len(plain) :] if prompt.startswith(plain) else ""
        if not header.strip():
            header = text[text.index("Zqv000kx") + 8 : text.index("Zqv001kx")]
        end_of_turn_ids = set()
        special = {n for n, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        for word in ("Zqv001kx", "Zqv003kx"):
            rest = text[text.index(word) + len(word) :]
            ids = self.tokenizer(rest, add_special_tokens=False)["input_ids"]
            end_of_turn_ids.update([token for token in ids if token in special][:1])
        if self.tokenizer.eos_token_id is not None:
            end_of_turn_ids.add(self.tokenizer.eos_token_id)
        # The last word only: some tokenizers drop white space inside the header.
        words = THINKING.sub(b"", header.encode()).split()
        return TurnMarkers(words[-1] if words else b"", frozenset(end_of_turn_ids))
