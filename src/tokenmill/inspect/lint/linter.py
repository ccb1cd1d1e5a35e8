"""The lint worker: render and encode a block like a build, and apply all checks.

Workers return findings by rule and, for every accepted row, a digest of its rendered text and a
sketch of its body. The parent finds duplicates from these. Workers then compare the candidates for
near-duplicates exactly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tokenmill._core.collector import without_collector
from tokenmill.build.blocks import block_of
from tokenmill.build.pipeline import Pipeline
from tokenmill.build.recipe import Recipe
from tokenmill.build.referenced import base_of
from tokenmill.build.slices import expander_of
from tokenmill.chat import Renderer, Rendering
from tokenmill.chat.render import digest_of
from tokenmill.chat.shapes import VARIABLES_KEY, AnswerGroup, Conversation, Plain, misspelt_role
from tokenmill.chat.template import REASONING_KEYS
from tokenmill.chat.thinking import REASONING, THINKING, any_of, cut, literals, thinking_tags
from tokenmill.errors import RowError, TokenmillError
from tokenmill.inspect.lint import minhash
from tokenmill.inspect.lint.checks import (
    CALL_KEYS,
    RowFinding,
    Side,
    argument_texts,
    balance,
    check_images,
    comparisons,
    control_text,
    empty_turns,
    function_of,
    odd_characters,
    side_of,
    sides_of,
    texts_of,
)
from tokenmill.inspect.lint.rules import Collector, excerpt
from tokenmill.sources.block import read_block
from tokenmill.sources.rows import open_rows
from tokenmill.tokenizers.cache import load_copy
from tokenmill.tokenizers.encoded import Encoded

LINT = "tokenmill.inspect.lint.linter:open_linter"
COMPARE = "tokenmill.inspect.lint.linter:open_comparer"
RAW_SHOWN = 200  # bytes of a row that could not be parsed
NULLABLE = (*CALL_KEYS, "tool_call_id", "name")  # members of a message about tools
NULL_IS_VALUE = ("default", "const", "enum", "examples", "example")  # members of a JSON schema

MAX_HISTORIES = 4096  # orders of roles; data has far fewer

_PROBE = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
    {"role": "assistant", "content": "Rome."},
]


def open_linter(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return Linter(options).lint


class Linter:
    def __init__(self, options: dict[str, Any]) -> None:
        self.recipe = Recipe(**options["recipe"])
        self.spec = self.recipe.chat_spec()
        self.rules = frozenset(options["rules"])
        self.tokenizer = load_copy(Path(options["tokenizer"]), options["card"])
        expander = expander_of(options, self.tokenizer, hashed=False)
        engines = options["engine"], options["renderer"]
        self.pipeline = Pipeline(self.recipe, self.tokenizer, *engines, expander, as_text=True)
        self._expander = expander
        self.template = TemplateChecker(self.renderer)
        # The cached copy of the tokenizer may have other `special` flags than the caller's.
        self._control = any_of(self._control_tokens(options["card"]["control_tokens"]))
        self._about_tokenizer = self._check_tokenizer()

    @property
    def renderer(self) -> Renderer:
        """The current renderer; the pipeline replaces one that failed an audit."""
        return self.pipeline.renderer

    def _control_tokens(self, control_tokens: Sequence[str]) -> set[str]:
        # Thinking tags are part of the assistant's text even if the tokenizer flags them.
        text = self.template.plain_text()
        tokens = {*control_tokens, *(t for t in self.tokenizer.added_contents if t in text)}
        # A single letter or space also occurs in ordinary text.
        return {token for token in tokens if len(token.strip()) > 1 and not THINKING.search(token)}

    def _check_tokenizer(self) -> dict[str, str]:
        findings, tokenizer = {}, self.tokenizer
        pad, eos, bos = tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id
        name = tokenizer.special_tokens.get("eos_token")
        if pad is not None and pad == eos:
            findings["pad_is_eos"] = f"both are {name!r} ({eos})"
        if pad is None and eos is not None:
            findings["no_pad_token"] = f"the loader pads with eos, {name!r} ({eos})"
        start = tokenizer.special_tokens.get("bos_token")
        if start and self.template.plain_text().startswith(start) and self._adds(bos):
            findings["bos_in_text"] = f"the template prints {start!r}, and the tokenizer adds it"
        return {rule: detail for rule, detail in findings.items() if rule in self.rules}

    def _adds(self, bos: int | None) -> bool:
        import tokenizers

        encoder = tokenizers.Tokenizer.from_buffer(self.tokenizer.data)
        ids = encoder.encode("x", add_special_tokens=True).ids
        return bos is not None and bool(ids) and ids[0] == bos

    @without_collector()
    def lint(self, payload: dict[str, Any]) -> dict[str, Any]:
        block = block_of(payload)
        rows, base = read_block(block), base_of(block)
        self.pipeline.begin(block, rows, "")
        findings = Collector(self.rules)
        chosen: list[int] | None = payload["rows"]
        numbers = list(range(len(rows.values))) if chosen is None else chosen
        values = {number: rows.values[number] for number in numbers}
        good: list[int] = []
        parsed_rows: dict[int, list[Side]] = {}
        shown: list[tuple[int, int, int]] = []
        for number in numbers:
            value = values[number]
            if isinstance(value, RowError):
                raw = rows.raw[number][:RAW_SHOWN].decode("utf-8", "replace")
                findings.add(number, value.reason, value.message, excerpt(raw))
                continue
            good.append(number)
            if self._expander is not None and isinstance(value, dict):
                images, tokens = self._expander.images, self._expander.tokens
                row_findings, pairs = check_images(value, base, images, self.spec, tokens)
                shown += [(number, *digests) for digests in pairs]
                for row_finding in row_findings:
                    findings.add(number, *row_finding)
            try:
                parsed = self.renderer.read(value)
            except RowError:
                continue  # rendering reports it below
            parsed_rows[number] = sides_of(parsed)
            self._check_content(findings, number, value, parsed)
        rendering = self.renderer.render([values[number] for number in good])
        for place, _, error in rendering.rejected:
            sides = parsed_rows.get(good[place])
            one = sides[0] if sides is not None and len(sides) == 1 else None
            self._report_rejected(findings, good[place], one, error)
        sources = [good[place] for place in rendering.source]
        parts = zip(sources, rendering.part, strict=True)
        parsed_texts = [side_of(parsed_rows[number], part) for number, part in parts]
        encoded = self.encode(rendering, parsed_texts)
        self._check_accepted(findings, rendering, encoded, sources, parsed_texts)
        return {
            "rows": len(numbers),
            "findings": findings.document(),
            "tokenizer": self._about_tokenizer,
            "balance": balance(rendering, encoded),
            "images": shown,
            **self._digests(rendering, encoded, sources, shown),
        }

    def _check_content(
        self, findings: Collector, number: int, row: Any, parsed: Side | AnswerGroup
    ) -> None:
        row_findings = [*comparisons(parsed)]
        for side in sides_of(parsed):
            row_findings += [*odd_characters(texts_of(side)), *empty_turns(side)]
            if isinstance(side, Plain) and self.renderer.skips_template(side):
                detail = "prompt and answer are plain strings: the chat template is not applied"
                row_findings.append(("plain_strings", detail, excerpt(side.text)))
            if isinstance(side, Conversation):
                # Texts and pairs of strings may be rendered already, with control tokens.
                row_findings += control_text(self._control, texts_of(side))
        if isinstance(parsed, Conversation):
            row_findings += argument_texts(row, self.spec.message_columns)
            if misspelt := misspelt_role(parsed.messages):
                row_findings.append(("misspelt_role", misspelt, _first_text(parsed)))
        for row_finding in dict.fromkeys(row_findings):  # every side contains the prompt
            findings.add(number, *row_finding)

    def _report_rejected(
        self, findings: Collector, number: int, parsed: Conversation | Plain | None, error: RowError
    ) -> None:
        if error.reason == "bad_media" and findings.has("missing_image", number):
            return
        row_finding = error.reason, error.message, ""
        if isinstance(parsed, Conversation):
            if error.reason == "template_error":
                row_finding = self.template.refusal(parsed, error)
            elif error.reason == "template_drops_content":
                dropped = self.template.dropped_calls(parsed)
                row_finding = dropped or (error.reason, error.message, _first_text(parsed))
            else:
                text = next((text for _, text in texts_of(parsed) if text), "")
                row_finding = error.reason, error.message, excerpt(text)
        findings.add(number, *row_finding)

    def encode(self, rendering: Rendering, parsed_rows: list[Conversation | Plain]) -> Encoded:
        """Encode texts; the only turn end of each text is the start of its body."""
        bodies = [
            [_body_start(text, parsed)]
            for text, parsed in zip(rendering.texts, parsed_rows, strict=True)
        ]
        digests = np.fromiter(map(digest_of, rendering.texts), np.uint64, len(bodies))
        return self.pipeline.encoded(replace(rendering, ends=bodies), digests)[0]

    def _check_accepted(
        self,
        findings: Collector,
        rendering: Rendering,
        encoded: Encoded,
        sources: list[int],
        parsed_texts: list[Side],
    ) -> None:
        for place, error in encoded.rejected:
            if error.reason != "bad_media" or not findings.has("missing_image", sources[place]):
                text = rendering.texts[place]
                findings.add(sources[place], error.reason, error.message, excerpt(text))
        unclosed, clipped = set(rendering.unclosed), set(rendering.clipped)
        trained = encoded.trained
        for place in encoded.kept.tolist():
            number, text = sources[place], rendering.texts[place]
            parsed = parsed_texts[place]
            ids, mask, _ = encoded.row(place)
            if not trained[place]:
                detail = "no token of this row is trained"
                findings.add(number, "no_trained_tokens", detail, excerpt(text))
            limit = self.recipe.max_length
            if limit is not None and len(ids) > limit:
                detail = f"{len(ids):,} tokens, {len(ids) - limit:,} more than {limit:,}"
                findings.add(number, "overlong", detail, excerpt(text))
            bos = self.tokenizer.bos_token_id
            if bos is not None and len(ids) > 1 and ids[0] == bos == ids[1]:
                detail = "the first two tokens are begin-of-sequence"
                findings.add(number, "double_bos", detail, excerpt(text))
            if place in unclosed or (trained[place] and self._lacks_end_of_turn(parsed, ids, mask)):
                end = rendering.spans[place]
                at = end[-1][1] if end else len(text)
                detail = "the trained text ends without an end-of-turn token"
                findings.add(number, "missing_closer", detail, excerpt(text, at))
            if place in clipped:
                detail = "the block starts with the generation prompt, which is not trained"
                findings.add(number, "generation_header", detail, excerpt(text))
            if isinstance(parsed, Conversation):
                self._check_rendered(findings, number, parsed, text)

    def _lacks_end_of_turn(self, parsed: Conversation | Plain, ids: Any, mask: Any) -> bool:
        """Return whether the last trained token is an ordinary one; the renderer may check it."""
        if isinstance(parsed, Plain):
            if parsed.shape == "text" or self.recipe.append_eos:
                return False
        elif not self.renderer.reference(parsed.tools).has_generation:
            return False  # the renderer checks each end-of-turn token
        last = int(ids[np.flatnonzero(mask)[-1]])
        return not bool(self.tokenizer.table.is_added[last])

    def _check_rendered(
        self, findings: Collector, number: int, conversation: Conversation, text: str
    ) -> None:
        row_findings = [
            self.template.dropped_tools(conversation, text),
            self.template.dropped_context(conversation, text),
        ]
        train_on = self.spec.trained(conversation.shape)
        if train_on == "everything" or self.renderer.reference(conversation.tools).has_generation:
            row_findings.append(self.template.dropped_calls(conversation, text))
        if conversation.tools is not None or not conversation.simple:
            row_findings.append(self.template.nulls(conversation))
        if self.spec.expand == "none" and train_on == "all_assistant_messages":
            history_finding = self.template.lost_thinking(conversation, text)
            if (
                history_finding is None
                and sum(m["role"] == "assistant" for m in conversation.messages) > 1
            ):
                history_finding = self.template.differing_history(conversation)
            row_findings.append(history_finding)
        for row_finding in row_findings:
            if row_finding is not None:
                findings.add(number, *row_finding)

    def _digests(
        self,
        rendering: Rendering,
        encoded: Encoded,
        sources: list[int],
        shown: list[tuple[int, int, int]],
    ) -> dict[str, Any]:
        """Return numbers, digests and sketches of the accepted rows; of several parts the last."""
        places = {sources[place]: place for place in encoded.kept.tolist()}
        numbers = sorted(places)
        texts = {number: rendering.texts[place] for number, place in places.items()}
        for first, facts in rendering.groups.items():
            members = rendering.texts[first : first + len(facts.labels)]
            texts[sources[first]] = "\0".join(members)
        seen_in: dict[int, str] = {}  # digests of images; rows with images have no sketch
        for number, content, _ in shown:
            seen_in[number] = f"{seen_in.get(number, '')}\0{content:x}"
        digests = [digest_of(texts[number] + seen_in.get(number, "")) for number in numbers]
        sketched, hashed = [], []
        if "near_duplicate" in self.rules:
            for number in numbers:
                if number in seen_in:
                    continue
                hashes = minhash.shingles(body(encoded, places[number]))
                if len(hashes) >= minhash.MIN_SHINGLES:
                    sketched.append(number)
                    hashed.append(hashes)
        return {
            "numbers": numbers,
            "digests": digests,
            "sketched": sketched,
            "sketches": minhash.sketches(hashed).tolist(),
        }


def body(encoded: Encoded, place: int) -> np.ndarray[Any, Any]:
    ids, _, ends = encoded.row(place)
    return ids[int(ends[0]) :]


def _body_start(text: str, parsed: Conversation | Plain) -> int:
    """Return the start of the content of the first turn that is not a system turn."""
    if isinstance(parsed, Conversation):
        for message in parsed.messages:
            content = message.get("content")
            if message["role"] in ("system", "developer") or not isinstance(content, str):
                continue
            return max(0, text.find(content.strip())) if content.strip() else 0
    return 0


ROWS_PER_TASK = 256  # each with up to `minhash.ANCHORS` others


def open_comparer(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    linter = Linter(options)
    rows = open_rows(list(options["sources"]), cache_dir=options["cache"])

    def compare(payload: dict[str, Any]) -> dict[str, Any]:
        pairs: list[tuple[int, list[int]]] = payload["pairs"]
        numbers = sorted({number for row, others in pairs for number in (row, *others)})
        sets = shingle_sets(linter, rows.batch(numbers))
        known = dict(zip(numbers, sets, strict=True))
        return {"near": [list(pair) for pair in near_duplicates(pairs, known)]}

    return compare


def near_duplicates(
    pairs: Sequence[tuple[int, list[int]]], known: dict[int, minhash.Hashes]
) -> Iterator[tuple[int, int, float]]:
    for row, others in pairs:
        for other in others:
            index = minhash.jaccard(known[row], known[other])
            if index >= minhash.THRESHOLD:
                yield row, other, round(index, 4)
                break


def shingle_sets(linter: Linter, values: Sequence[dict[str, Any]]) -> list[minhash.Hashes]:
    rendering = linter.renderer.render(values)
    parsed_rows = [
        side_of(sides_of(linter.renderer.read(values[place])), part)
        for place, part in zip(rendering.source, rendering.part, strict=True)
    ]
    encoded = linter.encode(rendering, parsed_rows)
    sets = [np.zeros(0, np.uint64)] * len(values)
    for place in encoded.kept.tolist():  # of several parts the last, as in `_digests`
        sets[rendering.source[place]] = np.unique(minhash.shingles(body(encoded, place)))
    return sets


class TemplateChecker:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._tags: dict[str, re.Pattern[str] | None] = {}
        self._histories: dict[tuple[tuple[str, ...], str], RowFinding | None] = {}

    def plain_text(self) -> str:
        """Return a rendered plain conversation; empty without a template."""
        try:
            return str(self._renderer.reference().render([*_PROBE]))
        except TokenmillError:
            return ""

    def refusal(self, conversation: Conversation, error: RowError) -> RowFinding:
        """Return ``role_order`` if the roles alone cause the error, else ``template_error``.

        Placeholder texts must raise the same error with these roles, and none in alternating turns.
        """
        roles = [message["role"] for message in conversation.messages]
        turns = ["assistant" if number % 2 else "user" for number in range(len(roles))]
        options = conversation.variables
        raised = self._refused(roles, options)
        if raised == error.message and self._refused(turns, options) is None:
            shown = " → ".join(roles[:12])
            return (
                "role_order",
                f"{error.message}; the roles are {shown}",
                _first_text(conversation),
            )
        return "template_error", error.message, _first_text(conversation)

    def _refused(self, roles: list[str], variables: dict[str, Any] | None) -> str | None:
        try:
            self._renderer.reference(None, variables).render(_placeholder_turns(roles))
        except TokenmillError as error:
            return error.message
        return None

    def _render(self, conversation: Conversation) -> str | None:
        tools = conversation.tools
        try:
            reference = self._renderer.reference(tools, conversation.variables)
            return str(reference.render(conversation.messages, tools))
        except TokenmillError:
            return None

    def dropped_calls(
        self, conversation: Conversation, text: str | None = None
    ) -> RowFinding | None:
        text = self._render(conversation) if text is None else text
        if text is None:
            return None
        for number, message in enumerate(conversation.messages):
            for name in _called(message):
                if name not in text:
                    detail = f"turn {number} calls {name!r}; the template does not print the call"
                    return "template_drops_tool_calls", detail, excerpt(text, len(text))
        if not any(_called(message) for message in conversation.messages):
            return None
        none = [_with_calls(m, 0) for m in conversation.messages]
        if self._render(replace(conversation, messages=none)) == text:
            detail = "the rendered text is the same without the calls"
            return "template_drops_tool_calls", detail, _first_text(conversation)
        if any(len(_called(message)) > 1 for message in conversation.messages):
            first = [_with_calls(m, 1) for m in conversation.messages]
            if self._render(replace(conversation, messages=first)) == text:
                detail = "the template prints only the first of several calls in a turn"
                return "template_drops_tool_calls", detail, _first_text(conversation)
        return None

    def dropped_tools(self, conversation: Conversation, text: str) -> RowFinding | None:
        names = [name for name in map(_tool_name, conversation.tools or ()) if name]
        if not names or any(name in text for name in names):
            return None
        shown = ", ".join(names[:3])
        return (
            "template_drops_tools",
            f"the template prints none of {len(names)} tools: {shown}",
            "",
        )

    def dropped_context(self, conversation: Conversation, text: str) -> RowFinding | None:
        # Mistral's templates print the system text only before the last user turn, and not at all
        # in a conversation that ends with an answer.
        for number, message in enumerate(conversation.messages):
            content = message.get("content")
            if message["role"] == "assistant" or not isinstance(content, str):
                continue
            words = content.strip()
            if not words or words in text:
                continue
            other = [*conversation.messages]
            other[number] = {**message, "content": f"{words} {words}"}
            if self._render(replace(conversation, messages=other)) == text:
                detail = f"the template does not print turn {number} ({message['role']})"
                return "template_drops_context", detail, excerpt(words)
        return None

    def nulls(self, conversation: Conversation) -> RowFinding | None:
        paths: list[str] = []
        known = {_tool_name(tool): _properties(tool) for tool in conversation.tools or ()}
        tools = None if conversation.tools is None else _pruned(conversation.tools, "tools", paths)
        messages = [
            _pruned_message(message, f"turn {number}", paths, known)
            for number, message in enumerate(conversation.messages)
        ]
        if not paths:
            return None
        as_is = self._render(conversation)
        pruned = replace(conversation, messages=messages, tools=tools)
        if as_is is None or as_is == self._render(pruned):
            return None
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        shown = excerpt(as_is, max(0, as_is.find("null")))
        return "null_tool_keys", f"{paths[0]} is null{more}", shown

    def lost_thinking(self, conversation: Conversation, text: str) -> RowFinding | None:
        assistants = [n for n, m in enumerate(conversation.messages) if m["role"] == "assistant"]
        dropped_turns, first = [], ""
        for number in assistants[:-1]:
            thoughts = list(self._thoughts(conversation.messages[number], conversation.tools))
            missing = [thought for thought in thoughts if thought not in text]
            if missing:
                dropped_turns.append(number)
                first = first or missing[0]
        if not dropped_turns:
            return None
        numbers = ", ".join(map(str, dropped_turns[:8])) + (" …" if len(dropped_turns) > 8 else "")
        which = "turn" if len(dropped_turns) == 1 else "turns"
        which += f" {numbers} of {len(conversation.messages)}"
        return "rewrites_history", f"{which}: the thinking is not printed", excerpt(first)

    def _thoughts(self, message: dict[str, Any], tools: list[Any] | None) -> Iterator[str]:
        for key in REASONING_KEYS:
            value = message.get(key)
            if isinstance(value, str) and value.strip():
                yield value.strip()
        content = message.get("content")
        if isinstance(content, str) and "<" in content:
            tags = self._thinking(self._renderer.reference(tools))
            yield from (run for kind, run in cut(content, tags) if kind == REASONING)

    def _thinking(self, template: Any) -> re.Pattern[str] | None:
        if template.source not in self._tags:
            strings = getattr(template, "strings", None) or literals(template.tree)
            self._tags[template.source] = any_of(thinking_tags(strings))
        return self._tags[template.source]

    def differing_history(self, conversation: Conversation) -> RowFinding | None:
        """Return a finding if the trained text of a turn changes when another turn follows."""
        roles = tuple(message["role"] for message in conversation.messages)
        key = roles, repr(conversation.variables)
        if key not in self._histories and len(self._histories) < MAX_HISTORIES:
            self._histories[key] = self._compare_history(roles, conversation.variables)
        return self._histories.get(key)

    def _compare_history(
        self, roles: tuple[str, ...], variables: dict[str, Any] | None
    ) -> RowFinding | None:
        # If any turn is printed differently in history, the first assistant turn is, too.
        words = _placeholder_turns(roles)
        first = roles.index("assistant") + 1
        rows = [{"messages": part, VARIABLES_KEY: variables} for part in (words[:first], words)]
        rendering = self._probe.render(rows)
        if rendering.source != [0, 1]:
            return None
        trained = []
        for text, spans in zip(rendering.texts, rendering.spans, strict=True):
            start, end = (spans or [(0, 0)])[0]
            trained.append(text[start:end])
        last, history = trained
        if last == history:
            return None
        return "history_differs", f"last turn: {last!r}, earlier turn: {history!r}", ""

    @cached_property
    def _probe(self) -> Renderer:
        spec, own = self._renderer.spec, self._renderer
        return Renderer(
            type(spec)(
                chat_template_kwargs=spec.chat_template_kwargs, date=spec.date, trailing="trim"
            ),
            own.template,
            own.special_tokens,
            renderer="jinja2",
            tokenizer=own.tokenizer,
        )


def _placeholder_turns(roles: Sequence[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": f"Word {n}."} for n, role in enumerate(roles)]


def _with_calls(message: dict[str, Any], count: int) -> dict[str, Any]:
    kept = {key: value for key, value in message.items() if key not in CALL_KEYS}
    calls = message.get("tool_calls")
    return {**kept, "tool_calls": calls[:count]} if count and isinstance(calls, list) else kept


def _first_text(conversation: Conversation) -> str:
    content = conversation.messages[0].get("content") if conversation.messages else ""
    return excerpt(content) if isinstance(content, str) else ""


def _called(message: dict[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    all_calls = [*(calls if isinstance(calls, list) else ()), message.get("function_call")]
    names = (function_of(call).get("name") for call in all_calls)
    return [name for name in names if isinstance(name, str)]


def _tool_name(tool: Any) -> str:
    name = function_of(tool).get("name")
    return name if isinstance(name, str) else ""


def _properties(tool: Any) -> set[str]:
    parameters = function_of(tool).get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return set(properties) if isinstance(properties, dict) else set()


def _pruned(
    value: Any, path: str, paths: list[str], keep: tuple[str, ...] | set[str] = NULL_IS_VALUE
) -> Any:
    """Return the value without null members, and append their paths to ``paths``."""
    if isinstance(value, list):
        return [_pruned(item, f"{path}[{n}]", paths, keep) for n, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        if item is None and name not in keep:
            paths.append(f"{path}.{name}")
        else:
            kept[name] = (
                item if name in NULL_IS_VALUE else _pruned(item, f"{path}.{name}", paths, keep)
            )
    return kept


def _pruned_message(
    message: dict[str, Any], path: str, paths: list[str], known: dict[str, set[str]]
) -> dict[str, Any]:
    """Return a message without null members about tools; a declared argument may be null."""
    if len(message) <= 2:
        return message
    kept: dict[str, Any] = {}
    declared = set().union(*(known.get(name, set()) for name in _called(message)), NULL_IS_VALUE)
    for name, item in message.items():
        if name in NULLABLE and item is None:
            paths.append(f"{path}.{name}")
        elif name in CALL_KEYS:
            kept[name] = _pruned(item, f"{path}.{name}", paths, declared)
        else:
            kept[name] = item
    return kept
